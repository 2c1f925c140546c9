"""Folders that reshard wrote, in real Megatron-Core: all its checks pass, and numbers go on where they were."""

import json
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.topology import Topology
from tests.engine.reshard_run import launch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("megatron_rank.py")
EXAMPLE = ROOT / "tests/golden/megatron-0.16.1/iter_0000003"
LLAMA = ROOT / "tests/golden/safetensors/llama"


def to(source: Path, target: Path, topology: str, **wanted) -> Path:
    assert convert(
        Conversion(source=source, target=target, topology=Topology.parse(topology), **wanted), RunOptions(reread=True)
    ).verified
    return target


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """Hugging Face's golden Llama as a Megatron-Core folder."""
    folder = tmp_path_factory.mktemp("llama")
    text = (ROOT / "examples/name_maps/llama-megatron.yaml").read_text(encoding="utf-8")
    names = folder / "names.yaml"
    names.write_text(text.replace("hidden: 4096, heads: 32, kv_heads: 8", "hidden: 8, heads: 4, kv_heads: 2"))
    return to(LLAMA, folder / "iter_0000000", "tp=2", target_format="megatron", like=EXAMPLE, names=names)


@pytest.fixture(scope="module")
def results(tmp_path_factory, llama) -> dict[str, list[float]]:
    """Numbers of every run by its name; the run that is saved has two data-parallel ranks."""
    folder = tmp_path_factory.mktemp("runs")
    saved = folder / "saved"
    found = launch([run("saved", "train", tp=1, save=str(saved))], RANK)
    other = to(saved, folder / "other", "tp=2,dp=2")
    through = to(saved, folder / "dcp", "dp=3", target_format="dcp")
    back = to(through, folder / "back", "tp=2", target_format="megatron", like=saved)
    of_llama = {"load": str(llama), "vocabulary": 13}
    found |= launch(
        [
            run("back", "train", tp=1, load=str(back)),
            run("saved at tp=2", "train", tp=2, load=str(saved)),
            run("other at tp=2", "train", tp=2, load=str(other)),
            run("back at tp=2", "train", tp=2, load=str(back)),
            run("llama at tp=2", "logits", tp=2, **of_llama),
        ],
        RANK,
    )
    return found | launch([run("llama", "logits", tp=1, world=1, **of_llama)], RANK)


def run(name: str, kind: str, *, tp: int, world: int = 2, **more) -> dict:
    return {"name": name, "kind": kind, "tp": tp, "topology": f"tp={tp},dp={world // tp}", **more}


@pytest.mark.parametrize("name", ["llama", "llama at tp=2"])
def test_a_model_of_hugging_face_has_the_logits_that_it_had_there(results, name):
    truth = json.loads((LLAMA.parent / "truth.json").read_text())["llama"]["logits"]
    assert results[name] == pytest.approx(truth, abs=1e-6, rel=0)
    assert max(map(abs, truth)) > 1e-3


def test_a_run_goes_on_with_its_very_losses_after_a_way_through_another_format(results):
    assert results["back"] == results["saved"]


@pytest.mark.parametrize("name", ["other at tp=2", "back at tp=2"])
def test_a_run_goes_on_at_another_degree_as_megatron_core_itself_goes_on(results, name):
    assert results[name] == results["saved at tp=2"]
    assert results[name] == pytest.approx(results["saved"], abs=2e-3, rel=0)  # bf16, summed in another order


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 6}
MODELS = {
    "dense": {},
    "sequential experts": {**EXPERTS, "moe_grouped_gemm": False},
    "grouped experts": {**EXPERTS, "moe_grouped_gemm": True},
}
DEGREES = {"tp": {"tp": 2}, "pp": {"pp": 2}, "ep": {"ep": 2}}
KINDS = [(name, degree) for name in MODELS for degree in ("pp", "tp" if name == "dense" else "ep")]


def held(name: str, model: str, degree: str, **more) -> dict:
    """A run of two ranks that only holds weights."""
    degrees = {"tp": 1, "pp": 1, "ep": 1, **DEGREES[degree]}
    settings = {"pipeline_model_parallel_size": 2, "pipeline_dtype": "float32"} if degree == "pp" else {}
    return {
        "name": name,
        "kind": "weights",
        "model": {**MODELS[model], **settings, "expert_model_parallel_size": degrees["ep"]},
        "topology": f"tp={degrees['tp']},pp={degrees['pp']},dp={2 // degrees['tp'] // degrees['pp']}",
        **degrees,
        **more,
    }


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[str, list[float]]:
    """Sums of weights: as saved at one degree, loaded at each, from the run's own folder and from what reshard made."""
    folder = tmp_path_factory.mktemp("weights")
    saves, loads = [], []
    for model, degree in KINDS:
        saved = folder / f"{model}-{degree}"
        saves.append(held(f"{model} {degree}", model, degree, save=str(saved)))
        for other in (other for name, other in KINDS if name == model):
            loads += [
                held(f"{model} {degree} in {other}, {made}", model, other, load=str(path))
                for made, path in (("own", saved), ("ours", saved.with_name(f"{saved.name}-for-{other}")))
            ]
    found = launch(saves, RANK)
    for model, degree in KINDS:
        saved = folder / f"{model}-{degree}"
        for other in (other for name, other in KINDS if name == model):
            to(saved, saved.with_name(f"{saved.name}-for-{other}"), {"tp": "tp=2", "pp": "pp=2", "ep": "dp=2"}[other])
    return found | launch(loads, RANK)


@pytest.mark.parametrize(("model", "degree"), KINDS)
def test_weights_are_where_megatron_core_itself_puts_them(weights, model, degree):
    for other in (other for name, other in KINDS if name == model):
        ours = weights[f"{model} {degree} in {other}, ours"]
        assert ours == weights[f"{model} {degree} in {other}, own"]
        assert len(set(ours)) > 10
