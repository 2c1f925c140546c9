"""States in the buckets of Megatron-Core's distributed optimizer: every one is found, or it is said why not."""

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
from tests.golden.files import assemble, check_truth

ROOT = Path(__file__).parent / "megatron-0.16.1"
SOURCE, EXPERTS = (ROOT / name / "iter_0000003" for name in ("buckets-tp2", "buckets-experts"))
SOURCES = [(SOURCE, 4 * 15), (EXPERTS, 4 * 39)]


def go(source: Path, target: Path, topology: str, target_format: str = "", **more) -> Index:
    wanted = Conversion(
        source=source, target=target, topology=Topology.parse(topology), target_format=target_format, **more
    )
    report = convert(wanted, RunOptions(reread=True))
    assert report.verified
    assert report.witness["not_witnessed"] == 0
    return index_of(target)


@pytest.mark.parametrize(("source", "number"), SOURCES)
def test_every_tensor_is_what_torch_reads_of_a_run_with_one_bucket(source, number):
    found, wanted = assemble(FORMAT.read(source, None)), json.loads((source.parent / "truth.json").read_text())
    check_truth(found, wanted)
    assert len(found) == number


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


def test_both_optimizers_of_a_model_with_experts_become_the_kind_that_loads_at_any_degree(tmp_path):
    whole = go(EXPERTS, tmp_path / "whole", "dp=3")
    assert read_digests(whole) == read_digests(index_of(EXPERTS))
    common = read(tmp_path / "whole" / "common.pt").value
    assert common["content_metadata"]["chained_optim_avoid_prefix"] is True
    assert {
        number: (own["param_state_sharding_type"], [group["step"] for group in own["optimizer"]["param_groups"]])
        for number, own in common["optimizer"].items()
    } == {0: ("fully_reshardable", [3.0, 3.0]), 1: ("fully_reshardable", [3.0])}
    keys = {entry.key for entry in read_metadata(tmp_path / "whole")}
    assert "optimizer.state.exp_avg.decoder.layers.3.mlp.experts.experts.linear_fc1.weight" in keys
    assert not any("distributed" in key or "chained" in key for key in keys)


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


@pytest.mark.parametrize("what", ["expert", "virtual stage"])
def test_states_of_another_expert_or_virtual_stage_are_not_published(what, tmp_path, monkeypatch):
    real_cut, real_chunks = buckets._cut_expert, buckets.list_chunks
    if what == "expert":
        monkeypatch.setattr(buckets, "_cut_expert", lambda *args: real_cut(*args[:-1], args[-1] ^ 1))
    else:
        exchanged = (0, 2, 1, 3)  # the layers of both have the same parameters
        monkeypatch.setattr(buckets, "list_chunks", lambda *args: [real_chunks(*args)[at] for at in exchanged])
    with pytest.raises(VerificationError, match="weights are not their master weights rounded"):
        go(EXPERTS, tmp_path / "out", "dp=1")
    assert not (tmp_path / "out").exists()


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
KEY = "{}optimizer.distributed.dp_group_idx_{}.gbuf_idx_{}.dtype_({}, torch.float32).bucket_idx_{}.param"


def locations(**more) -> dict[str, TensorLocation]:
    return {
        name: TensorLocation(key=name, layer=None, shape=shape, dtype="float32", counts=(1,) * len(shape))
        for name, shape in {**SHAPES, **more}.items()
    }


def bucket(
    sizes, *, buffer: int = 0, number: int = 0, group: int = 0, chain: str = "", dtype: str = "torch.float32"
) -> Entry:
    """A bucket with parts of these sizes, each in a chunk, and with padding between them."""
    chunks, stop = [], 0
    for size in sizes:
        start = -(-stop // 64) * 64
        for low, high in ((stop, start), (start, start + size)):
            if low < high:
                chunks.append((Box((low,), (high - low,)), Place("__0_0.distcp", low, 1)))
        stop = start + size
    key = KEY.format(chain, group, buffer, dtype, number)
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
        ([bucket(OWN), bucket(OWN, buffer=1)], {}, "several buffers, but one pipeline stage"),
        ([bucket(OWN), bucket(OWN, buffer=1, dtype="torch.bfloat16")], {}, "parameters of several types"),
        ([bucket(OWN), bucket(OWN, group=2)], {}, "groups of ranks"),
        ([bucket(OWN, chain="chained_0."), bucket((8,), chain="chained_1.")], {}, "no experts"),
        ([bucket(OWN, chain="chained_0."), bucket((8,), chain="chained_2.")], {}, "optimizers"),
        ([bucket(OWN, number=1)], {}, "missing"),
        ([bucket(OWN[:-1])], {}, "no known order"),
        ([bucket((*OWN, 8))], {}, "no known order"),
        ([bucket((8, 48, 96, 8, 128, 64, 96, 8))], {}, "no known order"),
        ([bucket((8, 49, 95, 8, 128, 64, 8, 96))], {}, "no known order"),
        ([bucket(OWN)], {"decoder.layers.0.mlp.other.weight": (4, 8)}, "order of decoder.layers.0.mlp.other"),
        ([bucket(OWN)], {"decoder.layers.2.mlp.linear_fc2.weight": (8, 6)}, "layers"),
        ([bucket((8, 48, 96, 8, 128, 8, 8, 96))], {"decoder.layers.0.self_attention.linear_proj.weight": (1, 8)},
         "several orders"),
    ],
)  # fmt: skip
def test_what_is_not_certain_is_left_behind(entries, more, problem):
    with pytest.raises(PlacingError, match=problem):
        place_states(entries, locations(**more))


