"""Checkpoints that real torch wrote: every element is found, and conversions keep each of them."""

import dataclasses
import json
import shutil

import pytest

from reshard.api import Conversion, RunOptions, index_of
from reshard.api import convert as convert_all
from reshard.cli.main import main
from reshard.execution.verify import read_digests
from reshard.formats.dcp import FORMAT
from reshard.formats.dcp.metadata import read_metadata
from reshard.tensors.layout import TensorKey
from reshard.topology import Topology
from tests.golden.dcp_files import NAMES, ROOT, add_entries, check_archives, convert, golden, items, meaning
from tests.golden.files import assemble, check_truth
from tests.golden.files import golden as deepspeed

STATES = {
    "fsdp2-flat": ("exp_avg", "exp_avg_sq"),
    "single-nested": ("momentum_buffer",),
    "tp2-fsdp2-titan": ("velocity",),
}
MATRICES, VECTORS = ("embed.weight", "up.weight", "down.weight"), ("up.bias",)
LEFT = {
    "fsdp2-flat": (),
    "single-nested": ("app.schedule.last_epoch",),
    "tp2-fsdp2-titan": ("lr_scheduler.last_epoch", "train_state.rng", "train_state.tokens"),
}


def truth(name):
    return json.loads((ROOT / name / "truth.json").read_text())


