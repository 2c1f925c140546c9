"""Chunks of a checkpoint and where they lie, in columns: a checkpoint of thousands of ranks has millions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

import numpy as np

from reshard.tensors.geometry import Box
from reshard.tensors.intervals import Int64Array


class Place(NamedTuple):
    """Where an item lies: one complete `.pt` archive inside a file.

    Attributes:
        file: name of the file.
        offset: first byte.
        length: bytes.
    """

    file: str
    offset: int
    length: int


Piece = tuple[Box | None, Place]
"""A chunk's box and its item; no box for what is not a tensor."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """Chunks of all entries, one row each.

    Attributes:
        names: of the files.
        offset: first element in the tensor, [rows, max_ndim]; dims that a tensor lacks are 0.
        size: elements, [rows, max_ndim]; dims that a tensor lacks are 1.
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
        """These rows only."""
        return Chunks(
            names=self.names,
            offset=self.offset[rows],
            size=self.size[rows],
            file=self.file[rows],
            start=self.start[rows],
            length=self.length[rows],
        )

    def place(self, row: int) -> Place:
        """Where one item lies."""
        return Place(self.names[self.file[row]], int(self.start[row]), int(self.length[row]))

    def piece(self, row: int, ndim: int) -> tuple[Box, Place]:
        """One chunk, with the tensor's own number of dims."""
        box = Box(tuple(self.offset[row, :ndim].tolist()), tuple(self.size[row, :ndim].tolist()))
        return box, self.place(row)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces(Sequence[Piece]):
    """Those of one entry; each is made when it is asked for.

    Attributes:
        chunks: of all entries.
        first: first row.
        last: row behind the last.
        ndim: of the tensor; None for what is not a tensor.
    """

    chunks: Chunks
    first: int
    last: int
    ndim: int | None

    def __len__(self) -> int:
        return self.last - self.first

    @overload
    def __getitem__(self, at: int) -> Piece: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Piece, ...]: ...
    def __getitem__(self, at: int | slice) -> Piece | tuple[Piece, ...]:
        if isinstance(at, slice):
            return tuple(self[number] for number in range(*at.indices(len(self))))
        row = self.first + (at if at >= 0 else at + len(self))
        if not self.first <= row < self.last:
            raise IndexError(at)
        return (None, self.chunks.place(row)) if self.ndim is None else self.chunks.piece(row, self.ndim)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def in_columns(pieces: Iterable[Sequence[Piece]]) -> Chunks:
    """Rows of all pieces, one behind the other."""
    every = list(pieces)
    tables = {id(item.chunks): item.chunks for item in every if isinstance(item, Pieces)}
    if len(tables) == 1 and all(isinstance(item, Pieces) for item in every):
        (table,) = tables.values()
        first = np.array([item.first for item in every if isinstance(item, Pieces)], dtype=np.int64)
        count = np.array([len(item) for item in every], dtype=np.int64)
        rows = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
        return table.take(rows)
    return made_of([piece for item in every for piece in item])


def made_of(pieces: Sequence[Piece]) -> Chunks:
    """Columns of single pieces."""
    names = tuple(dict.fromkeys(place.file for _, place in pieces))
    numbers = {name: at for at, name in enumerate(names)}
    ndim = max([1, *(box.ndim for box, _ in pieces if box is not None)])
    offset = np.zeros((len(pieces), ndim), dtype=np.int64)
    size = np.ones((len(pieces), ndim), dtype=np.int64)
    for row, (box, _) in enumerate(pieces):
        if box is not None:
            offset[row, : box.ndim], size[row, : box.ndim] = box.offset, box.size
    return Chunks(
        names=names,
        offset=offset,
        size=size,
        file=np.array([numbers[place.file] for _, place in pieces], dtype=np.int64),
        start=np.array([place.offset for _, place in pieces], dtype=np.int64),
        length=np.array([place.length for _, place in pieces], dtype=np.int64),
    )
