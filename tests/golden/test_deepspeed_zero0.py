"""ZeRO-0 numbers its parameters: names are found where that is certain, and nothing is guessed where it is not."""

import dataclasses
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from reshard.api import index_of, plan_of, reshard
from reshard.commits.commit import read_commit
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats import read_checkpoint
from reshard.formats.base import Request
from reshard.formats.deepspeed.unpartitioned import FLAT_MASTERS, make_view
from reshard.formats.pt.objects import StatefulDict, new_tensor
from reshard.formats.pt.reader import read
from reshard.tensors.views import select_states
from reshard.topology import Topology
from tests.golden.files import MODEL, STEP, assemble, edit, golden, refused_but_for_weights

GROUPS = [
    ("embed.weight", "up.weight", "down.weight"),
    ("up.bias", "norm.weight", "norm.bias", "down.bias"),
]


def edited(tmp_path: Path, change, name: str = "zero0-dp2") -> Path:
    folder = Path(shutil.copytree(golden(name), tmp_path / "source"))
    edit(folder, MODEL.format(0), lambda value: change(value["optimizer"]))
    return folder


def rounded(master):
    """fp32 as bf16: to nearest, ties to even."""
    return (master + 0x7FFF + ((master >> 16) & 1)) >> 16


def split(optimizer) -> None:
    """Three parameters of one shape, in two groups: which is which?"""
    second = optimizer["param_groups"][1]
    optimizer["param_groups"].append({**second, "params": second["params"][2:3]})
    del second["params"][2]


def test_names_follow_from_the_order_of_the_module():
    for name in ("zero0-dp2", "zero0-bf16-dp2"):
        assert [group.names for group in read_checkpoint(golden(name), None).groups] == GROUPS


def test_names_that_the_optimizer_was_given_are_taken(tmp_path):
    def name(optimizer) -> None:
        split(optimizer)
        taken = ("up.bias", "norm.weight", "down.bias")
        names = (GROUPS[0], taken, ("norm.bias",))
        for group, own in zip(optimizer["param_groups"], names, strict=True):
            group["param_names"] = list(own)

    index = read_checkpoint(edited(tmp_path, name), None)
    assert [group.names for group in index.groups] == [
        GROUPS[0],
        ("up.bias", "norm.weight", "down.bias"),
        ("norm.bias",),
    ]
    found, expected = assemble(index), assemble(read_checkpoint(golden("zero0-dp2"), None))
    assert all((found[key] == value).all() for key, value in expected.items())


def reorder(optimizer) -> None:
    optimizer["param_groups"][0]["params"].reverse()


def forget(optimizer) -> None:
    del optimizer["state"][4]


def step_on(optimizer) -> None:
    optimizer["state"][5]["step"].storage.data = struct.pack("<f", 1.0)


def fused(optimizer, steps=(0, 0, 2, 0, 0, 0, 2), **more) -> None:
    """As DeepSpeed's FusedAdam leaves it: the last parameter of a group counts for all."""
    for group in optimizer["param_groups"]:
        group["bias_correction"] = True
        group.update(more)
        del group["amsgrad"]
    for at, step in enumerate(steps):
        optimizer["state"][at]["step"] = step


@pytest.mark.parametrize("steps", [(0, 0, 2, 0, 0, 0, 2), (2, 2, 2, 2, 2, 2, 2), (2, 2, 4, 3, 3, 3, 4)])
def test_steps_of_a_fused_adam_are_counted_by_the_last_of_a_group(tmp_path, steps):
    folder = edited(tmp_path, lambda optimizer: fused(optimizer, steps))
    index = read_checkpoint(folder, None)
    assert [group.scalars["step"] for group in index.groups] == [steps[2], steps[6]]
    target = tmp_path / "target" / STEP
    reshard(folder, target, Topology(dp=2, zero=1))
    assert [group.scalars["step"] for group in read_checkpoint(target, None).groups] == [steps[2], steps[6]]


@pytest.mark.parametrize(
    ("steps", "more"),
    [
        ((0, 1, 2, 0, 0, 0, 2), {}),  # which of the first two?
        ((2, 2, 1, 2, 2, 2, 2), {}),  # the last one began later
        ((0, 0, 2, 0, 0, 0, 2), {"max_coeff": 10.0}),  # FusedLamb counts in each
    ],
)
def test_other_steps_are_not_taken_for_those_of_a_fused_adam(tmp_path, steps, more):
    folder = edited(tmp_path, lambda optimizer: fused(optimizer, steps, **more))
    refused_but_for_weights(folder, "has done another number of optimizer steps than")


