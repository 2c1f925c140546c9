"""Compare weights with the master weights that a framework rounds them from.

The digest of the rounded masters is computed while they are moved, without another read. If it differs from the digest
of the weights, both are read again and compared element by element, because equal numbers can have different bits:
processors write different patterns for a NaN, and some replace numbers below float32's smallest normal by zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.errors import VerificationError
from reshard.execution.tile import find_touching, gather
from reshard.planning.plan import Plan, Rounding
from reshard.storage.source_reader import SourceReader
from reshard.tensors.cast import UNSIGNED, Bits, cast
from reshard.tensors.geometry import Box, tiles

_TILE_BYTES = 4 << 20
_SMALLEST_NORMAL = np.float32(2.0**-126)


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


def find_unexplained(weights: Bits, masters: Bits, weight_type: str, master_type: str) -> npt.NDArray[np.bool_]:
    """Mark the weights that are not their masters rounded; all arrays have one shape.

    A weight is not marked if it and its master are both NaN, or if it is zero and its master is a tiny number.
    """
    unequal: npt.NDArray[np.bool_] = cast(masters, master_type, weight_type) != weights
    if unequal.any():
        narrow = cast(weights, weight_type, "float32").view(np.float32)
        wide = cast(masters, master_type, "float32").view(np.float32)
        unequal &= ~(np.isnan(narrow) & np.isnan(wide))
        unequal &= ~((narrow == 0) & (np.abs(wide) < _SMALLEST_NORMAL))
    return unequal


def _read_elements(plan: Plan, source: SourceReader, number: int, tile: Box) -> Bits:
    """Read a tile of a source tensor."""
    item_bytes = plan.index.tensors[number].item_bytes
    tile_elements: Bits = np.empty(tile.size, dtype=UNSIGNED[item_bytes])
    for row, box in find_touching(plan.index.shards, plan.source_rows[number], tile):
        elements: Bits = np.empty(box.size, dtype=tile_elements.dtype)
        gather(source, row, box, elements)
        low = [at - base for at, base in zip(box.offset, tile.offset, strict=True)]
        tile_elements[tuple(slice(at, at + size) for at, size in zip(low, box.size, strict=True))] = elements
    return tile_elements
