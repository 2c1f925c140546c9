"""Locate the slots of ZeRO-3: every rank holds some elements of each parameter, at the same offset of its own file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.pt.objects import Tensor
from reshard.formats.pt.reader import PtFile


class RankRange(NamedTuple):
    """Consecutive ranks that hold their slots at the same offset of consecutive files.

    Attributes:
        first: first rank.
        last: one past the last rank.
        file: of the first rank.
        byte_offset: position in each file.
    """

    first: int
    last: int
    file: int
    byte_offset: int


class Chunks(NamedTuple):
    """Consecutive elements that lie in consecutive files, at the same offset of each.

    Attributes:
        start: first element.
        stop: one past the last element.
        size: elements in each file; the last file can have fewer.
        file: the first.
        skipped: elements between the offset of the ranks' slots and that of the chunks.
    """

    start: int
    stop: int
    size: int
    file: int
    skipped: int


def group_ranks(ranks: Sequence[int], files: Sequence[int], byte_offsets: Sequence[int]) -> tuple[RankRange, ...]:
    """Group ranks in ascending order into the fewest `RankRange`s; each rank has a file and a position in it."""
    columns = np.array([ranks, files, byte_offsets], dtype=np.int64)
    step = np.diff(columns, axis=1)
    ends = np.flatnonzero((step[0] != 1) | (step[1] != 1) | (step[2] != 0)) + 1
    borders = [0, *ends.tolist(), len(ranks)] if len(ranks) else []
    return tuple(
        RankRange(ranks[first], ranks[last - 1] + 1, files[first], byte_offsets[first])
        for first, last in itertools.pairwise(borders)
    )


def find_chunks(ranks: RankRange, size: int, start: int, stop: int) -> Iterator[Chunks]:
    """Yield where elements `start:stop` lie, as far as the ranks hold them; each rank holds `size` elements.

    There are at most two chunks. If `start` is inside of a rank's slot, the rest of that slot is a chunk of its own.
    """
    low, high = max(start, ranks.first * size), min(stop, ranks.last * size)
    if low < high and low % size:
        end = min(high, (low // size + 1) * size)
        yield Chunks(low, end, end - low, ranks.file + low // size - ranks.first, low % size)
        low = end
    if low < high:
        yield Chunks(low, high, size, ranks.file + low // size - ranks.first, 0)


def locate_tensor(
    rank_tensors: Sequence[tuple[PtFile, Mapping[str, Tensor]]],
    key: str,
    files: Mapping[str, int],
    *,
    length: int,
    what: str,
) -> tuple[str, tuple[RankRange, ...]]:
    """Return the type of a flat tensor that ranks hold, and where it lies.

    Args:
        rank_tensors: `[ranks]`, file and tensors of every rank.
        key: of the tensor. Ranks that lack it are left out; the proof of exact cover names what is missing.
        files: path of a file -> its number.
        length: elements that each rank has to hold.
        what: the tensor, for errors.

    Raises:
        CorruptSourceError: the tensor of a rank has another length or type, or is not flat.
    """
    own = [(rank, file, tensors[key]) for rank, (file, tensors) in enumerate(rank_tensors) if key in tensors]
    dtype = own[0][2].dtype if isinstance(own[0][2], Tensor) else ""
    for rank, file, tensor in own:
        if not isinstance(tensor, Tensor) or tensor.num_elements != length or not tensor.is_contiguous:
            count = tensor.num_elements if isinstance(tensor, Tensor) else "no"
            master = rank_tensors[rank][1].get("fp32")  # beside a sound one, the optimizer makes the state so
            is_sound = key != "fp32" and isinstance(master, Tensor) and master.num_elements == length
            kind = UnsupportedError if is_sound else CorruptSourceError
            raise kind(f"{what} has {count} elements, expected {length}", path=file.path)
        if tensor.dtype != dtype:
            raise CorruptSourceError(f"{what} is {tensor.dtype}, another rank's {dtype}", path=file.path)
    ranks, numbers = [rank for rank, _, _ in own], [files[file.path] for _, file, _ in own]
    return dtype, group_ranks(ranks, numbers, [tensor.file_offset for _, _, tensor in own])
