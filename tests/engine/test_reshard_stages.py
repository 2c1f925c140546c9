"""Every ZeRO stage into every other one, fp32 and bf16, with real DeepSpeed: losses go on as if nothing had happened.

Two steps at dp=2, save, convert, load with unmodified `engine.load_checkpoint` at dp=3, three more steps.
"""

import itertools
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, convert
from reshard.topology import Topology
from tests.engine.reshard_run import folder_of, goes_on, launch_all, save_all
from tests.randomness import some

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

VARIANTS = {
    "fp32": ((0, 1, 2, 3), {}),
    "bf16": ((0, 1, 2, 3), {"bf16": True}),
    "bf16-optimizer": ((1, 2, 3), {"bf16": True, "data_types": {"grad_accum_dtype": "fp32"}}),
}
"""Stages and settings of each training. At stage 1 the last one is DeepSpeed's BF16_Optimizer."""

ALL_PAIRS = [
    (name, source, target)
    for name, (stages, _) in VARIANTS.items()
    for source, target in itertools.product(stages, stages)
    if "fp32" in name or source != target
]
PAIRS = some(ALL_PAIRS, every=3)
ELASTIC = "elastic -> fp32 zero=1"
CONFIGURED = (0, 2, 3)
OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.0},
    "param_groups": [{"weight_decay": 0.1}, {}],
}
"""That of `reshard_rank`, with its two groups."""

TOLERANCE = {"fp32": 1e-6, "bf16": 5e-4, "bf16-optimizer": 5e-4}


def run_of(name: str, stage: int, dp: int) -> dict:
    return {"model": "flat", "topology": f"dp={dp},zero={stage}", **VARIANTS[name][1]}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    root = tmp_path_factory.mktemp("sources")
    cases = {f"{name}-{stage}": run_of(name, stage, 2) for name, (stages, _) in VARIANTS.items() for stage in stages}
    cases["elastic"] = {**run_of("fp32", 2, 2), "zero": {"elastic_checkpoint": True}}
    return root, save_all(root, cases)


@pytest.fixture(scope="module")
def resumed(uninterrupted, tmp_path_factory) -> dict[str, list[float]]:
    root, _ = uninterrupted
    out = tmp_path_factory.mktemp("targets")
    runs = [
        goes_on(root, f"{name}-{source}", out, {"name": f"{name} {source} -> {target}", **run_of(name, target, 3)})
        for name, source, target in PAIRS
    ]
    wanted = Conversion(
        source=folder_of(root, "elastic"),
        target=folder_of(out, "elastic"),
        topology=Topology(dp=3, zero=1),
        like=folder_of(root, "fp32-2"),
    )
    convert(wanted)
    runs.append({"name": ELASTIC, **run_of("fp32", 1, 3), "steps": 3, "load": str(wanted.target)})
    config = out / "ds.json"
    config.write_text(json.dumps({"optimizer": OPTIMIZER}))
    for stage in CONFIGURED:
        target = folder_of(out, f"configured-{stage}")
        topology = Topology(dp=3, zero=stage)
        convert(Conversion(source=wanted.source, target=target, topology=topology, ds_config=config))
        name = f"configured -> zero={stage}"
        runs.append({"name": name, **run_of("fp32", stage, 3), "steps": 3, "load": str(target)})
    return launch_all(runs)


@pytest.mark.parametrize(("name", "source", "target"), PAIRS)
def test_resumed_run_goes_on_with_the_losses_of_the_uninterrupted_one(name, source, target, uninterrupted, resumed):
    expected = uninterrupted[1][f"{name}-{source}"][2:]
    assert resumed[f"{name} {source} -> {target}"] == pytest.approx(expected, abs=TOLERANCE[name], rel=0)


@pytest.mark.parametrize("stage", CONFIGURED)
def test_elastic_checkpoint_goes_on_with_settings_from_a_configuration(stage, uninterrupted, resumed):
    found = resumed[f"configured -> zero={stage}"]
    assert found == pytest.approx(uninterrupted[1]["elastic"][2:], abs=TOLERANCE["fp32"], rel=0)


def test_elastic_checkpoint_goes_on_with_settings_from_another(uninterrupted, resumed):
    assert resumed[ELASTIC] == pytest.approx(uninterrupted[1]["elastic"][2:], abs=TOLERANCE["fp32"], rel=0)
