"""Read boxes of a source, and compute their terms of the tensors' digests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import CrcRange
from reshard.checksums.digest import digest_term
from reshard.profile.clock import UNTIMED, Phase, PhaseClock
from reshard.storage.files import Bytes
from reshard.storage.source_reader import SourceReader
from reshard.tensors.cast import UNSIGNED, Bits, cast
from reshard.tensors.geometry import Box, tiles
from reshard.tensors.intervals import Int64Array
from reshard.tensors.shard_table import ShardRow, ShardTable

GATHER_BYTES = 4 << 20
"""Bytes of a file that are mapped at a time to copy ranges from the mapping."""

_LARGEST_SPAN = 64
"""Largest ratio of mapped bytes to copied bytes."""

_TILE_BYTES = 8 << 20


def find_touching(shards: ShardTable, rows: Int64Array, tile: Box) -> Iterator[tuple[ShardRow, Box]]:
    """Yield the boxes of rows that touch a tile, each with the box that it has in common with the tile."""
    for row in shards.boxes_touching(rows, tile):
        box = row.box.intersect(tile)
        if box is not None:
            yield row, box


def split_into_ranges(row: ShardRow, box: Box, elements: Bits) -> Iterator[tuple[int, Bytes]]:
    """Yield the file's ranges that hold a box of a row: position in the file, and the bytes in `elements`."""
    flat = elements.reshape(-1).view(np.uint8)
    positions, length = row.byte_ranges(box, elements.dtype.itemsize)
    for number, position in enumerate(positions):
        yield position, flat[number * length : (number + 1) * length]


def gather(
    source: SourceReader, row: ShardRow, box: Box, elements: Bits, clock: PhaseClock = UNTIMED
) -> list[CrcRange]:
    """Fill `elements` with a box of a row, and return the ranges that were read with their checksums.

    Ranges that are close together in the file are copied from one mapping.
    """
    ranges = list(split_into_ranges(row, box, elements))
    clock.lap(Phase.OTHER)
    if len(ranges) < 2:
        return _read_ranges(source, row.file, ranges, clock)
    step = max(1, GATHER_BYTES * len(ranges) // _span(ranges)[1])
    read: list[CrcRange] = []
    for first in range(0, len(ranges), step):
        some = ranges[first : first + step]
        low, num_bytes = _span(some)
        is_near = len(some) > 1 and num_bytes <= min(2 * GATHER_BYTES, _LARGEST_SPAN * len(some) * len(some[0][1]))
        window = source.view(row.file, low, num_bytes) if is_near else None
        if window is None:
            read += _read_ranges(source, row.file, some, clock)
            continue
        clock.lap(Phase.POPULATE, num_bytes, row.file)
        for position, content in some:
            content[:] = window[position - low : position - low + len(content)]
        clock.lap(Phase.COPY, len(some) * len(some[0][1]))
        read += _checksums(some, clock)
    return read


def _read_ranges(
    source: SourceReader, file: int, ranges: Sequence[tuple[int, Bytes]], clock: PhaseClock
) -> list[CrcRange]:
    """Read ranges of a file into memory, and return their checksums."""
    for position, content in ranges:
        source.fill(file, position, content)
    clock.lap(Phase.READ, sum(len(content) for _, content in ranges), file)
    return _checksums(ranges, clock)


def _checksums(ranges: Sequence[tuple[int, Bytes]], clock: PhaseClock) -> list[CrcRange]:
    """Return the checksums of ranges in memory; together they are small enough to be in the processor's cache."""
    read = [CrcRange(position, len(content), crc.crc32(content.data)) for position, content in ranges]
    clock.lap(Phase.CHECKSUM, sum(crc_range.num_bytes for crc_range in read))
    return read


def _span(ranges: Sequence[tuple[int, Bytes]]) -> tuple[int, int]:
    """Return the first byte of ranges of equal length, and the number of bytes up to the end of the last one."""
    positions = [position for position, _ in ranges]
    low = min(positions)
    return low, max(positions) - low + len(ranges[0][1])


def view_elements(source: SourceReader, row: ShardRow, box: Box, item_bytes: int) -> tuple[int, Bits] | None:
    """Return a box of a row that is one range of its file, without a copy: position in the file, and the elements.

    Return None if the box is several ranges, or if it must be read instead.
    """
    positions, num_bytes = row.byte_ranges(box, item_bytes)
    content = source.view(row.file, positions[0], num_bytes) if len(positions) == 1 else None
    return None if content is None else (positions[0], content.view(UNSIGNED[item_bytes]).reshape(box.size))


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
