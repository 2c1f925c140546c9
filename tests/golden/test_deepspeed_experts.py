"""Experts under the names of the whole model, and what is refused about them."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from reshard.api import plan_of, reshard
from reshard.errors import CorruptSourceError, TopologyError, UnsupportedError
from reshard.execution.verify import read_digests
from reshard.formats import read_checkpoint
from reshard.formats.deepspeed.experts import Experts, find_experts
from reshard.formats.pt.objects import Tensor, new_tensor
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


TENSOR_PARALLEL = "autoep-tp2-dp2-ep2"


def test_autoep_with_tensor_parallelism_says_in_each_file_which_rank_saved_it(tmp_path):
    """`tests/engine/test_reshard_experts.py` lets DeepSpeed load such files, which compares this."""
    reshard(golden(TENSOR_PARALLEL), tmp_path / STEP, Topology.parse("tp=2,dp=4,ep=4"))
    expected = {(expert, expert % 2): f"layer_0_expert_{expert}_mp_rank_{expert % 2:02d}" for expert in range(4)}
    assert {path.name for path in (tmp_path / STEP).glob("layer_0_*")} == {
        f"{name}_model_states.pt" for name in expected.values()
    }
    for (expert, tp), name in expected.items():
        folding = read(tmp_path / STEP / f"{name}_model_states.pt").value["folding"]
        assert (folding["tp_rank"], folding["ep_rank"], folding["zero_partition_count"]) == (tp, expert, 2)
    model = read(tmp_path / STEP / MODEL.format(1)).value
    assert (model["folding"]["tp_rank"], model["folding"]["ep_rank"]) == (1, 1)
    assert model["ds_autoep_layers"][0]["global_expert_start"] == 1
    name = "zero_pp_rank_3_mp_rank_01_optim_states.pt"  # rank 7 of 8: the last experts, and the second half of them
    families = read(tmp_path / STEP / name).value["folding"]["param_families"]
    assert families["block0.experts.w1"] == {
        "family": "routed_expert",
        "zero_partition_group": "edp",
        "zero_partition_rank": 1,
        "zero_partition_count": 2,
    }
    assert families["up.weight"]["zero_partition_rank"] == 3
    assert families["block0.router.gate.weight"]["family"] == "router_gate_replicated"


def test_autoep_without_tensor_parallelism_says_nothing_about_it(tmp_path):
    """DeepSpeed refuses to load files at tp=1 that do."""
    for target in ("dp=2,ep=2,zero=2", "dp=2,zero=3"):
        folder = tmp_path / target / STEP
        reshard(golden(TENSOR_PARALLEL), folder, Topology.parse(target))
        assert all("folding" not in read(path).value for path in folder.glob("*.pt"))


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("tp=2,dp=2", "does not train AutoEP with tensor parallelism at ep=1"),
        ("tp=2,dp=2,zero=3", "does not train AutoEP with tensor parallelism at ep=1"),
        ("tp=2,dp=2,ep=2,zero=0", "AutoEP's with tp, too, and at stage 3"),
        ("tp=5,dp=2,ep=2", "is not divisible by tp=5"),
    ],
)
def test_autoep_with_tensor_parallelism_that_is_not_converted_is_refused(target, text):
    with pytest.raises(UnsupportedError, match=text):
        plan_of(read_checkpoint(golden(TENSOR_PARALLEL), None), Topology.parse(target))


def test_autoep_with_tensor_parallelism_is_no_universal_checkpoint():
    index = read_checkpoint(golden(TENSOR_PARALLEL), None)
    with pytest.raises(UnsupportedError, match="no AutoEP with tensor parallelism"):
        plan_of(index, Topology(tp=2), target_format="universal")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda value: value["ds_autoep_layers"][0].update(ep_size=4), UnsupportedError, "ep=4 does not divide dp=2"),
        (lambda value: value.pop("folding"), CorruptSourceError, "folding is None"),
        (lambda value: value["folding"].update(tp_rank=1), CorruptSourceError, "'tp_rank': 1.*expected.*'tp_rank': 0"),
    ],
)
def test_files_of_other_ranks_under_tensor_parallelism_are_refused(tmp_path, change, error, text):
    folder = Path(shutil.copytree(golden(TENSOR_PARALLEL), tmp_path / STEP))
    edit(folder, MODEL.format(0), change)
    with pytest.raises(error, match=text):
        read_checkpoint(folder, None)


def test_expert_that_another_tensor_parallel_rank_saves_is_not_called_missing(tmp_path):
    folder = Path(shutil.copytree(golden(TENSOR_PARALLEL), tmp_path / STEP))
    name = "layer_0_expert_3_mp_rank_{:02d}_model_states.pt"
    (folder / name.format(1)).rename(folder / name.format(0))
    with pytest.raises(CorruptSourceError, match="belongs to no rank of this layout"):
        read_checkpoint(folder, None)


def test_native_experts_with_tensor_parallelism_are_refused_and_not_called_damaged(tmp_path):
    folder = Path(shutil.copytree(golden(NAME), tmp_path / STEP))
    degrees = {"mp_world_size": 2, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2}}
    edit(folder, MODEL.format(0), lambda value: value.update(degrees))
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


def _round(tensor: Tensor) -> Tensor:
    bits = np.frombuffer(tensor.storage.data, dtype="<u4").astype(np.uint64)
    halves = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return new_tensor("bfloat16", tensor.shape, halves.astype("<u2").tobytes())


def test_older_experts_with_bf16_weights_are_converted(older, tmp_path, say):
    """The witness, too, takes the names of master weights from the optimizer's files."""

    def round_all(tensors: dict) -> None:
        tensors.update({name: _round(tensor) for name, tensor in tensors.items() if tensor.dtype == "float32"})

    edit(older, MODEL.format(0), lambda value: round_all(value["module"]))
    for path in older.glob("layer_*"):
        edit(older, path.name, round_all)
    found = say.json("run", older, tmp_path / "out", "--to", "dp=2,ep=2,zero=1")
    assert found["witness"]["not_witnessed"] == 0


