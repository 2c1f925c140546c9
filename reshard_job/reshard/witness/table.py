"""Table of a checkpoint: shape and type of each tensor, and the place of each element of each copy."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from reshard.witness.pickles import ITEM_BYTES, Pickles

Ints = npt.NDArray[np.int64]

OPTIMIZER = "optimizer"
"""Key of `Table.unknown` for all states of the optimizer."""

PADDING = "#padding"
"""Ends the name under which the padding rows of a vocabulary are listed."""


class Key(NamedTuple):
    """A tensor's state (`weight`, `fp32`, `exp_avg`, ...) and name."""

    state: str
    name: str

    def __str__(self) -> str:
        return f"{self.state}/{self.name}"


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array without gaps."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class Holder(Protocol):
    """Numbered elements, and where each of them is in a file."""

    @property
    def num_elements(self) -> int:
        """Return how many elements it holds."""
        ...

    @property
    def border(self) -> int:
        """Return how many elements are in one storage before the next one begins; 0 if all are in one."""
        ...

    @property
    def num_places(self) -> int:
        """Return the number of storages."""
        ...

    def find(self, element: Ints) -> tuple[Ints, Ints]:
        """Return file number and byte of each element, [elements] each."""
        ...

    def places(self) -> list[Place]:
        """Return which elements are in which storage, in order."""
        ...


class Place(NamedTuple):
    """Elements of a holder that are in one storage.

    Attributes:
        storage: that holds them.
        offset: position of the first one in the storage, in elements.
        first: number of the first one.
        num_elements: number of elements.
    """

    storage: Storage
    offset: int
    first: int
    num_elements: int


@dataclasses.dataclass(eq=False)
class Storage:
    """Consecutive elements in a file.

    Attributes:
        file: number of the file in the table.
        locate: returns the first byte and the number of bytes; called when they are first needed.
        dtype: type of the elements.
    """

    file: int
    locate: Callable[[], tuple[int, int]]
    dtype: str

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @functools.cached_property
    def range(self) -> tuple[int, int]:
        """Return the first byte and the number of bytes."""
        return self.locate()

    @property
    def num_elements(self) -> int:
        return self.range[1] // self.item_bytes

    @property
    def border(self) -> int:
        return 0

    @property
    def num_places(self) -> int:
        return 1

    def find(self, element: Ints) -> tuple[Ints, Ints]:
        return np.full(len(element), self.file), self.range[0] + element * self.item_bytes

    def places(self) -> list[Place]:
        return [Place(self, 0, 0, self.num_elements)]


class Parts:
    """Storages in which a buffer was cut, one for each rank, with their places in columns.

    Args:
        storages: one for each rank, all of one type.
    """

    def __init__(self, storages: Sequence[Storage]) -> None:
        self.storages = tuple(storages)
        self.item_bytes = storages[0].item_bytes

    @functools.cached_property
    def columns(self) -> tuple[Ints, Ints]:
        """Return file number and first byte of each storage, [ranks] each."""
        ranges = [storage.range[0] for storage in self.storages]
        return np.array([storage.file for storage in self.storages]), np.array(ranges)


@dataclasses.dataclass(eq=False)
class Stream:
    """A buffer that was cut into equal partitions; elements count from the start of the buffer.

    Attributes:
        parts: a storage for each partition; the last elements of a partition, which are padding, may be missing in it.
        partition: elements of each partition.
    """

    parts: Parts
    partition: int

    @property
    def num_elements(self) -> int:
        return self.partition * len(self.parts.storages)

    @property
    def border(self) -> int:
        return self.partition

    @property
    def num_places(self) -> int:
        return 1  # the parameters of a group share its buffer, which is looked at once

    def find(self, element: Ints) -> tuple[Ints, Ints]:
        rank, inside = np.divmod(element, self.partition)
        files, bases = self.parts.columns
        return files[rank], bases[rank] + inside * self.parts.item_bytes

    def places(self) -> list[Place]:
        return [
            Place(storage, 0, rank * self.partition, self.partition) for rank, storage in enumerate(self.parts.storages)
        ]


