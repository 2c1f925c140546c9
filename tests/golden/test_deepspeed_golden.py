"""Checkpoints that real DeepSpeed wrote: read right, convert to every layout and back without changing a bit.

The truth beside each checkpoint is what DeepSpeed's own accessors returned when it was saved. `make.py` makes it again.
"""

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from reshard.api import reshard
from reshard.formats import read_checkpoint
from reshard.formats.pt.reader import read
from reshard.topology import Topology
from tests.golden.files import STEP, TARGETS, assemble, cut, golden, whole
from tests.randomness import some


# DeepSpeed's accessors go by param_slice_mappings, which are wrong under round_robin_gradients.
@pytest.mark.parametrize("name", [name for name in TARGETS if not name.endswith("round-robin")])
def test_read_finds_the_values_that_deepspeed_reported(name):
    index = read_checkpoint(golden(name), None)
    tensors = assemble(index)
    assert index.step == 2
    num_counts = index.topology.tp if name.startswith("autoep") else 1  # DeepSpeed counts AutoTP's ranks there
    assert index.samples == 24 * num_counts
    truths = sorted(golden(name).parent.glob("truth-*.json"))
    assert len(truths) == index.topology.tp * index.topology.pp
    compared = set()
    for path in truths:
        rank = int(path.stem.rpartition("tp")[2])
        for key, expected in json.loads(path.read_text()).items():
            found = whole(tensors, key)
            local = cut(key, found, index.topology.tp, rank) if index.topology.tp > 1 else found
            if ".experts.w" in key:  # the rank's part of a stack
                own = len(found) // index.topology.ep
                local = found[rank % index.topology.ep * own :][:own]
            digest = hashlib.sha256(np.ascontiguousarray(local).tobytes()).hexdigest()
            assert f"{local.shape} {digest}" == expected, key
            compared.add(key)
    states = {key for key in tensors if not key.startswith("weight/") and not key.endswith("#padding")}
    if name.startswith("experts"):  # the first rank's: its part of the experts
        assert {key for key in states - compared if "deepspeed_experts" not in key} == set()
        assert any("deepspeed_experts" in key for key in compared)
    else:
        assert compared == states


@pytest.mark.parametrize("name", TARGETS)
def test_weights_are_the_master_weights_in_the_model_type(name):
    tensors = assemble(read_checkpoint(golden(name), None))
    names = [key.removeprefix("fp32/") for key in tensors if key.startswith("fp32/")]
    for parameter in names:
        weight, master = tensors.get(f"weight/{parameter}"), tensors[f"fp32/{parameter}"]
        if "zero3" in name:
            assert weight is None
        elif master.dtype != weight.dtype:  # round to nearest, ties to even
            assert (weight == ((master + 0x7FFF + ((master >> 16) & 1)) >> 16).astype(np.uint16)).all(), parameter
        else:
            assert (weight == master).all(), parameter


@pytest.mark.parametrize(
    ("name", "target"), [("zero3-dp3", "dp=12,zero=3"), ("autoep-tp3-dp2-ep2-zero3", "tp=1,dp=12,ep=2,zero=3")]
)
def test_ranks_of_two_digits_are_witnessed(tmp_path, name, target):
    """The names of their files are not in the order of the ranks."""
    source = read_checkpoint(golden(name), None)
    there = reshard(golden(name), tmp_path / "there" / STEP, Topology.parse(target))
    back = reshard(tmp_path / "there" / STEP, tmp_path / "back" / STEP, source.topology)
    assert there.digest == back.digest
    assert [report.witness["not_witnessed"] for report in (there, back)] == [0, 0]
    assert min(report.witness["tensors"] for report in (there, back)) > 0


CHANGES = [(name, target) for name, to in TARGETS.items() for target in to]


@pytest.mark.parametrize(("name", "target"), some(CHANGES, every=5))
def test_conversion_and_back_changes_no_bit(tmp_path, name, target):
    source = read_checkpoint(golden(name), None)
    report = reshard(golden(name), tmp_path / "there" / STEP, Topology.parse(target))
    back = reshard(tmp_path / "there" / STEP, tmp_path / "back" / STEP, source.topology)
    assert report.digest == back.digest
    there = read_checkpoint(tmp_path / "there" / STEP, None)
    assert there.topology == Topology.parse(target)
    before, between = assemble(source), assemble(there)
    after = assemble(read_checkpoint(tmp_path / "back" / STEP, None))
    assert before.keys() == between.keys() == after.keys()
    for key, value in before.items():
        assert (value == between[key]).all(), key
        assert (value == after[key]).all(), key


