"""Proofs by mutation: any wrong, missing or misplaced element changes the digest, in any type and cut."""

import itertools
import math
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.checksums import crc
from reshard.checksums.digest import digest_term, finish_digest
from reshard.tensors import cast
from reshard.tensors.geometry import Box, flat_interval_to_boxes, tiles, whole

WIDE = cast.UNSIGNED[16]
UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)
POLYNOMIAL = 0x104C11DB7
ORDER = 2**32 - 1
FACTORS = (3, 5, 17, 257, 65537)


def digest_of(full: np.ndarray, boxes: list[Box] | None = None) -> int:
    term = 0
    for box in [whole(full.shape)] if boxes is None else boxes:
        term ^= digest_term(of(full, box), box, full.shape)
    return finish_digest(term, full.nbytes)


def of(full: np.ndarray, box: Box) -> np.ndarray:
    return np.ascontiguousarray(full[tuple(slice(low, high) for low, high in zip(box.offset, box.end, strict=True))])


def columns(shape: tuple[int, ...], width: int) -> list[Box]:
    """Cuts of the last dim, as tensor parallelism makes them."""
    lead, last = shape[:-1], shape[-1]
    starts = range(0, last, width)
    return [Box((*(0 for _ in lead), start), (*lead, min(width, last - start))) for start in starts]


