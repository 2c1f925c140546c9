"""Read the copies of a tensor that tensor-parallel ranks have trained by themselves, and take their mean.

Copies are read one after the other for one tile, so that memory does not depend on the number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.checksums.crc import CrcRange
from reshard.checksums.digest import digest_term, finish_digest
from reshard.errors import CorruptSourceError, VerificationError
from reshard.execution.scan import find_touching, gather
from reshard.execution.source_checks import check_files
from reshard.planning.averages import Average, name_few
from reshard.storage.source_reader import SourceReader
from reshard.tensors.cast import UNSIGNED, Bits, cast, find_unexplained
from reshard.tensors.geometry import Box, tiles
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import ITEM_BYTES, Index
from reshard.tensors.mean import CopiesMean

BUFFERS = 16
"""Arrays of a tile's size that averaging holds at once, beside the tile that is written."""

_TILE_BYTES = 1 << 20


class Elements(NamedTuple):
    """Elements of a tile that were read, and the ranges that hold them, by file."""

    elements: Bits
    ranges: dict[int, list[CrcRange]]


class Mean(NamedTuple):
    """The mean of all copies of a tile.

    Attributes:
        elements: elements that all copies agree about, and the mean of the others.
        ranges: ranges that hold the copies, by file; without those of master weights that the plan moves, too.
        difference: largest difference between two copies; None if all copies are equal.
    """

    elements: Bits
    ranges: dict[int, list[CrcRange]]
    difference: float | None


class MeanDigest(NamedTuple):
    """Digest of a mean, and the largest difference between two copies; None if all copies are equal."""

    digest: int
    difference: float | None


def read_rows(source: SourceReader, index: Index, number: int, rows: Int64Array, tile: Box) -> Elements:
    """Read a tile of a source tensor from rows that cover it once.

    Raises:
        CorruptSourceError: a file cannot be read.
    """
    elements: Bits = np.empty(tile.size, dtype=UNSIGNED[index.tensors[number].item_bytes])
    ranges: dict[int, list[CrcRange]] = defaultdict(list)
    for row, box in find_touching(index.shards, rows, tile):
        content: Bits = np.empty(box.size, dtype=elements.dtype)
        ranges[row.file] += gather(source, row, box, content)
        low = [at - base for at, base in zip(box.offset, tile.offset, strict=True)]
        inside: tuple[Any, ...] = (*(slice(at, at + size) for at, size in zip(low, box.size, strict=True)), ...)
        elements[inside] = content
    return Elements(elements, ranges)


def read_mean(source: SourceReader, index: Index, number: int, average: Average, tile: Box) -> Mean:
    """Read all copies of a tile and return their mean.

    Weights with master weights are the masters' mean, rounded; where all copies are equal, they are the weights.

    Args:
        source: files of the source.
        index: the source.
        number: position of the tensor in `index.tensors`.
        average: its copies.
        tile: box of the tensor.

    Raises:
        CorruptSourceError: a file cannot be read or is not what was committed, or a copy of another stage differs from
            its rank's copy.
        VerificationError: a rank's weights are not its master weights, rounded.
    """
    tensor = index.tensors[number]
    master = None if average.master is None else index.tensors[average.master]
    ranges: dict[int, list[CrcRange]] = defaultdict(list)
    mean: CopiesMean | None = None
    master_mean: CopiesMean | None = None
    for rank, rows in enumerate(average.ranks):
        own = read_rows(source, index, number, rows, tile)
        _add(ranges, own.ranges)
        for other_rows in (other for of, other in average.others if of == rank):
            other = read_rows(source, index, number, other_rows, tile)
            _add(ranges, other.ranges)
            if not np.array_equal(own.elements, other.elements):
                files = [index.files[file] for file in sorted({*own.ranges, *other.ranges})]
                check_files(index.root, files)  # where a commit proves one damaged, that file is blamed alone
                raise _stages_differ_error(index, number, (own, other), tile)
        mean = _add_copy(mean, own.elements, tensor.dtype)
        if average.master is not None and master is not None:
            wide = read_rows(source, index, average.master, average.masters[rank], tile)
            if not average.moves_master:
                _add(ranges, wide.ranges)
            unexplained = average.is_rounded and find_unexplained(
                own.elements, wide.elements, tensor.dtype, master.dtype
            )
            if np.any(unexplained):
                raise _not_rounded_error(index, (number, average.master), rank, own.ranges)
            master_mean = _add_copy(master_mean, wide.elements, master.dtype)
    assert mean is not None
    if master is None or master_mean is None:
        return Mean(mean.elements(), ranges, mean.largest_difference)
    rounded = cast(master_mean.elements(), master.dtype, tensor.dtype)
    first = mean.first
    merged: Bits = np.where(mean.differs | master_mean.differs, rounded, first)
    return Mean(merged, ranges, mean.largest_difference)


