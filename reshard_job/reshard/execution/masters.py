"""Compare weights with the master weights that a framework rounds them from.

The digest of the rounded masters is computed while they are moved, without another read. If it differs from the digest
of the weights, both are read again and compared element by element, because equal numbers can have different bits:
processors write different patterns for a NaN, and some replace numbers below float32's smallest normal by zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from reshard.errors import VerificationError
from reshard.execution.averages import read_mean, read_rows
from reshard.planning.plan import Plan, Rounding
from reshard.storage.source_reader import SourceReader
from reshard.tensors.cast import Bits, find_unexplained
from reshard.tensors.geometry import Box, tiles

_TILE_BYTES = 4 << 20


class Difference(NamedTuple):
    """Elements of a weight that differ from its rounded master.

    Attributes:
        num_elements: number of elements that differ.
        first: index of the first element that differs.
    """

    num_elements: int
    first: tuple[int, ...]


def check_masters(plan: Plan, source: SourceReader, unequal: Iterable[Rounding]) -> None:
    """Compare weights with masters whose digests differ.

    Args:
        plan: the conversion.
        source: files of the source.
        unequal: weights to compare with their masters.

    Raises:
        VerificationError: weights are not their masters rounded; the error lists them.
    """
    problems = []
    for pair in unequal:
        difference = _find_difference(plan, source, pair)
        if difference is not None:
            weight, master = plan.index.tensors[pair.weight], plan.index.tensors[pair.master]
            elements = f"{difference.num_elements} of {weight.num_elements} elements"
            expected = f"{master.key} rounded to {weight.dtype}"
            first = list(difference.first)
            problems.append(f"{weight.key}: {elements} are not those of {expected}, the first at {first}")
    if problems:
        raise VerificationError(
            f"{len(problems)} weights are not their master weights rounded: nothing was published",
            path=str(plan.index.root),
            problems=problems[:20],
            hint="a file is damaged or of another checkpoint, or the training script changes weights behind the"
            " optimizer's back (masks, averages): convert both as they are with --allow-differences",
        )


def _find_difference(plan: Plan, source: SourceReader, pair: Rounding) -> Difference | None:
    """Find elements of a weight that are not its master rounded; None if only NaN patterns and tiny numbers differ."""
    weight, master = plan.index.tensors[pair.weight], plan.index.tensors[pair.master]
    count, first = 0, None
    for tile in tiles(weight.shape, _TILE_BYTES // master.item_bytes):
        narrow = _read_elements(plan, source, pair.weight, tile)
        wide = _read_elements(plan, source, pair.master, tile)
        unequal = find_unexplained(narrow, wide, weight.dtype, master.dtype)
        if first is None and unequal.any():
            inside = np.unravel_index(int(unequal.reshape(-1).argmax()), unequal.shape)
            first = tuple(int(at) + low for at, low in zip(inside, tile.offset, strict=True))
        count += int(unequal.sum())
    return None if first is None else Difference(count, first)


def _read_elements(plan: Plan, source: SourceReader, number: int, tile: Box) -> Bits:
    """Read a tile of a source tensor: its first copy, or the mean of its copies."""
    if number in plan.averages:
        return read_mean(source, plan.index, number, plan.averages[number], tile).elements
    return read_rows(source, plan.index, number, plan.source_rows[number], tile).elements
