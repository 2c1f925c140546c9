"""Units of a plan: a worker makes the boxes of those that it claims, out of hundreds of thousands."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from reshard.tensors.geometry import Box, Tiling


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Work that one worker claims at a time.

    Attributes:
        boxes: (position in `Index.tensors`, box of that tensor) of all boxes to move.
        num_bytes: bytes of the source elements in the boxes.
    """

    boxes: tuple[tuple[int, Box], ...]
    num_bytes: int


class Units(Sequence[Unit]):
    """All units of a plan, in order; each is made on access.

    Args:
        tensors: (position in `Index.tensors`, shape, bytes of an element) of all tensors to move, in order.
        unit_bytes: neighbouring boxes of at most so many bytes together are one unit; no box is larger, unless one
            element is.
    """

    def __init__(self, tensors: Iterable[tuple[int, Sequence[int], int]], unit_bytes: int) -> None:
        cut = [(number, Tiling.cut(shape, unit_bytes // size), size) for number, shape, size in tensors]
        self._tensors = [(number, tiling) for number, tiling, _ in cut]
        self._first_boxes = list(itertools.accumulate((len(tiling) for _, tiling in self._tensors), initial=0))
        self._bounds, self._num_bytes = array("q"), array("q")  # first box of every unit, and the end; bytes of a unit
        sizes = (count * item_bytes for _, tiling, item_bytes in cut for count in tiling.list_sizes())
        for at, num_bytes in enumerate(sizes):
            if self._num_bytes and self._num_bytes[-1] + num_bytes <= unit_bytes:
                self._num_bytes[-1] += num_bytes
            else:
                self._bounds.append(at)
                self._num_bytes.append(num_bytes)
        self._bounds.append(self._first_boxes[-1])

    def __len__(self) -> int:
        return len(self._num_bytes)

    @overload
    def __getitem__(self, at: int) -> Unit: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Unit, ...]: ...
    def __getitem__(self, at: int | slice) -> Unit | tuple[Unit, ...]:
        numbers = range(len(self))[at]
        return tuple(map(self._make, numbers)) if isinstance(numbers, range) else self._make(numbers)

    def count_bytes(self, numbers: Iterable[int]) -> int:
        """Return the bytes of some units together, without their boxes."""
        return sum(self._num_bytes[number] for number in numbers)

    def _make(self, number: int) -> Unit:
        boxes = []
        for box in range(self._bounds[number], self._bounds[number + 1]):
            at = bisect.bisect_right(self._first_boxes, box) - 1
            tensor, tiling = self._tensors[at]
            boxes.append((tensor, tiling.box(box - self._first_boxes[at])))
        return Unit(tuple(boxes), self._num_bytes[number])
