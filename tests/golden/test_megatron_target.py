"""Folders of Megatron-Core that are written: what comes of other formats and back, and what is refused.

That Megatron-Core itself loads them is tested in tests/engine/test_reshard_megatron.py.
"""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.api import Conversion, RunOptions, convert, index_of, plan_conversion, plan_of
from reshard.commits.commit import COMMIT_FILE, read_commit
from reshard.errors import CorruptSourceError, UnsupportedError, UsageError
from reshard.execution.executor import execute
from reshard.formats.base import Request
from reshard.formats.dcp.metadata import read_metadata
from reshard.formats.megatron.amend import Progress, amend
from reshard.formats.megatron.example import TensorLocation
from reshard.formats.megatron.writer import count_chunks
from reshard.formats.pt.objects import Inert
from reshard.formats.pt.reader import read
from reshard.names import load, rename
from reshard.tensors.views import select_states
from reshard.topology import Topology
from tests.golden.dcp_files import edit_metadata
from tests.golden.files import assemble, edit, golden

HERE = Path(__file__).parent
SOURCE = HERE / "megatron-0.16.1" / "iter_0000003"
MAPS = HERE.parents[1] / "examples/name_maps"
LLAMA = HERE / "safetensors" / "llama"
FC1 = "decoder.layers.mlp.linear_fc1.weight"


def to(source: Path, target: Path, topology: str = "tp=1", **wanted) -> Path:
    wanted.setdefault("target_format", "megatron")
    done = convert(
        Conversion(source=source, target=target, topology=Topology.parse(topology), **wanted), RunOptions(reread=True)
    )
    assert done.verified
    return target


def refused(source: Path, target: Path, **wanted) -> str:
    wanted.setdefault("target_format", "megatron")
    with pytest.raises(UnsupportedError) as caught:
        plan_conversion(Conversion(source=source, target=target, topology=Topology(), **wanted))
    return str(caught.value)


def notes(source: Path, target: Path, **wanted) -> str:
    wanted = {"target_format": "megatron", "topology": Topology(), **wanted}
    return "\n".join(plan_conversion(Conversion(source=source, target=target, **wanted)).summary()["notes"])


@pytest.fixture
def names(tmp_path) -> Path:
    """The map from Hugging Face's names for the golden Llama."""
    text = (MAPS / "llama-megatron.yaml").read_text(encoding="utf-8")
    path = tmp_path / "names.yaml"
    path.write_text(text.replace("hidden: 4096, heads: 32, kv_heads: 8", "hidden: 8, heads: 4, kv_heads: 2"))
    return path


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all((second[key] == value).all() for key, value in first.items())


@pytest.mark.parametrize("topology", ["tp=1", "tp=2", "tp=4", "tp=2,pp=2,dp=2", "dp=7"])
def test_every_tensor_object_and_setting_is_there_at_another_degree(tmp_path, topology):
    written = to(SOURCE, tmp_path / "out", topology)
    assert same(assemble(index_of(SOURCE)), assemble(index_of(written)))
    before, after = index_of(SOURCE), index_of(written)
    assert (after.format, after.step, after.samples, after.groups) == ("megatron", 3, 96, before.groups)
    assert [entry.key for entry in read_metadata(written)] == [entry.key for entry in read_metadata(SOURCE)]
    assert (written / "metadata.json").read_bytes() == (SOURCE / "metadata.json").read_bytes()
    common = [read(folder / "common.pt").value for folder in (SOURCE, written)]
    assert [one.pop("args").state for one in common[:1]] == [one.pop("args").state for one in common[1:]]
    assert common[0] == common[1]


def test_tensors_are_cut_as_the_example_cuts_them(tmp_path):
    found = {entry.key: entry for entry in read_metadata(to(SOURCE, tmp_path / "out", "tp=1"))}
    assert found[FC1].shape == (2, 12, 8)
    assert [str(box) for box, _ in found[FC1].chunks if box is not None and box.offset[0] == 1] == [
        "[1:2, 0:6, 0:8]",
        "[1:2, 6:12, 0:8]",
    ]
    found = {entry.key: entry for entry in read_metadata(to(SOURCE, tmp_path / "two", "tp=2"))}
    assert {box.size for box, _ in found["decoder.layers.mlp.linear_fc2.weight"].chunks if box} == {(1, 8, 3)}


