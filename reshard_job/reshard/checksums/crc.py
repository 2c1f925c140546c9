"""CRC-32 (that of zip and zlib) of ranges, computed from the CRC-32 of smaller ranges in any order.

CRC-32 is linear over GF(2): the checksum of A + B follows from the checksums of A and B and the length of B. ISA-L
computes both five times as fast as zlib.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from isal import isal_zlib

crc32 = isal_zlib.crc32
"""CRC-32 of a buffer of bytes."""


class CrcRange(NamedTuple):
    """A range of a file and the CRC-32 of its content.

    Attributes:
        start: first byte.
        num_bytes: length.
        crc32: CRC-32 of the content.
    """

    start: int
    num_bytes: int
    crc32: int


def combine(first: int, second: int, second_num_bytes: int) -> int:
    """Compute the CRC-32 of A + B from the CRC-32 of A, the CRC-32 of B and the length of B."""
    return isal_zlib.crc32_combine(first, second, second_num_bytes)


@functools.lru_cache(maxsize=4096)
def crc32_of_zeros(num_bytes: int) -> int:
    """Compute the CRC-32 of `num_bytes` zero bytes."""
    value, done = 0, 0
    for bit in range(num_bytes.bit_length()):
        if num_bytes >> bit & 1:
            value, done = combine(value, _zeros_of_power(bit), 1 << bit), done + (1 << bit)
    return value


@functools.cache
def _zeros_of_power(bit: int) -> int:
    """Compute the CRC-32 of 2^bit zero bytes."""
    if bit == 0:
        return crc32(b"\0")
    half = _zeros_of_power(bit - 1)
    return combine(half, half, 1 << (bit - 1))


def assemble(ranges: Iterable[tuple[int, int, int]], *, start: int, num_bytes: int) -> int:
    """Compute the CRC-32 of a range from (position, length, crc32) of disjoint ranges inside it.

    Bytes that none of the ranges covers are zero.
    """
    value, position = 0, start
    for offset, length, range_crc32 in sorted(ranges):
        if offset > position:
            value = combine(value, crc32_of_zeros(offset - position), offset - position)
        value = combine(value, range_crc32, length)
        position = offset + length
    rest = start + num_bytes - position
    return combine(value, crc32_of_zeros(rest), rest) if rest else value


def join(ranges: Iterable[CrcRange]) -> list[CrcRange]:
    """Join ranges that follow each other; a range that is given twice counts once."""
    joined: list[CrcRange] = []
    for crc_range in sorted(set(ranges)):
        last = joined[-1] if joined else None
        if last is not None and last.start + last.num_bytes == crc_range.start:
            value = combine(last.crc32, crc_range.crc32, crc_range.num_bytes)
            joined[-1] = CrcRange(last.start, last.num_bytes + crc_range.num_bytes, value)
        else:
            joined.append(crc_range)
    return joined


def select_starting_in(ranges: Sequence[CrcRange], start: int, end: int) -> list[CrcRange]:
    """Return those of the sorted ranges that start in start:end."""
    first = bisect.bisect_left(ranges, start, key=lambda crc_range: crc_range.start)
    return list(ranges[first : bisect.bisect_left(ranges, end, key=lambda crc_range: crc_range.start)])


def separate_overlaps(ranges: Iterable[CrcRange]) -> tuple[list[CrcRange], list[CrcRange]]:
    """Split sorted ranges into ranges that do not overlap each other, and the remaining ones."""
    disjoint: list[CrcRange] = []
    overlapping: list[CrcRange] = []
    position = 0
    for crc_range in ranges:
        (disjoint if crc_range.start >= position else overlapping).append(crc_range)
        position = max(position, disjoint[-1].start + disjoint[-1].num_bytes)
    return disjoint, overlapping


def find_gaps(ranges: Sequence[CrcRange], start: int, end: int) -> list[tuple[int, int]] | None:
    """Return (position, length) of the gaps that sorted ranges leave in start:end; None if ranges overlap."""
    gaps, position = [], start
    for crc_range in ranges:
        if crc_range.start < position:
            return None
        if crc_range.start > position:
            gaps.append((position, crc_range.start - position))
        position = crc_range.start + crc_range.num_bytes
    if position < end:
        gaps.append((position, end - position))
    return gaps
