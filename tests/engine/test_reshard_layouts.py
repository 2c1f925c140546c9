"""Layouts into each other, with real DeepSpeed: a resumed run goes on as if nothing had happened.

Two steps, save, convert, load with unmodified `engine.load_checkpoint`, three more steps. The losses must be those of
the run that was never interrupted. One set of processes per world size keeps this in minutes.
"""

import itertools
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engine.reshard_run import folder_of, goes_on, launch_all, save_all
from tests.randomness import SOAKING

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

PIPELINE = [
    "tp=1,pp=1,dp=1", "tp=1,pp=1,dp=2", "tp=2,pp=1,dp=1", "tp=1,pp=3,dp=1",
    "tp=2,pp=2,dp=1", "tp=2,pp=1,dp=2", "tp=1,pp=2,dp=2",
]  # fmt: skip

FLAT = {
    "stages": {"stages": (1, 2, 3)},
    "zero3-sub-groups": {"stages": (3,), "zero": {"sub_group_size": 900}},
    "round-robin": {"stages": (2,), "zero": {"round_robin_gradients": True}},
    "aligned": {"stages": (1,), "zero": {"parameter_alignment": True}, "bf16": True},
    "bf16-optimizer": {"stages": (1,), "bf16": True, "data_types": {"grad_accum_dtype": "fp32"}},
    "frozen": {"stages": (2,), "frozen": ["up.bias", "norm.weight"]},
    "frozen-zero3": {"stages": (3,), "frozen": ["up.bias", "down.weight"]},
    "sgd": {"stages": (1,), "optimizer": "sgd"},
}
"""Variants of the model without pipeline: which options they train with and at which ZeRO stages."""

TOLERANCE = 1e-6
BF16_TOLERANCE = 5e-4


def cases() -> dict[str, dict]:
    """Name -> how to train it."""
    found = {f"pipeline/{layout}": {"model": "pipeline", "topology": f"{layout},zero=1"} for layout in PIPELINE}
    for name, variant in FLAT.items():
        options = {key: value for key, value in variant.items() if key != "stages"}
        for stage, dp in itertools.product(variant["stages"], (2, 3)):
            found[f"{name}/dp={dp},zero={stage}"] = {"model": "flat", "topology": f"dp={dp},zero={stage}", **options}
    return found


CASES = cases()


def pairs() -> list[tuple[str, str]]:
    """Every layout of a model into every other one; without a soak, each into the next one.

    The golden tests compare the bytes of such conversions in every run.
    """
    found = []
    for _, names in itertools.groupby(CASES, key=lambda name: name.partition("/")[0]):
        for (i, source), (j, target) in itertools.product(enumerate(own := list(names)), enumerate(own)):
            if SOAKING or (j - i) % len(own) == 1 % len(own):
                found.append((source, target))
    return found


PAIRS = pairs()

CONTROLS = ["pipeline/tp=2,pp=1,dp=1", "stages/dp=2,zero=2", "stages/dp=2,zero=3"]
"""Resumed from their own checkpoint with the first moment set to zero: the comparison has to notice."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    """Five steps of every case, saved after the second."""
    root = tmp_path_factory.mktemp("sources")
    return root, save_all(root, CASES)


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory) -> dict[str, list[float]]:
    """Three more steps of every target from every source's conversion."""
    root, _ = uninterrupted
    out = tmp_path_factory.mktemp("targets")
    runs = [goes_on(root, source, out, {"name": f"{source} -> {target}", **CASES[target]}) for source, target in PAIRS]
    for target in CONTROLS:
        own = {"name": f"control -> {target}", "steps": 3, "load": str(folder_of(root, target)), "spoil": True}
        runs.append({**CASES[target], **own})
    return launch_all(runs)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{source} -> {target}" for source, target in PAIRS])
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(source, target, uninterrupted, resumed):
    expected = uninterrupted[1][source][2:]
    tolerance = BF16_TOLERANCE if CASES[source].get("bf16") else TOLERANCE
    assert resumed[f"{source} -> {target}"] == pytest.approx(expected, abs=tolerance, rel=0)


@pytest.mark.parametrize("target", CONTROLS)
def test_lost_first_moment_would_show(target, uninterrupted, resumed):
    expected = uninterrupted[1][target][2:]
    difference = max(abs(a - b) for a, b in zip(resumed[f"control -> {target}"], expected, strict=True))
    assert difference > 100 * TOLERANCE
