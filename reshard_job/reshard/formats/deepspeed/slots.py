"""Slots of ZeRO-3: every rank holds a part of every parameter, at the same place of a file of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reshard.errors import CorruptSourceError
from reshard.formats.pt.objects import Tensor
from reshard.formats.pt.reader import PtFile


class Run(NamedTuple):
    """Consecutive ranks that hold their parts at the same place of consecutive files.

    Attributes:
        first: first rank.
        last: rank behind the last.
        file: of the first rank.
        byte_offset: position in each file.
    """

    first: int
    last: int
    file: int
    byte_offset: int


class Chunks(NamedTuple):
    """Consecutive elements that lie in consecutive files, at the same place of each.

    Attributes:
        start: first element.
        stop: element behind the last.
        size: elements in each file; in the last there may be fewer.
        file: the first.
        skipped: elements between the place of the run and that of the chunks.
    """

    start: int
    stop: int
    size: int
    file: int
    skipped: int


def runs_of(ranks: Sequence[int], files: Sequence[int], byte_offsets: Sequence[int]) -> tuple[Run, ...]:
    """The fewest runs of these ranks, in ascending order, whose parts lie in these files at these positions."""
    columns = np.array([ranks, files, byte_offsets], dtype=np.int64)
    step = np.diff(columns, axis=1)
    ends = np.flatnonzero((step[0] != 1) | (step[1] != 1) | (step[2] != 0)) + 1
    borders = [0, *ends.tolist(), len(ranks)] if len(ranks) else []
    return tuple(
        Run(ranks[first], ranks[last - 1] + 1, files[first], byte_offsets[first])
        for first, last in itertools.pairwise(borders)
    )


def chunks_of(run: Run, size: int, start: int, stop: int) -> Iterator[Chunks]:
    """Where elements `start:stop` lie, of those that a run holds: `size` of them on each rank.

    At most two: a part that `start` cuts off is shorter than the others, and begins behind the run's place.
    """
    low, high = max(start, run.first * size), min(stop, run.last * size)
    if low < high and low % size:
        end = min(high, (low // size + 1) * size)
        yield Chunks(low, end, end - low, run.file + low // size - run.first, low % size)
        low = end
    if low < high:
        yield Chunks(low, high, size, run.file + low // size - run.first, 0)


def held_runs(
    held: Sequence[tuple[PtFile, Mapping[str, Tensor]]], key: str, files: Mapping[str, int], *, length: int, what: str
) -> tuple[str, tuple[Run, ...]]:
    """Type of a flat tensor that ranks hold, and where it lies.

    Args:
        held: file and tensors of every rank, [ranks].
        key: of the tensor. Ranks that lack it are left out: the proof of exact cover names what is missing.
        files: path of a file -> its number.
        length: elements that each rank has to hold.
        what: the tensor, for errors.

    Raises:
        CorruptSourceError: a rank's has another length or type, or is not flat.
    """
    own = [(rank, file, tensors[key]) for rank, (file, tensors) in enumerate(held) if key in tensors]
    dtype = own[0][2].dtype if isinstance(own[0][2], Tensor) else ""
    for _, file, tensor in own:
        if not isinstance(tensor, Tensor) or tensor.num_elements != length or not tensor.is_contiguous:
            count = tensor.num_elements if isinstance(tensor, Tensor) else "no"
            raise CorruptSourceError(f"{what} has {count} elements, expected {length}", path=file.path)
        if tensor.dtype != dtype:
            raise CorruptSourceError(f"{what} is {tensor.dtype}, another rank's {dtype}", path=file.path)
    ranks, numbers = [rank for rank, _, _ in own], [files[file.path] for _, file, _ in own]
    return dtype, runs_of(ranks, numbers, [tensor.file_offset for _, _, tensor in own])
