"""Sequence parallelism (Ulysses), with real DeepSpeed and its own mpu: ranks that share a sample, each a part of it."""

import itertools
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engine.reshard_run import goes_on, launch_all, save_all
from tests.randomness import some

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

STAGES = (1, 2, 3)
SOURCES = {f"{layout},zero={stage}": stage for layout in ("dp=4,cp=2", "dp=2") for stage in STAGES}
ALL_PAIRS = [
    *itertools.product([source for source in SOURCES if "cp" in source], ["dp=2,cp=2,zero={}", "dp=3,zero={}"], STAGES),
    *itertools.product([source for source in SOURCES if "cp" not in source], ["dp=4,cp=2,zero={}"], STAGES),
    ("dp=4,cp=2,zero=2", "dp=4,cp=4,zero={}", 3),
    ("dp=4,cp=2,zero=3", "dp=6,cp=2,zero={}", 1),
    ("dp=4,cp=2,zero=1", "dp=2,cp=2,zero={}", 0),
]
PAIRS = some(ALL_PAIRS, every=4)
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("sources")
    return root, save_all(root, {name: {"model": "flat", "topology": name} for name, _, _ in PAIRS})


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory) -> dict[str, list[float]]:
    root, _ = uninterrupted
    out = tmp_path_factory.mktemp("targets")
    runs = []
    for source, layout, stage in PAIRS:
        target = layout.format(stage)
        run = {"name": f"{source} -> {target}", "model": "flat", "topology": target}
        runs.append(goes_on(root, source, out, run))
    return launch_all(runs)


@pytest.mark.parametrize(("source", "layout", "stage"), PAIRS)
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(source, layout, stage, uninterrupted, resumed):
    expected = uninterrupted[1][source][2:]
    assert resumed[f"{source} -> {layout.format(stage)}"] == pytest.approx(expected, abs=TOLERANCE, rel=0)
