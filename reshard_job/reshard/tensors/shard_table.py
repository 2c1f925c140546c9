"""Boxes of logical tensors and the bytes that hold them, in columns of numpy arrays: a row costs about a hundred bytes.

ZeRO-3 cuts every parameter into one chunk for each rank, and each rank stores its chunk at the same position of its own
file. All chunks of a parameter are one row, a *family*, however many ranks there are. The boxes of a family are made
only when a caller asks for them.
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
    """One box of a `ShardTable` as plain Python values."""

    tensor: int
    replica: int
    box: Box
    file: int
    byte_offset: int
    strides: tuple[int, ...]

    def byte_ranges(self, box: Box, item_bytes: int) -> tuple[list[int], int]:
        """Return the ranges of the file that hold a box inside this row's box.

        Returns:
            Positions of the ranges, in row-major order of the elements, and the number of bytes of each range.
        """
        start = sum((low - base) * s for low, base, s in zip(box.offset, self.box.offset, self.strides, strict=True))
        dim, expected = box.ndim, 1
        while dim > 0 and (box.size[dim - 1] == 1 or self.strides[dim - 1] == expected):
            dim -= 1
            expected *= box.size[dim]
        first = self.byte_offset + start * item_bytes
        if dim == 0:
            return [first], expected * item_bytes
        distances = np.zeros(1, dtype=np.int64)
        for size, stride in zip(box.size[:dim], self.strides[:dim], strict=True):
            distances = (distances[:, None] + np.arange(size) * stride).reshape(-1)
        return (distances * item_bytes + first).tolist(), expected * item_bytes


class Ranges(NamedTuple):
    """Ranges of bytes, each at the same position in several consecutive files.

    Attributes:
        first: number of the first file, [ranges].
        last: number of the file behind the last one, [ranges].
        start: first byte, [ranges].
        stop: first byte behind the range, [ranges].
    """

    first: Int64Array
    last: Int64Array
    start: Int64Array
    stop: Int64Array


def ranges_of(rows: Sequence[tuple[int, int, int, int]]) -> Ranges:
    """Make `Ranges` from rows of (first file, file behind the last, first byte, first byte behind the range)."""
    return Ranges(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


_CHUNKS_AT_ONCE = 1 << 20
_NONE = np.zeros(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable:
    """Boxes of logical tensors and the bytes of files that hold them.

    Rows of one tensor with the same `replica` number cover the tensor exactly; every replica holds all of it.

    A row with a `chunk` is a family. It holds the elements `start:stop` of its box, flattened in row-major order and
    cut into chunks of `chunk` elements; the last chunk may be shorter. Chunk k is one range of bytes at `byte_offset`
    of file number `file + k`. A row without a `chunk` holds all elements of its box in one file.

    Attributes:
        tensor: index into the list of logical tensors, [rows].
        replica: number of the complete copy that the row belongs to, from 0, [rows].
        offset: first element of the box, [rows, max_ndim]; dims that a tensor lacks are 0.
        size: elements of the box, [rows, max_ndim]; dims that a tensor lacks are 1.
        file: index into the list of files, [rows].
        byte_offset: position of the box's first element in the file, [rows].
        stride: distance in elements between neighbours in the file, [rows, max_ndim].
        start: first element of a family, [rows]. This and the following columns are 0 for rows that are no family.
        stop: first element behind a family, [rows].
        chunk: elements of each chunk of a family, [rows].
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
        """Return True if some row is a family."""
        return bool(self.chunk.any())

    @property
    def num_elements(self) -> Int64Array:
        """Return the number of elements of each row, [rows]."""
        return np.where(self.chunk != 0, self.stop - self.start, self.size.prod(axis=1))

    @property
    def num_chunks(self) -> Int64Array:
        """Return the number of chunks, and so of files, of each row, [rows]; 1 for a row that is no family."""
        return np.where(self.chunk != 0, -(-(self.stop - self.start) // np.maximum(1, self.chunk)), 1)

    def row(self, index: int, ndim: int) -> ShardRow:
        """Return one row with the tensor's own number of dims.

        Raises:
            ValueError: the row is a family, which has many boxes.
        """
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

    def iterate_boxes(self, rows: Int64Array, ndim: int) -> Iterator[ShardRow]:
        """Yield all boxes of some rows of one tensor; the boxes of a family come in the order of its elements."""
        for at in rows.tolist():
            table = self.take(np.array([at])).boxes()
            for number in range(len(table)):
                yield table.row(number, ndim)

    def by_tensor(self, num_tensors: int) -> list[Int64Array]:
        """Return the row numbers of every tensor, in the table's order."""
        order = np.argsort(self.tensor, kind="stable")
        bounds = np.searchsorted(self.tensor[order], np.arange(num_tensors + 1))
        return [order[bounds[i] : bounds[i + 1]] for i in range(num_tensors)]

    @property
    def num_boxes(self) -> Int64Array:
        """Return the number of boxes of each row, [rows]; 1 for a row that is no family."""
        counts = np.ones(len(self), dtype=np.int64)
        family = np.flatnonzero(self.chunk != 0)
        ends = np.cumsum(self.num_chunks[family])
        first = 0
        while first < len(family):
            last = max(
                first + 1, int(np.searchsorted(ends, (ends[first - 1] if first else 0) + _CHUNKS_AT_ONCE, "right"))
            )
            some = family[first:last]
            row, _, begin, end = self.take(some)._chunks(self.start[some], self.stop[some])
            number = intervals.count(self.size[some][row], begin, end)
            counts[some] = np.bincount(row, weights=number, minlength=len(some)).astype(np.int64)
            first = last
        return counts

    def boxes_by_tensor(self, num_tensors: int) -> Int64Array:
        """Return the number of boxes of every tensor, [tensors]."""
        counts = np.zeros(num_tensors, dtype=np.int64)
        np.add.at(counts, self.tensor, self.num_boxes)
        return counts

    def take(self, rows: Int64Array) -> ShardTable:
        """Return a table of these rows only."""
        return ShardTable(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})

    def boxes(self) -> ShardTable:
        """Return the table with one row for each box, so that no row is a family."""
        return self._between(self.start, self.stop)

    def covers(self) -> ShardTable:
        """Return boxes that cover the same elements as this table; files and positions do not mean anything in them."""
        return dataclasses.replace(self, chunk=np.where(self.chunk != 0, self.stop - self.start, 0)).boxes()

    def rows_touching(self, rows: Int64Array, box: Box) -> Int64Array:
        """Return those of some rows of one tensor that touch a box."""
        low, high = self._bounds(box)
        offset = self.offset[rows]
        touching: Int64Array = rows[((offset < high) & (offset + self.size[rows] > low)).all(axis=1)]
        return touching

    def boxes_touching(self, rows: Int64Array, box: Box) -> Iterator[ShardRow]:
        """Yield the boxes of some rows of one tensor that touch `box`; other boxes of families are not made."""
        for at in self.rows_touching(rows, box).tolist():
            if not self.chunk[at]:
                yield self.row(at, box.ndim)
            else:
                yield from self._family_boxes_touching(at, box)

    def _family_boxes_touching(self, at: int, box: Box) -> Iterator[ShardRow]:
        """Yield the boxes of a family that touch `box`.

        A family usually has few of them, and for few boxes Python's integers are faster than arrays.
        """
        ndim = box.ndim
        whole = Box(tuple(self.offset[at, :ndim].tolist()), tuple(self.size[at, :ndim].tolist()))
        common, strides = whole.intersect(box), strides_of(whole.size)
        if common is None:
            return
        start, stop, chunk = int(self.start[at]), int(self.stop[at]), int(self.chunk[at])
        first = sum((low - base) * step for low, base, step in zip(common.offset, whole.offset, strides, strict=True))
        last = first + sum((size - 1) * step for size, step in zip(common.size, strides, strict=True))
        low, high = max(first, start), min(last + 1, stop)
        for number in range((low - start) // chunk, -(-(high - start) // chunk) if low < high else 0):
            begin, end = start + number * chunk, min(start + (number + 1) * chunk, stop)
            for own_box, flat in flat_interval_to_boxes(whole.size, begin, end):
                row = ShardRow(
                    tensor=int(self.tensor[at]),
                    replica=int(self.replica[at]),
                    box=own_box.shift(whole.offset),
                    file=int(self.file[at]) + number,
                    byte_offset=int(self.byte_offset[at]) + (flat - begin) * int(self.item_bytes[at]),
                    strides=strides,
                )
                if row.box.intersect(box) is not None:
                    yield row

    def ranges(self, item_bytes: Int64Array) -> tuple[Ranges, Int64Array]:
        """Return the ranges of files that hold the rows whose bytes are consecutive.

        Args:
            item_bytes: bytes of one element, [rows].

        Returns:
            The ranges, at most two for a family, and the numbers of the rows whose bytes have gaps in their files.
        """
        family = np.flatnonzero(self.chunk != 0)
        spanned = (((self.size - 1) * self.stride).sum(axis=1) + 1) * item_bytes
        dense = (self.size.prod(axis=1) * item_bytes == spanned) & (self.chunk == 0)
        plain, number = np.flatnonzero(dense), self.num_chunks[family] - 1
        file, at, item = self.file[family], self.byte_offset[family], item_bytes[family]
        full, last = (
            self.chunk[family] * item,
            (self.stop - self.start)[family] * item - number * self.chunk[family] * item,
        )
        ranges = Ranges(
            first=np.concatenate((self.file[plain], file, file + number)),
            last=np.concatenate((self.file[plain] + 1, file + number, file + number + 1)),
            start=np.concatenate((self.byte_offset[plain], at, at)),
            stop=np.concatenate((self.byte_offset[plain] + spanned[plain], at + full, at + last)),
        )
        some = np.flatnonzero((ranges.first < ranges.last) & (ranges.start < ranges.stop))
        return Ranges(*(column[some] for column in ranges)), np.flatnonzero(~dense & (self.chunk == 0))

    def bytes_by_file(self, item_bytes: Int64Array, num_files: int) -> Int64Array:
        """Return the bytes of elements in each file, [num_files].

        Args:
            item_bytes: bytes of one element, [rows].
            num_files: number of files.
        """
        ranges, gaps = self.ranges(item_bytes)
        step = np.zeros(num_files + 1, dtype=np.int64)
        np.add.at(step, ranges.first, ranges.stop - ranges.start)
        np.add.at(step, ranges.last, ranges.start - ranges.stop)
        num_bytes = np.cumsum(step)[:-1]
        np.add.at(num_bytes, self.file[gaps], self.size[gaps].prod(axis=1) * item_bytes[gaps])
        return num_bytes

    def _bounds(self, box: Box) -> tuple[Int64Array, Int64Array]:
        """Return the first element of a box and the end of it, with as many dims as the table, [max_ndim]."""
        rest = self.size.shape[1] - box.ndim
        low, high = (*box.offset, *(0,) * rest), (*box.end, *(1,) * rest)
        return np.array(low, dtype=np.int64), np.array(high, dtype=np.int64)

    def _chunks(self, low: Int64Array, high: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Return the chunks of families that hold elements of `low:high`.

        Returns:
            Row, number in the family, first element, and first element behind the chunk, each [chunks].
        """
        first = (low - self.start) // self.chunk
        count = np.maximum(0, -(-(high - self.start) // self.chunk) - first)
        row = np.repeat(np.arange(len(self)), count)
        number = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first, count)
        begin = self.start[row] + number * self.chunk[row]
        return row, number, begin, np.minimum(begin + self.chunk[row], self.stop[row])

    def _between(self, low: Int64Array, high: Int64Array) -> ShardTable:
        """Return the table with families replaced by the boxes of their chunks that hold elements of `low:high`."""
        family = np.flatnonzero(self.chunk != 0)
        if not len(family):
            return self
        plain = np.flatnonzero(self.chunk == 0)
        row, chunk_number, begin, end = self.take(family)._chunks(low[family], high[family])
        row = family[row]
        boxes = intervals.cut(self.size[row], begin, end)
        source, inside = row[boxes.interval], boxes.first - begin[boxes.interval]
        numbers = np.concatenate((plain, source))
        order = np.argsort(numbers, kind="stable")
        few, nothing = self.take(plain), np.zeros(len(numbers), dtype=np.int64)
        columns = {
            "tensor": (few.tensor, self.tensor[source]),
            "replica": (few.replica, self.replica[source]),
            "offset": (few.offset, self.offset[source] + boxes.offset),
            "size": (few.size, boxes.size),
            "file": (few.file, self.file[source] + chunk_number[boxes.interval]),
            "byte_offset": (few.byte_offset, self.byte_offset[source] + inside * self.item_bytes[source]),
            "stride": (few.stride, intervals.strides_of(self.size[source])),
        }
        ordered = {name: np.concatenate(pair)[order] for name, pair in columns.items()}
        return ShardTable(**ordered, start=nothing, stop=nothing, chunk=nothing, item_bytes=nothing)


class ShardTableBuilder:
    """Collects rows and turns them into a `ShardTable`. A collected row takes tens of bytes."""

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
        """Add a row; without `strides` the file holds the box as a row-major array."""
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
        """Add a family: elements `start:stop` of the flattened box, `chunk` of them in each of consecutive files.

        Raises:
            ValueError: the box does not have these elements, or `chunk` is below 1.
        """
        if not 0 <= start < stop <= box.num_elements or chunk < 1:
            raise ValueError(
                f"a family of elements {start}:{stop} of {box} in chunks of {chunk}:"
                " expected elements of the box, and chunks of at least 1"
            )
        scalars = (tensor, replica, file, byte_offset, len(box.size), start, stop, chunk, item_bytes)
        self._add(scalars, box, None)

    def _add(self, scalars: tuple[int, ...], box: Box, strides: Sequence[int] | None) -> None:
        file_strides = strides if strides is not None else strides_of(box.size)
        self._scalars.extend(scalars)
        for dim in zip(box.offset, box.size, file_strides, strict=True):
            self._dims.extend(dim)

    def build(self) -> ShardTable:
        """Make the table of all rows that were added."""
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
