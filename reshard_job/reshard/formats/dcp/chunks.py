"""Chunks of tensors and the items that hold them, in columns: a checkpoint of thousands of ranks has millions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

import numpy as np

from reshard.tensors.geometry import Box
from reshard.tensors.intervals import Int64Array


class Place(NamedTuple):
    """Byte range of an item: one complete `.pt` archive inside a file.

    Attributes:
        file: name of the file.
        offset: first byte.
        length: bytes.
    """

    file: str
    offset: int
    length: int


PlacedChunk = tuple[Box | None, Place]
"""A chunk's box and the place of its item; an entry that is not a tensor has no box."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """Chunks of all entries, one row each.

    Attributes:
        names: names of the files.
        offset: first element in the tensor, [rows, max_ndim]; 0 for dims that a tensor lacks.
        size: number of elements, [rows, max_ndim]; 1 for dims that a tensor lacks.
        file: number of the file in `names`, [rows].
        start: first byte of the item in the file, [rows].
        length: bytes of the item, [rows].
    """

    names: tuple[str, ...]
    offset: Int64Array
    size: Int64Array
    file: Int64Array
    start: Int64Array
    length: Int64Array

    def __len__(self) -> int:
        return len(self.file)

    def take(self, rows: Int64Array | slice) -> Chunks:
        """Return a table of the chunks in `rows`."""
        return Chunks(
            names=self.names,
            offset=self.offset[rows],
            size=self.size[rows],
            file=self.file[rows],
            start=self.start[rows],
            length=self.length[rows],
        )

    def place(self, row: int) -> Place:
        """Return the place of the item in a row."""
        return Place(self.names[self.file[row]], int(self.start[row]), int(self.length[row]))

    def chunk(self, row: int, ndim: int) -> tuple[Box, Place]:
        """Return the box of the chunk in a row, with the first `ndim` dims, and the place of its item."""
        box = Box(tuple(self.offset[row, :ndim].tolist()), tuple(self.size[row, :ndim].tolist()))
        return box, self.place(row)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryChunks(Sequence[PlacedChunk]):
    """Chunks of one entry, as a sequence that builds each element on access.

    Attributes:
        chunks: chunks of all entries.
        first: first row of the entry.
        last: row behind its last.
        ndim: number of dims of the tensor; None for an entry that is not a tensor.
    """

    chunks: Chunks
    first: int
    last: int
    ndim: int | None

    def __len__(self) -> int:
        return self.last - self.first

    @overload
    def __getitem__(self, at: int) -> PlacedChunk: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[PlacedChunk, ...]: ...
    def __getitem__(self, at: int | slice) -> PlacedChunk | tuple[PlacedChunk, ...]:
        if isinstance(at, slice):
            return tuple(self[number] for number in range(*at.indices(len(self))))
        row = self.first + (at if at >= 0 else at + len(self))
        if not self.first <= row < self.last:
            raise IndexError(at)
        return (None, self.chunks.place(row)) if self.ndim is None else self.chunks.chunk(row, self.ndim)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def stack_chunks(entries: Iterable[Sequence[PlacedChunk]]) -> Chunks:
    """Concatenate the chunks of several entries into one table."""
    sequences = list(entries)
    tables = {id(item.chunks): item.chunks for item in sequences if isinstance(item, EntryChunks)}
    if len(tables) == 1 and all(isinstance(item, EntryChunks) for item in sequences):
        (table,) = tables.values()
        first = np.array([item.first for item in sequences if isinstance(item, EntryChunks)], dtype=np.int64)
        count = np.array([len(item) for item in sequences], dtype=np.int64)
        rows = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
        return table.take(rows)
    return build_chunks([chunk for item in sequences for chunk in item])


def build_chunks(placed: Sequence[PlacedChunk]) -> Chunks:
    """Build a table from single chunks."""
    names = tuple(dict.fromkeys(place.file for _, place in placed))
    numbers = {name: at for at, name in enumerate(names)}
    ndim = max([1, *(box.ndim for box, _ in placed if box is not None)])
    offset = np.zeros((len(placed), ndim), dtype=np.int64)
    size = np.ones((len(placed), ndim), dtype=np.int64)
    for row, (box, _) in enumerate(placed):
        if box is not None:
            offset[row, : box.ndim], size[row, : box.ndim] = box.offset, box.size
    return Chunks(
        names=names,
        offset=offset,
        size=size,
        file=np.array([numbers[place.file] for _, place in placed], dtype=np.int64),
        start=np.array([place.offset for _, place in placed], dtype=np.int64),
        length=np.array([place.length for _, place in placed], dtype=np.int64),
    )
