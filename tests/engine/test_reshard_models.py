"""BLOOM and Phi-MoE of transformers, into other stages, other numbers of ranks, and other tensor parallelism."""

import itertools
from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert, plan_conversion
from reshard.errors import UnsupportedError
from reshard.topology import Topology
from tests.engine.reshard_run import launch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak_only,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
]

SCRIPT = Path(__file__).with_name("family_rank.py")
STEP = "step-00000002"
TP1, TP2 = "tp=1,dp=2,zero=1", "tp=2,dp=1,zero=1"
SOURCES: dict[str, dict] = {
    f"{family}-{name}": {"family": family, **run}
    for family in ("bloom", "phimoe")
    for name, run in {
        "zero1": {"topology": TP1},
        "zero2": {"topology": "dp=2,zero=2"},
        "zero3": {"topology": "dp=2,zero=3"},
        "bf16": {"topology": TP1, "bf16": True},
        "tp2": {"topology": TP2, **({"alibi": True} if family == "bloom" else {"preset": "mixtral"})},
    }.items()
}
BLOOM_TP, PHIMOE_TP = {"alibi": True, "patterns": True}, {"preset": "mixtral"}
TARGETS: list[tuple[str, str, dict]] = [
    *((f"bloom-{name}", *target) for name, *target in [
        ("zero1", "dp=1,zero=3", {}), ("zero1", "dp=2,zero=2", {"universal": True}), ("zero2", "dp=2,zero=3", {}),
        ("zero3", "dp=1,zero=1", {}), ("bf16", "dp=2,zero=3", {}), ("bf16", "dp=1,zero=2", {}),
        ("zero1", TP2, BLOOM_TP), ("bf16", TP2, BLOOM_TP), ("tp2", TP1, {}), ("tp2", "dp=2,zero=3", {}),
    ]),
    *((f"phimoe-{name}", *target) for name, *target in [
        ("zero1", "dp=2,zero=2", {}), ("zero2", "dp=1,zero=3", {}), ("zero3", "dp=2,zero=1", {"universal": True}),
        ("bf16", "dp=2,zero=3", {}), ("zero1", TP2, PHIMOE_TP), ("zero3", TP2, PHIMOE_TP), ("tp2", TP1, {}),
    ]),
]  # fmt: skip
TOLERANCE, BF16_TOLERANCE = 1e-5, 5e-3
PATTERNS = r"""
version: 1
rules:
  - {pattern: '.*(layernorm|ln_f)\.(weight|bias)', kind: replicate}
  - {pattern: 'transformer\.word_embeddings\.weight', kind: replicate}
  - {pattern: '.*\.(query_key_value|dense_h_to_4h)\.(weight|bias)', kind: shard-v}
  - {pattern: '.*\.(dense|dense_4h_to_h)\.weight', kind: shard-h}
  - {pattern: '.*\.(dense|dense_4h_to_h)\.bias', kind: replicate}
"""


def launch_all(runs: list[dict]) -> dict[str, list]:
    """One set of processes per world size and tensor-parallel degree: AutoTP leaves groups of processes behind."""

    def key(run: dict) -> tuple[int, int]:
        topology = Topology.parse(run["topology"])
        return topology.world_size, topology.tp

    losses: dict[str, list] = {}
    for _, group in itertools.groupby(sorted(runs, key=key), key=key):
        losses |= launch(list(group), SCRIPT)
    return losses


