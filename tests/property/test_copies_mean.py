"""The mean of copies is numpy's formula, bit by bit; what copies agree about stays as it is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from reshard.tensors.cast import FLOATS, UNSIGNED, cast
from reshard.tensors.layout import ITEM_BYTES
from reshard.tensors.mean import CopiesMean, can_average


def mean_of(copies: np.ndarray, dtype: str) -> tuple[np.ndarray, float | None]:
    mean = CopiesMean(copies[0].copy(), dtype)
    for copy in copies[1:]:
        mean.add(copy)
    return mean.elements(), mean.largest_difference


def formula(numbers: np.ndarray) -> np.ndarray:
    """DeepSpeed's `sum(slices) / len(slices)`, in float32."""
    with np.errstate(all="ignore"):
        total = np.zeros(numbers.shape[1:], numbers.dtype)
        for own in numbers:
            total = total + own
        return total / numbers.dtype.type(len(numbers))


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal bits, but for the pattern of a NaN."""
    return bool(((one == other) & (np.signbit(one) == np.signbit(other)) | np.isnan(one) & np.isnan(other)).all())


@given(arrays.arrays(np.uint32, st.tuples(st.integers(2, 5), st.integers(1, 12)), elements=st.integers(0, 2**32 - 1)))
def test_float32_copies_of_any_bits(bits):
    numbers = bits.view(np.float32)
    found, largest = mean_of(bits, "float32")
    differs = (bits != bits[0]).any(axis=0)
    assert same(found.view(np.float32)[differs], formula(numbers)[differs])
    assert np.array_equal(found[~differs], bits[0][~differs])
    assert (largest is None) is not differs.any()
    if largest is not None and np.isfinite(numbers).all():
        spread = numbers.astype(np.float64)
        assert largest == float((spread.max(axis=0) - spread.min(axis=0))[differs].max())
    elif largest is not None and not np.isfinite(numbers[:, differs]).all():
        assert largest == np.inf


@given(st.integers(2, 8), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_random_copies_have_the_mean_of_numpys_formula(count, size, seed):
    numbers = np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)
    found, _ = mean_of(numbers.view(np.uint32), "float32")
    assert np.array_equal(found, formula(numbers).view(np.uint32))


@pytest.mark.parametrize("dtype", FLOATS)
@given(data=st.data())
def test_narrow_copies_are_added_in_float32_and_rounded(dtype, data):
    unsigned = UNSIGNED[ITEM_BYTES[dtype]]
    top = 2 ** (8 * ITEM_BYTES[dtype]) - 1
    shape = st.tuples(st.integers(2, 4), st.integers(1, 9))
    bits = data.draw(arrays.arrays(unsigned, shape, elements=st.integers(0, top)))
    found, _ = mean_of(bits, dtype)
    if dtype == "float64":
        numbers, widened = formula(bits.view(np.float64)), found.view(np.float64)
    else:
        wide = np.stack([cast(copy, dtype, "float32").view(np.float32) for copy in bits])
        numbers = cast(cast(formula(wide).view(np.uint32), "float32", dtype), dtype, "float32").view(np.float32)
        widened = cast(found, dtype, "float32").view(np.float32)
    differs = (bits != bits[0]).any(axis=0)
    assert same(widened[differs], numbers[differs])
    assert np.array_equal(found[~differs], bits[0][~differs])


@given(st.integers(2, 6), st.integers(1, 30), st.integers(0, 2**32 - 1), st.data())
def test_tiles_of_any_size_give_the_same_mean(count, size, seed, data):
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 2**32, size=(count, size), dtype=np.uint32)
    bits[:, generator.random(size) < 0.3] = bits[0, 0]
    border = data.draw(st.integers(1, size))
    whole, largest = mean_of(bits, "float32")
    parts = [mean_of(bits[:, low:high], "float32") for low, high in ((0, border), (border, size)) if low < high]
    assert np.array_equal(np.concatenate([part for part, _ in parts]), whole)
    assert max((own for _, own in parts if own is not None), default=None) == largest


def test_whole_numbers_have_no_mean():
    assert not any(map(can_average, ("int64", "bool", "uint8", "float8_e4m3fn")))