def named(index):
    """The same tensors as another format would hand them over."""
    return dataclasses.replace(index, format="other", extra=None)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_what_torch_said_it_was(name):
    found = assemble(FORMAT.read(golden(name), None))
    wanted = {key.replace("model/", "weight/", 1): value for key, value in truth(name).items() if "step/" not in key}
    check_truth(found, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_parameter_groups_and_the_rest_are_told_apart(name):
    index = FORMAT.read(golden(name), None)
    assert [group.names for group in index.groups] == [MATRICES, VECTORS]
    assert [group.options["weight_decay"] for group in index.groups] == [0.1, 0.0]
    assert {key.state for key in (item.key for item in index.tensors)} == {"weight", *STATES[name]}
    assert set(LEFT[name]) <= set(index.extra.naming.rest)
    assert not any(key.startswith(("optim.", "optimizer.", "app.optimizer.")) for key in index.extra.naming.rest)


def test_steps_are_numbers_of_their_group():
    index = FORMAT.read(golden("fsdp2-flat"), None)
    assert index.step == 2
    assert [group.scalars for group in index.groups] == [{"step": 2.0}, {"step": 2.0}]
    assert index.groups[0].options["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_another_number_of_ranks_keeps_every_element_and_every_object(name, world, tmp_path):
    index = FORMAT.read(golden(name), None)
    layout, outcome = convert(index, tmp_path / "out", world)
    again = FORMAT.read(tmp_path / "out", None)
    before, after = assemble(index), assemble(again)
    assert before.keys() == after.keys()
    assert all((before[key] == after[key]).all() for key in before)
    assert outcome.bytes_read == sum(tensor.num_bytes for tensor in index.tensors)
    assert again.groups == index.groups
    assert again.extra.order == index.extra.order
    assert again.topology.world_size == min(world, 6)  # six rows at most: more ranks have nothing
    old, new = items(golden(name)), items(tmp_path / "out")
    carried = [key for key in old if key[0] in {entry.key for entry in index.extra.carried}]
    assert all(meaning(old[key]) == meaning(new[key]) for key in carried)
    assert check_archives(tmp_path / "out") == len(new)
    assert layout.notes == ()


@pytest.mark.parametrize("name", NAMES)
def test_paths_in_the_state_dict_stay(name, tmp_path):
    convert(FORMAT.read(golden(name), None), tmp_path / "out", 3)
    before = {entry.key: (entry.path, entry.shape, entry.dtype) for entry in read_metadata(golden(name))}
    assert before == {entry.key: (entry.path, entry.shape, entry.dtype) for entry in read_metadata(tmp_path / "out")}


@pytest.mark.parametrize("name", NAMES)
def test_from_another_format_names_are_those_of_get_state_dict(name, tmp_path):
    index = named(FORMAT.read(golden(name), None))
    convert(index, tmp_path / "out", 2)
    again = FORMAT.read(tmp_path / "out", None)
    before, after = assemble(index), assemble(again)
    assert before.keys() == after.keys()
    assert all((before[key] == after[key]).all() for key in before)
    assert [(group.names, group.options, group.scalars) for group in again.groups] == [
        (group.names, group.options, group.scalars) for group in index.groups
    ]
    keys = {entry.key for entry in read_metadata(tmp_path / "out")}
    state = STATES[name][0]
    assert {"model.up.bias", f"optim.state.up.bias.{state}", "optim.param_groups.up.bias.lr"} <= keys
    assert {"optim.param_groups.1.lr", "optim.param_groups.1.params"} <= keys
    assert ("optim.state.up.bias.step" in keys) == (name == "fsdp2-flat")


def test_weights_of_another_type_are_rounded_and_nothing_else(tmp_path):
    index = FORMAT.read(golden("fsdp2-flat"), None)
    convert(index, tmp_path / "out", 2, weight_dtype="bfloat16")
    types = {tensor.key: tensor.dtype for tensor in FORMAT.read(tmp_path / "out", None).tensors}
    assert types[TensorKey("weight", "up.weight")] == "bfloat16"
    assert types[TensorKey("exp_avg", "up.weight")] == "float32"
    before, after = (
        assemble(index)["weight/up.weight"],
        assemble(FORMAT.read(tmp_path / "out", None))["weight/up.weight"],
    )
    rounded = (before + 0x7FFF + ((before >> 16) & 1)) >> 16
    assert (rounded == after).all()


@pytest.mark.parametrize("name", ["zero2-dp3", "zero2-dp3-round-robin", "zero3-dp3", "bf16-dp2"])
def test_deepspeed_becomes_a_state_dict_of_torch(name, tmp_path):
    source = deepspeed(name)
    wanted = Conversion(source=source, target=tmp_path / "out", topology=Topology(dp=2, zero=3), target_format="dcp")
    assert convert_all(wanted, RunOptions(reread=True)).verified
    before, found = index_of(source), index_of(tmp_path / "out")
    old, new = assemble(before), assemble(found)
    names = {key.removeprefix("fp32/") for key in old if key.startswith("fp32/")}
    assert names == {name for group in before.groups for name in group.names}
    for key in names:
        assert (new[f"weight/{key}"] == old[f"fp32/{key}"]).all()
        for state in ("exp_avg", "exp_avg_sq"):
            assert (new[f"{state}/{key}"] == old[f"{state}/{key}"]).all()
    assert (new["weight/head.weight"] == old["fp32/embed.weight"]).all()
    assert (new["weight/scale"] == old["weight/scale"]).all()
    assert found.step == before.step
    assert [(group.names, group.scalars) for group in found.groups] == [
        (group.names, group.scalars) for group in before.groups
    ]
    assert [group.options for group in found.groups] == [group.options for group in before.groups]


@pytest.mark.parametrize("name", ["zero2-dp3-round-robin", "zero3-dp3", "bf16-dp2"])
def test_deepspeed_comes_back_from_a_state_dict_as_it_was(name, tmp_path):
    source = deepspeed(name)
    topology = index_of(source).topology
    there = Conversion(source=source, target=tmp_path / "dcp", topology=Topology(dp=4, zero=3), target_format="dcp")
    convert_all(there)
    back = Conversion(
        source=there.target, target=tmp_path / "back", topology=topology, target_format="deepspeed", like=source
    )
    convert_all(back)
    assert read_digests(index_of(back.target)) == read_digests(index_of(source))


def test_what_was_converted_twice_is_what_was_converted_once(tmp_path):
    index = FORMAT.read(golden("tp2-fsdp2-titan"), None)
    convert(index, tmp_path / "three", 3)
    convert(FORMAT.read(tmp_path / "three", None), tmp_path / "two", 2)
    convert(index, tmp_path / "direct", 2)
    assert items(tmp_path / "two") == items(tmp_path / "direct")


@pytest.mark.parametrize(("dp", "stays"), [(2, True), (3, False)])
def test_entries_of_single_ranks_are_left_out_where_the_ranks_change_and_the_plan_says_so(dp, stays, tmp_path, capsys):
    source = shutil.copytree(golden("tp2-fsdp2-titan"), tmp_path / "in", ignore=shutil.ignore_patterns("COMMIT.json"))
    objects = {f"dataloader.dp_rank_{rank}": "lr_scheduler.last_epoch" for rank in range(2)}
    tensors = {f"rng.dp_rank_{rank}": "train_state.rng" for rank in range(2)}
    add_entries(source, {**objects, **tensors})
    words = [str(source), "--to", f"dp={dp}"]
    assert main(["plan", *words, "--json"]) == 0
    (*notes,) = json.loads(capsys.readouterr().out)["notes"]
    named = [note for note in notes if "belong to single ranks" in note]
    assert ["dataloader.dp_rank_0" in note and "rng.dp_rank_1" in note for note in named] == [True] * (not stays)
    assert main(["run", str(source), str(tmp_path / "out"), *words[1:], "--report", str(tmp_path / "report")]) == 0
    assert ("dataloader.dp_rank_0" in json.loads((tmp_path / "report").read_text())["message"]) is not stays
    keys = {entry.key for entry in read_metadata(tmp_path / "out")}
    assert {*objects, *tensors} & keys == ({*objects, *tensors} if stays else set())
    assert {"train_state.rng", "lr_scheduler.last_epoch"} < keys
