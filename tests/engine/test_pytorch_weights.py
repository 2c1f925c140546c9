"""Files of torch.save in forms that scripts write: read as torch reads them, or refused."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from reshard.api import Conversion, convert, index_of, reshard
from reshard.errors import SourceError, UnsafePickleError, UnsupportedError
from reshard.execution.verify import read_digests
from reshard.tensors.views import select_states
from reshard.topology import Topology

pytestmark = pytest.mark.engine
GOLDEN = Path(__file__).parents[1] / "golden/deepspeed-0.19.8/zero2-dp3/step-00000002"


def save(folder, value, name="pytorch_model.bin"):
    folder.mkdir(exist_ok=True)
    torch.save(value, folder / name)
    return folder


def to(target_format, source, target):
    zero = 3 if target_format == "dcp" else 0
    convert(Conversion(source=source, target=target, topology=Topology(dp=1, zero=zero), target_format=target_format))
    return target


def test_what_deepspeeds_own_script_makes_of_a_converted_checkpoint_has_the_same_weights(tmp_path):
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    reshard(GOLDEN, tmp_path / "run" / "global_step2", "dp=2,zero=3")
    convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path / "run"), str(tmp_path / "bin"), tag="global_step2")
    assert (tmp_path / "bin" / "pytorch_model.bin").exists()
    found = read_digests(index_of(tmp_path / "bin"))
    masters = read_digests(select_states(index_of(GOLDEN), ("fp32",)))
    assert masters
    assert masters.items() <= {key.replace("weight/", "fp32/", 1): digest for key, digest in found.items()}.items()


def model():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 6))


@pytest.mark.parametrize("keys", [(), ("state_dict",), ("model_state_dict",), ("model", "module")])
def test_a_models_weights_become_safetensors(tmp_path, keys):
    state = value = model().state_dict()
    for key in reversed(keys):
        value = {key: value, "step": 3, "args": {"lr": 0.1}}
    out = to("safetensors", save(tmp_path / "in", value), tmp_path / "out")
    found = load_file(next(out.glob("*.safetensors")))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_torch_starts_a_model_from_the_weights_alone_in_dcp(tmp_path):
    state = model().state_dict()
    out = to("dcp", save(tmp_path / "in", state), tmp_path / "out")
    target = {"model": {name: torch.zeros_like(tensor) for name, tensor in state.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=out, no_dist=True)
    assert all(torch.equal(target["model"][name], tensor) for name, tensor in state.items())


def test_views_parameters_and_strides_are_read_as_torch_reads_them(tmp_path):
    base = torch.randn(5, 8)
    state = {
        "whole": base,
        "rows": base[1:3],
        "columns": base[:, 2:4],
        "turned": base.t(),
        "parameter": torch.nn.Parameter(torch.randn(3).to(torch.float16)),
        "half": base.to(torch.bfloat16),
    }
    out = to("safetensors", save(tmp_path / "in", state), tmp_path / "out")
    found = load_file(next(out.glob("*.safetensors")))
    assert all(torch.equal(found[name], tensor.detach()) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"model": {"w": torch.ones(2)}, "state_dict": {"w": torch.ones(2)}}, "in several places"),
        ({"model": {"w": torch.ones(2)}, "w": torch.ones(2)}, "in several places"),
        ({"optimizer": {"state": {}}, "epoch": 1}, "holds no weights"),
        ([torch.ones(2)], "expected a dict"),
        ({0: torch.ones(2)}, "not converted"),
        ({"w": torch.ones(1).expand(4)}, "not converted"),
    ],
)
def test_what_is_not_clear_is_refused(tmp_path, value, message):
    with pytest.raises(UnsupportedError, match=message):
        index_of(save(tmp_path / "in", value))


def test_a_whole_module_is_refused_and_nothing_runs(tmp_path):
    with pytest.raises((UnsupportedError, UnsafePickleError)):
        index_of(save(tmp_path / "in", model()))


def test_the_old_layout_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "in" / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises((UnsupportedError, SourceError)):
        index_of(tmp_path / "in")
