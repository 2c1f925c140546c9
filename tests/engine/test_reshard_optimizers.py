"""Other optimizers, and a parameter group that is smaller than the number of ranks, with real DeepSpeed."""

import itertools
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engine.reshard_run import goes_on, launch_all, save_all

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

VARIANTS = {
    "lion": ((1, 3), {"optimizer": "lion"}),
    "accumulating": ((1, 3), {"optimizer": "accumulating"}),
    "single": ((1, 2, 3), {"single": "gain"}),
}
PAIRS = [
    (name, source, target)
    for name, (stages, _) in VARIANTS.items()
    for source, target in itertools.product(stages, stages)
    # DeepSpeed's stage 3 steps its optimizer once for every sub-group, which such a group's step counts.
    if name != "accumulating" or source == target
]
TOLERANCE = 1e-6


def run_of(name: str, stage: int, dp: int) -> dict:
    return {"model": "flat", "topology": f"dp={dp},zero={stage}", **VARIANTS[name][1]}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("sources")
    cases = {f"{name}-{stage}": run_of(name, stage, 2) for name, (stages, _) in VARIANTS.items() for stage in stages}
    return root, save_all(root, cases)


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory) -> dict[str, list[float]]:
    root, _ = uninterrupted
    out = tmp_path_factory.mktemp("targets")
    return launch_all(
        [
            goes_on(root, f"{name}-{source}", out, {"name": f"{name} {source} -> {target}", **run_of(name, target, 3)})
            for name, source, target in PAIRS
        ]
    )


@pytest.mark.parametrize(("name", "source", "target"), PAIRS)
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(name, source, target, uninterrupted, resumed):
    expected = uninterrupted[1][f"{name}-{source}"][2:]
    assert resumed[f"{name} {source} -> {target}"] == pytest.approx(expected, abs=TOLERANCE, rel=0)
