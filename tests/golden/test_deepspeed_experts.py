"""Experts under the names of the whole model, and what is refused about them."""

import shutil
from pathlib import Path

import pytest

from reshard.api import plan_of, reshard
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats import read_checkpoint
from reshard.formats.deepspeed.experts import Experts, find_experts
from reshard.formats.pt.reader import read
from reshard.topology import Topology
from tests.golden.files import MODEL, OPTIMIZER, STEP, edit, golden

NAME = "experts-dp4-ep2"
AUTOEP = "autoep-dp2-ep2"
PREFIX = "moe0.deepspeed_moe.experts.deepspeed_experts."
EXPERTS = Experts(counts={PREFIX: 4})


def test_every_expert_of_every_layer_has_weights_and_states():
    index = read_checkpoint(golden(NAME), None)
    assert index.topology == Topology(dp=4, ep=2)
    names = {str(tensor.key) for tensor in index.tensors}
    for layer, count in (("moe0", 4), ("moe1", 2)):
        for expert in range(count):
            for state in ("weight", "fp32", "exp_avg", "exp_avg_sq"):
                assert f"{state}/{layer}.deepspeed_moe.experts.deepspeed_experts.{expert}.weight" in names
    assert f"fp32/{PREFIX}4.weight" not in names


def test_groups_name_the_process_group_of_the_target(tmp_path):
    reshard(golden(NAME), tmp_path / STEP, Topology(dp=4))
    state = read(tmp_path / STEP / OPTIMIZER.format(0)).value["optimizer_state_dict"]
    groups = state["base_optimizer_state"]["param_groups"]
    assert [group["name"] for group in groups if group.get("moe")] == ["ep_size_1", "ep_size_1"]
    assert state["partition_count"] == [4, 4, 4, 4]
    shapes = read(tmp_path / STEP / MODEL.format(0)).value["param_shapes"]
    assert sum("deepspeed_experts.3." in name for group in shapes for name in group) == 2


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("dp=4,ep=4", "moe1.*has 2 experts, which 4 does not divide"),
        ("dp=4,ep=2,zero=3", "experts is laid out at tp=1, cp=1 and ZeRO stages 1 and 2"),
        ("dp=4,ep=2,zero=0", "experts is laid out at tp=1, cp=1 and ZeRO stages 1 and 2"),
        ("dp=4,tp=2", "experts is laid out at tp=1"),
    ],
)
def test_layout_that_experts_have_not_is_refused(target, text):
    with pytest.raises(UnsupportedError, match=text):
        plan_of(read_checkpoint(golden(NAME), None), Topology.parse(target))


