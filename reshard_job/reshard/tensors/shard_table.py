"""Boxes of logical tensors and the bytes that hold them, in columns of numpy arrays: a row costs about a hundred bytes.

ZeRO-3 cuts every parameter over all ranks, each of which stores its part at the same place of its own file. Such parts
are one row, a *family*, however many ranks there are; whoever needs boxes has only those made that it looks at.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from reshard.tensors import intervals
from reshard.tensors.geometry import Box, flat_interval_to_boxes, strides_of
from reshard.tensors.intervals import Int64Array


class ShardRow(NamedTuple):
    """One box of a `ShardTable`, for those who look at single ones."""

    tensor: int
    replica: int
    box: Box
    file: int
    byte_offset: int
    strides: tuple[int, ...]

    def runs(self, part: Box, item_bytes: int) -> tuple[list[int], int]:
        """Where a part of the box lies in the file.

        Returns:
            Positions of its pieces that are consecutive there, in row-major order, and the bytes of each.
        """
        start = sum((p - b) * s for p, b, s in zip(part.offset, self.box.offset, self.strides, strict=True))
        dim, expected = part.ndim, 1
        while dim > 0 and (part.size[dim - 1] == 1 or self.strides[dim - 1] == expected):
            dim -= 1
            expected *= part.size[dim]
        first = self.byte_offset + start * item_bytes
        if dim == 0:
            return [first], expected * item_bytes
        distances = np.zeros(1, dtype=np.int64)
        for size, stride in zip(part.size[:dim], self.strides[:dim], strict=True):
            distances = (distances[:, None] + np.arange(size) * stride).reshape(-1)
        return (distances * item_bytes + first).tolist(), expected * item_bytes


class Ranges(NamedTuple):
    """Bytes that lie at the same place in consecutive files.

    Attributes:
        first: first of the files, [ranges].
        last: file behind the last, [ranges].
        start: first byte, [ranges].
        stop: byte behind the last, [ranges].
    """

    first: Int64Array
    last: Int64Array
    start: Int64Array
    stop: Int64Array


def ranges_of(rows: Sequence[tuple[int, int, int, int]]) -> Ranges:
    """Ranges from rows of (first file, file behind the last, first byte, byte behind the last)."""
    return Ranges(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


_PARTS_AT_ONCE = 1 << 20
_NONE = np.zeros(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable:
    """Boxes of logical tensors and the bytes of files that hold them.

    Rows of one tensor with the same `replica` number cover the tensor exactly; every replica holds all of it.

    A row with a `chunk` is a family: of its box, flattened in row-major order, it holds the elements `start:stop`, cut
    into parts of `chunk` elements, of which the last may be shorter. Part k is one run of bytes at `byte_offset` of
    file number `file + k`. Other rows hold all of their box.

    Attributes:
        tensor: index into the list of logical tensors, [rows].
        replica: which complete copy the row belongs to, from 0, [rows].
        offset: first element of the box, [rows, max_ndim]; dims that a tensor lacks are 0.
        size: elements of the box, [rows, max_ndim]; dims that a tensor lacks are 1.
        file: index into the list of files, [rows].
        byte_offset: position of the box's first element in the file, [rows].
        stride: distance in elements between neighbours in the file, [rows, max_ndim].
        start: first element of a family, [rows]; 0 for others, as are the following.
        stop: element behind the last of a family, [rows].
        chunk: elements of each part of a family, [rows].
        item_bytes: bytes of one element of a family, [rows].
    """

    tensor: Int64Array
    replica: Int64Array
    offset: Int64Array
    size: Int64Array
    file: Int64Array
    byte_offset: Int64Array
    stride: Int64Array
    start: Int64Array = dataclasses.field(default_factory=lambda: _NONE)
    stop: Int64Array = dataclasses.field(default_factory=lambda: _NONE)
    chunk: Int64Array = dataclasses.field(default_factory=lambda: _NONE)
    item_bytes: Int64Array = dataclasses.field(default_factory=lambda: _NONE)

    def __post_init__(self) -> None:
        for name in ("start", "stop", "chunk", "item_bytes"):
            if getattr(self, name) is _NONE:
                object.__setattr__(self, name, np.zeros(len(self.tensor), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def has_families(self) -> bool:
        """Some row is a family."""
        return bool(self.chunk.any())

    @property
    def num_elements(self) -> Int64Array:
        """Elements of each row, [rows]."""
        return np.where(self.chunk != 0, self.stop - self.start, self.size.prod(axis=1))

    @property
    def num_parts(self) -> Int64Array:
        """Files of each row, [rows]: 1 but for families."""
        return np.where(self.chunk != 0, -(-(self.stop - self.start) // np.maximum(1, self.chunk)), 1)

    def row(self, index: int, ndim: int) -> ShardRow:
        """One row, with the tensor's own number of dims; not of a family, which has many boxes."""
        if self.chunk[index]:
            raise ValueError(f"row {index} is a family of boxes")
        return ShardRow(
            tensor=int(self.tensor[index]),
            replica=int(self.replica[index]),
            box=Box(tuple(self.offset[index, :ndim].tolist()), tuple(self.size[index, :ndim].tolist())),
            file=int(self.file[index]),
            byte_offset=int(self.byte_offset[index]),
            strides=tuple(self.stride[index, :ndim].tolist()),
        )

    def each(self, rows: Int64Array, ndim: int) -> Iterator[ShardRow]:
        """All boxes of some rows of one tensor, a family's in the order of its elements."""
        for at in rows.tolist():
            table = self.take(np.array([at])).boxes()
            for number in range(len(table)):
                yield table.row(number, ndim)

    def by_tensor(self, num_tensors: int) -> list[Int64Array]:
        """Row numbers of every tensor, in the table's order."""
        order = np.argsort(self.tensor, kind="stable")
        bounds = np.searchsorted(self.tensor[order], np.arange(num_tensors + 1))
        return [order[bounds[i] : bounds[i + 1]] for i in range(num_tensors)]

    @property
    def num_boxes(self) -> Int64Array:
        """Boxes of each row, [rows]: 1 but for families."""
        found = np.ones(len(self), dtype=np.int64)
        family = np.flatnonzero(self.chunk != 0)
        ends = np.cumsum(self.num_parts[family])
        first = 0
        while first < len(family):
            last = max(
                first + 1, int(np.searchsorted(ends, (ends[first - 1] if first else 0) + _PARTS_AT_ONCE, "right"))
            )
            some = family[first:last]
            row, _, begin, end = self.take(some)._parts(self.start[some], self.stop[some])
            number = intervals.count(self.size[some][row], begin, end)
            found[some] = np.bincount(row, weights=number, minlength=len(some)).astype(np.int64)
            first = last
        return found

    def boxes_by_tensor(self, num_tensors: int) -> Int64Array:
        """Boxes of every tensor, [tensors]."""
        found = np.zeros(num_tensors, dtype=np.int64)
        np.add.at(found, self.tensor, self.num_boxes)
        return found

    def take(self, rows: Int64Array) -> ShardTable:
        """These rows only."""
        return ShardTable(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})

    def boxes(self) -> ShardTable:
        """The same without families: one row for each of their boxes."""
        return self._between(self.start, self.stop)

    def covers(self) -> ShardTable:
        """Boxes without families that cover the same elements, wherever those lie."""
        return dataclasses.replace(self, chunk=np.where(self.chunk != 0, self.stop - self.start, 0)).boxes()

    def touching(self, rows: Int64Array, region: Box) -> Int64Array:
        """Those of some rows of one tensor whose boxes touch a region."""
        low, high = self._bounds(region)
        offset = self.offset[rows]
        found: Int64Array = rows[((offset < high) & (offset + self.size[rows] > low)).all(axis=1)]
        return found

    def within(self, rows: Int64Array, region: Box) -> Iterator[ShardRow]:
        """Boxes of some rows of one tensor that touch a region; of families only those are made."""
        for at in self.touching(rows, region).tolist():
            if not self.chunk[at]:
                yield self.row(at, region.ndim)
            else:
                yield from self._family_within(at, region)

    def _family_within(self, at: int, region: Box) -> Iterator[ShardRow]:
        """Boxes of a family, few as a rule: plain numbers are faster than arrays."""
        ndim = region.ndim
        whole = Box(tuple(self.offset[at, :ndim].tolist()), tuple(self.size[at, :ndim].tolist()))
        common, strides = whole.intersect(region), strides_of(whole.size)
        if common is None:
            return
        start, stop, chunk = int(self.start[at]), int(self.stop[at]), int(self.chunk[at])
        first = sum((low - base) * step for low, base, step in zip(common.offset, whole.offset, strides, strict=True))
        last = first + sum((size - 1) * step for size, step in zip(common.size, strides, strict=True))
        low, high = max(first, start), min(last + 1, stop)
        for part in range((low - start) // chunk, -(-(high - start) // chunk) if low < high else 0):
            begin, end = start + part * chunk, min(start + (part + 1) * chunk, stop)
            for box, flat in flat_interval_to_boxes(whole.size, begin, end):
                found = ShardRow(
                    tensor=int(self.tensor[at]),
                    replica=int(self.replica[at]),
                    box=box.shift(whole.offset),
                    file=int(self.file[at]) + part,
                    byte_offset=int(self.byte_offset[at]) + (flat - begin) * int(self.item_bytes[at]),
                    strides=strides,
                )
                if found.box.intersect(region) is not None:
                    yield found

    def ranges(self, item_bytes: Int64Array) -> tuple[Ranges, Int64Array]:
        """Where rows without gaps lie, a family as at most two ranges.

        Args:
            item_bytes: of one element, [rows].

        Returns:
            The ranges, and the numbers of the rows that lie in their files with gaps.
        """
        family = np.flatnonzero(self.chunk != 0)
        extent = (((self.size - 1) * self.stride).sum(axis=1) + 1) * item_bytes
        dense = (self.size.prod(axis=1) * item_bytes == extent) & (self.chunk == 0)
        plain, number = np.flatnonzero(dense), self.num_parts[family] - 1
        file, at, item = self.file[family], self.byte_offset[family], item_bytes[family]
        full, last = (
            self.chunk[family] * item,
            (self.stop - self.start)[family] * item - number * self.chunk[family] * item,
        )
        found = Ranges(
            first=np.concatenate((self.file[plain], file, file + number)),
            last=np.concatenate((self.file[plain] + 1, file + number, file + number + 1)),
            start=np.concatenate((self.byte_offset[plain], at, at)),
            stop=np.concatenate((self.byte_offset[plain] + extent[plain], at + full, at + last)),
        )
        some = np.flatnonzero((found.first < found.last) & (found.start < found.stop))
        return Ranges(*(column[some] for column in found)), np.flatnonzero(~dense & (self.chunk == 0))

    def bytes_by_file(self, item_bytes: Int64Array, num_files: int) -> Int64Array:
        """Bytes of elements in each file, [num_files]; `item_bytes` is that of one element, [rows]."""
        ranges, gaps = self.ranges(item_bytes)
        step = np.zeros(num_files + 1, dtype=np.int64)
        np.add.at(step, ranges.first, ranges.stop - ranges.start)
        np.add.at(step, ranges.last, ranges.start - ranges.stop)
        found = np.cumsum(step)[:-1]
        np.add.at(found, self.file[gaps], self.size[gaps].prod(axis=1) * item_bytes[gaps])
        return found

    def _bounds(self, region: Box) -> tuple[Int64Array, Int64Array]:
        """First element of a region and that behind it, with as many dims as the table, [max_ndim]."""
        rest = self.size.shape[1] - region.ndim
        low, high = (*region.offset, *(0,) * rest), (*region.end, *(1,) * rest)
        return np.array(low, dtype=np.int64), np.array(high, dtype=np.int64)

    def _parts(self, low: Int64Array, high: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Parts of families that hold elements of `low:high`: row, number, first element, that behind the last."""
        first = (low - self.start) // self.chunk
        count = np.maximum(0, -(-(high - self.start) // self.chunk) - first)
        row = np.repeat(np.arange(len(self)), count)
        part = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first, count)
        begin = self.start[row] + part * self.chunk[row]
        return row, part, begin, np.minimum(begin + self.chunk[row], self.stop[row])

    def _between(self, low: Int64Array, high: Int64Array) -> ShardTable:
        """Boxes of the parts of families that hold elements of `low:high`, [rows]; other rows as they are."""
        family = np.flatnonzero(self.chunk != 0)
        if not len(family):
            return self
        plain = np.flatnonzero(self.chunk == 0)
        row, part, begin, end = self.take(family)._parts(low[family], high[family])
        row = family[row]
        found = intervals.cut(self.size[row], begin, end)
        source, inside = row[found.interval], found.first - begin[found.interval]
        numbers = np.concatenate((plain, source))
        order = np.argsort(numbers, kind="stable")
        few, nothing = self.take(plain), np.zeros(len(numbers), dtype=np.int64)
        columns = {
            "tensor": (few.tensor, self.tensor[source]),
            "replica": (few.replica, self.replica[source]),
            "offset": (few.offset, self.offset[source] + found.offset),
            "size": (few.size, found.size),
            "file": (few.file, self.file[source] + part[found.interval]),
            "byte_offset": (few.byte_offset, self.byte_offset[source] + inside * self.item_bytes[source]),
            "stride": (few.stride, intervals.strides_of(self.size[source])),
        }
        ordered = {name: np.concatenate(pair)[order] for name, pair in columns.items()}
        return ShardTable(**ordered, start=nothing, stop=nothing, chunk=nothing, item_bytes=nothing)


class ShardTableBuilder:
    """Collects rows and turns them into columns; tens of bytes a row while it does."""

    def __init__(self) -> None:
        # tensor, replica, file, byte_offset, number of dims, start, stop, chunk and item_bytes of every row
        self._scalars = array("q")
        self._dims = array("q")  # offset, size and stride of every dim of every row

    def add(
        self,
        *,
        tensor: int,
        box: Box,
        file: int,
        byte_offset: int,
        strides: Sequence[int] | None = None,
        replica: int = 0,
    ) -> None:
        """Add a row; without `strides` the box lies in the file as a row-major array of its own."""
        self._add((tensor, replica, file, byte_offset, len(box.size), 0, 0, 0, 0), box, strides)

    def add_family(
        self,
        *,
        tensor: int,
        box: Box,
        start: int,
        stop: int,
        chunk: int,
        file: int,
        byte_offset: int,
        item_bytes: int,
        replica: int = 0,
    ) -> None:
        """Add a family: elements `start:stop` of the flattened box, `chunk` of them in each of consecutive files."""
        if not 0 <= start < stop <= box.num_elements or chunk < 1:
            raise ValueError(f"a family of elements {start}:{stop} of {box} in parts of {chunk}")
        scalars = (tensor, replica, file, byte_offset, len(box.size), start, stop, chunk, item_bytes)
        self._add(scalars, box, None)

    def _add(self, scalars: tuple[int, ...], box: Box, strides: Sequence[int] | None) -> None:
        found = strides if strides is not None else strides_of(box.size)
        self._scalars.extend(scalars)
        for dim in zip(box.offset, box.size, found, strict=True):
            self._dims.extend(dim)

    def build(self) -> ShardTable:
        """The table."""
        scalars = np.array(self._scalars, dtype=np.int64).reshape(-1, 9)
        dims = np.array(self._dims, dtype=np.int64).reshape(-1, 3)
        ndims = scalars[:, 4]
        shape = (len(scalars), max(1, int(ndims.max(initial=1))))
        row = np.repeat(np.arange(len(scalars)), ndims)
        dim = np.arange(len(dims)) - np.repeat(np.cumsum(ndims) - ndims, ndims)
        matrices = []
        for column, missing in ((0, 0), (1, 1), (2, 0)):
            matrix = np.full(shape, missing, dtype=np.int64)
            matrix[row, dim] = dims[:, column]
            matrices.append(matrix)
        tensor, replica, file, byte_offset, _, start, stop, chunk, item_bytes = map(np.ascontiguousarray, scalars.T)
        return ShardTable(
            tensor=tensor,
            replica=replica,
            offset=matrices[0],
            size=matrices[1],
            file=file,
            byte_offset=byte_offset,
            stride=matrices[2],
            start=start,
            stop=stop,
            chunk=chunk,
            item_bytes=item_bytes,
        )
