"""Change the type of floating-point elements as torch does: round to nearest, ties to even.

numpy has no bfloat16, so elements travel as their bits in unsigned integers of the same width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.unsignedinteger[Any]]

UNSIGNED: Mapping[int, type[Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Bytes of an element -> numpy type of that width. A copy as this type keeps all bits."""

_QUIET_NAN = np.uint16(0x7FC0)
_SMALLEST_NORMAL = np.float32(2.0**-126)


def _float32_of_bfloat16(bits: Bits) -> npt.NDArray[np.float32]:
    widened: npt.NDArray[np.uint32] = bits.astype(np.uint32) << np.uint32(16)
    return widened.view(np.float32)


def _bfloat16_of_float32(values: npt.NDArray[np.float32]) -> Bits:
    """Round float32 values to bfloat16 bits.

    Source of the rounding: c10/util/BFloat16.h, round_to_nearest_even (torch 2.13).
    """
    bits = values.view(np.uint32)
    wide = bits >> np.uint32(16)  # changed in place below, because the master weights of whole models are rounded here
    wide &= np.uint32(1)
    wide += np.uint32(0x7FFF)
    with np.errstate(over="ignore", invalid="ignore"):
        wide += bits
        wide >>= np.uint32(16)
        rounded: Bits = wide.astype(np.uint16)
        if np.isnan(values.sum()):  # some values are NaN, or there are infinities of both signs
            rounded[np.isnan(values)] = _QUIET_NAN
    return rounded


_TO_WIDE: dict[str, Callable[[Bits], npt.NDArray[Any]]] = {
    "float64": lambda bits: bits.view(np.float64),
    "float32": lambda bits: bits.view(np.float32),
    "float16": lambda bits: bits.view(np.float16).astype(np.float32),
    "bfloat16": _float32_of_bfloat16,
}
_FROM_WIDE: dict[str, Callable[[npt.NDArray[Any]], Bits]] = {
    "float64": lambda values: values.astype(np.float64).view(np.uint64),
    "float32": lambda values: values.astype(np.float32).view(np.uint32),
    "float16": lambda values: values.astype(np.float32).astype(np.float16).view(np.uint16),
    "bfloat16": lambda values: _bfloat16_of_float32(values.astype(np.float32)),
}


FLOATS = tuple(_TO_WIDE)
"""Types that `cast` converts into each other, by torch's names."""


def can_cast(source: str, target: str) -> bool:
    """Return True if elements of type `source` can be converted to type `target`; both are torch's names."""
    return source == target or (source in _TO_WIDE and target in _FROM_WIDE)


def cast(bits: Bits, source: str, target: str) -> Bits:
    """Convert the bits of elements of type `source` to the bits of type `target`; the shape stays the same.

    float64 is converted to float16 and bfloat16 by way of float32, which rounds twice. torch does the same, because it
    makes c10::Half and c10::BFloat16 of float. Values outside of the target's range become infinite.
    """
    if source == target:
        return bits
    with np.errstate(over="ignore", invalid="ignore"):
        return _FROM_WIDE[target](_TO_WIDE[source](np.ascontiguousarray(bits)))


def to_numbers(bits: Bits, dtype: str) -> npt.NDArray[Any]:
    """Return the numbers that the bits of a type in `FLOATS` stand for: float64 of float64, else float32."""
    return _TO_WIDE[dtype](np.ascontiguousarray(bits))


def from_numbers(numbers: npt.NDArray[Any], dtype: str) -> Bits:
    """Return the bits of a type in `FLOATS` that are nearest to numbers, which are contiguous."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _FROM_WIDE[dtype](numbers)


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