@given(
    count=st.integers(1, 4),
    tp=st.integers(1, 8),
    target=st.integers(1, 8),
    dim=st.integers(0, 1),
)
def test_what_is_cut_along_a_dim_is_cut_along_it_again(count, tp, target, dim):
    def home(cut):
        counts = tuple(cut if at == dim else 1 for at in range(2))
        return TensorLocation(key="k", layer=None, shape=(64, 64), dtype="float32", counts=counts)

    found = count_chunks(home(count * tp), tp, target)
    if count * tp > 1:
        assert found[dim] == count * target
        assert found[1 - dim] == 1
    assert count_chunks(home(1), max(tp, 2), target) == (1, 1)


def test_through_dcp_and_back_changes_no_bit(tmp_path):
    states = ("fp32", "exp_avg")
    through = to(SOURCE, tmp_path / "dcp", "dp=3", target_format="dcp", states=states)
    back = to(through, tmp_path / "back", "tp=2", like=SOURCE)
    before, after = assemble(index_of(SOURCE)), assemble(index_of(back))
    assert after.keys() == before.keys()
    for key, value in after.items():
        assert (value == before[key.replace("weight/", "fp32/")]).all(), key
    assert index_of(back).groups == index_of(SOURCE).groups


def test_through_safetensors_and_back_changes_no_weight(tmp_path):
    through = to(SOURCE, tmp_path / "files", target_format="safetensors", states=("weight",))
    back = to(through, tmp_path / "back", "tp=2", like=SOURCE)
    before = {key: value for key, value in assemble(index_of(SOURCE)).items() if key.startswith("weight/")}
    assert same(assemble(index_of(back)), before)