@dataclasses.dataclass(eq=False)
class Slots:
    """A parameter that ZeRO-3 cut into a chunk for each rank, at the same position of each rank's buffer.

    Attributes:
        parts: a buffer for each rank.
        slot: first element of the chunk in each buffer.
        chunk: elements of each chunk; the last ones may be cut short or empty.
        num_elements: of the parameter.
    """

    parts: Parts
    slot: int
    chunk: int
    num_elements: int

    @property
    def border(self) -> int:
        return self.chunk

    @property
    def num_places(self) -> int:
        return len(self.parts.storages)

    def find(self, element: Ints) -> tuple[Ints, Ints]:
        rank, inside = np.divmod(element, self.chunk)
        files, bases = self.parts.columns
        return files[rank], bases[rank] + (self.slot + inside) * self.parts.item_bytes

    def places(self) -> list[Place]:
        firsts = range(0, self.num_elements, self.chunk)
        return [
            Place(storage, self.slot, first, min(self.chunk, self.num_elements - first))
            for storage, first in zip(self.parts.storages, firsts, strict=False)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where its elements are.

    Attributes:
        low: first index of the box, [ndim] of `whole`.
        size: of the box.
        holder: what holds the elements.
        start: element of the holder that is the first one of the box.
        strides: elements of the holder between neighbours, [ndim].
        whole: shape in which the box is stated; it has as many elements as the tensor, in the same order.
    """

    low: tuple[int, ...]
    size: tuple[int, ...]
    holder: Holder
    start: int
    strides: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)

    @property
    def last(self) -> int:
        """Return the last element of the holder that belongs to the box."""
        return self.start + sum((size - 1) * stride for size, stride in zip(self.size, self.strides, strict=True))

    def rows(self, first: int, stop: int) -> Piece | None:
        """Return the rows of dim 0 from `first` to `stop`, counted from `first`; None if the box has none of them."""
        low, high = max(self.low[0], first), min(self.low[0] + self.size[0], stop)
        if low >= high:
            return None
        return dataclasses.replace(
            self,
            low=(low - first, *self.low[1:]),
            size=(high - low, *self.size[1:]),
            start=self.start + (low - self.low[0]) * self.strides[0],
            whole=(stop - first, *self.whole[1:]),
        )

    def without_first_dim(self) -> Piece:
        """Return the box without dim 0, along which it has one index."""
        return dataclasses.replace(
            self, low=self.low[1:], size=self.size[1:], strides=self.strides[1:], whole=self.whole[1:]
        )


@dataclasses.dataclass(slots=True, eq=False)
class Tensor:
    """A tensor of a table.

    Attributes:
        shape: of the whole tensor.
        dtype: type of its elements.
        copies: pieces of each copy; every copy holds the whole tensor.
        num_averaged: the framework declares that the tensor is the mean of so many copies, from the first on; 0 if not.
        is_rank_local: the framework lets the copies differ, and takes the first one.
    """

    shape: tuple[int, ...]
    dtype: str
    copies: list[list[Piece]]
    num_averaged: int = 0
    is_rank_local: bool = False

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def find(self, copy: int, element: Ints) -> tuple[Ints, Ints]:
        """Return file number and byte of elements, numbered in row-major order; -1 for elements that nothing holds."""
        only = self.copies[copy][0] if len(self.copies[copy]) == 1 else None
        if only is not None and only.size == only.whole and only.strides == row_major(only.size):
            return only.holder.find(element + only.start)
        files, positions = np.full(len(element), -1), np.full(len(element), -1)
        by_whole: dict[tuple[int, ...], list[Piece]] = {}
        for piece in self.copies[copy]:
            by_whole.setdefault(piece.whole, []).append(piece)
        for whole, pieces in by_whole.items():
            index = np.array(np.unravel_index(element, whole or (1,)), dtype=np.int64).T
            low = np.array([piece.low or (0,) for piece in pieces], dtype=np.int64)
            high = low + np.array([piece.size or (1,) for piece in pieces], dtype=np.int64)
            step = max(1, (1 << 20) // (len(pieces) * low.shape[1]))
            for first in range(0, len(element), step):
                some = index[first : first + step]
                inside = (some[:, None] >= low).all(axis=2) & (some[:, None] < high).all(axis=2)
                where, number = np.nonzero(inside)
                for at in sorted(set(number.tolist())):
                    own = where[number == at]
                    piece = pieces[at]
                    local = (some[own] - low[at]) @ np.array(piece.strides or (0,), dtype=np.int64) + piece.start
                    files[own + first], positions[own + first] = piece.holder.find(local)
        return files, positions


def _not_stated(_name: str) -> str:
    return ""


@dataclasses.dataclass(slots=True, eq=False)
class Table:
    """Tensors of a checkpoint with their places in its files.

    Attributes:
        root: the checkpoint's folder.
        tensors: all tensors.
        others: tensors that are there, and that no conversion takes along.
        aliases: second name of a tied weight -> first name.
        unknown: name -> why the stranger cannot say where the tensor is.
        files: paths of the files, by number.
        filler: ranges of files that are neither container nor tensor, by file: (start, stop).
        storages: all storages of all files.
        model_dtype: type that the framework gives to the weights of this model; empty if it is not stated.
        kind_of: returns how tensor parallelism cuts a parameter, in words; empty if the checkpoint does not say it.
        pickles: loads the pickles of all files.
    """

    root: Path
    tensors: dict[Key, Tensor] = dataclasses.field(default_factory=dict)
    others: list[Tensor] = dataclasses.field(default_factory=list)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: dict[str, str] = dataclasses.field(default_factory=dict)
    files: list[str] = dataclasses.field(default_factory=list)
    filler: dict[int, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    storages: list[Storage] = dataclasses.field(default_factory=list)
    model_dtype: str = ""
    kind_of: Callable[[str], str] = _not_stated
    pickles: Pickles = dataclasses.field(default_factory=Pickles)

    def add_file(self, path: str) -> int:
        """Return the number of a new file."""
        self.files.append(path)
        return len(self.files) - 1

    def add(self, key: Key, tensor: Tensor, rows: int | None = None) -> None:
        """Add a tensor; rows of dim 0 behind `rows` are listed as padding of their own."""
        if rows is None or not tensor.shape or tensor.shape[0] <= rows:
            self.tensors[key] = tensor
            return
        for name, first, stop in ((key.name, 0, rows), (key.name + PADDING, rows, tensor.shape[0])):
            copies = [
                [part for piece in copy if (part := piece.rows(first, stop)) is not None] for copy in tensor.copies
            ]
            shape = (stop - first, *tensor.shape[1:])
            self.tensors[Key(key.state, name)] = dataclasses.replace(tensor, shape=shape, copies=copies)


def select(table: Table, states: Sequence[str]) -> Mapping[Key, Tensor]:
    """Return the tensors of some states; all of them if no state is named."""
    return {key: tensor for key, tensor in table.tensors.items() if not states or key.state in states}
