"""Casts are torch's, to the last bit: every 16-bit pattern, and edges and random patterns of the wider types."""

import numpy as np
import pytest
import torch

from reshard.tensors.cast import UNSIGNED, can_cast, cast
from reshard.tensors.mean import CopiesMean

pytestmark = pytest.mark.engine

TYPES = {
    "float64": (torch.float64, np.int64, 8),
    "float32": (torch.float32, np.int32, 4),
    "float16": (torch.float16, np.int16, 2),
    "bfloat16": (torch.bfloat16, np.int16, 2),
}
PAIRS = [(source, target) for source in TYPES for target in TYPES]


def torch_of(bits: np.ndarray, name: str) -> torch.Tensor:
    kind, signed, _ = TYPES[name]
    return torch.from_numpy(bits.view(signed).copy()).view(kind)


def bits_of(tensor: torch.Tensor, name: str) -> np.ndarray:
    _, signed, item_bytes = TYPES[name]
    as_int = tensor.view({np.int64: torch.int64, np.int32: torch.int32, np.int16: torch.int16}[signed])
    return as_int.numpy().view(UNSIGNED[item_bytes])


@np.errstate(all="ignore")
def patterns(name: str) -> np.ndarray:
    """All of 16 bits; of wider types a million at random, and the neighbourhood of everything that rounds."""
    _, _, item_bytes = TYPES[name]
    kind = np.dtype(UNSIGNED[item_bytes])
    if item_bytes == 2:
        return np.arange(1 << 16, dtype=np.uint32).astype(kind)
    random = np.frombuffer(np.random.default_rng(item_bytes).bytes(item_bytes << 20), dtype=kind)
    halves = [np.arange(1 << 16, dtype=np.uint16)]
    wide = np.float32 if item_bytes == 4 else np.float64
    near = []
    for half in halves:
        for values in (
            half.view(np.float16).astype(wide),
            (half.astype(np.uint32) << 16).view(np.float32).astype(wide),
        ):
            near += [values, (values[:-1] + values[1:]) / 2]  # ties
    if item_bytes == 8:
        singles = np.frombuffer(np.random.default_rng(1).bytes(4 << 16), dtype=np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            # Between float32 neighbours, and where rounding twice (by way of float32) differs from rounding once.
            near += [
                singles.astype(wide),
                (singles.astype(wide) + np.nextafter(singles, np.float32(0)).astype(wide)) / 2,
            ]
    edges = np.concatenate([values.view(kind) for values in near])
    with np.errstate(over="ignore"):
        around = [edges, edges + kind.type(1), edges - kind.type(1)]
    return np.concatenate([random, *around])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_cast_is_torchs(source: str, target: str) -> None:
    assert can_cast(source, target)
    bits = patterns(source)
    value = torch_of(bits, source)
    expected, found = bits_of(value.to(TYPES[target][0]), target), cast(bits, source, target)
    # A not-a-number stays one, of whatever payload: torch's own differs between its vectorised and its scalar code.
    nan = torch.isnan(value).numpy()
    assert (expected[~nan] == found[~nan]).all()
    assert torch.isnan(torch_of(found, target)).numpy()[nan].all()
    assert nan.any()
    assert len(bits) >= 1 << 16


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_widening_and_back_is_the_identity(name: str) -> None:
    bits = patterns(name)
    number = ~torch.isnan(torch_of(bits, name)).numpy()
    for wide in ("float32", "float64"):
        assert (cast(cast(bits, name, wide), wide, name)[number] == bits[number]).all()


def test_a_cast_that_is_none_moves_every_bit_of_every_pattern() -> None:
    for name in TYPES:
        bits = patterns(name)
        assert cast(bits, name, name) is bits


def test_integers_are_not_cast() -> None:
    assert not can_cast("int64", "float32")
    assert not can_cast("float32", "int32")
    assert not can_cast("float8_e4m3fn", "bfloat16")


@pytest.mark.parametrize("count", range(2, 10))
def test_a_mean_is_deepspeeds(count: int) -> None:
    """`sum(slices) / len(slices)`, as deepspeed/checkpoint/ds_to_universal.py writes it."""
    slices = list(torch.randn(count, 10_000, generator=torch.Generator().manual_seed(count)))
    mean = CopiesMean(slices[0].numpy().view(np.uint32), "float32")
    for one in slices[1:]:
        mean.add(one.numpy().view(np.uint32))
    assert np.array_equal(mean.elements(), (sum(slices) / len(slices)).numpy().view(np.uint32))