def test_weights_of_hugging_face_are_put_together_by_a_map_of_names(tmp_path, names):
    written = to(LLAMA, tmp_path / "out", "tp=2", like=SOURCE, names=names)
    before, after = assemble(index_of(LLAMA)), assemble(index_of(written))
    qkv = after["weight/decoder.layers.1.self_attention.linear_qkv.weight"]
    parts = [before[f"weight/model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert (qkv[0:4] == parts[0][0:4]).all()  # two queries of two rows, then the key and the value of the group
    assert (qkv[4:6] == parts[1][0:2]).all()
    assert (qkv[6:8] == parts[2][0:2]).all()
    assert (qkv[8:12] == parts[0][4:8]).all()
    fc1 = after["weight/decoder.layers.0.mlp.linear_fc1.weight"]
    assert (fc1[:6] == before["weight/model.layers.0.mlp.gate_proj.weight"]).all()
    assert (fc1[6:] == before["weight/model.layers.0.mlp.up_proj.weight"]).all()
    assert after["weight/embedding.word_embeddings.weight"].shape == (13, 8)
    assert not [key for key in after if not key.startswith("weight/")]


@pytest.mark.parametrize("name", ["pipeline-dp2", "pipeline-tp2-pp2"])
def test_a_run_of_deepspeed_goes_into_megatron_with_its_optimizer(tmp_path, name):
    sizes = {"hidden": 8, "heads": 4, "kv_heads": 2}
    source = select_states(index_of(golden(name)), ("fp32", "exp_avg"))
    there = rename(source, load(MAPS / "gpt-llama.yaml", {**sizes, "layers": 2, "ffn": 6}))
    there = rename(there, load(MAPS / "llama-megatron.yaml", sizes))
    plan = plan_of(there, Request(topology=Topology(tp=2), like=index_of(SOURCE)), target_format="megatron")
    target = tmp_path / "out"
    target.mkdir()
    execute(plan, target, sync=False)
    written = index_of(target)
    before, after = assemble(there), assemble(written)
    assert {key.partition("/")[0] for key in after} == {"weight", "fp32", "exp_avg"}
    for key, value in after.items():
        assert (value == before[key.replace("weight/", "fp32/")]).all(), key
    assert written.step == source.step == 2
    assert written.groups[0].scalars == {"step": 2}


def test_the_common_part_tells_of_the_source_and_of_no_optimizer(tmp_path, names):
    written = to(LLAMA, tmp_path / "out", like=SOURCE, names=names)
    common = read(written / "common.pt").value
    assert common["iteration"] == 0
    assert common["args"].state["consumed_train_samples"] == 0
    assert common["args"].state["no_save_optim"] is True
    assert "optimizer" not in common
    told = notes(LLAMA, tmp_path / "other", like=SOURCE, names=names)
    assert "weights alone, which load with --no-load-optim or --finetune" in told
    assert "embedding.word_embeddings.weight [13, 8]" in told
    assert f"those of {SOURCE}" in told


def test_a_weights_only_selection_leaves_the_optimizer_out(tmp_path):
    written = to(SOURCE, tmp_path / "out", states=("weight",))
    assert {tensor.key.state for tensor in index_of(written).tensors} == {"weight"}
    assert "optimizer" not in read(written / "common.pt").value
    assert index_of(written).step == 3


def test_weights_may_be_of_another_type(tmp_path):
    written = to(SOURCE, tmp_path / "out", states=("weight",), weight_dtype="bfloat16")
    assert {tensor.dtype for tensor in index_of(written).tensors} == {"bfloat16"}
    assert "converted from float32 to bfloat16" in notes(
        SOURCE, tmp_path / "other", states=("weight",), weight_dtype="bfloat16"
    )


def test_weights_that_are_all_there_is_keep_their_type(tmp_path):
    narrow = to(SOURCE, tmp_path / "narrow", target_format="safetensors", states=("weight",), weight_dtype="bfloat16")
    written = index_of(to(narrow, tmp_path / "out", like=SOURCE))
    assert {tensor.dtype for tensor in written.tensors} == {"bfloat16"}
    wide = index_of(to(narrow, tmp_path / "wide", like=SOURCE, weight_dtype="float32"))
    assert {tensor.dtype for tensor in wide.tensors} == {"float32"}


def test_the_optimizer_counts_the_steps_of_the_source(tmp_path):
    example = Path(shutil.copytree(SOURCE, tmp_path / "example"))
    edit(example, "common.pt", lambda value: value["optimizer"]["param_groups"][0].update(step=9))
    edit(example, "common.pt", lambda value: value.update(iteration=9))
    through = to(SOURCE, tmp_path / "dcp", target_format="dcp", states=("fp32", "exp_avg"))
    written = to(through, tmp_path / "out", like=example)
    index = index_of(written)
    assert index.step == 3
    assert index.groups[0].scalars == {"step": 3}


def test_without_master_weights_of_its_own_the_weights_are_the_masters(tmp_path):
    example = Path(shutil.copytree(SOURCE, tmp_path / "example"))

    def forget(state):
        gone = [key for key in state["state_dict_metadata"] if key.startswith("optimizer.state.fp32_param.")]
        for index in [index for index in state["storage_data"] if index.state["fqn"] in gone]:
            del state["storage_data"][index]
        for key in gone:
            del state["state_dict_metadata"][key]

    edit_metadata(example, forget)
    written = to(SOURCE, tmp_path / "out", like=example)
    before, after = assemble(index_of(SOURCE)), assemble(index_of(written))
    assert {key.partition("/")[0] for key in after} == {"weight", "exp_avg"}
    for key, value in after.items():
        assert (value == before[key.replace("weight/", "fp32/")]).all(), key
    assert "14 tensors weight/* are left behind" in notes(SOURCE, tmp_path / "other", like=example)


def test_no_example_is_refused(tmp_path):
    told = refused(LLAMA, tmp_path / "out")
    assert "does not say what else a Megatron-Core folder holds" in told
    assert "--like" in told


def test_other_names_without_an_example_are_refused(tmp_path):
    path = tmp_path / "names.yaml"
    path.write_text('version: 1\nrules: [{from: "{x:any}", to: "model.{x}"}]\n', encoding="utf-8")
    assert "has other names than a Megatron-Core folder" in refused(SOURCE, tmp_path / "out", names=path)


def test_an_example_of_another_format_is_refused(tmp_path):
    assert "is of the format safetensors, not megatron" in refused(SOURCE, tmp_path / "out", like=LLAMA)


def test_tensors_of_another_model_are_refused_by_name(tmp_path):
    told = refused(LLAMA, tmp_path / "out", like=SOURCE)
    assert "weight/embedding.word_embeddings.weight [12, 8] is not in the source" in told
    told = refused(LLAMA.parent / "phi3", tmp_path / "out", like=SOURCE)
    assert "is not in the source" in told


def test_a_missing_state_is_refused_by_name(tmp_path):
    weights_and_moments = to(SOURCE, tmp_path / "dcp", target_format="dcp", states=("weight", "exp_avg"))
    example = to(SOURCE, tmp_path / "weights", states=("weight",))
    told = refused(weights_and_moments, tmp_path / "out", like=example)
    assert "exp_avg/decoder.final_layernorm.weight [8] is not in the checkpoint that the target shall be like" in told


def test_weights_of_another_shape_are_refused_by_name(tmp_path, names):
    text = names.read_text(encoding="utf-8")
    for old, new in (("self_attention.linear_proj", "?"), ("mlp.linear_fc2", "self_attention.linear_proj")):
        text = text.replace(old, new)
    names.write_text(text.replace("?", "mlp.linear_fc2"), encoding="utf-8")
    told = refused(LLAMA, tmp_path / "out", like=SOURCE, names=names)
    assert "weight/decoder.layers.0.mlp.linear_fc2.weight is [8, 8], and [8, 6] in the one it shall be like" in told


def test_an_unknown_number_of_steps_is_refused(tmp_path):
    through = to(SOURCE, tmp_path / "dcp", target_format="dcp", states=("fp32", "exp_avg"))

    def forget(value):
        value["iteration"] = 9
        value["optimizer"]["param_groups"][0].pop("step")

    example = Path(shutil.copytree(SOURCE, tmp_path / "example"))
    edit(example, "common.pt", forget)
    assert "its optimizer's settings have no step" in refused(through, tmp_path / "out", like=example)
    without = Path(shutil.copytree(SOURCE, tmp_path / "without"))
    edit(without, "common.pt", forget)
    edit(without, "common.pt", lambda value: value.update(iteration=4))
    stepless = to(without, tmp_path / "stepless", target_format="dcp", states=("fp32", "exp_avg"))
    assert "it does not say how many steps that did" in refused(stepless, tmp_path / "out", like=SOURCE)


def test_sizes_of_files_are_not_for_this_format(tmp_path):
    with pytest.raises(UsageError, match="--file-size"):
        plan_conversion(Conversion(source=SOURCE, target=tmp_path / "o", topology=Topology(), file_bytes=1 << 20))


def test_a_flipped_bit_in_a_tensor_of_the_common_part_is_found(tmp_path):
    example = Path(shutil.copytree(SOURCE, tmp_path / "example"))
    content = bytearray((example / "common.pt").read_bytes())
    at = content.index(b"amsgrad")
    content[at] ^= 1
    (example / "common.pt").write_bytes(content)
    with pytest.raises(CorruptSourceError):
        to(example, tmp_path / "out")


@pytest.mark.parametrize(
    ("fields", "progress", "after"),
    [
        ({"iteration": 3}, Progress(), None),
        ({"iteration": 3}, Progress(step=3), None),
        ({"iteration": 3}, Progress(step=4), {"iteration": 4}),
        ({"iteration": 3, "optimizer": {}, "opt_param_scheduler": {}}, Progress(optimizer=False), {"iteration": 3}),
        (
            {"optimizer": {0: {"optimizer": {"state": {"common_step": 2.0}}}, 1: {"param_groups": [{"step": 2}]}}},
            Progress(optimizer_step=5),
            {"optimizer": {0: {"optimizer": {"state": {"common_step": 5.0}}}, 1: {"param_groups": [{"step": 5}]}}},
        ),
    ],
)
def test_only_what_is_said_changes_in_the_common_part(fields, progress, after):
    before = repr(fields)
    assert amend(fields, progress, "") is (after is not None)
    assert repr(fields) == (before if after is None else repr(after))


def test_a_common_part_that_is_no_dict_is_refused():
    with pytest.raises(UnsupportedError, match="expected a dict"):
        amend(Inert("new", None, ()), Progress(), "common.pt")  # type: ignore[arg-type]


def test_the_commit_names_the_degrees_and_the_format(tmp_path):
    written = to(SOURCE, tmp_path / "out", "tp=2,pp=2")
    assert (written / COMMIT_FILE).is_file()
    assert read_commit(written).topology == Topology.parse("tp=2,pp=2")