def read_mean_digest(source: SourceReader, index: Index, number: int, average: Average, dtype: str) -> MeanDigest:
    """Read all copies of a tensor, and return the digest of their mean in a type.

    Raises:
        CorruptSourceError, VerificationError: see `read_mean`.
    """
    tensor = index.tensors[number]
    term, largest = 0, None
    for tile in tiles(tensor.shape, _TILE_BYTES // tensor.item_bytes):
        mean = read_mean(source, index, number, average, tile)
        term ^= digest_term(cast(mean.elements, tensor.dtype, dtype), tile, tensor.shape)
        if mean.difference is not None:
            largest = max(mean.difference, largest or 0.0)
    return MeanDigest(finish_digest(term, tensor.num_elements * ITEM_BYTES[dtype]), largest)


def describe_differences(differences: Mapping[str, float]) -> str:
    """Say which tensors were averaged, and how much their copies differed; empty if none was averaged.

    Args:
        differences: largest difference between copies, by `state/name`.
    """
    if not differences:
        return ""
    count = "1 tensor is the mean" if len(differences) == 1 else f"{len(differences)} tensors are means"
    return (
        f"{count} of copies that differ between tensor-parallel ranks by up to {max(differences.values()):.3g}"
        f" ({name_few(list(differences))})"
    )


def _add(ranges: dict[int, list[CrcRange]], more: Mapping[int, Sequence[CrcRange]]) -> None:
    for file, own in more.items():
        ranges[file] += own


def _add_copy(mean: CopiesMean | None, elements: Bits, dtype: str) -> CopiesMean:
    if mean is None:
        return CopiesMean(elements, dtype)
    mean.add(elements)
    return mean


def _stages_differ_error(index: Index, number: int, copies: tuple[Elements, Elements], tile: Box) -> CorruptSourceError:
    """Make the error for copies that one rank holds in several stages, and that differ."""
    count = int((copies[0].elements != copies[1].elements).sum())
    one, other = (", ".join(index.files[file].path for file in copy.ranges) for copy in copies)
    what = f"{one} and {other}, of one tensor-parallel rank, differ in {count} elements of the box {tile}"
    return CorruptSourceError(
        "copies of one tensor differ: nothing was published",
        path=str(index.root),
        problems=[f"{index.tensors[number].key}: {what}"],
        hint="only copies of different tensor-parallel ranks are averaged, so a file may be damaged: use an earlier"
        " checkpoint, or average the first copies with --allow-differences",
    )


def _not_rounded_error(
    index: Index, pair: tuple[int, int], rank: int, ranges: Mapping[int, Sequence[CrcRange]]
) -> VerificationError:
    """Make the error for a rank whose weights are not its master weights rounded."""
    weight, master = (index.tensors[number] for number in pair)
    files = ", ".join(index.files[file].path for file in ranges)
    what = f"{files}, of tensor-parallel rank {rank}: not {master.key} of that rank, rounded to {weight.dtype}"
    return VerificationError(
        "weights are not their master weights rounded: nothing was published",
        path=str(index.root),
        problems=[f"{weight.key}: {what}"],
        hint="a file is damaged or of another checkpoint, or the training script changes weights behind the"
        " optimizer's back: average the masters as they are with --allow-differences",
    )
