"""Boxes: half-open regions of logical tensors.

Tensor parallel shards, slices of fused tensors and flat ZeRO partitions are all described as boxes. This module reads
no data and no files and needs the standard library only. `[ndim]` in docstrings means a tuple with one number per dim.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """Half-open region: element `i` is inside if `offset[d] <= i[d] < offset[d] + size[d]` in every dim.

    Attributes:
        offset: first element, [ndim].
        size: number of elements, [ndim]; at least 1 in every dim, except for an empty tensor.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size):
            raise ValueError(f"offset {self.offset} and size {self.size} differ in their number of dims")
        if self.size and (min(self.offset) < 0 or min(self.size) < 0):
            raise ValueError(f"negative offset or size: {self}")

    @property
    def ndim(self) -> int:
        """Return the number of dims."""
        return len(self.size)

    @property
    def num_elements(self) -> int:
        """Return the product of the sizes; 1 for a scalar."""
        return math.prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        """Return the first element behind the box, [ndim]."""
        return tuple(map(operator.add, self.offset, self.size))

    def intersect(self, other: Box) -> Box | None:
        """Return the box that both boxes have in common, or None if they do not touch."""
        if len(self.size) != len(other.size):
            raise ValueError(f"{self} and {other} differ in their number of dims")
        low = tuple(map(max, self.offset, other.offset))
        size = tuple(map(operator.sub, map(min, self.end, other.end), low))
        return None if size and min(size) <= 0 else Box(low, size)

    def shift(self, by: Sequence[int]) -> Box:
        """Return the box moved by an offset, [ndim]."""
        return Box(tuple(map(operator.add, self.offset, by)), self.size)

    def contains(self, other: Box) -> bool:
        """Return True if `other` lies inside this box."""
        return self.intersect(other) == other

    def is_consecutive(self, shape: Sequence[int]) -> bool:
        """Return True if the box's elements are consecutive in the row-major tensor of `shape`, [ndim]."""
        dim = self.ndim
        while dim > 0 and self.size[dim - 1] == shape[dim - 1]:
            dim -= 1
        return all(size == 1 for size in self.size[: max(0, dim - 1)])

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in zip(self.offset, self.end, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major array in elements, [ndim]."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def flat_interval_to_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[tuple[Box, int], ...]:
    """Cut an interval of a row-major flattened tensor into boxes.

    Args:
        shape: shape of the tensor, [ndim].
        start: first element of the interval.
        stop: first element behind the interval.

    Returns:
        Pairs (box, flat index of its first element) in ascending order. The elements of each box are consecutive. There
        are at most `2 * ndim - 1` boxes: in every dim partial rows at both ends and whole rows between them.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"interval {start}:{stop} is outside of shape {tuple(shape)}")
    return tuple(_cut(tuple(shape), start, stop, (), 0)) if start < stop else ()


def _cut(
    shape: tuple[int, ...], start: int, stop: int, prefix: tuple[int, ...], base: int
) -> Iterator[tuple[Box, int]]:
    if not shape:
        yield Box(prefix, (1,) * len(prefix)), base
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head:
        end = min(stop, (first + 1) * row)
        yield from _cut(shape[1:], head, end - first * row, (*prefix, first), base + first * row)
        if stop <= (first + 1) * row:
            return
        first += 1
    if last > first:
        offset = (*prefix, first, *(0 for _ in shape[1:]))
        yield Box(offset, (*(1 for _ in prefix), last - first, *shape[1:])), base + first * row
    if tail:
        yield from _cut(shape[1:], 0, tail, (*prefix, last), base + last * row)


def tiles(shape: Sequence[int], max_elements: int) -> Iterator[Box]:
    """Cut a tensor into boxes, see `Tiling`."""
    tiling = Tiling.cut(shape, max_elements)
    return map(tiling.box, range(len(tiling)))


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """A tensor in boxes of at most so many consecutive elements, in row-major order; each is made when it is asked for.

    Only the first dims are cut, so that a row-major shard holds its share of a tile in one range of its file.

    Attributes:
        shape: of the tensor, [ndim].
        dim: last dim that is cut; -1 if one box holds the tensor.
        rows: of that dim in a box; the last box of every row of the dims before can have fewer.
    """

    shape: tuple[int, ...]
    dim: int
    rows: int

    @classmethod
    def cut(cls, shape: Sequence[int], max_elements: int) -> Tiling:
        """Cut a tensor into boxes of at most `max_elements`."""
        dim, inner = 0, math.prod(shape)
        while dim < len(shape) and inner > max_elements:
            inner //= shape[dim]
            dim += 1
        # one row of the dim before fits into a tile, the whole dim does not
        return cls(tuple(shape), dim - 1, max(1, max_elements // max(1, inner)))

    def __len__(self) -> int:
        return math.prod(self.shape[: self.dim]) * self._num_steps if self.dim >= 0 else 1

    def box(self, number: int) -> Box:
        """Return the box with a number, from 0."""
        if self.dim < 0:
            return whole(self.shape)
        index, step = divmod(number, self._num_steps)
        first, rest = step * self.rows, self.shape[self.dim + 1 :]
        count = min(self.rows, self.shape[self.dim] - first)
        prefix = _unravel(index, self.shape[: self.dim])
        return Box((*prefix, first, *(0,) * len(rest)), (*(1,) * self.dim, count, *rest))

    def list_sizes(self) -> list[int]:
        """Return the number of elements of each box, [boxes]."""
        if self.dim < 0:
            return [math.prod(self.shape)]
        row, num_rows = math.prod(self.shape[self.dim + 1 :]), self.shape[self.dim]
        last = num_rows - (self._num_steps - 1) * self.rows
        return ([self.rows * row] * (self._num_steps - 1) + [last * row]) * math.prod(self.shape[: self.dim])

    @property
    def _num_steps(self) -> int:
        """Return the number of boxes along `dim`."""
        return -(-self.shape[self.dim] // self.rows)


def _unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    position: list[int] = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        position.append(rest)
    return tuple(reversed(position))