def rounded(master: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Master weights in the type of the weights: fp32, or bf16 by rounding to nearest, ties to even."""
    if like.dtype == master.dtype:
        return master
    return ((master + 0x7FFF + ((master >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("zero2-dp3", ["dp=2,zero=3", "dp=3,zero=2"]),
        ("zero2-dp3-round-robin", ["dp=5,zero=3", "dp=3,zero=2"]),
        ("zero3-dp3", ["dp=2,zero=1", "dp=3,zero=3"]),
        ("zero3-dp3", ["dp=64,zero=2", "dp=3,zero=3"]),
        ("zero3-dp3", ["dp=2,zero=0", "dp=3,zero=3"]),
        ("bf16-dp2", ["dp=3,zero=3", "dp=2,zero=1"]),
        ("bf16-dp2", ["dp=3,zero=0", "dp=4,zero=3", "dp=2,zero=1"]),
        ("bf16-optimizer-dp2", ["dp=3,zero=3", "dp=2,zero=1"]),
        ("bf16-optimizer-dp2", ["dp=3,zero=2", "dp=3,zero=0", "dp=2,zero=1"]),
        ("zero0-dp2", ["dp=3,zero=1", "dp=2,zero=3", "dp=2,zero=0"]),
        ("zero0-bf16-dp2", ["dp=3,zero=1", "dp=2,zero=3", "dp=2,zero=0"]),
        ("autoep-tp2-dp2-ep2", ["tp=3,dp=2,ep=2,zero=3", "tp=2,dp=4,ep=4,zero=2", "tp=2,dp=2,ep=2,zero=1"]),
        ("autoep-tp3-dp2-ep2-zero3", ["tp=2,dp=2,ep=2,zero=2", "tp=1,dp=3,zero=1", "tp=3,dp=2,ep=2,zero=3"]),
    ],
)
def test_change_of_stage_and_back_changes_no_bit(tmp_path, name, path):
    """Weights come from the master weights where a stage stores only those; all else is moved as it is."""
    before = assemble(read_checkpoint(golden(name), None))
    now = golden(name)
    for target in path:
        now = Path(reshard(now, tmp_path / target / STEP, Topology.parse(target)).target)
        found = assemble(read_checkpoint(now, None))
        for key in found:
            state, _, parameter = key.partition("/")
            original = before.get(key)
            if original is None:  # only one of weights and master weights is stored
                master = before[f"{'fp32' if state == 'weight' else 'weight'}/{parameter}"]
                original = rounded(master, found[key])
            assert (found[key] == original).all(), (target, key)
        moments = {key for key in before if key.startswith("exp_avg")}
        assert moments == {key for key in found if key.startswith("exp_avg")}
    assert before.keys() == assemble(read_checkpoint(now, None)).keys()


@pytest.mark.parametrize("name", TARGETS)
def test_written_files_are_whole_archives(tmp_path, name):
    reshard(golden(name), tmp_path / STEP, Topology.parse(TARGETS[name][1]))
    for path in (tmp_path / STEP).glob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None, path.name


@pytest.mark.parametrize("name", TARGETS)
def test_conversion_to_the_same_layout_rebuilds_every_field(tmp_path, name):
    """The same topology again: scalars, groups, mappings, names and their order are those that DeepSpeed wrote."""
    topology = read_checkpoint(golden(name), None).topology
    reshard(golden(name), tmp_path / STEP, topology)
    originals = {path.name: path for path in golden(name).glob("*.pt")}
    assert {path.name for path in (tmp_path / STEP).glob("*.pt")} == originals.keys()
    for file, path in originals.items():
        ours, theirs = describe(read(tmp_path / STEP / file).value), describe(read(path).value)
        if "_expert_" in file and "folding" in ours:  # all ranks of these experts write the file: the last one says so
            for value in (ours, theirs):
                value["folding"].pop("zero_partition_rank")
        if name.endswith("round-robin"):  # DeepSpeed's own are wrong there
            for value in (ours, theirs):
                value.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)
        assert ours == theirs, file


@pytest.mark.parametrize(
    ("name", "target"), [("zero3-dp3", "dp=2,zero=3"), ("zero2-dp3", "dp=2,zero=3"), ("pipeline-dp2", "tp=2")]
)
def test_groups_count_their_steps_apart(tmp_path, name, target):
    """One `step` tensor for all sub-groups would be counted up by each of them: DeepSpeed's own converter does that."""
    reshard(golden(name), tmp_path / STEP, Topology.parse(target))
    for path in (tmp_path / STEP).glob("*_optim_states.pt"):
        state = read(path).value["optimizer_state_dict"]
        inner = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        steps = [group["step"].storage for group in inner["state"].values()]
        assert len(steps) >= 2
        assert len({id(storage) for storage in steps}) == len(steps)


def describe(value):
    """A comparable form: tensors by type and shape."""
    if hasattr(value, "storage"):
        return ("tensor", value.dtype, value.shape)
    if hasattr(value, "target"):
        args = value.args
        if value.target.name == "Generator":
            args = ()
        return ("object", str(value.target), describe(args), describe(value.state))
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    return value


def test_training_in_bf16_is_told_by_its_files_where_weights_are_not_saved_in_it(tmp_path):
    """Adapters stay in fp32 at ZeRO-3, and without frozen parameters nothing else is in the module."""
    folder = Path(shutil.copytree(golden("zero3-dp3"), tmp_path / "source"))
    for path in folder.glob("zero_*_optim_states.pt"):
        path.rename(path.with_name(f"bf16_{path.name}"))
    reshard(folder, tmp_path / "out" / STEP, Topology(dp=2, zero=3))
    found = sorted(path.name for path in (tmp_path / "out" / STEP).glob("*_optim_states.pt"))
    assert found == [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