@st.composite
def tensors(draw: st.DrawFn, most: int = 6) -> np.ndarray:
    """Bits of a small tensor of any width, zeros and repetitions included."""
    kind = np.dtype(draw(st.sampled_from(UNSIGNED)))
    shape = tuple(draw(st.lists(st.integers(1, most), max_size=4)))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits = np.frombuffer(chance.bytes(int(np.prod(shape, dtype=int)) * kind.itemsize), dtype=kind).reshape(shape).copy()
    return bits if draw(st.booleans()) else np.asarray(bits % kind.type(3))  # with many zeros and equals


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A cut of a tensor into boxes: flat partitions, as ZeRO makes them, tiles, or columns."""
    count = int(np.prod(shape, dtype=int))
    kinds = ["flat", "tiles", "columns"] if shape else ["flat", "tiles"]
    kind = draw(st.sampled_from(kinds))
    if kind == "tiles":
        return list(tiles(shape, draw(st.integers(1, count))))
    if kind == "columns":
        return columns(shape, draw(st.integers(1, shape[-1])))
    edges = [0, *sorted(draw(st.sets(st.integers(0, count), max_size=4))), count]
    return [box for low, high in itertools.pairwise(edges) for box, _ in flat_interval_to_boxes(shape, low, high)]


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 3))
def test_elements_of_16_bytes_have_the_digest_of_their_bytes(seed, width, cut):
    """No unsigned type is as wide: not-a-number and negative zero must not lose a bit on the way."""
    content = np.random.default_rng(seed).bytes(6 * width * 16)
    full = np.frombuffer(content, dtype=WIDE).reshape(2, 3, width)
    assert digest_of(full, columns(full.shape, min(cut, width))) == zlib.crc32(content)


@given(tensors(), st.data())
def test_the_digest_of_any_cut_is_zlibs_checksum_of_the_tensor(full: np.ndarray, data: st.DataObject) -> None:
    boxes = data.draw(parts(full.shape))
    data.draw(st.randoms()).shuffle(boxes)
    assert digest_of(full, boxes) == zlib.crc32(full.tobytes())


@given(tensors(most=4), st.integers(1, 40), st.integers(1, 70), st.data())
def test_long_and_short_runs_far_apart_have_their_place(
    small: np.ndarray, rows: int, width: int, data: st.DataObject
) -> None:
    full = np.resize(small.reshape(-1), (2, rows, 3 * width))
    boxes = columns(full.shape, data.draw(st.integers(1, 3 * width)))
    assert digest_of(full, boxes) == zlib.crc32(full.tobytes())


@given(tensors())
def test_a_checksum_that_is_known_gives_the_same_term(full: np.ndarray) -> None:
    box = whole(full.shape)
    known = zlib.crc32(full.tobytes())
    assert digest_term(full, box, full.shape, known_crc32=known) == digest_term(full, box, full.shape)


def test_parts_of_a_tensor_of_terabytes_have_their_place():
    """Not computed from its bytes: zeros but for two elements 2^40 elements apart."""
    shape, ones = (1 << 20, 1 << 21), np.ones(1, dtype=np.uint32)
    term = 0
    for row, column in ((3, 5), (3 + (1 << 19), 5)):
        term ^= digest_term(ones, Box((row, column), (1, 1)), shape)
    num_bytes = 4 << 41
    between, behind = 4 << 40, num_bytes - 4 * ((3 + (1 << 19)) * (1 << 21) + 6)
    first = crc.combine(crc.crc32_of_zeros(4 * (3 * (1 << 21) + 5)), zlib.crc32(ones.tobytes()), 4)
    second = crc.combine(
        crc.combine(first, crc.crc32_of_zeros(between - 4), between - 4), zlib.crc32(ones.tobytes()), 4
    )
    assert finish_digest(term, num_bytes) == crc.combine(second, crc.crc32_of_zeros(behind), behind)


@given(tensors(), st.data())
def test_one_wrong_element_is_caught_in_any_cut(full: np.ndarray, data: st.DataObject) -> None:
    boxes = data.draw(parts(full.shape))
    wrong = full.copy()
    at = data.draw(st.integers(0, full.size - 1))
    wrong.reshape(-1)[at] ^= full.dtype.type(data.draw(st.integers(1, 2 ** (8 * full.itemsize) - 1)))
    assert digest_of(wrong, boxes) != digest_of(full, boxes)


@given(tensors(), st.data())
def test_a_missing_or_doubled_box_is_caught_unless_it_is_zero(full: np.ndarray, data: st.DataObject) -> None:
    boxes = data.draw(parts(full.shape))
    victim = data.draw(st.sampled_from(boxes))
    for wrong in ([box for box in boxes if box is not victim], [*boxes, victim]):
        assert (digest_of(full, wrong) != digest_of(full, boxes)) == bool(of(full, victim).any())


@given(tensors(), st.data())
def test_one_element_in_the_place_of_another_is_caught(full: np.ndarray, data: st.DataObject) -> None:
    first, second = (data.draw(st.integers(0, full.size - 1)) for _ in range(2))
    doubled, swapped = full.copy(), full.copy()
    doubled.reshape(-1)[second] = doubled.reshape(-1)[first]
    swapped.reshape(-1)[[first, second]] = swapped.reshape(-1)[[second, first]]
    for wrong in (doubled, swapped):
        assert (digest_of(wrong) == digest_of(full)) == bool((wrong == full).all())


@given(tensors(), st.data())
def test_rolled_transposed_and_reversed_tensors_are_caught(full: np.ndarray, data: st.DataObject) -> None:
    flat = full.reshape(-1)
    rolled = np.roll(flat, data.draw(st.integers(1, 5)))
    for wrong in (rolled, flat[::-1], full.T.reshape(-1), full.byteswap().reshape(-1)):
        changed = np.ascontiguousarray(wrong)
        assert (digest_of(changed) == digest_of(np.ascontiguousarray(flat))) == bool((changed == flat).all())


def test_the_polynomial_is_primitive():
    """x has the order 2^32 - 1: what docs/verification.md says of swapped elements rests on it."""

    def power(exponent: int) -> int:
        result, base = 1, 2
        while exponent:
            result = product(result, base) if exponent & 1 else result
            base, exponent = product(base, base), exponent >> 1
        return result

    def product(left: int, right: int) -> int:
        found = 0
        for bit in range(32):
            found ^= left << bit if right >> bit & 1 else 0
        for bit in range(63, 31, -1):
            found ^= POLYNOMIAL << bit - 32 if found >> bit & 1 else 0
        return found

    assert math.prod(FACTORS) == ORDER
    assert power(ORDER) == 1
    assert all(power(ORDER // prime) != 1 for prime in FACTORS)


def test_hundred_thousand_random_damages_of_several_elements_are_caught():
    """Each is missed with a probability of 2^-32; the terms of 1024 places and all 32 bits are added as they fall."""
    chance = np.random.default_rng(3)
    shape = (1024,)
    bits = [
        [digest_term(np.array([1 << bit], dtype=np.uint32), Box((at,), (1,)), shape) for bit in range(32)]
        for at in range(64)
    ]
    table = np.array(bits, dtype=np.uint64)
    for most in (2, 3, 16):
        places = np.stack([chance.permutation(64)[:most] for _ in range(30_000)])
        flips = chance.integers(0, 32, size=(*places.shape, 3))
        differing = table[places[..., None], flips]
        differing[..., 1:] *= chance.integers(0, 2, size=differing[..., 1:].shape, dtype=np.uint64)
        same = (flips[..., :1] == flips[..., 1:]).any(axis=(1, 2))
        sums = np.bitwise_xor.reduce(differing, axis=(1, 2))
        assert (~same).sum() > 1_000
        assert (sums[~same] != 0).all()
