"""Universal checkpoints that DeepSpeed's own converter made, and ours of the same sources beside them."""

import dataclasses
import shlex
import subprocess
import sys

import numpy as np
import pytest

from reshard.api import Conversion, RunOptions, convert, plan_of
from reshard.errors import UnsupportedError
from reshard.execution.executor import execute
from reshard.formats import format_of, read_checkpoint
from reshard.formats.base import Request
from reshard.formats.universal.names import MODEL_FILES
from reshard.topology import Topology
from tests.golden.files import STEP, assemble, golden
from tests.golden.universal_files import NAMES, converted, universal, value_of

VOCABULARY = "tied_modules.embed.weight"


@pytest.mark.parametrize("name", NAMES)
def test_folders_of_deepspeeds_converter_hold_what_the_native_checkpoint_holds(name):
    index, native = read_checkpoint(converted(name), None), read_checkpoint(golden(name), None)
    assert index.format == "universal"
    assert (index.step, index.samples) == (native.step, native.samples) == (2, 24)
    assert index.groups == native.groups
    assert index.aliases == native.aliases
    found, expected = assemble(index), assemble(native)
    masters = {key.removeprefix("fp32/") for key in expected if key.startswith("fp32/")}
    wanted = {key for key in expected if not key.endswith("#padding")}  # which the converter strips
    assert found.keys() == {key for key in wanted if key.removeprefix("weight/") not in masters}
    for key, value in found.items():
        assert (value == expected[key]).all(), key


@pytest.mark.parametrize("name", NAMES)
def test_ours_says_the_same_in_the_files_that_both_write(tmp_path, name):
    ours, theirs = universal(golden(name), tmp_path / STEP), converted(name)
    shapes = read_checkpoint(theirs, None).extra.params
    compared = 0
    for path in sorted((theirs / "zero").glob("*/*.pt")):
        relative = path.relative_to(theirs)
        if path.parent.name == "head.weight":  # the second name of a tied weight: DeepSpeed loads the first
            assert not (ours / relative).exists()
            continue
        expected, found = value_of(path), value_of(ours / relative)
        if isinstance(expected, dict):
            compare_atoms(expected, found, path.parent.name, told="pipeline" in name)
        elif path.stem == "step":
            assert found == expected
        else:  # bare, flat tensors of ZeRO-3
            assert found["param"] == (expected[0], shapes[path.parent.name].shape, expected[2])
        compared += 1
    assert compared == len(list((ours / "zero").glob("*/*.pt"))) - (8 if name == "zero3-dp3" else 0)


def compare_atoms(expected: dict, found: dict, parameter: str, *, told: bool) -> None:
    dtype, shape, content = expected.pop("param")
    own = found.pop("param")
    if parameter == VOCABULARY:
        assert own[1] == (16, shape[1])
        assert (own[0], own[2][: len(content)]) == (dtype, content)
    else:
        assert own == (dtype, shape, content)
    for hints in (expected, found):
        if "sub_param_shape" in hints:
            hints["sub_param_shape"][2].pop("patterns")
    if told:
        assert found == expected
    elif parameter != "scale":  # nothing is said about cuts: theirs says dim 0, ours that it cannot be cut
        assert expected == {"cat_dim": 0}
        assert found["sub_param_shape"][2]["shape"] == ((1,), *shape)


@pytest.mark.parametrize("name", [*NAMES, "pipeline-dp2", "zero2-dp3-round-robin", "bf16-dp2", "zero0-bf16-dp2"])
def test_conversion_of_ours_changes_no_bit_and_no_file(tmp_path, name):
    first = universal(golden(name), tmp_path / "first" / STEP)
    second = universal(first, tmp_path / "second" / STEP)
    files = sorted(path.relative_to(first) for path in first.rglob("*.pt"))
    assert files == sorted(path.relative_to(second) for path in second.rglob("*.pt"))
    for path in files:
        assert (first / path).read_bytes() == (second / path).read_bytes(), path
    index, native = read_checkpoint(first, None), read_checkpoint(golden(name), None)
    assert index.groups == native.groups
    expected = assemble(native)
    for key, value in assemble(index).items():
        assert (value == expected[key]).all(), key


@pytest.mark.parametrize("name", NAMES)
def test_folders_of_both_makers_become_other_formats(tmp_path, name):
    ours = universal(golden(name), tmp_path / "ours" / STEP)
    for target in ("dcp", "safetensors"):
        digests = []
        for maker, source in (("ours", ours), ("theirs", converted(name))):
            folder = tmp_path / maker / target
            topology = Topology.parse("dp=2,zero=1")
            convert(
                Conversion(source=source, target=folder, topology=topology, target_format=target),
                RunOptions(sync=False),
            )
            digests.append(assemble(read_checkpoint(folder, None)))
        assert digests[0].keys() == digests[1].keys()
        for key, value in digests[0].items():
            assert (value == digests[1][key]).all(), key


