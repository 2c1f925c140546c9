"""Mixtures of experts, DeepSpeed's own and AutoEP's, into other degrees of expert, data and other parallelism."""

import itertools
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engine.reshard_run import goes_on, launch_all, save_all

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak_only,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

SOURCES = ["dp=4,ep=2,zero=1", "dp=4,ep=1,zero=2"]
TARGETS = ["dp=2,ep=1,zero=1", "dp=2,ep=2,zero=2", "dp=4,ep=2,zero=2"]
TENSOR_PARALLEL = "tp=3,dp=2,ep=2,zero=1"  # at tp=2, two ranks write the same file of an expert at once
PIPELINE = "pp=2,dp=2,ep=2,zero=1"
ZERO3 = "dp=4,ep=2,zero=3"
TENSOR_PARALLEL_ZERO3 = "tp=2,dp=2,ep=2,zero=3"  # experts have no files of their own there
PAIRS = [
    *(("moe", source, target) for source, target in itertools.product(SOURCES, TARGETS)),
    *(("moe-pipeline", PIPELINE, target) for target in ("pp=1,dp=2,ep=2,zero=1", "pp=3,dp=1,zero=1")),
    ("moe-pipeline", "pp=1,dp=2,ep=2,zero=1", "pp=2,dp=2,zero=1"),
    *(("autoep", SOURCES[0], target) for target in ("dp=2,ep=1,zero=1", "dp=2,ep=2,zero=2", "dp=4,ep=4,zero=1")),
    ("autoep", SOURCES[0], "dp=2,ep=2,zero=3"),
    *(("autoep-cut", TENSOR_PARALLEL, target) for target in ("tp=1,dp=4,ep=4,zero=1", "tp=1,dp=2,ep=1,zero=3")),
    *(("autoep-cut", TENSOR_PARALLEL, target) for target in ("tp=2,dp=2,ep=2,zero=2", "tp=2,dp=2,ep=2,zero=3")),
    *(("autoep-cut", TENSOR_PARALLEL_ZERO3, target) for target in ("tp=3,dp=2,ep=2,zero=3", "tp=2,dp=4,ep=4,zero=3")),
    *(("autoep-cut", TENSOR_PARALLEL_ZERO3, target) for target in ("tp=1,dp=2,ep=1,zero=3", "tp=2,dp=2,ep=2,zero=1")),
    *(("autoep", ZERO3, target) for target in ("dp=2,ep=2,zero=3", "dp=4,ep=4,zero=3", "dp=2,ep=1,zero=3")),
    *(("autoep", ZERO3, target) for target in ("dp=2,ep=2,zero=1", "dp=4,ep=2,zero=2")),
]
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("sources")
    cases = {f"{model} {layout}": {"model": model, "topology": layout} for model, layout, _ in PAIRS}
    return root, save_all(root, cases)


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory) -> dict[str, list[float]]:
    root, _ = uninterrupted
    out = tmp_path_factory.mktemp("targets")
    runs = []
    for model, source, target in PAIRS:
        run = {"name": f"{model} {source} -> {target}", "model": model, "topology": target}
        runs.append(goes_on(root, f"{model} {source}", out, run))
    return launch_all(runs)


@pytest.mark.parametrize(("model", "source", "target"), PAIRS)
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(model, source, target, uninterrupted, resumed):
    expected = uninterrupted[1][f"{model} {source}"][2:]
    assert resumed[f"{model} {source} -> {target}"] == pytest.approx(expected, abs=TOLERANCE, rel=0)
