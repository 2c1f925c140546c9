"""Proofs by mutation: any wrong, missing, doubled or misplaced element changes the digest, in any type and cut."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.digest import MODULUS, _high, _low, box_digest, run_digest
from reshard.geometry import Box, flat_interval_to_boxes

UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)


@st.composite
def tensors(draw: st.DrawFn) -> np.ndarray:
    """Bits of a small tensor of any width, zeros and repetitions included."""
    kind = np.dtype(draw(st.sampled_from(UNSIGNED)))
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits = np.frombuffer(chance.bytes(int(np.prod(shape, dtype=int)) * kind.itemsize), dtype=kind).reshape(shape).copy()
    return bits if draw(st.booleans()) else np.asarray(bits % kind.type(3))  # with many zeros and equals


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A cut of a tensor into boxes: flat partitions, as ZeRO makes them."""
    count = int(np.prod(shape, dtype=int))
    edges = [0, *sorted(draw(st.sets(st.integers(0, count), max_size=4))), count]
    return [box for low, high in itertools.pairwise(edges) for box, _ in flat_interval_to_boxes(shape, low, high)]


def of(full: np.ndarray, box: Box) -> np.ndarray:
    return np.ascontiguousarray(full[tuple(slice(low, high) for low, high in zip(box.offset, box.end, strict=True))])


def total(full: np.ndarray, boxes: list[Box]) -> int:
    return sum(box_digest(of(full, box), box, full.shape) for box in boxes) % MODULUS


def test_every_weight_is_odd_so_that_no_single_difference_vanishes():
    """The whole table of low weights, and the high ones of the first 2^20 blocks: 2^36 elements, 68 billion."""
    assert (_low() & np.uint64(1)).all()
    assert (_high(np.arange(1 << 20, dtype=np.uint64)) & np.uint64(1)).all()


def test_the_digest_is_what_the_normative_page_says():
    mask = MODULUS - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return (z ^ (z >> 31)) | 1

    def weight(i: int) -> int:
        v = mix((i % 65536 + 1) * 0x9E3779B97F4A7C15 & mask)
        return v * mix(((i >> 16) * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & mask) & mask

    for start, kind in ((0, np.uint8), (65_530, np.uint16), (1 << 33, np.uint32), ((1 << 40) - 3, np.uint64)):
        bits = np.frombuffer(np.random.default_rng(start).bytes(20 * np.dtype(kind).itemsize), dtype=kind)
        halves, first = (bits.view(np.uint32), 2 * start) if kind is np.uint64 else (bits, start)
        expected = sum(int(x) * weight(first + i) for i, x in enumerate(halves)) % MODULUS
        assert run_digest(bits, start) == expected


@given(tensors(), st.data())
def test_one_wrong_element_is_always_caught_in_any_cut(full: np.ndarray, data: st.DataObject) -> None:
    boxes = data.draw(parts(full.shape))
    at = data.draw(st.integers(0, full.size - 1))
    wrong = full.copy()
    wrong.reshape(-1)[at] ^= full.dtype.type(data.draw(st.integers(1, 2 ** (8 * full.itemsize) - 1)))
    assert total(full, boxes) == run_digest(full, 0)
    assert total(wrong, boxes) != total(full, boxes)


@given(tensors(), st.data())
def test_one_missing_or_doubled_element_is_always_caught_unless_it_is_zero(
    full: np.ndarray, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, full.size - 1))
    own = run_digest(full.reshape(-1)[at : at + 1], at)
    for wrong in (run_digest(full, 0) - own, run_digest(full, 0) + own):
        assert (wrong % MODULUS != run_digest(full, 0)) == bool(full.reshape(-1)[at])


@given(tensors(), st.data())
def test_a_missing_or_doubled_box_is_caught(full: np.ndarray, data: st.DataObject) -> None:
    boxes = data.draw(parts(full.shape))
    victim = data.draw(st.sampled_from(boxes))
    for wrong in ([box for box in boxes if box is not victim], [*boxes, victim]):
        assert (total(full, wrong) != total(full, boxes)) == bool(of(full, victim).any())


@given(tensors(), st.data())
def test_two_elements_in_each_others_places_are_caught(full: np.ndarray, data: st.DataObject) -> None:
    first, second = (data.draw(st.integers(0, full.size - 1)) for _ in range(2))
    swapped = full.copy()
    flat = swapped.reshape(-1)
    flat[[first, second]] = flat[[second, first]]
    assert (run_digest(swapped, 0) == run_digest(full, 0)) == bool((swapped == full).all())


@given(tensors(), st.data())
def test_rolled_transposed_and_reversed_tensors_are_caught(full: np.ndarray, data: st.DataObject) -> None:
    flat = full.reshape(-1)
    rolled = np.roll(flat, data.draw(st.integers(1, 5)))
    for wrong in (rolled, flat[::-1], full.T.reshape(-1), full.byteswap().reshape(-1)):
        changed = np.ascontiguousarray(wrong)
        assert (run_digest(changed, 0) == run_digest(full, 0)) == bool((changed == flat).all())


def test_signs_are_caught_where_a_sum_modulo_2_to_the_64_is_weakest():
    """The highest bit of two elements of 8 bytes times two odd numbers would add up to 0: they count as halves."""
    full = np.random.default_rng(1).standard_normal(64)
    for wrong in (np.negative(full), np.where(np.arange(64) < 2, -full, full)):
        assert run_digest(wrong, 0) != run_digest(full, 0)
    mirrored = np.array([1.5, -1.5] * 8)
    assert run_digest(mirrored[::-1].copy(), 0) != run_digest(mirrored, 0)
    for size in (2, 4):
        bits = full.astype(f"f{size}")
        assert run_digest(-bits, 0) != run_digest(bits, 0)


def test_no_two_of_the_first_positions_can_swap_two_elements_that_differ_in_their_sign_alone():
    """All pairs among the first 4096: 32-bit elements, the likeliest collision there is."""
    weights = _low()[:4096] * _high(np.zeros(1, dtype=np.uint64))[0]
    assert len(np.unique(weights % np.uint64(1 << 33))) == 4096


def test_hundred_thousand_random_damages_of_many_elements_are_caught():
    """Damage whose differences are multiples of 2^31, for which the bound of 2^-32 holds, and damage of any bits."""
    chance = np.random.default_rng(3)
    weights = _low()[:1024] * _high(np.zeros(1, dtype=np.uint64))[0]
    for unit in (1, 1 << 15, 1 << 31):
        difference = chance.integers(-1, 2, size=(100_000 // 3, 16)).astype(np.int64) * unit
        places = chance.integers(0, 1024, size=difference.shape)
        places.sort(axis=1)
        changed = (difference != 0).any(axis=1) & (np.diff(places, axis=1) > 0).all(axis=1)
        sums = (difference.view(np.uint64) * weights[places]).sum(axis=1, dtype=np.uint64)
        assert changed.sum() > 10_000
        assert (sums[changed] != 0).all()