@pytest.mark.parametrize(
    ("name", "target"), [("pipeline-tp2-pp2", "tp=2,pp=2"), ("zero2-dp3", "dp=2,zero=3"), ("zero3-dp3", "dp=4,zero=1")]
)
def test_back_into_a_native_checkpoint_with_one_like_it(tmp_path, name, target):
    folder = universal(golden(name), tmp_path / "universal" / STEP)
    wanted = Conversion(
        source=folder,
        target=tmp_path / "native" / STEP,
        topology=Topology.parse(target),
        target_format="deepspeed",
        like=golden(name),
    )
    convert(wanted, RunOptions(reread=True, sync=False))
    found, expected = assemble(read_checkpoint(wanted.target, None)), assemble(read_checkpoint(golden(name), None))
    for key, value in found.items():
        if key not in expected:  # weights that ZeRO-3 does not store
            key = key.replace("weight/", "fp32/")  # noqa: PLW2901
        assert (value == expected[key]).all(), key
    assert {key for key in expected if "exp_avg" in key} == {key for key in found if "exp_avg" in key}


@pytest.mark.parametrize("like", ["zero2-dp3", "zero3-dp3", "universal"])
def test_a_source_of_another_format_takes_the_rest_from_a_checkpoint_like_it(tmp_path, like):
    native = read_checkpoint(golden("zero2-dp3"), None)
    groups = tuple(
        dataclasses.replace(group, options={**group.options, "lr": 0.125}, scalars={"step": 7})
        for group in native.groups
    )
    foreign = dataclasses.replace(native, format="other", extra=None, step=7, samples=99, groups=groups)
    template = read_checkpoint(converted("zero2-dp3") if like == "universal" else golden(like), None)
    request = Request(topology=Topology(zero=1), like=template)
    (tmp_path / STEP).mkdir()
    execute(plan_of(foreign, request, target_format="universal"), tmp_path / STEP, sync=False)
    index = read_checkpoint(tmp_path / STEP, None)
    assert (index.step, index.samples) == (7, 99)
    assert [group.scalars for group in index.groups] == [{"step": 7.0}] * 2
    assert {group.options["lr"] for group in index.groups} == {0.125}
    assert [group.options["weight_decay"] for group in index.groups] == [0.1, 0.0]
    expected = assemble(native)
    for key, value in assemble(index).items():
        assert (value == expected[key]).all(), key


def test_without_one_like_it_there_is_no_guess():
    foreign = dataclasses.replace(read_checkpoint(golden("zero2-dp3"), None), format="other", extra=None)
    with pytest.raises(UnsupportedError, match="name with --like a DeepSpeed checkpoint of the same model"):
        format_of("universal").layout(foreign, Request(topology=Topology(zero=1)))


def test_model_and_optimizer_files_are_what_the_loaders_of_all_stages_look_for(tmp_path):
    folder = universal(golden("pipeline-tp2-pp2"), tmp_path / STEP, "tp=2,pp=2,zero=1")
    first, second = (value_of(folder / name) for name in MODEL_FILES)
    assert first == second
    assert (first["mp_world_size"], first["module"], first["global_steps"]) == (1, None, 2)
    assert first["pipeline_layout"]["parts"] == (0, 5)
    assert [len(group) for group in first["param_shapes"]] == [9, 5]
    optimizer = value_of(folder / "zero" / "optimizer_state.pt")
    assert optimizer["ds_version"] == "0.19.8"
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.1, 0.0]
    for_stage_3 = optimizer["optimizer_state_dict"]
    assert np.frombuffer(for_stage_3["state"][0]["step"][2], np.float32) == 2
    assert len(for_stage_3["param_groups"]) == 1
    assert for_stage_3["param_groups"][0]["lr"] == 0.01
    assert "weight_decay" not in for_stage_3["param_groups"][0]  # every group keeps its own
    assert read_checkpoint(folder, None).topology == Topology(tp=2, pp=2, zero=1)


def test_the_commands_know_the_format(tmp_path, capsys):
    from reshard.cli.main import main

    folder = tmp_path / STEP
    assert main(["run", str(golden("zero2-dp3")), str(folder), "--to", "dp=1", "--format", "universal"]) == 0
    assert main(["verify", str(folder)]) == 0
    assert main(["inspect", str(folder)]) == 0
    assert "universal" in capsys.readouterr().out


def test_stacks_of_experts_are_marked_and_stay_so(tmp_path):
    first = universal(golden("autoep-dp2-ep2"), tmp_path / "first" / STEP)
    second = universal(first, tmp_path / "second" / STEP)
    for folder in (first, second):
        atom = value_of(folder / "zero/block1.experts.w2/exp_avg.pt")
        dtype, shape, _ = atom.pop("param")
        assert (dtype, shape) == ("float32", (4, 8, 6))
        assert atom == {"is_expert_param": True, "ep_num_experts": 4}
    expected = assemble(read_checkpoint(golden("autoep-dp2-ep2"), None))
    for key, value in assemble(read_checkpoint(second, None)).items():
        assert (value == expected[key]).all(), key


def test_more_files_than_a_process_may_open(tmp_path):
    """Four files per parameter are soon more than the usual 1024."""
    program = "import sys; from reshard.cli.main import main; sys.exit(main())"
    arguments = ["run", str(golden("pipeline-tp2-pp2")), str(tmp_path / STEP), "--to", "dp=1", "--format", "universal"]
    command = shlex.join([sys.executable, "-c", program, *arguments])
    done = subprocess.run(["bash", "-c", f"ulimit -n 32; exec {command}"], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / STEP).rglob("*.pt"))) == 59
