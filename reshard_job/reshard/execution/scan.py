"""Read boxes of a source and compute their terms of the tensors' digests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import CrcRange
from reshard.checksums.digest import digest_term
from reshard.execution.tile import gather, view_elements
from reshard.storage.source_reader import SourceReader
from reshard.tensors.cast import UNSIGNED, Bits, cast
from reshard.tensors.geometry import Box, tiles
from reshard.tensors.shard_table import ShardRow

_TILE_BYTES = 8 << 20


class Term(NamedTuple):
    """Term of a box in its tensor's digest, and the ranges that were read for it."""

    term: int
    ranges: list[CrcRange]


def read_term(
    source: SourceReader,
    row: ShardRow,
    box: Box,
    shape: tuple[int, ...],
    item_bytes: int,
    *,
    types: tuple[str, str] | None = None,
) -> Term:
    """Read a box inside a source's row, tile by tile, and compute its term.

    Args:
        source: files of the source.
        row: row of the source's table.
        box: box to read, inside the row's box.
        shape: shape of the tensor, [ndim].
        item_bytes: bytes of one element.
        types: convert the elements from the first type to the second before the term is computed.

    Raises:
        CorruptSourceError: a file cannot be read.
    """
    term, ranges = 0, []
    for relative_tile in tiles(box.size, _TILE_BYTES // item_bytes):
        tile = relative_tile.shift(box.offset)
        elements, own = _read(source, row, tile, item_bytes)
        known = own[0].crc32 if len(own) == 1 and types is None else None
        term ^= digest_term(elements if types is None else cast(elements, *types), tile, shape, known_crc32=known)
        ranges += own
    return Term(term, crc.join(ranges))


def _read(source: SourceReader, row: ShardRow, tile: Box, item_bytes: int) -> tuple[Bits, list[CrcRange]]:
    """Return the elements of a tile, without a copy if that is possible, and the ranges that hold them."""
    mapped = view_elements(source, row, tile, item_bytes)
    if mapped is not None:
        position, view = mapped
        return view, [CrcRange(position, view.nbytes, crc.crc32(view.reshape(-1).view(np.uint8).data))]
    elements: Bits = np.empty(tile.size, dtype=UNSIGNED[item_bytes])
    return elements, gather(source, row, tile, elements)
