"""Cut intervals of flattened boxes into boxes: `geometry.flat_interval_to_boxes` for many intervals at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class Cut(NamedTuple):
    """Boxes that intervals were cut into, sorted by interval and by first element.

    Attributes:
        interval: number of the interval that each box belongs to, [boxes].
        offset: first element of the box, relative to the first element of the flattened box, [boxes, ndim].
        size: size of the box, [boxes, ndim].
        first: flat index of the box's first element, [boxes].
    """

    interval: Int64Array
    offset: Int64Array
    size: Int64Array
    first: Int64Array


def strides_of(size: Int64Array) -> Int64Array:
    """Return the strides in elements of row-major arrays of these sizes; both are [boxes, ndim]."""
    strides = np.ones_like(size)
    strides[:, :-1] = np.cumprod(size[:, :0:-1], axis=1)[:, ::-1]
    return strides


def count(size: Int64Array, start: Int64Array, stop: Int64Array) -> Int64Array:
    """Return how many boxes `cut` makes of each interval, [intervals], for the same arguments."""
    stride = strides_of(size)
    low, high, num_boxes = start, stop, np.zeros(len(start), dtype=np.int64)
    for dim in range(size.shape[1] - 1, 0, -1):
        row = np.maximum(1, stride[:, dim - 1])
        border = -(-low // row) * row
        head = (border != low) & (low < high)
        low = np.where(head, np.minimum(high, border), low)
        border = high // row * row
        tail = (border != high) & (low < high)
        high = np.where(tail, np.maximum(low, border), high)
        num_boxes += head.astype(np.int64) + tail
    return num_boxes + (low < high)


def cut(size: Int64Array, start: Int64Array, stop: Int64Array) -> Cut:
    """Cut intervals into boxes of consecutive elements, at most `2 * ndim - 1` for each interval.

    From the last dim to the first, the incomplete rows at both ends of an interval become boxes of their own.

    Args:
        size: size of the box that each interval lies in, [intervals, ndim]; not 0 where the interval is not empty.
        start: first element of each interval in the flattened box, [intervals].
        stop: first element behind each interval, [intervals].
    """
    stride = strides_of(size)
    low, high = start.copy(), stop.copy()
    interval: list[Int64Array] = []
    first: list[Int64Array] = []
    last: list[Int64Array] = []
    dims: list[Int64Array] = []

    def add(chosen: Int64Array, begin: Int64Array, end: Int64Array, dim: int) -> None:
        interval.append(chosen)
        first.append(begin)
        last.append(end)
        dims.append(np.full(len(chosen), dim, dtype=np.int64))

    for dim in range(size.shape[1] - 1, 0, -1):
        row = np.maximum(1, stride[:, dim - 1])
        head = np.flatnonzero((low % row != 0) & (low < high))
        border = np.minimum(high[head], -(-low[head] // row[head]) * row[head])
        add(head, low[head], border, dim)
        low[head] = border
        tail = np.flatnonzero((high % row != 0) & (low < high))
        border = np.maximum(low[tail], high[tail] // row[tail] * row[tail])
        add(tail, border, high[tail], dim)
        high[tail] = border
    rest = np.flatnonzero(low < high)
    add(rest, low[rest], high[rest], 0)
    chosen, begin, end, at = (np.concatenate(column) for column in (interval, first, last, dims))
    order = np.lexsort((begin, chosen))
    chosen, begin, end, at = chosen[order], begin[order], end[order], at[order]
    within, steps = size[chosen], np.maximum(1, stride[chosen])
    offset = begin[:, None] // steps
    offset[:, 1:] %= np.maximum(1, within[:, 1:])
    rows = np.arange(len(at))
    sizes = np.where(np.arange(size.shape[1]) < at[:, None], 1, within)
    sizes[rows, at] = (end - begin) // steps[rows, at]
    return Cut(chosen, offset, sizes, begin)
