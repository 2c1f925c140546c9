"""Digests of logical tensors that do not depend on how files shard the tensors.

The digest of a tensor is the CRC-32 (that of zip and zlib) of its elements, row-major and little-endian, at its full
shape: `zlib.crc32(tensor.numpy())`. CRC-32 is linear, so the digest is computed from boxes. Let L(A) be the remainder
of the bytes A taken as a polynomial over GF(2), with nothing added at its start and end. The term of a box of
consecutive elements is `L(box) * x^(8 * bytes behind it)`. Terms of disjoint boxes are added by XOR. The sum of all
terms is L(tensor), which differs from CRC-32 by a constant that depends on the number of bytes alone. So a reader of
any layout computes the terms of the boxes that it reads. The CRC-32 of bytes that were read or written is needed
anyway, and the term of a box that is consecutive in its tensor follows from it without reading the bytes again.

The page docs/verification.md says which damage a digest detects.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checksums import crc
from reshard.errors import VerificationError
from reshard.tensors.geometry import Box, strides_of

_SHORT_ROW_BYTES = 128  # for shorter rows, advancing all rows word by word is faster than one call for each row

UInt32Array = npt.NDArray[np.uint32]


class Tally:
    """Term of a box in its tensor's digest, computed while the elements arrive in row-major order."""

    def __init__(self, box: Box, shape: tuple[int, ...], item_bytes: int) -> None:
        """Begin with no elements.

        Args:
            box: box of the logical tensor, [ndim].
            shape: shape of the logical tensor, [ndim].
            item_bytes: bytes of one element.
        """
        self._strides = [stride * item_bytes for stride in strides_of(shape)]
        last = sum((end - 1) * stride for end, stride in zip(box.end, self._strides, strict=True))
        self._behind = (math.prod(shape) - 1) * item_bytes - last
        # A row ends with all trailing dims that the box spans entirely: its elements are consecutive in the tensor.
        inner, dim = 1, len(shape)
        while dim > 0 and (dim == len(shape) or box.size[dim] == shape[dim]):
            dim -= 1
            inner *= box.size[dim]
        self._outer, self._row_elements = box.size[:dim], inner
        self._num_bytes = box.num_elements * item_bytes
        self._consecutive = box.num_elements == inner
        self._seen = 0
        self._crc32 = 0
        self._row_terms: list[UInt32Array] = []

    def add(self, elements: npt.NDArray[np.generic], crc32: int | None = None) -> None:
        """Add the next elements of the box.

        Args:
            elements: contiguous elements of any shape; whole rows if the box is not consecutive in its tensor.
            crc32: CRC-32 of the elements' bytes, if it is known.
        """
        if self._consecutive:
            value = crc.crc32(elements.reshape(-1).view(np.uint8).data) if crc32 is None else crc32
            self._crc32 = crc.combine(self._crc32, value, elements.nbytes)
        else:
            self._row_terms.append(_remainders(elements.reshape(-1, self._row_elements)))
        self._seen += elements.nbytes

    @property
    def term(self) -> int:
        """Return the term of the box; terms of disjoint boxes are added by `^`.

        Raises:
            VerificationError: not all elements of the box were added.
        """
        if self._seen != self._num_bytes:
            raise VerificationError(f"{self._seen} of {self._num_bytes} bytes of a box of a tensor arrived")
        if not self._num_bytes:
            return 0
        if self._consecutive:
            return crc.combine(self._crc32 ^ crc.crc32_of_zeros(self._num_bytes), 0, self._behind)
        terms = np.concatenate(self._row_terms).reshape(self._outer)
        for stride in self._strides[len(self._outer) - 1 :: -1]:
            terms = _sum_terms(terms, stride)
        return crc.combine(int(terms), 0, self._behind)


def digest_term(
    data: npt.NDArray[np.generic], box: Box, shape: tuple[int, ...], *, known_crc32: int | None = None
) -> int:
    """Compute the term of a box in its tensor's digest; terms of disjoint boxes are added by `^`.

    Args:
        data: contiguous elements of the box, row-major, any shape with the box's number of elements.
        box: box of the logical tensor, [ndim].
        shape: shape of the logical tensor, [ndim].
        known_crc32: CRC-32 of `data`'s bytes, if it is known.
    """
    tally = Tally(box, shape, data.dtype.itemsize)
    tally.add(data, known_crc32)
    return tally.term


def finish_digest(term: int, num_bytes: int) -> int:
    """Compute the CRC-32 of a tensor of `num_bytes` from the sum of its terms, or the sum from the CRC-32."""
    return term ^ crc.crc32_of_zeros(num_bytes)


def to_hex(digest: int) -> str:
    """Format a digest as 8 hex digits, as in COMMIT.json."""
    return f"{digest:08x}"


def _remainders(rows: npt.NDArray[Any]) -> UInt32Array:
    """Compute L of every row of an array, [rows, length] -> [rows]."""
    row_bytes = rows.shape[1] * rows.dtype.itemsize
    if row_bytes < _SHORT_ROW_BYTES:
        words = rows.view(np.uint32 if row_bytes % 4 == 0 else f"u{min(2, rows.dtype.itemsize)}")
        state = np.zeros(len(rows), dtype=np.uint32)
        for word in np.ascontiguousarray(words.T):
            state = _shift(state ^ word, words.dtype.itemsize)
        return state
    values = list(map(crc.crc32, rows.reshape(-1).view(np.uint8).reshape(-1, row_bytes)))
    return np.array(values, dtype=np.uint32) ^ np.uint32(crc.crc32_of_zeros(row_bytes))


def _sum_terms(values: UInt32Array, spacing_bytes: int) -> UInt32Array:
    """Sum terms `spacing_bytes` apart over the last axis, relative to the end of the last one; [..., n] -> [...]."""
    while values.shape[-1] > 1:
        if values.shape[-1] % 2:
            values = np.concatenate([np.zeros((*values.shape[:-1], 1), dtype=np.uint32), values], axis=-1)
        values = _shift(values[..., ::2], spacing_bytes) ^ values[..., 1::2]
        spacing_bytes *= 2
    return values[..., 0]


def _shift(values: UInt32Array, num_bytes: int) -> UInt32Array:
    """Multiply every value by x^(8 * num_bytes); the shape stays the same."""
    table, octets = _table(num_bytes), np.ascontiguousarray(values, dtype="<u4").view(np.uint8)
    products: UInt32Array = table[0].take(octets[..., 0::4])
    for byte in range(1, 4):
        products ^= table[byte].take(octets[..., byte::4])
    return products


@functools.lru_cache(maxsize=1024)
def _table(num_bytes: int) -> UInt32Array:
    """Compute the products of x^(8 * num_bytes) with every value of each byte of a remainder, [4, 256]."""
    table = np.zeros((4, 256), dtype=np.uint32)
    for bit in range(32):
        byte, power = bit // 8, 1 << bit % 8
        product = np.uint32(crc.combine(1 << bit, 0, num_bytes))
        table[byte, power : 2 * power] = table[byte, :power] ^ product
    return table
