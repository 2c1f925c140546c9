"""Folders as Accelerate and the Trainer save them with FSDP: model and optimizer apart, read as one checkpoint."""

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from reshard.api import index_of
from reshard.cli.main import main
from reshard.execution.verify import read_digests
from reshard.tensors.views import select_states

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny model after a step, and the folder that accelerate would save of it."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    folder = tmp_path_factory.mktemp("fsdp") / "checkpoint-1"
    parts = {
        "pytorch_model_fsdp_0": {"model": get_model_state_dict(model)},
        "optimizer_0": {"optimizer": get_optimizer_state_dict(model, optimizer)},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, state in parts.items():
            dcp.save(state, checkpoint_id=folder / name, no_dist=True)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "rng_state_0.pth").write_bytes(b"random")
    return model, optimizer, folder


def say(capsys, *words, code=0):
    assert main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_both_parts_are_one_checkpoint(trained, capsys):
    model, _, folder = trained
    index = index_of(folder)
    assert (index.format, index.step) == ("dcp", 1)
    assert {tensor.key.state for tensor in index.tensors} == {"weight", "exp_avg", "exp_avg_sq"}
    assert len(index.tensors) == 3 * len(list(model.parameters()))
    found = say(capsys, "inspect", folder)
    assert found["ok"]
    assert any("pytorch_model_fsdp_0 and optimizer_0" in note for note in found["notes"])
    assert say(capsys, "verify", folder)["tensors"] == len(index.tensors)


def test_its_weights_become_safetensors_and_both_parts_one_folder(trained, tmp_path, capsys):
    model, _, folder = trained
    say(capsys, "run", folder, tmp_path / "weights", "--format", "safetensors")
    weights = load_file(next((tmp_path / "weights").glob("*.safetensors")))
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    say(capsys, "run", folder, tmp_path / "one", "--format", "dcp", "--to", "dp=3,zero=3")
    one = read_digests(index_of(tmp_path / "one"))
    assert one == read_digests(index_of(folder))
    assert not (tmp_path / "one" / "trainer_state.json").exists()


def test_torch_loads_model_and_optimizer_from_the_one_folder(trained, tmp_path, capsys):
    model, optimizer, folder = trained
    say(capsys, "run", folder, tmp_path / "one", "--format", "dcp", "--to", "dp=2,zero=3")
    states = get_optimizer_state_dict(model, optimizer)["state"]
    target = {
        "model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()},
        "optimizer": {
            "state": {name: {"exp_avg": torch.zeros_like(state["exp_avg"])} for name, state in states.items()}
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=tmp_path / "one", no_dist=True)
    assert all(torch.equal(target["model"][name], value) for name, value in model.state_dict().items())
    for name, state in states.items():
        assert torch.equal(target["optimizer"]["state"][name]["exp_avg"], state["exp_avg"])


def test_torch_loads_both_parts_of_a_folder_for_other_ranks(trained, tmp_path, capsys):
    model, optimizer, folder = trained
    say(capsys, "run", folder, tmp_path / "out", "--to", "dp=3")
    states = get_optimizer_state_dict(model, optimizer)
    moments = {name: {"exp_avg": torch.zeros_like(state["exp_avg"])} for name, state in states["state"].items()}
    weights = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(weights, checkpoint_id=tmp_path / "out" / "pytorch_model_fsdp_0", no_dist=True)
        dcp.load({"optimizer": {"state": moments}}, checkpoint_id=tmp_path / "out" / "optimizer_0", no_dist=True)
    assert all(torch.equal(weights["model"][name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(moments[name]["exp_avg"], state["exp_avg"]) for name, state in states["state"].items())
    assert (tmp_path / "out" / "trainer_state.json").read_text() == "{}"


def test_the_model_part_alone_is_read_as_before(trained):
    _, _, folder = trained
    both, alone = index_of(folder), index_of(folder / "pytorch_model_fsdp_0")
    assert read_digests(select_states(both, ("weight",))) == read_digests(alone)
