"""Files that Hugging Face's libraries wrote: read right, written again, and expressed in other names.

`truth.json` is what those libraries say each tensor is; `make.py` makes all of it again.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from reshard.errors import UnsupportedError
from reshard.execution.executor import execute
from reshard.execution.verify import read_digests
from reshard.formats import read_checkpoint
from reshard.formats.base import Request
from reshard.formats.safetensors import FORMAT
from reshard.names import load, rename
from reshard.planning.check import check_plan
from reshard.planning.plan import make_plan
from reshard.storage.object_store import location
from reshard.tensors.layout import Index, TargetLayout, TensorKey
from reshard.topology import Topology
from tests.golden.files import assemble, golden

HERE = Path(__file__).parent
MAPS = Path(__file__).parents[3] / "examples/name_maps"
TRUTH = json.loads((HERE / "truth.json").read_text())
SIZES = {"hidden": 8, "heads": 4, "kv_heads": 2}
GPT = {**SIZES, "layers": 2, "ffn": 6}


def describe(index: Index) -> dict[str, str]:
    """As in truth.json; every tensor lies in one piece, as the format has it."""
    found = {}
    for tensor, rows in zip(index.tensors, index.shards.by_tensor(len(index.tensors)), strict=True):
        content = b""
        if tensor.num_bytes:
            row = index.shards.row(int(rows[0]), len(tensor.shape))
            whole = (index.root / index.files[row.file].path).read_bytes()
            content = whole[row.byte_offset : row.byte_offset + tensor.num_bytes]
        found[tensor.key.name] = f"{list(tensor.shape)} {tensor.dtype} {hashlib.sha256(content).hexdigest()}"
    return {**found, **{second: found[name] for second, name in index.aliases.items()}}


def convert(index: Index, folder: Path, **request) -> TargetLayout:
    layout = FORMAT.layout(index, Request(topology=Topology(), **request))
    plan = make_plan(index, layout)
    check_plan(plan)
    folder.mkdir(parents=True)
    execute(plan, folder, sync=False)
    return layout


def header_of(path: Path) -> tuple[dict, int]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), 8 + length


@pytest.mark.parametrize("name", TRUTH)
def test_read_finds_what_the_libraries_wrote(name):
    assert describe(read_checkpoint(HERE / name, None)) == TRUTH[name]["tensors"]


def test_read_finds_the_same_in_an_object_store():
    store = pytest.importorskip("fsspec").filesystem("memory")
    for path in (HERE / "phimoe").iterdir():
        store.pipe(f"/models/phimoe/{path.name}", path.read_bytes())
    index = read_checkpoint(location("memory://models/phimoe"), None)
    assert describe(index) == TRUTH["phimoe"]["tensors"]
    assert read_digests(index) == read_digests(read_checkpoint(HERE / "phimoe", None))


@pytest.mark.parametrize("file_bytes", [5 << 30, 1500])
@pytest.mark.parametrize("name", TRUTH)
def test_written_again_nothing_changes(tmp_path, name, file_bytes):
    source = read_checkpoint(HERE / name, None)
    layout = convert(source, tmp_path / "out", file_bytes=file_bytes)
    written = read_checkpoint(tmp_path / "out", None)
    assert describe(written) == TRUTH[name]["tensors"]
    assert written.aliases == source.aliases
    assert read_digests(written) == read_digests(source)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    files = [name for name in names if name.endswith(".safetensors")]
    if len(files) == 1:
        assert names == ["model.safetensors"]
    else:
        assert files == [f"model-{at:05d}-of-{len(files):05d}.safetensors" for at in range(1, len(files) + 1)]
        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
        assert list(index["weight_map"]) == sorted({tensor.key.name for tensor in source.tensors})
        assert index["metadata"] == {"total_size": sum(tensor.num_bytes for tensor in source.tensors)}
    for path in (tmp_path / "out").glob("*.safetensors"):
        header, start = header_of(path)
        assert start % 8 == 0
        assert header.pop("__metadata__")["format"] == "pt"
        width = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2}
        assert all(entry["data_offsets"][0] % width.get(entry["dtype"], 1) == 0 for entry in header.values())
        assert path.stat().st_size <= file_bytes or len(header) == 1
    assert [file.num_bytes for file in layout.files] == [
        (tmp_path / "out" / f.path).stat().st_size for f in layout.files
    ]


def test_the_users_metadata_and_second_names_come_through(tmp_path):
    convert(read_checkpoint(HERE / "odd", None), tmp_path / "out")
    header, _ = header_of(tmp_path / "out/model.safetensors")
    assert header["__metadata__"] == {
        "about": "odd ones", "format": "pt", "reshard.step": "0", "reshard.samples": "0",
        "second.weight": "first.weight",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["pipeline-tp2-pp2", "pipeline-dp2", "zero2-dp3", "zero2-dp3-round-robin", "bf16-dp2"])
def test_weights_of_a_training_checkpoint_are_the_models_own(tmp_path, name):
    source = read_checkpoint(golden(name), None)
    layout = convert(source, tmp_path / "out")
    before, after = assemble(source), assemble(FORMAT.read(tmp_path / "out", None))
    assert after.keys() == {key for key in before if key.startswith("weight/") and not key.endswith("#padding")}
    for key, value in after.items():
        assert (value == before[key]).all(), key
    notes = "\n".join(layout.notes)
    assert "the optimizer stays behind: exp_avg of" in notes
    assert "the float32 master weights stay behind" in notes
    assert ("padding rows of the vocabulary stay behind: tied_modules.embed.weight" in notes) == ("pipeline" in name)
    written = FORMAT.read(tmp_path / "out", None)
    assert (written.step, written.samples) == (2, 24)


@pytest.mark.parametrize("name", ["zero3-dp3", "bf16-dp2", "pipeline-tp2-pp2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_another_type_is_rounded_once_from_the_master_weights(tmp_path, name, dtype):
    source = read_checkpoint(golden(name), None)
    layout = convert(source, tmp_path / "out", weight_dtype=dtype)
    before = assemble(source)
    written = FORMAT.read(tmp_path / "out", None)
    found = {tensor.key.name: tensor for tensor in written.tensors}
    content = {file.path: (tmp_path / "out" / file.path).read_bytes() for file in written.files}
    (data,) = content.values()
    for key in (key for key in before if key.startswith("fp32/") and not key.endswith("#padding")):
        tensor = found[key.removeprefix("fp32/")]
        assert tensor.dtype == dtype
        at = [t.key for t in written.tensors].index(tensor.key)
        start = int(written.shards.byte_offset[written.shards.tensor == at][0])
        bits = data[start : start + tensor.num_bytes]
        master = before[key].view(np.float32)
        if dtype == "bfloat16":
            raw = before[key].astype(np.uint64)
            expected = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)
        else:
            expected = master.astype(dtype)
        assert bits == expected.tobytes(), key
    if name == "zero3-dp3":
        assert any("weights are the float32 master weights" in note for note in layout.notes)


def test_zero3_has_the_same_tensors_as_zero2(tmp_path):
    found = []
    for name in ("zero2-dp3", "zero3-dp3"):
        convert(read_checkpoint(golden(name), None), tmp_path / name)
        found.append(shapes_of(FORMAT.read(tmp_path / name, None)))
    assert found[0] == found[1]
    assert "scale" in found[0]  # a buffer, which ZeRO-3 does not partition


def test_buffers_of_whole_numbers_keep_their_type(tmp_path):
    source = read_checkpoint(HERE / "odd", None)
    with pytest.raises(UnsupportedError, match=r"weight/packed: float8_e4m3fn cannot become bfloat16"):
        FORMAT.layout(source, Request(topology=Topology(), weight_dtype="bfloat16"))
    name_map = tmp_path / "map.yaml"
    name_map.write_text("version: 1\nrules: [{from: '{x:any}', to: 'm.{x}'}]\n")
    kept = tmp_path / "kept.yaml"
    kept.write_text("version: 1\nrules: [{from: '{x:count|empty|mask|scale|first.weight}', to: 'm.{x}'}]\n"
                    "drop: [packed]\nuntied: {second.weight: first.weight}\n")  # fmt: skip
    assert rename(source, load(name_map)).aliases == {"m.second.weight": "m.first.weight"}
    convert(rename(source, load(kept)), tmp_path / "out", weight_dtype="bfloat16")
    written = FORMAT.read(tmp_path / "out", None)
    assert not written.aliases
    assert {tensor.key.name: tensor.dtype for tensor in written.tensors} == {
        "m.count": "int64", "m.empty": "bfloat16", "m.mask": "bool", "m.scale": "bfloat16",
        "m.first.weight": "bfloat16",
    }  # fmt: skip


def test_an_unknown_type_is_refused():
    with pytest.raises(UnsupportedError, match="--dtype int8: expected one of float64, float32, float16, bfloat16"):
        FORMAT.layout(read_checkpoint(HERE / "llama", None), Request(topology=Topology(), weight_dtype="int8"))


def shapes_of(index: Index) -> dict[str, tuple[int, ...]]:
    return {tensor.key.name: tensor.shape for tensor in index.tensors if tensor.key.state == "weight"}


@pytest.mark.parametrize("name", ["pipeline-tp2-pp2", "pipeline-dp2"])
def test_a_pipelines_checkpoint_becomes_llama_in_all_states_and_comes_back(tmp_path, name):
    source = read_checkpoint(golden(name), None)
    name_map = load(MAPS / "gpt-llama.yaml", GPT)
    renamed = rename(source, name_map)
    llama = shapes_of(read_checkpoint(HERE / "llama", None))
    assert {key: shape for key, shape in shapes_of(renamed).items() if "#" not in key} == llama
    assert renamed.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    before, after = assemble(source), assemble(renamed)
    for state in ("weight", "fp32", "exp_avg", "exp_avg_sq"):
        query, key, value = np.split(before[f"{state}/1.qkv"], [8, 12])
        for part, expected in (("q", query), ("k", key), ("v", value)):
            assert (after[f"{state}/model.layers.0.self_attn.{part}_proj.weight"] == expected).all()
        gate, up = np.split(before[f"{state}/2.gate_up"], 2)
        assert (after[f"{state}/model.layers.1.mlp.gate_proj.weight"] == gate).all()
        assert (after[f"{state}/model.layers.1.mlp.up_proj.weight"] == up).all()
        assert (after[f"{state}/model.norm.weight"] == before[f"{state}/3.norm"]).all()
    decayed, rest = (group.names for group in renamed.groups)
    assert "model.layers.1.self_attn.k_proj.weight" in decayed
    assert sorted([*decayed, *rest]) == sorted(llama)
    back = rename(renamed, name_map.inverse())
    assert read_digests(back) == read_digests(source)
    assert back.groups == source.groups
    convert(renamed, tmp_path / "out")
    header, _ = header_of(tmp_path / "out/model.safetensors")
    assert header["__metadata__"]["lm_head.weight"] == "model.embed_tokens.weight"
    assert header["model.embed_tokens.weight"]["shape"] == [13, 8]


def test_a_pipelines_checkpoint_becomes_flat_and_comes_back():
    source = read_checkpoint(golden("pipeline-tp2-pp2"), None)
    name_map = load(MAPS / "gpt-flat.yaml", {"layers": 2})
    renamed = rename(source, name_map)
    assert sorted({tensor.key.name.partition(".")[0] for tensor in renamed.tensors}) == ["blocks", "embed", "norm"]
    assert renamed.number_of(TensorKey("exp_avg", "blocks.1.qkv")) is not None
    assert sorted(read_digests(renamed).values()) == sorted(read_digests(source).values())
    assert read_digests(rename(renamed, name_map.inverse())) == read_digests(source)


def test_a_map_for_another_number_of_layers_is_refused_by_name():
    source = read_checkpoint(golden("pipeline-dp2"), None)
    with pytest.raises(UnsupportedError, match=r"3\.norm: no rule matches"):
        rename(source, load(MAPS / "gpt-flat.yaml"))


def both_ways(family: str, yaml: str, constants: dict, *, inverse: bool = False) -> tuple[dict, dict]:
    """Arrays of a family's golden files, and of the same in other names; checks the way back."""
    source = read_checkpoint(HERE / family, None)
    name_map = load(MAPS / yaml, constants)
    if inverse:
        name_map = name_map.inverse()
    renamed = rename(source, name_map)
    assert read_digests(rename(renamed, name_map.inverse())) == read_digests(source)
    before, after = assemble(source), assemble(renamed)
    return ({key.removeprefix("weight/"): value for key, value in found.items()} for found in (before, after))


