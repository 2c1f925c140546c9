"""Tensors of another origin, laid out like a DeepSpeed checkpoint of the same model."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from reshard.api import Conversion, RunOptions, convert, plan_of, reshard
from reshard.errors import UnsupportedError
from reshard.execution.executor import execute
from reshard.formats import read_checkpoint
from reshard.formats.base import Request
from reshard.formats.pt.reader import read
from reshard.tensors.layout import Index, LogicalTensor, TensorKey
from reshard.tensors.views import keep_tensors
from reshard.topology import Topology
from tests.golden.command import Answer
from tests.golden.files import MODEL, OPTIMIZER, STEP, assemble, golden


def foreign(name: str, *, step: int = 5) -> Index:
    """The checkpoint as another format's reader would describe it: no files of DeepSpeed behind it."""
    index = read_checkpoint(golden(name), None)
    groups = tuple(
        dataclasses.replace(group, options={**group.options, "lr": 0.125, "betas": [0.5, 0.75]}, scalars={"step": step})
        for group in index.groups
    )
    return dataclasses.replace(index, format="other", extra=None, step=step, samples=77, groups=groups)


def written(index: Index, like: str, target: str, folder: Path) -> Path:
    request = Request(topology=Topology.parse(target), like=read_checkpoint(golden(like), None))
    folder.mkdir()
    execute(plan_of(index, request, target_format="deepspeed"), folder, sync=False)
    return folder


def number(path: Path, tensor) -> float:
    return float(np.frombuffer(path.read_bytes()[tensor.file_offset :][:4], np.float32)[0])


@pytest.mark.parametrize(
    ("name", "like", "target"),
    [
        ("zero2-dp3", "zero3-dp3", "dp=2,zero=3"),
        ("zero3-dp3", "zero2-dp3", "dp=2,zero=1"),
        ("zero2-dp3", "zero0-dp2", "dp=4,zero=0"),
        ("pipeline-tp2-pp2", "pipeline-dp2", "tp=2,pp=2,dp=2"),
        ("bf16-dp2", "bf16-optimizer-dp2", "dp=3,zero=1"),
    ],
)
def test_values_are_the_sources_and_files_are_like_the_template(tmp_path, name, like, target):
    index = foreign(name)
    folder = written(index, like, target, tmp_path / STEP)
    found, expected = read_checkpoint(folder, None), assemble(index)
    assert (found.step, found.samples) == (5, 77)
    for key, value in assemble(found).items():
        if key in expected:
            assert (value == expected[key]).all(), key
        else:  # weights of a stage that stores only master weights
            assert (value == expected[key.replace("weight/", "fp32/")]).all(), key
    assert [group.scalars for group in found.groups] == [{"step": 5.0}] * len(found.groups)
    for group in found.groups:
        assert group.options["lr"] == 0.125
        assert group.options["betas"] == [0.5, 0.75]


def test_settings_keep_the_form_that_deepspeed_gives_them(tmp_path):
    folder = written(foreign("zero2-dp3"), "zero2-dp3", "dp=1,zero=2", tmp_path / STEP)
    path = folder / OPTIMIZER.format(0)
    inner = read(path).value["optimizer_state_dict"]["base_optimizer_state"]
    assert inner["param_groups"][0]["betas"] == (0.5, 0.75)
    assert number(path, inner["state"][1]["step"]) == 5.0
    assert read(folder / MODEL.format(0)).value["global_steps"] == 5


def test_bf16_weights_become_master_weights_where_there_are_none(tmp_path):
    """Weights from one place, moments from another: what a source of weights alone would need."""
    index = foreign("bf16-dp2")
    chosen = [at for at, tensor in enumerate(index.tensors) if tensor.key.state != "fp32"]
    weights = keep_tensors(index, chosen)
    folder = written(weights, "bf16-dp2", "dp=2,zero=1", tmp_path / STEP)
    request = Request(topology=Topology(dp=2), like=read_checkpoint(golden("bf16-dp2"), None))
    (note,) = plan_of(weights, request, target_format="deepspeed").layout.notes
    assert note == "fp32: 7 master weights are made of rounded weights, such as embed.weight"
    found = assemble(read_checkpoint(folder, None))
    weight = assemble(index)["weight/up.weight"]
    assert (found["fp32/up.weight"] == weight.astype(np.uint32) << 16).all()


def test_what_stays_behind_is_noted():
    plan = plan_of(read_checkpoint(golden("bf16-dp2"), None), Topology(dp=2, zero=3))
    assert plan.layout.notes == ("weight: 7 tensors of the source are not stored in the target, such as embed.weight",)
    assert plan_of(read_checkpoint(golden("bf16-dp2"), None), Topology(dp=3)).layout.notes == ()


def test_source_that_lacks_tensors_is_refused_by_their_names(tmp_path):
    index = foreign("zero2-dp3")
    chosen = [at for at, tensor in enumerate(index.tensors) if str(tensor.key) != "exp_avg_sq/up.weight"]
    with pytest.raises(UnsupportedError, match=r"exp_avg_sq/up.weight \[3, 7\] is missing"):
        written(keep_tensors(index, chosen), "zero2-dp3", "dp=2,zero=1", tmp_path / STEP)