def factor(optimizer) -> None:
    optimizer["state"][1]["row"] = new_tensor("float32", (3,), bytes(12))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (split, "more than one assignment"),
        (reorder, "no assignment"),
        (forget, "have no state in the optimizer"),
        (step_on, "norm.bias has done another number of optimizer steps than up.bias"),
        (factor, r"the states of parameter 1 have the shapes \[\(3,\), \(3, 7\)\]"),
    ],
)
def test_what_is_not_certain_is_refused(tmp_path, change, text):
    refused_but_for_weights(edited(tmp_path, change), text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda optimizer: optimizer.pop("state"), "no state and param_groups"),
        (lambda optimizer: optimizer.update(fp32_groups=[[]]), "do not fit the optimizer's param_groups"),
    ],
)
def test_damaged_optimizer_is_refused(tmp_path, change, text):
    with pytest.raises(CorruptSourceError, match=text):
        read_checkpoint(edited(tmp_path, change), None)


def test_folder_without_its_optimizer_files_is_not_taken_for_zero_0(tmp_path):
    folder = Path(shutil.copytree(golden("zero2-dp3"), tmp_path / "source"))
    for path in folder.glob("*_optim_states.pt"):
        path.unlink()
    with pytest.raises(CorruptSourceError, match="was saved with them"):
        read_checkpoint(folder, None)


def test_checkpoint_without_an_optimizer_is_refused(tmp_path):
    folder = Path(shutil.copytree(golden("zero0-dp2"), tmp_path / "source"))
    edit(folder, MODEL.format(0), lambda value: value.update(optimizer=None))
    refused_but_for_weights(folder, "has no optimizer")


def test_optimizer_that_deepspeed_0_17_did_not_save_is_no_damage(tmp_path):
    folder = Path(shutil.copytree(golden("zero0-bf16-dp2"), tmp_path / "source"))
    shapes = {"param_shapes": [StatefulDict(), StatefulDict()], "optimizer": None}  # seen in a checkpoint of 0.17.6
    edit(folder, MODEL.format(0), lambda value: value.update(ds_version="0.17.6", **shapes))
    refused_but_for_weights(folder, "has no optimizer")
    edit(folder, MODEL.format(0), lambda value: value.update(ds_version="0.16.9"))
    with pytest.raises(CorruptSourceError, match="was saved with them"):
        read_checkpoint(folder, None)


@pytest.mark.parametrize("target_format", ["deepspeed", "universal"])
def test_weights_alone_make_no_checkpoint_of_deepspeed(tmp_path, target_format):
    index = select_states(read_checkpoint(edited(tmp_path, reorder), None), ("weight",))
    with pytest.raises(UnsupportedError, match="no assignment"):
        plan_of(index, Topology(dp=3), target_format=target_format)


FUSED = "zero0-fused-bf16-dp2"


def flat_groups(optimizer, size: int, names=None) -> None:
    """The one flat group as two: the last `size` elements, and those before."""
    (master,) = optimizer["fp32_groups_flat"]
    inner = optimizer["optimizer_state_dict"]
    moments = {key: value for key, value in inner["state"][0].items() if key != "step"}
    spans = [(0, master.num_elements - size), (master.num_elements - size, size)]
    optimizer["fp32_groups_flat"] = [make_view(master, start, (count,)) for start, count in spans]
    for number, (start, count) in enumerate(spans):
        inner["state"][number] = {
            "step": 2,
            **{key: make_view(value, start, (count,)) for key, value in moments.items()},
        }
    (group,) = inner["param_groups"]
    inner["param_groups"] = [{**group, "params": [number]} for number in (0, 1)]
    for own, found in zip(names or (), inner["param_groups"], strict=False):
        found["param_names"] = own


def test_flat_group_of_a_fused_optimizer_is_that_of_the_module_in_order():
    (group,) = read_checkpoint(golden(FUSED), None).groups
    assert group.names == (
        "embed.weight",
        "up.weight",
        "up.bias",
        "norm.weight",
        "norm.bias",
        "down.weight",
        "down.bias",
    )
    tensors = assemble(read_checkpoint(golden(FUSED), None))
    for name in group.names:
        assert (tensors[f"weight/{name}"] == rounded(tensors[f"fp32/{name}"])).all()
        assert tensors[f"exp_avg/{name}"].shape == tensors[f"weight/{name}"].shape
        assert tensors[f"exp_avg/{name}"].any()