def same(found: dict, key: str, expected: np.ndarray) -> None:
    assert found[key].shape == expected.shape, key
    assert (found[key] == expected).all(), key


def test_bloom_for_a_pipeline():
    before, after = both_ways("bloom", "bloom.yaml", {"layers": 2}, inverse=True)
    same(after, "tied_modules.embed.word_embeddings.weight", before["transformer.word_embeddings.weight"])
    same(after, "tied_modules.embed.word_embeddings.norm.bias", before["transformer.word_embeddings_layernorm.bias"])
    same(after, "4.self_attention.query_key_value.bias", before["transformer.h.1.self_attention.query_key_value.bias"])
    same(after, "3.mlp.dense_4h_to_h.weight", before["transformer.h.0.mlp.dense_4h_to_h.weight"])
    same(after, "6.weight", before["transformer.ln_f.weight"])
    assert len(after) == len(before)


def test_blooms_heads_taken_apart():
    before, after = both_ways("bloom", "bloom-separate-qkv.yaml", {"hidden": 8, "heads": 4})
    for layer in range(2):
        for kind in ("weight", "bias"):
            fused = before[f"transformer.h.{layer}.self_attention.query_key_value.{kind}"]
            heads = fused.reshape(4, 3, 2, *fused.shape[1:])  # head, which of the three, row
            for at, part in enumerate(("query", "key", "value")):
                expected = heads[:, at].reshape(8, *fused.shape[1:])
                same(after, f"transformer.h.{layer}.self_attention.{part}.{kind}", expected)