def name_of(source: str, target: str, options: dict) -> str:
    return f"{source} to {'universal ' if options.get('universal') else ''}{target}"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, dict[str, list]]:
    root = tmp_path_factory.mktemp("sources")
    runs = [
        {"name": name, **run, "steps": 4, "save_at": 2, "save": str(root / name / STEP)}
        for name, run in SOURCES.items()
    ]
    fails = {"family": "bloom", "topology": TP2, "steps": 1, "refused": True}
    runs += [{"name": "bloom-fails", **fails}, {"name": "bloom-preset", "preset": "bloom", **fails}]
    return root, launch_all(runs)


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory) -> dict[str, list]:
    root, _ = uninterrupted
    out = tmp_path_factory.mktemp("targets")
    patterns = out / "patterns.yaml"
    patterns.write_text(PATTERNS)
    runs = []
    for source, target, options in TARGETS:
        name = name_of(source, target, options)
        folder = out / name / STEP
        wanted = Conversion(
            source=root / source / STEP,
            target=folder,
            topology=Topology.parse(target),
            target_format="universal" if options.get("universal") else "",
            patterns=patterns if options.get("patterns") else None,
        )
        convert(wanted, RunOptions(reread=True))
        own = {key: SOURCES[source].get(key) for key in ("family", "bf16")}
        runs.append({"name": name, **own, **options, "topology": target, "steps": 2, "load": str(folder)})
    return launch_all(runs)


@pytest.mark.parametrize(("source", "target", "options"), TARGETS, ids=str)
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(source, target, options, uninterrupted, resumed):
    tolerance = BF16_TOLERANCE if SOURCES[source].get("bf16") else TOLERANCE
    expected = uninterrupted[1][source][2:]
    assert resumed[name_of(source, target, options)] == pytest.approx(expected, abs=tolerance, rel=0)


def test_tensor_parallel_runs_train_the_model_that_one_rank_trains(uninterrupted):
    """BLOOM only where the script binds the function that DeepSpeed's inference binds."""
    for family in ("bloom", "phimoe"):
        losses = [uninterrupted[1][f"{family}-{name}"] for name in ("zero1", "tp2")]
        assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE, rel=0)


def test_deepspeed_itself_does_not_train_bloom_with_tensor_parallelism(uninterrupted):
    """It fails over the biases of all heads, or (by the preset) gives each rank those of a model of fewer heads."""
    root, losses = uninterrupted
    assert "must match the existing size (4)" in losses["bloom-fails"][0]
    assert abs(losses["bloom-preset"][0] - losses["bloom-zero1"][0]) > 10 * TOLERANCE
    wanted = Conversion(source=root / "bloom-zero1" / STEP, target=root / "never" / STEP, topology=Topology.parse(TP2))
    with pytest.raises(UnsupportedError, match=r"Hugging Face BLOOM: .*build_bloom_alibi_tensor"):
        plan_conversion(wanted)


def test_family_of_phimoe_says_what_the_resumed_run_must_set(uninterrupted, tmp_path):
    source = uninterrupted[0] / "phimoe-zero1" / STEP
    wanted = Conversion(source=source, target=tmp_path / STEP, topology=Topology.parse(TP2))
    (note,) = [note for note in plan_conversion(wanted).layout.notes if "split as" in note]
    assert "Hugging Face Phi-MoE" in note
    assert "preset_model: mixtral" in note


@pytest.mark.parametrize("source", ["bloom-zero3", "bloom-tp2", "phimoe-zero2", "phimoe-tp2"])
def test_transformers_loads_the_weights(source, uninterrupted, tmp_path):
    import torch
    from safetensors.torch import load_file

    from tests.engine.family_rank import build  # its imports need DeepSpeed

    wanted = Conversion(
        source=uninterrupted[0] / source / STEP,
        target=tmp_path / "hf",
        topology=Topology.parse("dp=1"),
        target_format="safetensors",
    )
    convert(wanted)
    model = build(source.partition("-")[0]).eval()
    model.config.save_pretrained(tmp_path / "hf")
    loaded, report = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True, dtype=torch.float32)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    (path,) = (tmp_path / "hf").glob("*.safetensors")
    model.load_state_dict(load_file(path), strict=False)
    tokens = torch.arange(12)[None]
    expected = model(input_ids=tokens).logits  # transformers may choose another kernel for the experts
    assert torch.allclose(loaded.eval()(input_ids=tokens).logits, expected, atol=1e-6, rtol=0)
