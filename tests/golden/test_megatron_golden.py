"""A checkpoint that Megatron-Core wrote: every element is found, and what cannot be known is said."""

import json
import os
import shutil
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, index_of, plan_conversion
from reshard.errors import CorruptSourceError, UnsafePickleError, UnsupportedError
from reshard.formats.dcp import FORMAT as DCP
from reshard.formats.megatron import FORMAT
from reshard.formats.pt.objects import Global, Inert, Size
from reshard.formats.pt.writer import lay_out_pt
from reshard.tensors.layout import TensorKey
from reshard.topology import Topology
from tests.golden.dcp_files import chunks, edit_metadata
from tests.golden.files import assemble, check_truth, edit

ROOT = Path(__file__).parent / "megatron-0.16.1"
SOURCE = ROOT / "iter_0000003"
KEYS = {  # of the checkpoint, by those of the module: as layers with fused norms call them
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}
FC1 = "decoder.layers.mlp.linear_fc1.weight"


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path / "copy"))


def truth():
    found = json.loads((ROOT / "truth.json").read_text())
    for old, new in KEYS.items():
        found = {key.replace(old, new): value for key, value in found.items()}
    return found


def test_every_tensor_is_what_megatron_said_it_was():
    found, wanted = assemble(FORMAT.read(SOURCE, None)), truth()
    check_truth(found, wanted)
    assert len(found) == 3 * 14


def test_what_is_beside_the_tensors_is_understood():
    index = index_of(SOURCE)
    assert (index.format, index.step, index.samples) == ("megatron", 3, 96)
    assert (index.topology.tp, index.topology.pp, index.topology.dp) == (2, 1, 1)
    (group,) = index.groups
    assert group.scalars == {"step": 3}
    assert group.options["betas"] == (0.9, 0.999)
    assert set(group.names) == {key.removeprefix("fp32/") for key in truth() if key.startswith("fp32/")}
    assert any("_extra_state" in note for note in index.notes)


def test_it_becomes_a_state_dict_of_torch(tmp_path):
    wanted = Conversion(source=SOURCE, target=tmp_path / "out", topology=Topology(dp=3, zero=3), target_format="dcp")
    plan = plan_conversion(wanted)
    assert any("_extra_state" in note for note in plan.summary()["notes"])
    assert convert(wanted, RunOptions(reread=True)).verified
    before, after = assemble(index_of(SOURCE)), assemble(index_of(tmp_path / "out"))
    for key, value in before.items():
        if not key.startswith("weight/"):
            assert (after[key.replace("fp32/", "weight/")] == value).all(), key
    assert index_of(tmp_path / "out").groups[0].scalars == {"step": 3.0}


