"""CRC-32 (that of zip and zlib) of ranges, from the CRC-32 of their parts in any order.

CRC-32 is linear over GF(2): the checksum of a concatenation follows from the parts' checksums and the second part's
length. ISA-L computes both five times as fast as zlib.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from isal import isal_zlib

crc32 = isal_zlib.crc32
"""Of a buffer of bytes."""


class Piece(NamedTuple):
    """A range of a file and its checksum.

    Attributes:
        start: first byte.
        num_bytes: length.
        crc32: CRC-32 of the content.
    """

    start: int
    num_bytes: int
    crc32: int


def combine(first: int, second: int, second_num_bytes: int) -> int:
    """CRC-32 of A + B from those of A and B and B's length."""
    return isal_zlib.crc32_combine(first, second, second_num_bytes)


@functools.lru_cache(maxsize=4096)
def zeros(num_bytes: int) -> int:
    """CRC-32 of `num_bytes` zero bytes."""
    value, done = 0, 0
    for bit in range(num_bytes.bit_length()):
        if num_bytes >> bit & 1:
            value, done = combine(value, _zeros_of_power(bit), 1 << bit), done + (1 << bit)
    return value


@functools.cache
def _zeros_of_power(bit: int) -> int:
    """CRC-32 of 2^bit zero bytes."""
    if bit == 0:
        return crc32(b"\0")
    half = _zeros_of_power(bit - 1)
    return combine(half, half, 1 << (bit - 1))


def assemble(pieces: Iterable[tuple[int, int, int]], *, start: int, num_bytes: int) -> int:
    """CRC-32 of a range from (position, length, crc) of disjoint pieces inside it; what no piece covers is zero."""
    value, position = 0, start
    for offset, length, piece in sorted(pieces):
        if offset > position:
            value = combine(value, zeros(offset - position), offset - position)
        value = combine(value, piece, length)
        position = offset + length
    rest = start + num_bytes - position
    return combine(value, zeros(rest), rest) if rest else value


def join(pieces: Iterable[Piece]) -> list[Piece]:
    """The same ranges, with neighbours joined; pieces that are given twice count once."""
    joined: list[Piece] = []
    for piece in sorted(set(pieces)):
        last = joined[-1] if joined else None
        if last is not None and last.start + last.num_bytes == piece.start:
            value = combine(last.crc32, piece.crc32, piece.num_bytes)
            joined[-1] = Piece(last.start, last.num_bytes + piece.num_bytes, value)
        else:
            joined.append(piece)
    return joined


def starting_in(pieces: Sequence[Piece], start: int, end: int) -> list[Piece]:
    """Those of the sorted pieces that start in start:end."""
    first = bisect.bisect_left(pieces, start, key=lambda piece: piece.start)
    return list(pieces[first : bisect.bisect_left(pieces, end, key=lambda piece: piece.start)])


def disjoint(pieces: Iterable[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Sorted pieces that do not overlap, and the others."""
    taken: list[Piece] = []
    doubled: list[Piece] = []
    position = 0
    for piece in pieces:
        (taken if piece.start >= position else doubled).append(piece)
        position = max(position, taken[-1].start + taken[-1].num_bytes)
    return taken, doubled


def gaps(pieces: Sequence[Piece], start: int, end: int) -> list[tuple[int, int]] | None:
    """(position, length) of what sorted pieces leave out of start:end; None if pieces overlap."""
    left_out, position = [], start
    for piece in pieces:
        if piece.start < position:
            return None
        if piece.start > position:
            left_out.append((position, piece.start - position))
        position = piece.start + piece.num_bytes
    if position < end:
        left_out.append((position, end - position))
    return left_out