def test_tensor_of_another_shape_is_refused(tmp_path):
    index = foreign("zero2-dp3")
    at = index.number_of(TensorKey("exp_avg", "up.bias"))
    tensors = list(index.tensors)
    tensors[at] = LogicalTensor(key=tensors[at].key, shape=(1, 3), dtype="float32")
    with pytest.raises(UnsupportedError, match=r"exp_avg/up.bias has the shape \[1, 3\], expected \[3\]"):
        written(dataclasses.replace(index, tensors=tuple(tensors)), "zero2-dp3", "dp=2,zero=1", tmp_path / STEP)


def test_tied_weight_is_found_under_its_other_name(tmp_path):
    index = foreign("zero2-dp3")
    tensors = tuple(
        dataclasses.replace(tensor, key=TensorKey(tensor.key.state, tensor.key.name.replace("embed.", "head.")))
        for tensor in index.tensors
    )
    folder = written(dataclasses.replace(index, tensors=tensors), "zero2-dp3", "dp=2,zero=1", tmp_path / STEP)
    assert (assemble(read_checkpoint(folder, None))["fp32/embed.weight"] == assemble(index)["fp32/embed.weight"]).all()


def test_groups_with_different_settings_are_not_merged(tmp_path):
    index = foreign("zero2-dp3")
    first = index.groups[0]
    split = tuple(dataclasses.replace(first, names=(name,), options={"lr": at}) for at, name in enumerate(first.names))
    with pytest.raises(UnsupportedError, match="different options lr"):
        written(
            dataclasses.replace(index, groups=(*split, index.groups[1])), "zero2-dp3", "dp=1,zero=1", tmp_path / STEP
        )


def test_source_of_another_format_needs_a_template():
    with pytest.raises(UnsupportedError, match="--like"):
        plan_of(foreign("zero2-dp3"), Topology(dp=2), target_format="deepspeed")


def test_template_of_another_format_is_refused():
    request = Request(topology=Topology(dp=2), like=foreign("zero2-dp3"))
    with pytest.raises(UnsupportedError, match="--like names a checkpoint of the format other"):
        plan_of(read_checkpoint(golden("zero2-dp3"), None), request, target_format="deepspeed")


def test_elastic_checkpoint_takes_settings_from_a_configuration(tmp_path, capsys):
    answer, path = Answer(capsys), tmp_path / "ds.json"
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.0}}
    path.write_text(json.dumps({"optimizer": optimizer}))
    command = ["run", golden("elastic-dp2"), tmp_path / STEP, "--to", "dp=3,zero=2", "--ds-config", path]
    assert "optimizer.params says one group, the checkpoint has 2" in answer(*command, code=2)
    path.write_text(json.dumps({"optimizer": {**optimizer, "param_groups": [{"weight_decay": 0.1}, {}]}}))
    answer("inspect", golden("elastic-dp2"), "--ds-config", path)
    assert "settings are those of --ds-config" in answer("plan", *command[1:2], "--to", "dp=3", "--ds-config", path)
    answer(*command)
    expected = {**assemble(read_checkpoint(golden("elastic-dp2"), None))}
    after = read_checkpoint(tmp_path / STEP, None)
    assert all((value == assemble(after)[key]).all() for key, value in expected.items())
    twin = read_checkpoint(golden("zero2-dp3"), None)  # the same run without elastic_checkpoint, but for its dp
    for found, like in zip(after.groups, twin.groups, strict=True):
        known = found.options.keys() & like.options.keys()
        assert {"lr", "betas", "eps", "weight_decay", "decoupled_weight_decay"} <= known
        assert {key: found.options[key] for key in known - {"lr"}} == {key: like.options[key] for key in known - {"lr"}}
        assert found.options["lr"] == pytest.approx(like.options["lr"], rel=1e-12)
    refused = answer("plan", golden("zero2-dp3"), "--to", "dp=2", "--ds-config", path, code=2)
    assert "keeps the settings of its optimizer itself" in refused


def test_elastic_checkpoint_is_read_and_needs_settings_from_elsewhere(tmp_path):
    with pytest.raises(UnsupportedError, match="keeps no settings of the optimizer"):
        reshard(golden("elastic-dp2"), tmp_path / "refused", Topology(dp=3))
    wanted = Conversion(
        source=golden("elastic-dp2"),
        target=tmp_path / STEP,
        topology=Topology.parse("dp=3,zero=2"),
        like=golden("zero2-dp3"),
    )
    assert convert(wanted, RunOptions(reread=True)).ok
    found, expected = read_checkpoint(tmp_path / STEP, None), read_checkpoint(golden("elastic-dp2"), None)
    before, after = assemble(expected), assemble(found)
    assert before.keys() == after.keys()
    assert all((value == after[key]).all() for key, value in before.items())
    assert [group.scalars for group in found.groups] == [group.scalars for group in expected.groups]
