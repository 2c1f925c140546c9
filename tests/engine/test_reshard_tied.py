"""Tied weights of a DCP checkpoint, which holds each of their names: what the loaders of each target want of them."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.topology import Topology
from tests.golden.dcp_files import golden

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: make setup"),
    pytest.mark.skipif(find_spec("safetensors") is None, reason="needs safetensors: make setup"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

MAP = """
version: 1
rules:
  - {from: "{part:embed|up|down}.{leaf:any}", to: "{part}.{leaf}"}
  - {from: scale, to: scale}
drop: [head.weight]
tied: {head.weight: embed.weight}
"""


def converted(target: Path, target_format: str, names: Path | None = None) -> Path:
    wanted = Conversion(
        source=golden("single-nested"),
        target=target,
        topology=Topology(dp=2, zero=3),
        target_format=target_format,
        states=("weight",),
        names=names,
    )
    convert(wanted, RunOptions(sync=False))
    return target


def name_map(folder: Path) -> Path:
    path = folder / "tied.yaml"
    path.write_text(MAP)
    return path


def model():
    """The one that was saved, with other values."""
    import torch

    from tests.engine.dcp_net import SIZES, Net

    net = Net(*SIZES["tiny"])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    return net


def weights_of(folder: Path, keys) -> dict:
    """Read the golden checkpoint, or another with the same tree, with torch."""
    import torch
    from torch.distributed import checkpoint

    state = {"app": {"model": {key: torch.empty_like(value) for key, value in keys.items()}}}
    checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return state["app"]["model"]


def test_torch_wants_both_names_and_finds_them(tmp_path: Path) -> None:
    import torch

    net = model()
    assert {"embed.weight", "head.weight"} <= net.state_dict().keys()
    loaded = weights_of(converted(tmp_path / "dcp", "dcp"), net.state_dict())
    net.load_state_dict(loaded)  # strict: nothing missing, nothing more
    assert net.head.weight is net.embed.weight
    assert torch.equal(net.embed.weight, weights_of(golden("single-nested"), net.state_dict())["embed.weight"])


def test_both_names_go_into_safetensors_which_only_load_model_refuses(tmp_path: Path) -> None:
    from safetensors.torch import load_file, load_model

    file = converted(tmp_path / "st", "safetensors") / "model.safetensors"
    net = model()
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "head.weight"'):
        load_model(net, file)
    net.load_state_dict(load_file(file))
    assert net.embed.weight.abs().sum() > 0


def test_a_name_map_ties_them_again(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_model

    net = model()
    load_model(net, converted(tmp_path / "st", "safetensors", name_map(tmp_path)) / "model.safetensors")
    assert torch.equal(net.head.weight, weights_of(golden("single-nested"), net.state_dict())["embed.weight"])