@pytest.mark.parametrize("target", ["dp=3,zero=0", "dp=2,zero=1", "dp=3,zero=2", "dp=2,zero=3"])
def test_flat_group_of_a_fused_optimizer_goes_to_every_stage_and_back_without_changing_a_bit(tmp_path, target):
    before = assemble(read_checkpoint(golden(FUSED), None))
    reshard(golden(FUSED), tmp_path / "there" / STEP, Topology.parse(target))
    reshard(tmp_path / "there" / STEP, tmp_path / "back" / STEP, Topology(dp=2, zero=0))
    after = assemble(read_checkpoint(tmp_path / "back" / STEP, None))
    assert before.keys() == after.keys()
    assert all((after[key] == value).all() for key, value in before.items())
    found, written = (
        read(path / MODEL.format(0)).value["optimizer"] for path in (golden(FUSED), tmp_path / "back" / STEP)
    )
    assert list(found) == list(written)
    assert found["optimizer_state_dict"]["param_groups"] == written["optimizer_state_dict"]["param_groups"]
    assert [item.shape for item in found[FLAT_MASTERS]] == [item.shape for item in written[FLAT_MASTERS]]


def test_flat_groups_that_could_hold_several_parameters_are_refused(tmp_path):
    folder = edited(tmp_path, lambda optimizer: flat_groups(optimizer, 3), FUSED)
    refused_but_for_weights(folder, r"holds 2 flat groups .* more than one assignment .* fits their sizes")


@pytest.mark.parametrize("are_named", [True, False])
def test_flat_groups_are_told_apart_by_names_or_by_sizes(tmp_path, are_named):
    (whole,) = (group.names for group in read_checkpoint(golden(FUSED), None).groups)
    names = [list(whole[:-1]), [whole[-1]]]  # the only parameter of 7 elements

    def change(optimizer) -> None:
        flat_groups(optimizer, 7, names if are_named else None)

    index = read_checkpoint(edited(tmp_path, change, FUSED), None)
    assert [list(group.names) for group in index.groups] == names
    found, expected = assemble(index), assemble(read_checkpoint(golden(FUSED), None))
    assert all((found[key] == value).all() for key, value in expected.items())


def spread(optimizer) -> None:
    optimizer["fp32_groups_flat"] = [
        dataclasses.replace(master, stride=(0,)) for master in optimizer["fp32_groups_flat"]
    ]


def turn(optimizer) -> None:
    """Another parameter's values come first."""
    (master,) = optimizer["fp32_groups_flat"]
    content = np.arange(master.num_elements, dtype="<f4").tobytes()
    optimizer["fp32_groups_flat"] = [new_tensor("float32", master.shape, content)]


def shorten(optimizer) -> None:
    state = optimizer["optimizer_state_dict"]["state"][0]
    state["exp_avg"] = make_view(state["exp_avg"], 0, (5,))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda optimizer: optimizer.update(fp32_groups_flat=[]), CorruptSourceError, "do not fit the optimizer's"),
        (lambda optimizer: optimizer.update(fp32_groups_flat=7), CorruptSourceError, "no list of flat tensors"),
        (shorten, UnsupportedError, "the states of parameter 0 have the shapes"),
        (lambda optimizer: optimizer["optimizer_state_dict"]["state"].clear(), CorruptSourceError, "lacks states"),
        (spread, CorruptSourceError, "is not contiguous"),
        (turn, UnsupportedError, "in another order than the module's: embed.weight is not where"),
    ],
)
def test_damaged_flat_groups_are_refused(tmp_path, change, error, text):
    folder = edited(tmp_path, change, FUSED)
    if error is UnsupportedError:
        refused_but_for_weights(folder, text)
        return
    with pytest.raises(error, match=text):
        read_checkpoint(folder, None)


