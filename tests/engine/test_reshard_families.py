"""Models of transformers at tp=1, converted to tp=2 without a file of patterns, go on under DeepSpeed's AutoTP."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, plan_conversion, reshard
from reshard.execution.verify import read_digests
from reshard.formats import read_checkpoint
from reshard.formats.pt.reader import read
from reshard.topology import Topology
from tests.engine.reshard_run import launch
from tests.randomness import SOAKING

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
]

SCRIPT = Path(__file__).with_name("family_rank.py")
STEP = "step-00000002"
CASES = {
    "llama": ("llama", "tp=1,dp=2,zero=1", "tp=2,dp=1,zero=1"),
    "llama-tied": ("llama-tied", "tp=1,dp=2,zero=1", "tp=2,dp=1,zero=1"),
    "llama-universal": ("llama", "tp=1,dp=2,zero=1", "tp=2,dp=1,zero=1"),
    "qwen2": ("qwen2", "tp=1,dp=2,zero=3", "tp=2,dp=1,zero=3"),
    "mixtral": ("mixtral", "tp=1,dp=2,zero=1", "tp=2,dp=1,zero=1"),
}
if SOAKING:
    CASES |= {
        "phi": ("phi", "tp=1,dp=2,zero=1", "tp=2,dp=1,zero=1"),
        "qwen3": ("qwen3", "tp=1,dp=2,zero=1", "tp=2,dp=1,zero=1"),
        "mistral": ("mistral", "tp=1,dp=2,zero=2", "tp=2,dp=1,zero=1"),
        "llama-preset": ("llama", "tp=1,dp=2,zero=1", "tp=2,dp=1,zero=1"),
        "llama-biases": ("llama-biases", "tp=1,dp=2,zero=1", "tp=2,dp=1,zero=2"),
        "llama-bf16": ("llama", "tp=1,dp=2,zero=1", "tp=2,dp=1,zero=1"),
        "qwen2-tied": ("qwen2-tied", "tp=1,dp=2,zero=3", "tp=2,dp=1,zero=1"),
    }
PRESETS = {"mixtral": "mixtral", "llama-preset": "llama"}
ODD = ("llama-one-kv-head", "tp=1,dp=2,zero=1", "tp=2,dp=1,zero=1")
TOLERANCE = 1e-5
BF16_TOLERANCE = 2e-3
"""AutoTP sums halves that were rounded to bf16, in another order than one rank does."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("sources")
    sources = {name: (family, source) for name, (family, source, _) in CASES.items()}
    sources |= {"odd": ODD[:2]}
    sources |= {name: (name, "tp=1,dp=2,zero=1") for name in ("megatron", "megatron-pipeline")}
    runs = [
        {"name": name, "family": family, "topology": source, "steps": 4, "save_at": 2,
         "preset": "llama" if name == "llama-preset" else None, "bf16": name == "llama-bf16",
         "save": str(root / name / STEP)}
        for name, (family, source) in sources.items()
        if name != "llama-universal"
    ]  # fmt: skip
    return root, launch(runs, SCRIPT)


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory) -> dict[str, list[float]]:
    root, _ = uninterrupted
    out = tmp_path_factory.mktemp("targets")
    runs = []
    for name, (family, _, target) in {**CASES, "odd": ODD}.items():
        folder, is_universal = out / name / STEP, name == "llama-universal"
        wanted = Conversion(
            source=root / ("llama" if is_universal else name) / STEP,
            target=folder,
            topology=Topology.parse(target),
            target_format="universal" if is_universal else "",
        )
        convert(wanted, RunOptions(reread=True))
        runs.append({"name": name, "family": family, "preset": PRESETS.get(name), "topology": target, "steps": 2,
                     "load": str(folder), "refused": name == "odd", "universal": is_universal,
                     "bf16": name == "llama-bf16"})  # fmt: skip
    return launch(runs, SCRIPT)


@pytest.mark.parametrize("name", CASES)
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(name, uninterrupted, resumed):
    expected = uninterrupted[1]["llama" if name == "llama-universal" else name]
    tolerance = BF16_TOLERANCE if name == "llama-bf16" else TOLERANCE
    assert resumed[name] == pytest.approx(expected[2:], abs=tolerance, rel=0)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "mixtral"])
