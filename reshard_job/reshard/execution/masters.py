"""Weights and master weights: where a framework rounds one from the other, a source that holds both must agree.

The digest of the rounded masters is taken while they are moved, and costs no further read. Where it is not that of the
weights, both are read once more and compared element by element, because equal numbers can have other bits: processors
write different patterns for a NaN, and some flush numbers that are too small for float32's exponent to zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.errors import VerificationError
from reshard.execution.tile import gather, touching
from reshard.planning.plan import Plan, Rounding
from reshard.storage.source_reader import SourceReader
from reshard.tensors.cast import UNSIGNED, Bits, cast
from reshard.tensors.geometry import Box, tiles

_TILE_BYTES = 4 << 20
_SMALLEST_NORMAL = np.float32(2.0**-126)


class Difference(NamedTuple):
    """How weights differ from their masters.

    Attributes:
        num_elements: that differ.
        first: the first of them.
    """

    num_elements: int
    first: tuple[int, ...]


def check_masters(plan: Plan, source: SourceReader, unequal: Iterable[Rounding]) -> None:
    """Compare weights with masters whose digests differ.

    Args:
        plan: the conversion.
        source: its files.
        unequal: tensors to compare.

    Raises:
        VerificationError: with every weight that is not its master rounded.
    """
    problems = []
    for pair in unequal:
        found = _difference(plan, source, pair)
        if found is not None:
            weight, master = plan.index.tensors[pair.weight], plan.index.tensors[pair.master]
            elements = f"{found.num_elements} of {weight.num_elements} elements"
            wanted = f"{master.key} rounded to {weight.dtype}"
            problems.append(f"{weight.key}: {elements} are not those of {wanted}, the first at {list(found.first)}")
    if problems:
        raise VerificationError(
            f"{len(problems)} weights are not their master weights rounded: nothing was published",
            path=str(plan.index.root),
            problems=problems[:20],
            hint="a file is damaged or of another checkpoint, or the training script changes weights behind the"
            " optimizer's back (masks, averages): convert both as they are with --allow-differences",
        )


def _difference(plan: Plan, source: SourceReader, pair: Rounding) -> Difference | None:
    """Where a weight is not its master rounded; None if it is, but for patterns of NaN and for tiny numbers."""
    weight, master = plan.index.tensors[pair.weight], plan.index.tensors[pair.master]
    count, first = 0, None
    for tile in tiles(weight.shape, _TILE_BYTES // master.item_bytes):
        held, wide = _elements(plan, source, pair.weight, tile), _elements(plan, source, pair.master, tile)
        unequal = unexplained(held, wide, weight.dtype, master.dtype)
        if first is None and unequal.any():
            inside = np.unravel_index(int(unequal.reshape(-1).argmax()), unequal.shape)
            first = tuple(int(at) + low for at, low in zip(inside, tile.offset, strict=True))
        count += int(unequal.sum())
    return None if first is None else Difference(count, first)


def unexplained(weights: Bits, masters: Bits, weight_type: str, master_type: str) -> npt.NDArray[np.bool_]:
    """Which weights are not their masters rounded, [...] as both: no two NaN, and no tiny number that became zero."""
    unequal: npt.NDArray[np.bool_] = cast(masters, master_type, weight_type) != weights
    if unequal.any():
        narrow = cast(weights, weight_type, "float32").view(np.float32)
        wide = cast(masters, master_type, "float32").view(np.float32)
        unequal &= ~(np.isnan(narrow) & np.isnan(wide))
        unequal &= ~((narrow == 0) & (np.abs(wide) < _SMALLEST_NORMAL))
    return unequal


def _elements(plan: Plan, source: SourceReader, number: int, tile: Box) -> Bits:
    """Read a part of a source tensor."""
    item_bytes = plan.index.tensors[number].item_bytes
    found: Bits = np.empty(tile.size, dtype=UNSIGNED[item_bytes])
    for row, part in touching(plan.index.shards, plan.source_rows[number], tile):
        elements: Bits = np.empty(part.size, dtype=found.dtype)
        gather(source, row, part, elements)
        low = [at - base for at, base in zip(part.offset, tile.offset, strict=True)]
        found[tuple(slice(at, at + size) for at, size in zip(low, part.size, strict=True))] = elements
    return found