def with_groups(tmp_path: Path, **more) -> Path:
    """A ZeRO-1 checkpoint in bf16, its groups with more settings."""
    folder = Path(shutil.copytree(golden("bf16-dp2"), tmp_path / "source"))

    def change(value) -> None:
        for group in value["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group.update(more)

    for rank in (0, 1):
        edit(folder, f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", change)
    return folder


def test_optimizer_that_deepspeed_does_not_take_at_zero_0_is_refused(tmp_path):
    folder = with_groups(tmp_path, bias_correction=True)  # with amsgrad: DeepSpeedCPUAdam
    with pytest.raises(UnsupportedError, match="takes another optimizer at ZeRO stage 0"):
        plan_of(read_checkpoint(folder, None), Topology(zero=0))


def scaled(tmp_path: Path) -> Path:
    """Trained in fp16 with a loss scale."""
    folder = Path(shutil.copytree(golden("zero0-bf16-dp2"), tmp_path / "source"))

    def change(value) -> None:
        for tensor in value["module"].values():
            tensor.storage.dtype = "float16"
        value["ds_config"]["bf16"]["enabled"] = False
        value["optimizer"]["cur_scale"] = 256

    edit(folder, MODEL.format(0), change)
    return folder


@pytest.mark.parametrize("name", [None, "zero0-bf16-dp2", "bf16-dp2"])
def test_moments_of_a_scaled_loss_at_zero_0_stay_there(tmp_path, name):
    source = read_checkpoint(scaled(tmp_path), None)
    like = None if name is None else read_checkpoint(golden(name), None)
    if name is None:
        plan_of(source, Topology(dp=3, zero=0))
    for target_format in ("deepspeed", "universal"):
        with pytest.raises(UnsupportedError, match="gradients are too small by the loss scale, 256, at ZeRO stage 0"):
            plan_of(source, Request(topology=Topology(dp=3, zero=1), like=like), target_format=target_format)


def test_a_loss_that_is_not_scaled_goes_on_at_other_stages(tmp_path):
    folder = scaled(tmp_path)
    edit(folder, MODEL.format(0), lambda value: value["optimizer"].update(cur_scale=1))
    plan_of(read_checkpoint(folder, None), Topology(dp=3, zero=1))


def pipeline(tmp_path: Path, topology: str = "tp=2,pp=2,zero=0") -> Path:
    """A pipeline without ZeRO, made of one with it."""
    reshard(golden("pipeline-tp2-pp2"), tmp_path / STEP, Topology.parse(topology))
    (tmp_path / STEP / "COMMIT.json").unlink()
    return tmp_path / STEP


@pytest.mark.parametrize("topology", ["tp=2,pp=2,zero=0", "pp=3,zero=0", "dp=2,zero=0"])
def test_a_pipeline_numbers_the_parameters_of_each_stage_and_is_read_by_its_layers(tmp_path, topology):
    """Tied modules on two stages, three layers of the same shapes, and norms in a group of their own."""
    source = golden("pipeline-tp2-pp2")
    found, expected = read_checkpoint(pipeline(tmp_path, topology), None), read_checkpoint(source, None)
    assert found.groups == expected.groups
    tensors, wanted = assemble(found), assemble(expected)
    assert tensors.keys() == {key for key in wanted if not key.startswith("fp32/")}
    assert all((value == wanted[key]).all() for key, value in tensors.items())
    reshard(tmp_path / STEP, tmp_path / "back" / STEP, Topology.parse("tp=2,pp=2,zero=1"))
    back = assemble(read_checkpoint(tmp_path / "back" / STEP, None))
    assert back.keys() == wanted.keys()
    assert all((value == wanted[key]).all() for key, value in back.items())


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda value: value.pop("pipeline_layout"), UnsupportedError, "which layers each stage has"),
        (lambda value: value["pipeline_layout"].pop("tied"), UnsupportedError, "which of them are tied"),
        (lambda value: value["pipeline_layout"].pop("parts"), UnsupportedError, "which layers each stage has"),
        (lambda value: value["pipeline_layout"].update(parts=[0, 5]), CorruptSourceError, "has 2 pipeline stages"),
        (lambda value: value["pipeline_layout"].update(parts=[0, 2, 5]), UnsupportedError, "no assignment"),
    ],
)
def test_a_pipeline_that_does_not_say_its_layers_is_refused(tmp_path, change, kind, text):
    folder = pipeline(tmp_path)
    for rank in range(4):
        edit(folder, MODEL.format(rank), change)
    with pytest.raises(kind, match=text):
        read_checkpoint(folder, None)


def test_a_commit_says_the_layers_too(tmp_path):
    reshard(golden("pipeline-tp2-pp2"), tmp_path / STEP, Topology.parse("tp=2,pp=2,zero=0"))
    groups = index_of(tmp_path / STEP).groups
    for rank in range(4):
        edit(tmp_path / STEP, MODEL.format(rank), lambda value: value.pop("pipeline_layout"))
    assert read_checkpoint(tmp_path / STEP, read_commit(tmp_path / STEP)).groups == groups