def test_formats_do_not_take_each_others_folders(copy):
    assert "Megatron-Core" in str(DCP.sniff(SOURCE))
    (copy / "metadata.json").write_text('{"of": "the user"}')
    assert "metadata.json" in str(FORMAT.sniff(copy))
    assert DCP.sniff(copy) is None


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "9" * 5000, '{"sharded_backend": ' + "8" * 5000 + "}", "\udcff", "", "[]", '{"a": 1, "a": NaN}'],
)
def test_whatever_else_is_called_like_its_configuration_ends_in_no_bug(copy, text):
    (copy / "metadata.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    assert "metadata.json" in str(FORMAT.sniff(copy))
    assert DCP.sniff(copy) is None


def test_a_pipe_of_the_name_of_its_configuration_is_not_waited_for(copy):
    (copy / "metadata.json").unlink()
    os.mkfifo(copy / "metadata.json")
    assert "metadata.json" in str(FORMAT.sniff(copy))


def rename(folder: Path, old: str, new: str) -> None:
    def change(state):
        described = state["state_dict_metadata"]
        described.update({key.replace(old, new): described.pop(key) for key in list(described) if key.startswith(old)})
        for index in state["storage_data"]:
            if index.state["fqn"].startswith(old):
                index.state["fqn"] = index.state["fqn"].replace(old, new)

    edit_metadata(folder, change)


def test_states_in_buckets_are_left_behind_and_said_to_be(copy):
    rename(copy, "optimizer.state.", "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.")
    edit(
        copy,
        "common.pt",
        lambda value: value.update(content_metadata={"distrib_optim_sharding_type": "dp_reshardable"}),
    )
    index = FORMAT.read(copy, None)
    assert {tensor.key.state for tensor in index.tensors} == {"weight"}
    assert any("(dp_reshardable) and are left behind: optimizer.distributed" in note for note in index.notes)


def test_states_of_a_chain_of_optimizers_are_found(copy):
    rename(copy, "optimizer.state.", "chained_0.optimizer.state.")
    assert assemble(FORMAT.read(copy, None)).keys() == truth().keys()


def test_several_groups_are_one_with_what_is_the_same_in_all(copy):
    def split(value):
        first = value["optimizer"].pop("param_groups")[0]
        chain = [{"param_groups": [first]}, {"param_groups": [{**first, "lr": 1.0}]}]
        value["optimizer"] = {at: {"optimizer": one} for at, one in enumerate(chain)}

    edit(copy, "common.pt", split)
    index = FORMAT.read(copy, None)
    (group,) = index.groups
    assert group.scalars == {"step": 3}
    assert group.options["betas"] == (0.9, 0.999)
    assert "lr" not in group.options
    assert any("2 parameter groups" in note and note.endswith("left behind (lr)") for note in index.notes)


def test_common_state_may_be_an_object_in_the_container(copy, tmp_path):
    rename(copy, "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2", "common_state/shard_0_1")
    (copy / "common.pt").unlink()
    layout = lay_out_pt("archive", [{"iteration": 5, "args": Inert("new", Global("argparse", "Namespace"), (), {})}])
    content = bytearray(layout.num_bytes)
    for offset, data in layout.fixed:
        content[offset : offset + len(data)] = data

    def change(state):
        index = next(i for i in state["storage_data"] if i.state["fqn"] == "common_state/shard_0_1")
        state["storage_data"][index].state.update(relative_path="__9_0.distcp", offset=0, length=len(content))

    (copy / "__9_0.distcp").write_bytes(content)
    edit_metadata(copy, change)
    assert FORMAT.read(copy, None).step == 5


def drop_layer(state) -> None:
    removed = [chunk for chunk in chunks(state, FC1) if chunk.state["offsets"][0] == 1]
    chunks(state, FC1)[:] = [chunk for chunk in chunks(state, FC1) if chunk not in removed]
    for index in [i for i in state["storage_data"] if i.state["fqn"] == FC1 and i.state["offset"][0] == 1]:
        del state["storage_data"][index]


def widen(state) -> None:
    chunk = chunks(state, FC1)[0]
    chunk.state["sizes"] = Size((2, *chunk.state["sizes"][1:]))


METADATA = {
    "a layer is missing": (drop_layer, CorruptSourceError, "weight/decoder.layers.1.mlp.linear_fc1.weight"),
    "a chunk of two layers": (widen, UnsupportedError, "is of 2 layers, expected one layer each"),
    "a flattened state": (
        lambda s: s["state_dict_metadata"][f"optimizer.state.exp_avg.{FC1}"].state.update(size=Size((2, 12, 9))),
        UnsupportedError, "flattened, as Megatron-Core before 0.15 did"),
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_is_wrong_is_refused_and_the_entry_named(name, copy):
    change, kind, mentioned = METADATA[name]
    edit_metadata(copy, change)
    with pytest.raises(kind) as caught:
        FORMAT.read(copy, None)
    assert mentioned in str(caught.value)


@pytest.mark.parametrize(
    ("new", "mentioned"),
    [
        ("optimizer.state.exp_avg.nobody.", r"no weight is called nobody\.embedding"),
        ("optimizer.other.", "neither optimizer.state nor"),
    ],
)
def test_states_that_belong_to_nothing_are_refused(new, mentioned, copy):
    rename(copy, "optimizer.state.exp_avg.", new)
    with pytest.raises(UnsupportedError, match=mentioned):
        FORMAT.read(copy, None)


def test_another_backend_is_refused(copy):
    (copy / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UnsupportedError, match="sharded_backend 'zarr'"):
        FORMAT.read(copy, None)


def test_code_in_the_common_part_is_refused(copy):
    evil = Inert("reduce", Global("os", "system"), ("touch executed",))
    edit(copy, "common.pt", lambda value: value.update(args=evil))
    with pytest.raises(UnsafePickleError, match=r"os\.system"):
        FORMAT.read(copy, None)


def test_one_flipped_bit_is_found(copy, tmp_path):
    index = FORMAT.read(copy, None)
    number = next(
        at
        for at, tensor in enumerate(index.tensors)
        if tensor.key == TensorKey("fp32", "decoder.layers.1.mlp.linear_fc2.weight")
    )
    row = index.shards.row(int(index.shards.by_tensor(len(index.tensors))[number][0]), 2)
    path = copy / index.files[row.file].path
    descriptor = os.open(path, os.O_RDWR)
    byte = os.pread(descriptor, 1, row.byte_offset)
    os.pwrite(descriptor, bytes([byte[0] ^ 1]), row.byte_offset)
    os.close(descriptor)
    with pytest.raises(CorruptSourceError, match="CRC-32"):
        convert(Conversion(source=copy, target=tmp_path / "out", topology=Topology(dp=2), target_format="dcp"))
    assert not (tmp_path / "out").exists()