def test_megatrons_groups_of_heads():
    before, after = both_ways("llama", "megatron-llama.yaml", SIZES, inverse=True)
    for layer in range(2):
        query, key, value = (before[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv")
        fused = np.concatenate([query.reshape(2, 4, 8), key.reshape(2, 2, 8), value.reshape(2, 2, 8)], axis=1)
        same(after, f"decoder.layers.{layer}.self_attention.linear_qkv.weight", fused.reshape(16, 8))
        gate, up = (before[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
        same(after, f"decoder.layers.{layer}.mlp.linear_fc1.weight", np.concatenate([gate, up]))


def test_phi3_in_the_parts_of_llama():
    before, after = both_ways("phi3", "phi3.yaml", SIZES)
    assert {key: value.shape for key, value in after.items()} == shapes_of(read_checkpoint(HERE / "llama", None))
    for layer in range(2):
        parts = np.split(before[f"model.layers.{layer}.self_attn.qkv_proj.weight"], [8, 12])
        for part, expected in zip("qkv", parts, strict=True):
            same(after, f"model.layers.{layer}.self_attn.{part}_proj.weight", expected)


def test_experts_of_phimoe_in_one_tensor():
    before, after = both_ways("phimoe", "phimoe.yaml", {"experts": 4})
    for layer in range(2):
        for part in ("w1", "w2", "w3"):
            names = [f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight" for expert in range(4)]
            same(after, f"model.layers.{layer}.moe.{part}", np.stack([before[name] for name in names]))
    assert len(after) == len(before) - 2 * 3 * 3


def test_fewer_experts_than_the_files_hold_are_refused_by_name():
    source = read_checkpoint(HERE / "phimoe", None)
    with pytest.raises(UnsupportedError, match=r"experts\.3\.w1\.weight: no rule matches"):
        rename(source, load(MAPS / "phimoe.yaml", {"experts": 3}))
    with pytest.raises(
        UnsupportedError, match=r"wants model\.layers\.0\.block_sparse_moe\.experts\.4\.w1\.weight besides"
    ):
        rename(source, load(MAPS / "phimoe.yaml", {"experts": 5}))
