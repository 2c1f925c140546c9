"""CRC-32 of ranges from the CRC-32 of their parts, in any order.

CRC-32 is linear over GF(2): the checksum of a concatenation follows from the parts' checksums and the second part's
length, by advancing the first over that many zero bytes (the method of zlib's crc32_combine).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

_POLYNOMIAL = 0xEDB88320


@functools.cache
def _zero_operators() -> tuple[tuple[int, ...], ...]:
    """Operators that advance a CRC over 2^k zero bytes, for k = 0..63; each is a 32x32 bit matrix by columns."""
    one_bit = (_POLYNOMIAL, *(1 << column for column in range(31)))
    operator = one_bit
    for _ in range(3):
        operator = _square(operator)
    operators = [operator]
    for _ in range(63):
        operators.append(_square(operators[-1]))
    return tuple(operators)


def _square(matrix: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_times(matrix, column) for column in matrix)


def _times(matrix: tuple[int, ...], vector: int) -> int:
    result, column = 0, 0
    while vector:
        if vector & 1:
            result ^= matrix[column]
        vector >>= 1
        column += 1
    return result


def _advance(crc: int, num_bytes: int) -> int:
    for bit, operator in enumerate(_zero_operators()):
        if num_bytes >> bit == 0:
            break
        if num_bytes >> bit & 1:
            crc = _times(operator, crc)
    return crc


def combine(first: int, second: int, second_num_bytes: int) -> int:
    """CRC-32 of A + B from those of A and B and B's length."""
    return _advance(first, second_num_bytes) ^ second


def zeros(num_bytes: int) -> int:
    """CRC-32 of `num_bytes` zero bytes."""
    return _advance(0xFFFFFFFF, num_bytes) ^ 0xFFFFFFFF


def assemble(pieces: Iterable[tuple[int, int, int]], *, start: int, num_bytes: int) -> int:
    """CRC-32 of a range from (position, length, crc) of disjoint pieces inside it; what no piece covers is zero."""
    crc, position = 0, start
    for offset, length, piece in sorted(pieces):
        if offset > position:
            crc = combine(crc, zeros(offset - position), offset - position)
        crc = combine(crc, piece, length)
        position = offset + length
    rest = start + num_bytes - position
    return combine(crc, zeros(rest), rest) if rest else crc