LAYER, OF_EXPERTS = "decoder.layers.0.", "decoder.layers.0.mlp.experts.experts."
IN_FRONT = (8, 48, 8, 128, 64, 8, 96)
"""Sizes of the final norm, router, norm, query to value, projection, norm and embedding."""


def expert_locations(*, gated: int = 2, number: int = 4, chunks: int = 4) -> dict[str, TensorLocation]:
    """Locations of a model of one layer of experts, two chunks for gate and up."""
    whole = {name: location for name, location in locations().items() if ".linear_fc1.w" not in name}
    del whole[f"{LAYER}mlp.linear_fc2.weight"]
    shapes = {
        f"{LAYER}mlp.router.weight": ((6, 8), (1, 1)),
        f"{LAYER}mlp.router.expert_bias": ((6,), (1,)),
        f"{OF_EXPERTS}linear_fc1.weight": ((number, 6 * gated, 8), (chunks, gated, 1)),
        f"{OF_EXPERTS}linear_fc2.weight": ((number, 8, 6), (chunks, 1, 1)),
    }
    return whole | {
        name: TensorLocation(key=name, layer=None, shape=shape, dtype="float32", counts=counts)
        for name, (shape, counts) in shapes.items()
    }


def split(sizes, ep: int = 2) -> list[Entry]:
    """Buckets of a run with expert parallelism, whose ranks have experts of these sizes."""
    own = [bucket(sizes, chain="chained_1.", group=group) for group in range(ep)]
    return [bucket(IN_FRONT, chain="chained_0."), *own]


@pytest.mark.parametrize(
    ("sizes", "order"),
    [((48, 96) * 2, "experts one after the other"), ((48, 48, 96, 96), "grouped experts")],
)
def test_the_order_of_experts_is_seen(sizes, order):
    found = place_states(split(sizes), expert_locations())
    assert found.order == f"norms of their own and {order}"
    assert not any("expert_bias" in tensor.key.name for tensor in found.tensors)
    second = [
        (found.tensors[piece.tensor].key.name.rpartition("experts.")[2], piece.box.offset[0])
        for chunk in found.chunks
        if "chained_1.optimizer.distributed.dp_group_idx_1" in chunk.entry.key
        for piece in chunk.pieces
    ]
    modules = ["linear_fc2", "linear_fc1", "linear_fc2", "linear_fc1"]
    experts = [3, 3, 2, 2]
    if "grouped" in order:
        modules, experts = sorted(modules, reverse=True), [3, 2, 3, 2]
    wanted = [(f"{module}.weight", expert) for module, expert in zip(modules, experts, strict=True)]
    assert list(dict.fromkeys(second)) == wanted


@pytest.mark.parametrize(
    ("entries", "more", "problem"),
    [
        (split((48, 48) * 2), {"gated": 1}, "several orders"),
        (split((48, 96), ep=4), {}, "may be transposed"),
        (split((48, 96) * 2), {"chunks": 2}, "that Megatron-Core transposes"),
        (split((48, 96) * 2, ep=1), {}, "in 1 groups of ranks"),
        (split((48, 96) * 2, ep=3), {}, "in 3 groups of ranks"),
        (split((48, 96, 48)), {}, "no known order"),
        (split((96, 48) * 2), {}, "no known order"),
    ],
)
def test_experts_whose_order_is_not_certain_are_left_behind(entries, more, problem):
    with pytest.raises(PlacingError, match=problem):
        place_states(entries, expert_locations(**more))


def test_one_expert_on_each_rank_is_known_where_the_checkpoint_says_that_it_is_not_grouped():
    found = place_states(split((48, 96), ep=4), expert_locations(), has_sequential_experts=True)
    assert found.order == "norms of their own and experts one after the other"
