"""Digests of logical tensors that do not depend on how they are cut.

The digest of a tensor is the sum over its elements of `bits(x_i) * h(i)` modulo 2^64, where `i` is the element's flat
index in the *logical* tensor and `h(i) = u(i >> 16) * v(i & 0xFFFF)` with odd, well-mixed 64-bit numbers u and v. Sums
commute, so the digests of shards add up to the tensor's, whatever the cut, and a reader of any layout can compute its
share. An element of 8 bytes counts as two of 4 bytes, the lower half first: its highest bit times any two odd numbers
would add up to 0, and two signs could change unseen.

What it catches. Changing the bits of one element changes its term by `d * h(i)` with 0 < |d| < 2^32 and `h(i)` odd,
which is never 0 modulo 2^64: a single wrong, missing or doubled (nonzero) element is caught *always*. Several wrong
elements, or elements in each other's places, change the sum by a combination of differences with the `h(i)`; with `h`
behaving like random odd numbers that combination is 0 by chance with probability at most 2^-32 (when every difference
is a multiple of 2^31), typically about 2^-62. It protects against damage and mistakes, not against an attacker. The
argument in full is on the page docs/verification.md.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.geometry import Box, strides_of

MODULUS = 1 << 64
_LOW_BITS = 16
_BLOCK = 1 << _LOW_BITS
_SHORT_RUN = 128  # elements up to which gathering the weights of many runs beats one dot product per run
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}

UInt64Array = npt.NDArray[np.uint64]


@functools.cache
def _low() -> UInt64Array:
    """`v`: one odd number for every value of the low 16 bits, [65536]."""
    return _mix(np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _high(blocks: UInt64Array) -> UInt64Array:
    """`u`: one odd number for every value of the high bits; same shape."""
    return _mix(blocks * np.uint64(0xD1B54A32D192ED03) + np.uint64(0x2545F4914F6CDD1D))


def _mix(value: UInt64Array) -> UInt64Array:
    """The finalizer of splitmix64 (Steele et al. 2014), made odd."""
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (value ^ value >> np.uint64(31)) | np.uint64(1)


def run_digest(data: npt.NDArray[np.generic], start: int) -> int:
    """Digest of consecutive elements.

    Args:
        data: contiguous elements of any type, [count].
        start: flat index of the first one in the logical tensor.
    """
    if data.dtype.itemsize == 8:
        return run_digest(_halves(data), 2 * start)
    bits = data.reshape(-1).view(_UNSIGNED[data.dtype.itemsize])
    low, count = _low(), len(bits)
    high = _high(np.arange(start >> _LOW_BITS, (start + count >> _LOW_BITS) + 1, dtype=np.uint64)).tolist()
    total = position = 0
    while position < count:
        block, within = divmod(start + position, _BLOCK)
        length = min(_BLOCK - within, count - position)
        product = _product("i,i->", bits[position : position + length], low[within : within + length])
        total += product * high[block - (start >> _LOW_BITS)]
        position += length
    return total % MODULUS


def box_digest(data: npt.NDArray[np.generic], box: Box, shape: tuple[int, ...]) -> int:
    """Digest of a box's elements.

    Args:
        data: contiguous elements of the box, row-major, any shape with the box's number of elements.
        box: where they lie in the logical tensor, [ndim].
        shape: of the logical tensor, [ndim].
    """
    if data.dtype.itemsize == 8:
        return box_digest(_halves(data), Box((*box.offset, 0), (*box.size, 2)), (*shape, 2))
    strides = strides_of(shape)
    start = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
    # Trailing dims that the box spans entirely are consecutive with the first one that it does not.
    inner, dim = 1, len(shape)
    while dim > 0 and (dim == len(shape) or box.size[dim] == shape[dim]):
        dim -= 1
        inner *= box.size[dim]
    flat = data.reshape(-1)
    if len(flat) == inner:
        return run_digest(flat, start)
    starts = _run_starts(start, box.size[:dim], strides[:dim])
    rows = flat.reshape(len(starts), inner).view(_UNSIGNED[data.dtype.itemsize])
    return _short_runs_digest(rows, starts) if inner <= _SHORT_RUN else _long_runs_digest(rows, starts)


def _halves(data: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Elements of 8 bytes as twice as many of 4 bytes, little-endian."""
    return data.reshape(-1).view(np.uint32)


def _run_starts(start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> UInt64Array:
    starts = np.array([start], dtype=np.uint64)
    for size, stride in zip(sizes, strides, strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.uint64) * np.uint64(stride)).reshape(-1)
    return starts


def _short_runs_digest(rows: npt.NDArray[np.generic], starts: UInt64Array) -> int:
    """Digest of equally long runs.

    Args:
        rows: bits of the elements, [runs, length].
        starts: flat index of each run's first element, [runs].
    """
    length = rows.shape[1]
    step = max(1, _BLOCK // length)
    total = 0
    for first in range(0, len(rows), step):
        bits = rows[first : first + step].astype(np.uint64)
        index: UInt64Array = np.add.outer(starts[first : first + step], np.arange(length, dtype=np.uint64))
        terms = _low()[(index & np.uint64(_BLOCK - 1)).astype(np.intp)]
        terms *= _high(index >> np.uint64(_LOW_BITS))
        terms *= bits
        total += int(terms.sum(dtype=np.uint64))
    return total % MODULUS


def _long_runs_digest(rows: npt.NDArray[np.generic], starts: UInt64Array) -> int:
    """The same for longer runs: one product for all runs that lie evenly spaced in one block of weights."""
    length = rows.shape[1]
    block = (starts >> np.uint64(_LOW_BITS)).astype(np.int64)
    within = (starts & np.uint64(_BLOCK - 1)).astype(np.int64)
    crossing = within + length > _BLOCK
    total = sum(run_digest(rows[at], int(starts[at])) for at in np.flatnonzero(crossing).tolist())
    inside = np.flatnonzero(~crossing)
    if not len(inside):
        return total % MODULUS
    high = _high(block[inside].astype(np.uint64)).tolist()
    step = np.diff(within[inside])
    same = (np.diff(block[inside]) == 0) & (np.diff(inside) == 1)
    same[1:] &= step[1:] == step[:-1]
    bounds = [0, *(np.flatnonzero(~same) + 1).tolist(), len(inside)]
    for first, last in itertools.pairwise(bounds):
        runs = rows[inside[first] : inside[last - 1] + 1]
        spacing = int(step[first]) if last - first > 1 else length
        total += _evenly_spaced(runs, int(within[inside[first]]), spacing) * high[first]
    return total % MODULUS


def _evenly_spaced(runs: npt.NDArray[np.generic], first: int, spacing: int) -> int:
    """Sum of `bits * v` over runs ([runs, length]) whose weights start at `first`, `first + spacing`, ..."""
    weights = _low()
    if len(runs) == 1:
        return _product("i,i->", runs[0], weights[first : first + runs.shape[1]])
    own = np.lib.stride_tricks.as_strided(
        weights[first:], shape=runs.shape, strides=(spacing * weights.itemsize, weights.itemsize), writeable=False
    )
    return _product("ij,ij->", runs, own)


def _product(subscripts: str, bits: npt.NDArray[Any], weights: UInt64Array) -> int:
    """Sum of products modulo 2^64; einsum widens on the way, twice as fast as `dot` of widened bits."""
    return int(np.einsum(subscripts, bits, weights, dtype=np.uint64, casting="unsafe"))


def to_hex(digest: int) -> str:
    """16 hex digits, as in COMMIT.json."""
    return f"{digest:016x}"
