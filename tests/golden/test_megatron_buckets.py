"""States in the buckets of Megatron-Core's distributed optimizer: every one is found, or it is said why not."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, index_of
from reshard.errors import UnsupportedError, VerificationError
from reshard.execution.verify import read_digests
from reshard.formats.dcp.metadata import Entry, Place, read_metadata
from reshard.formats.megatron import FORMAT, buckets
from reshard.formats.megatron.buckets import PlacingError, place_states
from reshard.formats.megatron.common import COMMON_KEY
from reshard.formats.megatron.example import TensorLocation
from reshard.formats.pt.reader import read
from reshard.tensors.geometry import Box
from reshard.tensors.layout import Index
from reshard.topology import Topology
from tests.golden.dcp_files import edit_metadata
from tests.golden.files import assemble

ROOT = Path(__file__).parent / "megatron-0.16.1" / "buckets-tp2"
SOURCE = ROOT / "iter_0000003"


def go(source: Path, target: Path, topology: str, target_format: str = "", **more) -> Index:
    wanted = Conversion(
        source=source, target=target, topology=Topology.parse(topology), target_format=target_format, **more
    )
    report = convert(wanted, RunOptions(reread=True))
    assert report.verified
    assert report.witness["not_witnessed"] == 0
    return index_of(target)


def test_every_tensor_is_what_torch_reads_of_a_run_with_one_bucket():
    found, wanted = assemble(FORMAT.read(SOURCE, None)), json.loads((ROOT / "truth.json").read_text())
    assert found.keys() == wanted.keys()
    assert len(found) == 4 * 15
    for key, value in wanted.items():
        assert list(found[key].shape) == value["shape"], key
        assert hashlib.sha256(found[key].tobytes()).hexdigest() == value["sha256"], key


def test_copies_and_settings_are_found_too():
    index = index_of(SOURCE)
    assert index.has_rounded_weights
    assert index.shards.replica.max() == 1  # norms, of both tensor-parallel ranks
    (group,) = index.groups
    assert group.scalars == {"step": 3.0}
    assert group.options["betas"] == (0.9, 0.999)
    assert any("order of a layer with norms of their own" in note for note in index.notes)


def test_it_becomes_the_kind_that_loads_at_any_degree(tmp_path):
    whole = go(SOURCE, tmp_path / "whole", "dp=3")
    assert read_digests(whole) == read_digests(index_of(SOURCE))
    common = read(tmp_path / "whole" / "common.pt").value
    assert common["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert [group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]] == [3.0, 3.0]
    keys = {entry.key for entry in read_metadata(tmp_path / "whole")}
    assert "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight" in keys
    assert not any("distributed" in key for key in keys)


def test_it_goes_through_dcp_and_is_an_example_for_the_way_back(tmp_path):
    go(SOURCE, tmp_path / "dcp", "dp=2", "dcp")
    back = go(tmp_path / "dcp", tmp_path / "back", "tp=2", "megatron", like=SOURCE)
    before = read_digests(index_of(SOURCE))
    assert {key: value for key, value in read_digests(back).items() if "weight/" not in key} == {
        key: value for key, value in before.items() if "weight/" not in key
    }


def test_weights_alone_need_no_buckets(tmp_path):
    index = go(SOURCE, tmp_path / "weights", "dp=1", states=("weight",))
    assert {tensor.key.state for tensor in index.tensors} == {"weight"}


def test_states_in_another_ones_place_are_not_published(tmp_path, monkeypatch):
    """What the ends of chunks cannot tell, two parts of equal size in each other's places, the weights do."""
    real = buckets._place_parts

    def exchange(parts, own):
        placed = real(parts, own)
        if placed is None:
            return None
        found = {part.name: (number, start, part) for number, start, part in placed}
        first, second = (f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in (0, 1))
        found[first], found[second] = (
            (*found[second][:2], found[first][2]),
            (*found[first][:2], found[second][2]),
        )
        return sorted(found.values(), key=lambda item: item[:2])

    monkeypatch.setattr(buckets, "_place_parts", exchange)
    with pytest.raises(VerificationError, match="2 weights are not their master weights rounded"):
        go(SOURCE, tmp_path / "out", "dp=1")
    assert not (tmp_path / "out").exists()


def test_groups_of_ranks_with_other_settings_make_no_common_part(tmp_path):
    folder = Path(shutil.copytree(SOURCE, tmp_path / "other"))

    def drop(state):
        key = next(key for key in state["state_dict_metadata"] if key.endswith("group_idx_1.optimizer/shard_0_1"))
        extra = next(key for key in state["state_dict_metadata"] if key.endswith("linear_proj._extra_state/shard_0_2"))
        places = {index.state["fqn"]: index for index in state["storage_data"]}
        state["storage_data"][places[key]] = state["storage_data"][places[extra]]

    edit_metadata(folder, drop)
    with pytest.raises(UnsupportedError, match="no settings of the optimizer, or different ones"):
        go(folder, tmp_path / "out", "dp=1")
    assert {tensor.key.state for tensor in go(folder, tmp_path / "dcp", "dp=1", "dcp").tensors} == {
        "weight", "exp_avg", "exp_avg_sq",
    }  # fmt: skip


