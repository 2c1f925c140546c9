"""Compute the mean of copies of a tensor, element by element, as DeepSpeed averages partial parameters. Pure.

Elements whose copies have equal bits keep them, so that equal copies stay what they are. Others are added in float32 in
the order of the copies and divided by their number, as `sum(slices) / len(slices)` does in deepspeed/checkpoint/
ds_to_universal.py, `merge_tp_slices` (0.19.8). float64 is averaged in float64. The rule looks at one element at a time,
so the result does not depend on how a tensor is cut into tiles.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from reshard.tensors.cast import FLOATS, Bits, from_numbers, to_numbers


def can_average(dtype: str) -> bool:
    """Return True if elements of a type have a mean; the type is torch's name."""
    return dtype in FLOATS


class CopiesMean:
    """Mean of copies that are added one after the other; memory does not depend on their number."""

    def __init__(self, first: Bits, dtype: str) -> None:
        """Begin with the first copy.

        Args:
            first: elements of the first copy; they must not change before `elements` was called.
            dtype: type of the elements, see `can_average`.
        """
        self.first = first
        """Elements of the first copy."""

        self._dtype, self._count = dtype, 1
        self._sum = to_numbers(first, dtype).copy()
        self._low, self._high = self._sum.copy(), self._sum.copy()
        self.differs: npt.NDArray[np.bool_] = np.zeros(first.shape, dtype=np.bool_)
        """Elements whose copies have different bits, in the shape of the copies."""

    def add(self, copy: Bits) -> None:
        """Add the next copy, which has the shape of the first."""
        numbers = to_numbers(copy, self._dtype)
        self.differs |= copy != self.first
        with np.errstate(all="ignore"):
            self._sum += numbers
        np.minimum(self._low, numbers, out=self._low)
        np.maximum(self._high, numbers, out=self._high)
        self._count += 1

    def elements(self) -> Bits:
        """Return the elements that all copies agree about, and the mean of the others."""
        if not self.differs.any():
            return self.first
        with np.errstate(all="ignore"):
            mean = from_numbers(self._sum / self._sum.dtype.type(self._count), self._dtype)
        merged: Bits = np.where(self.differs, mean, self.first)
        return merged

    @property
    def largest_difference(self) -> float | None:
        """Return the largest difference between two copies of an element; None if all copies are equal.

        It is infinite if an element is no finite number in one of its copies.
        """
        if not self.differs.any():
            return None
        with np.errstate(all="ignore"):
            spread = self._high[self.differs].astype(np.float64) - self._low[self.differs].astype(np.float64)
        largest = float(spread.max())
        return largest if math.isfinite(largest) else math.inf
