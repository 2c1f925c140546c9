"""Digests of logical tensors that do not depend on how they are cut.

The digest of a tensor is the CRC-32 (that of zip and zlib) of its elements, row-major and little-endian, at its full
shape: `zlib.crc32(tensor.numpy())`. It is put together from parts because CRC-32 is linear. Let L(A) be the remainder
of the bytes A taken as a polynomial over GF(2), with nothing added at its start and end. The term of a part is
`L(part) * x^(8 * bytes behind it)`; terms of disjoint parts are added by XOR, and the sum of all of them is L(tensor),
which differs from CRC-32 by a constant that depends on the number of bytes alone. So any reader of any layout computes
its share, and the checksum of bytes that were read or written, which is needed anyway, gives the term of a part that
is consecutive in its tensor for nothing.

What it catches is on the page docs/verification.md.
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

_SHORT_RUN_BYTES = 128  # below, advancing all runs word by word beats one call for each run

UInt32Array = npt.NDArray[np.uint32]


class Tally:
    """Term of a box in its tensor's digest, from pieces of the box in row-major order."""

    def __init__(self, box: Box, shape: tuple[int, ...], item_bytes: int) -> None:
        """Begin with no pieces.

        Args:
            box: where the elements lie in the logical tensor, [ndim].
            shape: of the logical tensor, [ndim].
            item_bytes: of one element.
        """
        self._strides = [stride * item_bytes for stride in strides_of(shape)]
        last = sum((end - 1) * stride for end, stride in zip(box.end, self._strides, strict=True))
        self._behind = (math.prod(shape) - 1) * item_bytes - last
        # Trailing dims that the box spans entirely are consecutive with the first one that it does not.
        inner, dim = 1, len(shape)
        while dim > 0 and (dim == len(shape) or box.size[dim] == shape[dim]):
            dim -= 1
            inner *= box.size[dim]
        self._outer, self._run_elements = box.size[:dim], inner
        self._num_bytes = box.num_elements * item_bytes
        self._consecutive = box.num_elements == inner
        self._seen = 0
        self._crc32 = 0
        self._runs: list[UInt32Array] = []

    def add(self, elements: npt.NDArray[np.generic], crc32: int | None = None) -> None:
        """The next elements, contiguous, of any shape, whose CRC-32 may be known; of a cut box whole runs."""
        if self._consecutive:
            value = crc.crc32(elements.reshape(-1).view(np.uint8).data) if crc32 is None else crc32
            self._crc32 = crc.combine(self._crc32, value, elements.nbytes)
        else:
            self._runs.append(_remainders(elements.reshape(-1, self._run_elements)))
        self._seen += elements.nbytes

    @property
    def term(self) -> int:
        """To be added by `^` to those of disjoint boxes.

        Raises:
            VerificationError: the pieces are not the whole box.
        """
        if self._seen != self._num_bytes:
            raise VerificationError(f"{self._seen} of {self._num_bytes} bytes of a part of a tensor arrived")
        if not self._num_bytes:
            return 0
        if self._consecutive:
            return crc.combine(self._crc32 ^ crc.zeros(self._num_bytes), 0, self._behind)
        runs = np.concatenate(self._runs).reshape(self._outer)
        for stride in self._strides[len(self._outer) - 1 :: -1]:
            runs = _joined(runs, stride)
        return crc.combine(int(runs), 0, self._behind)


def box_term(data: npt.NDArray[np.generic], box: Box, shape: tuple[int, ...], *, known_crc32: int | None = None) -> int:
    """Term of a box's elements in its tensor's digest; terms of disjoint boxes are added by `^`.

    Args:
        data: contiguous elements of the box, row-major, any shape with the box's number of elements.
        box: where they lie in the logical tensor, [ndim].
        shape: of the logical tensor, [ndim].
        known_crc32: of `data`'s bytes, where it has been computed.
    """
    tally = Tally(box, shape, data.dtype.itemsize)
    tally.add(data, known_crc32)
    return tally.term


def finished(term: int, num_bytes: int) -> int:
    """CRC-32 of a whole tensor of `num_bytes` from the sum of its terms, and the other way round."""
    return term ^ crc.zeros(num_bytes)


def to_hex(digest: int) -> str:
    """8 hex digits, as in COMMIT.json."""
    return f"{digest:08x}"


def _remainders(rows: npt.NDArray[Any]) -> UInt32Array:
    """L of equally long runs ([runs, length]), [runs]."""
    run_bytes = rows.shape[1] * rows.dtype.itemsize
    if run_bytes < _SHORT_RUN_BYTES:
        words = rows.view(np.uint32 if run_bytes % 4 == 0 else f"u{min(2, rows.dtype.itemsize)}")
        state = np.zeros(len(rows), dtype=np.uint32)
        for word in np.ascontiguousarray(words.T):
            state = _times(state ^ word, words.dtype.itemsize)
        return state
    flat, crc32 = rows.reshape(-1).view(np.uint8).data, crc.crc32
    values = [crc32(flat[start : start + run_bytes]) for start in range(0, len(flat), run_bytes)]
    return np.array(values, dtype=np.uint32) ^ np.uint32(crc.zeros(run_bytes))


def _joined(values: UInt32Array, spacing_bytes: int) -> UInt32Array:
    """Sum over the last axis of terms `spacing_bytes` apart, as seen from the last one's end; [..., n] -> [...]."""
    while values.shape[-1] > 1:
        if values.shape[-1] % 2:
            values = np.concatenate([np.zeros((*values.shape[:-1], 1), dtype=np.uint32), values], axis=-1)
        values = _times(values[..., ::2], spacing_bytes) ^ values[..., 1::2]
        spacing_bytes *= 2
    return values[..., 0]


def _times(values: UInt32Array, num_bytes: int) -> UInt32Array:
    """Every value times x^(8 * num_bytes), same shape."""
    table, octets = _table(num_bytes), np.ascontiguousarray(values, dtype="<u4").view(np.uint8)
    found: UInt32Array = table[0].take(octets[..., 0::4])
    for byte in range(1, 4):
        found ^= table[byte].take(octets[..., byte::4])
    return found


@functools.lru_cache(maxsize=1024)
def _table(num_bytes: int) -> UInt32Array:
    """Products of x^(8 * num_bytes) with every value of each of the four bytes of a remainder, [4, 256]."""
    table = np.zeros((4, 256), dtype=np.uint32)
    for bit in range(32):
        byte, power = bit // 8, 1 << bit % 8
        product = np.uint32(crc.combine(1 << bit, 0, num_bytes))
        table[byte, power : 2 * power] = table[byte, :power] ^ product
    return table
