"""Weights of real DeepSpeed runs as safetensors, and whole runs in other names: the losses go on where they were.

Each run is saved after its second step and goes on; its third loss, before the third update, is that of the weights in
the checkpoint. What other code computes with the converted weights must be the same number.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import index_of
from reshard.execution.executor import execute
from reshard.formats import format_of
from reshard.formats.base import Request
from reshard.names import load, rename
from reshard.planning.check import check_plan
from reshard.planning.plan import make_plan
from reshard.topology import Topology
from tests.engine.reshard_run import launch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(500),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
    pytest.mark.skipif(find_spec("safetensors") is None, reason="needs safetensors: make setup"),
]

ROOT = Path(__file__).parents[2]
MAPS = ROOT / "examples/name_maps"
GOLDEN = ROOT / "tests/golden/safetensors"
SMALL = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48}
GOLDEN_SIZES = {"layers": 2, "hidden": 8, "heads": 4, "kv_heads": 2, "ffn": 6}
RUNS = {
    "pipeline": {"model": "pipeline", "topology": "tp=2,pp=2,dp=1,zero=1"},
    "zero3": {"model": "flat", "topology": "dp=2,zero=3"},
    "bf16": {"model": "flat", "topology": "dp=2,zero=1", "bf16": True},
}


def convert(source: Path, target: Path, *maps, inverse: bool = False, to: str = "safetensors", **request) -> Path:
    """Convert through name maps, as (file, constants), the last one backwards if asked for."""
    index = index_of(source)
    for at, (name, constants) in enumerate(maps):
        name_map = load(MAPS / name, constants)
        index = rename(index, name_map.inverse() if inverse and at == len(maps) - 1 else name_map)
    plan = make_plan(index, format_of(to).layout(index, Request(topology=Topology(), **request)))
    check_plan(plan)
    target.mkdir()
    execute(plan, target, sync=False)
    return target


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> dict[str, list[float]]:
    """Five losses of every run, saved after the second step; `folder` is where."""
    root = tmp_path_factory.mktemp("sources")
    runs = [
        {"name": name, "steps": 5, "save_at": 2, "save": str(root / name / "step-00000002"), **run}
        for name, run in RUNS.items()
    ]
    return {"folder": root, **launch(runs[:1]), **launch(runs[1:])}


@pytest.fixture(scope="module")
def results(losses, tmp_path_factory) -> dict[str, object]:
    """Results that other code computes with the converted weights, all in one process."""
    out = tmp_path_factory.mktemp("targets")
    source = {name: losses["folder"] / name / "step-00000002" for name in RUNS}
    golden = json.dumps({**GOLDEN_SIZES, "vocabulary": 13, "padded_vocabulary": 13, "sequence": 4})
    small = {"size": "small", "step": 2}
    flat_map, llama_map = ("gpt-flat.yaml", {"layers": 4}), ("gpt-llama.yaml", SMALL)
    phi_map = ("phi3.yaml", {key: GOLDEN_SIZES[key] for key in ("hidden", "heads", "kv_heads")})
    to_flat = ("gpt-flat.yaml", {"layers": 2})
    training = {}
    for family, maps in (("llama", []), ("phi3", [phi_map])):
        there = convert(GOLDEN / family, out / family, *maps, ("gpt-llama.yaml", GOLDEN_SIZES), inverse=True)
        training[family] = convert(there, out / f"{family}-flat", to_flat)
    dcp = convert(source["pipeline"], out / "dcp", flat_map, to="dcp")
    tasks = {
        "pipeline": {"kind": "gpt-flat", "folder": convert(source["pipeline"], out / "flat", flat_map), **small},
        "zero3": {"kind": "flat", "dtype": "float32", "folder": convert(source["zero3"], out / "zero3"), **small},
        "bf16": {
            "kind": "flat", "dtype": "bfloat16", **small,
            "folder": convert(source["bf16"], out / "bf16", weight_dtype="bfloat16", file_bytes=3000),
        },
        "train": {"kind": "train", "folder": dcp, **small},
        "spoiled": {"kind": "train", "folder": dcp, "spoil": True, **small},
        "llama": {"kind": "logits", "folder": training["llama"], "size": golden},
        "phi3": {"kind": "logits", "folder": training["phi3"], "size": golden},
    }  # fmt: skip
    if find_spec("transformers") is not None:
        folder = convert(source["pipeline"], out / "hf", llama_map, file_bytes=20_000)
        assert len(list(folder.glob("*.safetensors"))) > 1
        tasks["transformers"] = {"kind": "llama", "folder": folder, **small}
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("safetensors_losses.py")),
            json.dumps([*tasks.values()], default=str),
        ],
        env={
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "examples/gpt_deepspeed"), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(zip(tasks, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize(("name", "tolerance"), [("pipeline", 1e-6), ("zero3", 1e-6), ("bf16", 5e-4)])
def test_loaded_by_safetensors_the_loss_is_the_runs_own(name, tolerance, losses, results):
    assert results[name] == pytest.approx(losses[name][2], abs=tolerance, rel=0)
    assert abs(losses[name][1] - losses[name][2]) > 2 * tolerance  # the weights of another step would show


def test_a_pipeline_goes_on_in_plain_torch_under_other_names(losses, results):
    """Weights, moments, step and groups of four ranks, in one process that knows no pipeline."""
    assert results["train"] == pytest.approx(losses["pipeline"][2:], abs=1e-6, rel=0)
    assert results["spoiled"] != pytest.approx(losses["pipeline"][2:], abs=1e-4, rel=0)  # without the first moment


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_loaded_by_transformers_the_loss_is_the_runs_own(losses, results):
    assert results["transformers"] == pytest.approx(losses["pipeline"][2], abs=1e-6, rel=0)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_weights_of_transformers_compute_the_same_in_the_example_model(family, results):
    truth = json.loads((GOLDEN / "truth.json").read_text())[family]["logits"]
    assert results[family] == pytest.approx(truth, abs=1e-6, rel=0)
    assert max(map(abs, truth)) > 1e-3