def test_older_experts_in_round_robin_order_are_refused(older):
    edit(
        older,
        OPTIMIZER.format(0),
        lambda value: value["ds_config"]["zero_optimization"].update(round_robin_gradients=True),
    )
    with pytest.raises(UnsupportedError, match="the order of parameters is not known"):
        read_checkpoint(older, None)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda state: state["param_slice_mappings"].pop(), CorruptSourceError, "param_slice_mappings has no group 3"),
        (lambda state: state["partition_count"].__setitem__(0, 0), CorruptSourceError, "partitions"),
        (lambda state: state["param_slice_mappings"][0].clear(), CorruptSourceError, "misses|disagree|elements"),
        (
            lambda state: state["param_slice_mappings"][0].update({"other": 1}),
            UnsupportedError,
            "'other' has no start",
        ),
    ],
)
def test_older_experts_whose_optimizer_says_something_else_are_refused(older, change, error, text):
    edit(older, OPTIMIZER.format(0), lambda value: change(value["optimizer_state_dict"]))
    with pytest.raises(error, match=text):
        read_checkpoint(older, None)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", ["autoep-dp2-ep2", "autoep-tp3-dp2-ep2-zero3"])
def test_a_number_of_experts_that_disagrees_with_the_stacks_is_damage(tmp_path, name, count):
    folder = Path(shutil.copytree(golden(name), tmp_path / STEP))

    def change(value: dict) -> None:
        for layer in value["ds_autoep_layers"]:
            layer.update(num_experts=count, num_local_experts=count // 2, expert_placement=None)

    for path in folder.glob("*mp_rank_0?_model_states.pt"):
        if "expert" not in path.name:
            edit(folder, path.name, change)
    with pytest.raises(CorruptSourceError, match=f"has 2 experts on each of 2 ranks, num_experts is {count}"):
        read_checkpoint(folder, None)


def test_frozen_experts_of_autoep_at_stage_1_are_not_called_damage(tmp_path):
    """DeepSpeed lists no frozen parameters at this stage; the experts have files, and are in no optimizer."""
    folder = Path(shutil.copytree(golden("autoep-dp2-ep2"), tmp_path / STEP))

    def change(value: dict) -> None:
        for group in value["param_shapes"]:
            for name in [name for name in group if ".experts." in name]:
                del group[name]

    edit(folder, "mp_rank_00_model_states.pt", change)
    with pytest.raises(UnsupportedError, match=r"frozen experts of AutoEP, such as block0\.experts"):
        read_checkpoint(folder, None)


def test_older_experts_without_weights_are_refused(older):
    edit(older, MODEL.format(0), lambda value: value["module"].pop("embed.weight"))
    with pytest.raises(CorruptSourceError, match=r"embed\.weight is in the optimizer, and in no file of weights"):
        read_checkpoint(older, None)


def test_older_experts_without_files_of_the_optimizer_are_damage(older):
    for path in older.glob("zero_pp_rank_*"):
        path.unlink()
    with pytest.raises(CorruptSourceError, match=r"has no \*_optim_states\.pt files beside it"):
        read_checkpoint(older, None)


PIPELINE = "experts-pp2-dp2-ep2"


@pytest.mark.parametrize(
    ("target", "files", "counts"),
    [
        ("pp=1,dp=2,ep=2", [(0, 0, 4), (0, 1, 2), (0, 2, 4)], [[4, 2, 4]]),
        ("pp=2,dp=2,ep=2", [(0, 0, 4), (1, 0, 2), (1, 1, 4)], [[4], [2, 4]]),
        ("pp=3,dp=1", [(0, 0, 4), (1, 0, 2), (2, 0, 4)], [[4], [2], [4]]),
    ],
)
def test_each_stage_counts_its_layers_of_experts_from_0(tmp_path, target, files, counts):
    """As DeepSpeed does: `tests/engine/test_reshard_experts.py` lets it load such files."""
    reshard(golden(PIPELINE), tmp_path / STEP, Topology.parse(target))
    expected = {
        f"layer_{layer}_expert_{expert}_mp_rank_{stage:02d}_model_states.pt"
        for stage, layer, count in files
        for expert in range(count)
    }
    assert {path.name for path in (tmp_path / STEP).glob("layer_*")} == expected
    values = [read(tmp_path / STEP / MODEL.format(stage)).value for stage in range(len(counts))]
    assert [value["num_experts"] for value in values] == counts
    for stage, value in enumerate(values):
        names = list(value["module"])
        assert ("tied_modules.embed.weight" in names) == (stage in {0, len(counts) - 1})
        assert not any("deepspeed_experts" in name for name in names)
        optimized = {name for group in value["param_shapes"] for name in group if "deepspeed_experts" not in name}
        assert set(names) == optimized


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("pp=4,dp=1", "stage 3 would hold no experts"),
        ("pp=2,dp=2,zero=2", "zero=2 with pp=2"),
        ("pp=1,dp=2,zero=2", "neither ZeRO-2 nor ZeRO-3 with a PipelineModule"),
        ("pp=2,tp=2", "experts is laid out at tp=1"),
        ("pp=2,dp=4,ep=4", "has 2 experts, which 4 does not divide"),
    ],
)
def test_pipeline_with_experts_that_deepspeed_does_not_train_is_refused(target, text):
    with pytest.raises((UnsupportedError, TopologyError), match=text):
        plan_of(read_checkpoint(golden(PIPELINE), None), Topology.parse(target))