def test_result_says_itself_how_it_is_split_and_goes_back_unchanged(name, uninterrupted, tmp_path):
    source, there, back = uninterrupted[0] / name / STEP, tmp_path / "there" / STEP, tmp_path / "back" / STEP
    reshard(source, there, "tp=2,dp=2")
    reshard(there, back, "tp=1,dp=2")
    assert read_digests(read_checkpoint(back, None)) == read_digests(read_checkpoint(source, None))


def test_heads_that_the_files_do_not_state_are_no_silent_error(resumed):
    """AutoTP gives one head of keys and values to one rank, and the shapes tell."""
    assert "size mismatch" in resumed["odd"]


def test_megatrons_names_are_split_by_heads(uninterrupted, tmp_path):
    """Megatron-DeepSpeed itself is not run: the model has its names, and DeepSpeed saved it."""
    source = uninterrupted[0] / "megatron" / STEP
    wanted = Conversion(source=source, target=tmp_path / STEP, topology=Topology.parse("tp=2,dp=1,zero=1"))
    (note,) = [note for note in plan_conversion(wanted).layout.notes if "split as" in note]
    assert "Megatron-DeepSpeed without a pipeline" in note
    convert(wanted)
    layer = "language_model.encoder.layers.1."
    whole = load(source, 0)
    for rank in (0, 1):
        shard = load(tmp_path / STEP, rank)
        fused = whole[layer + "self_attention.query_key_value.weight"].reshape(4, 3, 8, 32)[2 * rank : 2 * rank + 2]
        assert (shard[layer + "self_attention.query_key_value.weight"] == fused.reshape(48, 32)).all()
        for name, part in (("self_attention.dense", 16), ("mlp.dense_4h_to_h", 24)):
            cut = whole[f"{layer}{name}.weight"][:, part * rank : part * rank + part]
            assert (shard[f"{layer}{name}.weight"] == cut).all()
            assert (shard[f"{layer}{name}.bias"] == whole[f"{layer}{name}.bias"]).all()
        inner = whole[layer + "mlp.dense_h_to_4h.bias"][24 * rank : 24 * rank + 24]
        assert (shard[layer + "mlp.dense_h_to_4h.bias"] == inner).all()
        words = "language_model.embedding.word_embeddings.weight"
        assert (shard[words] == whole[words][32 * rank : 32 * rank + 32]).all()
    info = read(tmp_path / STEP / "mp_rank_00_model_states.pt").value["universal_checkpoint_info"]
    assert len(info["parameter_with_row_parallelism_patterns"]) == 2


def test_megatrons_pipeline_gets_the_row_patterns_that_it_leaves_out(uninterrupted, tmp_path):
    source = uninterrupted[0] / "megatron-pipeline" / STEP
    wanted = Conversion(source=source, target=tmp_path / STEP, topology=Topology.parse("tp=2,dp=1,zero=1"))
    (note,) = [note for note in plan_conversion(wanted).layout.notes if "split as" in note]
    assert "Megatron-DeepSpeed with a pipeline and SwiGLU" in note
    convert(wanted)
    whole = load(source, None, "layer_04-model_states.pt")
    for rank in (0, 1):
        shard = load(tmp_path / STEP, None, f"layer_04-model_{rank:02d}-model_states.pt")
        for name, part in (("self_attention.dense", 16), ("mlp.dense_4h_to_h", 24)):
            assert (shard[f"{name}.weight"] == whole[f"{name}.weight"][:, part * rank : part * rank + part]).all()
        gate_up = whole["mlp.dense_h_to_4h.weight"].reshape(2, 48, 32)[:, 24 * rank : 24 * rank + 24].reshape(48, 32)
        assert (shard["mlp.dense_h_to_4h.weight"] == gate_up).all()
        gate_up = whole["mlp.dense_h_to_4h.bias"].reshape(2, 48)[:, 24 * rank : 24 * rank + 24].flatten()
        assert (shard["mlp.dense_h_to_4h.bias"] == gate_up).all()
        words = load(tmp_path / STEP, None, f"layer_01-model_{rank:02d}-model_states.pt")["word_embeddings.weight"]
        assert words.shape == (32, 32)
    info = read(tmp_path / STEP / "mp_rank_00_model_states.pt").value["universal_checkpoint_info"]
    assert (info["original_vocab_size"], len(info["parameter_with_row_parallelism_patterns"])) == (61, 2)


def load(folder: Path, rank: int | None, name: str = ""):
    import torch

    value = torch.load(folder / (name or f"mp_rank_{rank:02d}_model_states.pt"), weights_only=False)
    return value if name else value["module"]
