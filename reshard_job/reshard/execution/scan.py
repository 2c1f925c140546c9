"""Read parts of a source for their digests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import Piece
from reshard.checksums.digest import box_term
from reshard.execution.tile import gather, look
from reshard.storage.source_reader import SourceReader
from reshard.tensors.cast import UNSIGNED, Bits, cast
from reshard.tensors.geometry import Box, tiles
from reshard.tensors.shard_table import ShardRow

_TILE_BYTES = 8 << 20


class Term(NamedTuple):
    """Term of a part in its tensor's digest, and the ranges that were read for it."""

    term: int
    pieces: list[Piece]


def term_of(
    source: SourceReader,
    row: ShardRow,
    region: Box,
    shape: tuple[int, ...],
    item_bytes: int,
    *,
    types: tuple[str, str] | None = None,
) -> Term:
    """Read a part of a source's row.

    Args:
        source: that holds it.
        row: the box.
        region: inside the box.
        shape: of the tensor, [ndim].
        item_bytes: of one element.
        types: digest the elements changed from the first type to the second.

    Raises:
        CorruptSourceError: it cannot be read.
    """
    term, pieces = 0, []
    for tile in tiles(region.size, _TILE_BYTES // item_bytes):
        part = tile.shift(region.offset)
        elements, own = _read(source, row, part, item_bytes)
        known = own[0].crc32 if len(own) == 1 and types is None else None
        term ^= box_term(elements if types is None else cast(elements, *types), part, shape, known_crc32=known)
        pieces += own
    return Term(term, crc.join(pieces))


def _read(source: SourceReader, row: ShardRow, part: Box, item_bytes: int) -> tuple[Bits, list[Piece]]:
    """Elements of a part, where they are if that can be, and the ranges that hold them."""
    found = look(source, row, part, item_bytes)
    if found is not None:
        position, seen = found
        return seen, [Piece(position, seen.nbytes, crc.crc32(seen.reshape(-1).view(np.uint8).data))]
    elements: Bits = np.empty(part.size, dtype=UNSIGNED[item_bytes])
    return elements, gather(source, row, part, elements)
