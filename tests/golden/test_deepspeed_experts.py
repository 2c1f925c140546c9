"""Experts under the names of the whole model, and what is refused about them."""

import shutil
from pathlib import Path

import pytest

from reshard.api import plan_of, reshard
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.execution.verify import read_digests
from reshard.formats import read_checkpoint
from reshard.formats.deepspeed.experts import Experts, find_experts
from reshard.formats.pt.reader import read
from reshard.formats.pt.writer import lay_out_pt
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


ZERO3_MODEL, ZERO3_OPTIMIZER = (f"zero_pp_rank_{{}}_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim"))


def test_stage_3_of_autoep_has_experts_on_the_ranks_of_their_part_and_goes_back_unchanged(tmp_path):
    """`tests/engine/test_reshard_experts.py` lets DeepSpeed load and save such files."""
    there, back = tmp_path / "there" / STEP, tmp_path / "back" / STEP
    reshard(golden(AUTOEP), there, Topology.parse("dp=6,ep=2,zero=3"))
    assert not list(there.glob("layer_*"))
    layer = read(there / ZERO3_MODEL.format(3)).value["ds_autoep_layers"][0]
    assert (layer["checkpoint_format"], layer["checkpoint_format_version"]) == ("zero3_partitioned", 1)
    assert (layer["ep_rank"], layer["expert_data_parallel_rank"], layer["global_expert_start"]) == (1, 1, 2)
    state = read(there / ZERO3_OPTIMIZER.format(3)).value["optimizer_state_dict"]
    dense, experts = state["ds_zero_partition_groups"]
    assert (dense["partition_ranks"], experts["partition_ranks"]) == ([0, 1, 2, 3, 4, 5], [1, 3, 5])
    assert experts["partition_rank"] == 1
    assert read_checkpoint(there, None).topology == Topology.parse("dp=6,ep=2,zero=3")
    reshard(there, back, Topology.parse("dp=2,ep=2,zero=1"))
    assert read_digests(read_checkpoint(back, None)) == read_digests(read_checkpoint(golden(AUTOEP), None))
    with pytest.raises(UnsupportedError, match="convert it to zero=1 first"):
        plan_of(read_checkpoint(there, None), Topology(dp=2), target_format="universal")


def test_autoep_with_tensor_parallelism_is_refused_and_not_called_damaged(tmp_path):
    """DeepSpeed 0.19.8 trains it: ranks with a tensor-parallel number name the files of their experts by it."""
    folder = Path(shutil.copytree(golden(AUTOEP), tmp_path / STEP))
    (folder / "layer_0_expert_3_mp_rank_00_model_states.pt").rename(
        folder / "layer_0_expert_3_mp_rank_01_model_states.pt"
    )
    with pytest.raises(UnsupportedError, match="has experts in the layout"):
        read_checkpoint(folder, None)


def test_partitions_of_other_ranks_are_refused(tmp_path):
    folder = tmp_path / STEP
    reshard(golden(AUTOEP), folder, Topology.parse("dp=4,ep=2,zero=3"))
    (folder / "COMMIT.json").unlink()

    def swap(value):
        value["optimizer_state_dict"]["ds_zero_partition_groups"][1]["partition_ranks"] = [0, 1]

    edit(folder, ZERO3_OPTIMIZER.format(2), swap)
    with pytest.raises(CorruptSourceError, match="ds_zero_partition_groups"):
        read_checkpoint(folder, None)


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
    _save(folder, "expp_rank_0_mp_rank_00_optim_states", {"optimizer": {"state": {}, "param_groups": []}})
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


def _save(folder: Path, name: str, value: dict) -> None:
    layout = lay_out_pt(name, value)
    content = bytearray(layout.num_bytes)
    for offset, data in layout.fixed:
        content[offset : offset + len(data)] = data
    (folder / f"{name}.pt").write_bytes(content)


def _as_before_0_19(value: dict) -> None:
    """Remove the keys that `_save_moe_checkpoint` left out of model files then; the tied weight is a copy in both."""
    for key in ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "buffer_names", "shared_params"):
        del value[key]
    for key in ("ds_config", "ds_version", "checkpoint_parallel_dimensions", "ds_autoep_layers", "optimizer"):
        del value[key]


@pytest.fixture
def older(tmp_path):
    folder = Path(shutil.copytree(golden(NAME), tmp_path / "older"))
    edit(folder, MODEL.format(0), _as_before_0_19)
    for part in (0, 1):
        _save(folder, f"expp_rank_{part}_mp_rank_00_optim_states", {"optimizer": None})
    return folder


def test_names_and_shapes_that_older_model_files_lack_are_those_of_the_optimizer_and_the_weights(older, tmp_path):
    index, expected = read_checkpoint(older, None), read_digests(read_checkpoint(golden(NAME), None))
    found = read_digests(index)
    assert index.topology == Topology(dp=4, ep=2)
    assert {key: found[key] for key in expected} == expected
    assert [str(key) for key in found.keys() - expected.keys()] == [
        "weight/head.weight"
    ]  # a copy, no word that it is tied
    reshard(older, tmp_path / STEP, Topology(dp=6, ep=2, zero=2))
    whole = read_digests(read_checkpoint(tmp_path / STEP, None))
    assert {key: whole[key] for key in expected} == expected


def test_older_experts_in_round_robin_order_are_refused(older):
    edit(
        older,
        OPTIMIZER.format(0),
        lambda value: value["ds_config"]["zero_optimization"].update(round_robin_gradients=True),
    )
    with pytest.raises(UnsupportedError, match="the order of parameters is not known"):
        read_checkpoint(older, None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state["param_slice_mappings"].pop(), "param_slice_mappings has no group 3"),
        (lambda state: state["partition_count"].__setitem__(0, 0), "partitions"),
        (lambda state: state["param_slice_mappings"][0].clear(), "misses|disagree|elements"),
        (lambda state: state["param_slice_mappings"][0].update({"other": 1}), "'other' has no start"),
    ],
)
def test_older_experts_whose_optimizer_says_something_else_are_refused(older, change, text):
    edit(older, OPTIMIZER.format(0), lambda value: change(value["optimizer_state_dict"]))
    with pytest.raises(CorruptSourceError, match=text):
        read_checkpoint(older, None)


def test_older_experts_without_weights_are_refused(older):
    edit(older, MODEL.format(0), lambda value: value["module"].pop("embed.weight"))
    with pytest.raises(CorruptSourceError, match=r"embed\.weight is in the optimizer, and in no file of weights"):
        read_checkpoint(older, None)


def test_older_experts_without_files_of_the_optimizer_are_damage(older):
    for path in older.glob("zero_pp_rank_*"):
        path.unlink()
    with pytest.raises(CorruptSourceError, match=r"has no \*_optim_states\.pt files beside it"):
        read_checkpoint(older, None)
