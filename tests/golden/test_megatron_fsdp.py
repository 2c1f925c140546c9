"""A checkpoint of Megatron-FSDP (`fsdp_dtensor`): every tensor is found by its name, or it is said why not."""

import json
import shutil
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, index_of
from reshard.errors import UnsupportedError
from reshard.execution.verify import read_digests
from reshard.formats.dcp import FORMAT
from reshard.topology import Topology
from tests.golden.dcp_files import edit_metadata
from tests.golden.files import assemble, check_truth

SOURCE = Path(__file__).parent / "megatron-0.16.1" / "fsdp-dtensor-dp2" / "iter_0000002"
LAYER = "module.decoder.layers.0"
GATED = f"{LAYER}.mlp.linear_fc1.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path / "changed"))


def rename(folder: Path, entry: str, old: str, new: str) -> None:
    """Put `new` for `old` in the name of an entry of the state dict."""

    def change(state):
        renamed = entry.replace(old, new)
        for table in ("state_dict_metadata", "planner_data"):
            state[table] = {renamed if key == entry else key: value for key, value in state[table].items()}
        path = state["planner_data"][renamed]
        state["planner_data"][renamed] = tuple(part.replace(old, new) for part in path)
        for index in state["storage_data"]:
            if index.state["fqn"] == entry:
                index.state["fqn"] = renamed

    edit_metadata(folder, change)


def test_every_tensor_is_what_torch_reads():
    found, wanted = assemble(FORMAT.read(SOURCE, None)), json.loads((SOURCE.parent / "truth.json").read_text())
    check_truth(found, wanted)
    assert len(found) == 3 * 16


def test_both_halves_of_a_gated_layer_have_the_options_that_are_stored_once():
    decayed, others = index_of(SOURCE).groups
    assert {f"{GATED}_w", f"{GATED}_v"} < set(decayed.names)
    assert (decayed.options["wd_mult"], others.options["wd_mult"]) == (1.0, 0.0)
    assert decayed.scalars == others.scalars == {"step": 2.0}


@pytest.mark.parametrize("topology", ["dp=1", "dp=3", "dp=5"])
def test_every_byte_arrives_at_another_degree(tmp_path, topology):
    wanted = Conversion(source=SOURCE, target=tmp_path / "out", topology=Topology.parse(topology))
    report = convert(wanted, RunOptions(reread=True))
    assert report.verified
    assert report.witness["not_witnessed"] == 0
    assert read_digests(index_of(wanted.target)) == read_digests(index_of(SOURCE))
    assert index_of(wanted.target).groups == index_of(SOURCE).groups


def refusal(folder: Path, tmp_path: Path) -> str:
    """Convert and return why that is refused."""
    wanted = Conversion(source=folder, target=tmp_path / "out", topology=Topology(dp=3))
    with pytest.raises(UnsupportedError) as caught:
        convert(wanted)
    assert not wanted.target.exists()
    return str(caught.value)


@pytest.mark.parametrize("half", ["_w", "_v"])
def test_a_half_without_its_weight_is_refused_by_name(folder, tmp_path, half):
    rename(folder, f"model.{GATED}{half}", f"weight{half}", "weight_x")
    said = refusal(folder, tmp_path)
    assert f"no weight belongs to the optimizer state state.{GATED}{half}." in said, said


def test_a_state_behind_another_number_of_wrappers_is_refused_by_name(folder, tmp_path):
    state = f"{LAYER}.mlp.linear_fc2.weight.exp_avg"
    rename(folder, f"optimizer.state.module.{state}", LAYER, f"module.{LAYER}")
    assert f"no weight belongs to the optimizer state state.module.{state}" in refusal(folder, tmp_path)