def test_pipeline_with_experts_at_pp_1_is_one_because_it_says_so(tmp_path):
    folder = tmp_path / STEP
    reshard(golden(PIPELINE), folder, Topology(dp=2))
    (folder / "COMMIT.json").unlink()
    assert plan_of(read_checkpoint(folder, None), Topology(pp=3)).layout.topology.pp == 3
    edit(folder, MODEL.format(0), lambda value: value.pop("pipeline_layout"))
    with pytest.raises(UnsupportedError, match="save pipeline_layout"):
        plan_of(read_checkpoint(folder, None), Topology(pp=3))


def test_balance_of_stages_counts_the_experts_of_one_rank(tmp_path):
    """`parameters` balances what each rank holds, which is a part of the experts: another ep, other stages."""
    folder = tmp_path / STEP
    reshard(golden(PIPELINE), folder, Topology(dp=2))
    (folder / "COMMIT.json").unlink()
    changes = {"partition_method": "parameters", "tied": {"embed": [0]}}  # the head would make up for the difference
    edit(folder, MODEL.format(0), lambda value: value["pipeline_layout"].update(changes))
    index = read_checkpoint(folder, None)
    bounds = {ep: plan_of(index, Topology(pp=2, dp=2, ep=ep)).layout.model["pipeline"]["parts"] for ep in (1, 2)}
    assert bounds == {1: [0, 3, 6], 2: [0, 2, 6]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("layer_1_expert_2_mp_rank_01", r"layer_1_expert_2_mp_rank_01_model_states\.pt is missing"),
        ("layer_0_expert_1_mp_rank_01", r"files of \[4, 1, 4\] experts are there, num_experts is \[4, 2, 4\]"),
    ],
)
def test_missing_expert_of_a_later_stage_is_named(tmp_path, name, text):
    folder = Path(shutil.copytree(golden(PIPELINE), tmp_path / "source"))
    (folder / f"{name}_model_states.pt").unlink()
    with pytest.raises(CorruptSourceError, match=text):
        read_checkpoint(folder, None)


def test_experts_of_another_stage_are_told_by_their_layers(tmp_path):
    folder = Path(shutil.copytree(golden(PIPELINE), tmp_path / "source"))
    name = "layer_{}_expert_{}_mp_rank_{:02d}_model_states.pt"
    for expert in range(4):  # exchanges those of the first layer with those of the last
        first, last = folder / name.format(0, expert, 0), folder / name.format(1, expert, 1)
        content = first.read_bytes()
        first.write_bytes(last.read_bytes())
        last.write_bytes(content)
    with pytest.raises(CorruptSourceError, match=r"pipeline's layers \[4, 3, 1\]"):
        read_checkpoint(folder, None)


def test_module_of_a_stage_that_lacks_a_weight_is_damaged(tmp_path):
    folder = Path(shutil.copytree(golden(PIPELINE), tmp_path / "source"))
    edit(folder, MODEL.format(1), lambda value: value["module"].pop("tied_modules.embed.weight"))
    with pytest.raises(CorruptSourceError, match=r"the module misses tied_modules\.embed\.weight"):
        read_checkpoint(folder, None)