def test_missing_file_of_an_expert_is_named(tmp_path):
    folder = Path(shutil.copytree(golden(NAME), tmp_path / "source"))
    (folder / "layer_0_expert_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CorruptSourceError, match=r"layer_0_expert_1_mp_rank_00_model_states\.pt is missing"):
        read_checkpoint(folder, None)


def test_file_of_another_expert_is_told_by_its_names(tmp_path):
    folder = Path(shutil.copytree(golden(NAME), tmp_path / "source"))
    name = "layer_0_expert_{}_mp_rank_00_model_states.pt"
    shutil.copy(folder / name.format(0), folder / name.format(1))
    with pytest.raises(CorruptSourceError, match="expert 1 of layer 0 holds other names"):
        read_checkpoint(folder, None)


def test_autoep_stacks_the_experts_of_the_whole_model():
    index = read_checkpoint(golden(AUTOEP), None)
    assert index.topology == Topology(dp=2, ep=2)
    shapes = {str(tensor.key): tensor.shape for tensor in index.tensors}
    for state in ("weight", "fp32", "exp_avg", "exp_avg_sq"):
        assert shapes[f"{state}/block1.experts.w1"] == (4, 6, 8)
        assert shapes[f"{state}/block1.experts.w2"] == (4, 8, 6)


def test_autoep_describes_its_layers_as_deepspeed_does_at_another_degree(tmp_path):
    """There and back, and what DeepSpeed's own maps say of the way."""
    affine = pytest.importorskip("deepspeed.checkpoint.affine")
    reshard(golden(AUTOEP), tmp_path / STEP, Topology(dp=4, ep=4))
    value = read(tmp_path / STEP / MODEL.format(0)).value
    assert value["universal_checkpoint_info"]["ds_autoep_layers"] == value["ds_autoep_layers"]
    layer = value["ds_autoep_layers"][1]
    assert (layer["ep_size"], layer["num_local_experts"], layer["global_expert_end"]) == (4, 1, 1)
    assert layer["expert_placement"]["ranks"][3] == {"rank": 3, "experts": [3]}
    expected = affine.contiguous_split_map((4, 8, 6), [1] * 4, 0).to_dict()
    assert layer["affine_maps"]["params"]["block1.experts.w2"] == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda layer: layer["expert_placement"]["ranks"][0].update(experts=[0, 2]), "not spread evenly and in order"),
        (lambda layer: layer.update(checkpoint_format="zero3_partitioned"), "zero3_partitioned"),
        (lambda layer: layer.update(ep_size=4, expert_placement=None), "have the degrees"),
    ],
)
def test_other_layouts_of_autoep_are_refused(tmp_path, change, text):
    folder = Path(shutil.copytree(golden(AUTOEP), tmp_path / "source"))
    edit(folder, MODEL.format(0), lambda value: change(value["ds_autoep_layers"][0]))
    with pytest.raises(UnsupportedError, match=text):
        read_checkpoint(folder, None)


def test_slice_of_another_expert_is_told_by_its_name(tmp_path):
    folder = Path(shutil.copytree(golden(AUTOEP), tmp_path / "source"))
    name = "layer_0_expert_{}_mp_rank_00_model_states.pt"
    shutil.copy(folder / name.format(0), folder / name.format(1))
    with pytest.raises(CorruptSourceError, match=r"expected a name that ends in \.1"):
        read_checkpoint(folder, None)


def test_optimizers_of_experts_at_zero_0_are_refused(tmp_path):
    folder = Path(shutil.copytree(golden("zero0-dp2"), tmp_path / "source"))
    (folder / "expp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="optimizers of experts at ZeRO-0"):
        read_checkpoint(folder, None)


def test_names_of_a_part_and_of_the_whole_model():
    local = [f"{PREFIX}{at}.{leaf}" for at in (0, 1) for leaf in ("a", "b")]
    whole = EXPERTS.whole_order(local, 2)
    assert whole == tuple(f"{PREFIX}{at}.{leaf}" for at in range(4) for leaf in ("a", "b"))
    for part in (0, 1):
        found = EXPERTS.local_names(whole, 2, part)
        assert list(found) == local
        assert [EXPERTS.whole_name(name, 2, part) for name in local] == list(found.values())
    assert list(EXPERTS.local_names(whole, 4, 3).values()) == [f"{PREFIX}3.a", f"{PREFIX}3.b"]
    assert EXPERTS.whole_name("embed.weight", 2, 1) == "embed.weight"


def test_mixed_groups_and_layers_of_different_degrees_are_refused():
    with pytest.raises(UnsupportedError, match="mixes"):
        EXPERTS.whole_order(["embed.weight", f"{PREFIX}0.a"], 2)
    other = PREFIX.replace("0", "1")
    files = {(layer, at): [f"{prefix}{at}.a"] for layer, prefix in enumerate((PREFIX, other)) for at in range(2)}
    assert find_experts(files, [f"{PREFIX}0.a", f"{other}0.a"], "path")[1] == 2
    with pytest.raises(UnsupportedError, match="different degrees"):
        find_experts(files, [f"{PREFIX}0.a", f"{other}0.a", f"{other}1.a"], "path")
    with pytest.raises(CorruptSourceError, match="in files or in the optimizer only"):
        find_experts(files, [f"{PREFIX}0.a"], "path")