def test_states_of_a_later_megatron_core_are_left_behind(tmp_path):
    folder = Path(shutil.copytree(SOURCE, tmp_path / "later"))

    def rename(state):
        old = next(key for key in state["state_dict_metadata"] if "_extra_state" in key)
        state["state_dict_metadata"][COMMON_KEY] = state["state_dict_metadata"].pop(old)
        for index in state["storage_data"]:
            if index.state["fqn"] == old:
                index.state["fqn"] = COMMON_KEY

    edit_metadata(folder, rename)
    (folder / "common.pt").unlink()
    index = FORMAT.read(folder, None)
    assert {tensor.key.state for tensor in index.tensors} == {"weight"}
    assert any("left behind: a later Megatron-Core saved them" in note for note in index.notes)
    target = go(folder, tmp_path / "out", "dp=1", "dcp")
    assert {tensor.key.state for tensor in target.tensors} == {"weight"}


SHAPES = {
    "embedding.word_embeddings.weight": (12, 8),
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (8,),
    "decoder.layers.0.self_attention.linear_proj.weight": (8, 8),
    "decoder.layers.0.self_attention.linear_qkv.weight": (16, 8),
    "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (8,),
    "decoder.layers.0.mlp.linear_fc1.weight": (12, 8),
    "decoder.layers.0.mlp.linear_fc2.weight": (8, 6),
    "decoder.final_layernorm.weight": (8,),
}
KEY = "optimizer.distributed.dp_group_idx_0.gbuf_idx_{}.dtype_(torch.float32, torch.float32).bucket_idx_{}.param"


def locations(**more) -> dict[str, TensorLocation]:
    return {
        name: TensorLocation(key=name, layer=None, shape=shape, dtype="float32", counts=(1,) * len(shape))
        for name, shape in {**SHAPES, **more}.items()
    }


def bucket(sizes, *, buffer: int = 0, number: int = 0) -> Entry:
    """A bucket with parts of these sizes, each in a chunk, and with padding between them."""
    chunks, stop = [], 0
    for size in sizes:
        start = -(-stop // 64) * 64
        for low, high in ((stop, start), (start, start + size)):
            if low < high:
                chunks.append((Box((low,), (high - low,)), Place("__0_0.distcp", low, 1)))
        stop = start + size
    key = KEY.format(buffer, number)
    return Entry(key=key, path=(key,), shape=(stop,), dtype="float32", chunks=tuple(chunks))


OWN = (8, 48, 96, 8, 128, 64, 8, 96)
FUSED = (8, 48, 96, 8, 128, 8, 64, 96)


@pytest.mark.parametrize(("sizes", "order"), [(OWN, "norms of their own"), (FUSED, "norms fused into linear layers")])
def test_the_order_of_a_layers_parameters_is_seen(sizes, order):
    found = place_states([bucket(sizes)], locations())
    assert found.order == order
    starts = {
        found.tensors[piece.tensor].key.name: chunk.box.offset[0] for chunk in found.chunks for piece in chunk.pieces
    }
    names = sorted(starts, key=starts.__getitem__)
    norm = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert names[0] == "decoder.final_layernorm.weight"
    assert names.index(norm) == (6 if order == "norms of their own" else 5)


@pytest.mark.parametrize(
    ("entries", "more", "problem"),
    [
        ([bucket(OWN), bucket(OWN, buffer=1)], {}, "several buffers"),
        ([bucket(OWN, number=1)], {}, "missing"),
        ([bucket(OWN[:-1])], {}, "no known order"),
        ([bucket((*OWN, 8))], {}, "no known order"),
        ([bucket((8, 48, 96, 8, 128, 64, 96, 8))], {}, "no known order"),
        ([bucket((8, 49, 95, 8, 128, 64, 8, 96))], {}, "no known order"),
        ([bucket(OWN)], {"decoder.layers.0.mlp.router.weight": (4, 8)}, "order of decoder.layers.0.mlp.router"),
        ([bucket(OWN)], {"decoder.layers.2.mlp.linear_fc2.weight": (8, 6)}, "layers"),
        ([bucket((8, 48, 96, 8, 128, 8, 8, 96))], {"decoder.layers.0.self_attention.linear_proj.weight": (1, 8)},
         "several orders"),
    ],
)  # fmt: skip
def test_what_is_not_certain_is_left_behind(entries, more, problem):
    with pytest.raises(PlacingError, match=problem):
        place_states(entries, locations(**more))
