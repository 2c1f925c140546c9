"""Unmodified torch loads every type of elements from what was converted, bit by bit."""

import hashlib
import json
from importlib.util import find_spec

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.formats.safetensors.header import DTYPES
from reshard.tensors.layout import ITEM_BYTES
from reshard.topology import Topology
from tests.golden.dcp_files import golden

pytestmark = [pytest.mark.engine, pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: make setup")]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_every_type_loads_with_the_bits_that_torch_saved(tmp_path):
    import torch
    from torch.distributed import checkpoint

    source = golden("types")
    convert(Conversion(source=source, target=tmp_path / "out", topology=Topology(dp=3, zero=3)), RunOptions(sync=False))
    zero = {f"a_{dtype}": torch.zeros(5, 3 * size, dtype=torch.uint8) for dtype, size in ITEM_BYTES.items()}
    state = {"model": {name: bits.view(getattr(torch, name[2:])) for name, bits in zero.items()}}
    checkpoint.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    truth = json.loads((source.parent / "truth.json").read_text())
    assert len(truth) == len(ITEM_BYTES)
    for key, value in truth.items():
        loaded = state["model"][key.removeprefix("model/")]
        assert hashlib.sha256(loaded.view(torch.uint8).numpy().tobytes()).hexdigest() == value["sha256"], key


@pytest.mark.skipif(find_spec("safetensors") is None, reason="needs safetensors")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_every_type_of_safetensors_comes_from_dcp_and_goes_back(tmp_path):
    import torch
    from safetensors.torch import load_file
    from torch.distributed import checkpoint

    torch.manual_seed(5)
    bits = {dtype: torch.randint(0, 2, (4, 2 * ITEM_BYTES[dtype]), dtype=torch.uint8) for dtype in DTYPES.values()}
    weights = {f"a_{dtype}": value.view(getattr(torch, dtype)) for dtype, value in bits.items()}
    checkpoint.save({"model": weights}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    there = Conversion(
        source=tmp_path / "dcp", target=tmp_path / "st", topology=Topology(), target_format="safetensors"
    )
    convert(there, RunOptions(sync=False))
    loaded = load_file(tmp_path / "st/model.safetensors")
    assert {name: value.dtype for name, value in loaded.items()} == {k: v.dtype for k, v in weights.items()}
    assert all(torch.equal(loaded[f"a_{dtype}"].view(torch.uint8), value) for dtype, value in bits.items())
    back = Conversion(source=tmp_path / "st", target=tmp_path / "back", topology=Topology(dp=2), target_format="dcp")
    convert(back, RunOptions(sync=False))
    state = {"model": {name: torch.zeros_like(value) for name, value in weights.items()}}
    checkpoint.load(state, checkpoint_id=tmp_path / "back", no_dist=True)
    assert all(torch.equal(state["model"][f"a_{dtype}"].view(torch.uint8), value) for dtype, value in bits.items())
