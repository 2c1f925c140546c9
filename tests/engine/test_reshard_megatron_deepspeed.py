"""A Llama with its optimizer goes from DeepSpeed to Megatron-Core and back, and trains on with its losses.

Both frameworks compute the same model from the same tokens. In fp32 their kernels differ by less than the tolerance, so
that the losses after a conversion are compared with those of the uninterrupted run in the other framework.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.topology import Topology
from tests.engine.reshard_run import launch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak_only,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core"),
]

ROOT = Path(__file__).parents[2]
DEEPSPEED, MEGATRON = (Path(__file__).with_name(name) for name in ("family_rank.py", "megatron_rank.py"))
STEPS, SAVE_AT = 4, 2
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}

DEEPSPEED_RUNS = {
    "zero1": {"topology": "dp=2,zero=1"},
    "zero3": {"topology": "dp=2,zero=3"},
    "tp2": {"topology": "tp=2,dp=1,zero=1"},
    "tied": {"topology": "dp=2,zero=1", "family": "llama-megatron-tied"},
    "bf16": {"topology": "dp=2,zero=1", "bf16": True},
}
MEGATRON_RUNS = {
    "dp2": {"tp": 1},
    "tp2": {"tp": 2},
    "tied": {"tp": 1, "tied": True},
    "bf16": {"tp": 1, "bf16": True},
}
TO_MEGATRON = {
    "zero1": "dp2", "zero1 to tp2": "tp2", "zero3": "dp2", "tp2": "dp2", "tp2 to tp2": "tp2", "tied": "tied",
    "bf16": "bf16", "zero1 by universal": "dp2",
}  # fmt: skip
TO_DEEPSPEED = {
    "dp2": "zero1", "dp2 to zero3": "zero3", "dp2 to tp2": "tp2", "tp2": "zero1", "tp2 to tp2": "tp2", "tied": "tied",
    "bf16": "bf16", "dp2 by universal": "zero1",
}  # fmt: skip


def run_in_deepspeed(name: str, kind: str, **more) -> dict:
    return {"name": name, "family": "llama-megatron", **DEEPSPEED_RUNS[kind], **more}


def run_in_megatron(name: str, kind: str, **more) -> dict:
    run = MEGATRON_RUNS[kind]
    return {"name": name, "kind": "llama", "topology": f"tp={run['tp']},dp={2 // run['tp']}", **run, **more}


def launch_by_tp(runs: list[dict]) -> dict[str, list[float]]:
    """Launch the runs of DeepSpeed: AutoTP leaves global state behind, and gets processes of its own."""
    split = [[run for run in runs if ("tp=2" in run["topology"]) == is_tp] for is_tp in (False, True)]
    return launch(split[0], DEEPSPEED) | launch(split[1], DEEPSPEED)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, list[float]]]:
    """Runs of both frameworks, saved at step 2, and examples of other seeds for `--like`."""
    root = tmp_path_factory.mktemp("saved")
    whole = {"steps": STEPS, "save_at": SAVE_AT}
    example = {"steps": 1, "save_at": 1, "seed": 5}
    runs = [
        run_in_deepspeed(f"deepspeed {kind}", kind, **whole, save=str(root / "deepspeed" / kind / "step-2"))
        for kind in DEEPSPEED_RUNS
    ] + [
        run_in_deepspeed(f"like {kind}", kind, **example, save=str(root / "like-deepspeed" / kind / "step-1"))
        for kind in DEEPSPEED_RUNS
    ]
    losses = launch_by_tp(runs)
    runs = [
        run_in_megatron(f"megatron {kind}", kind, **whole, save=str(root / "megatron" / kind)) for kind in MEGATRON_RUNS
    ] + [
        run_in_megatron(f"like {kind}", kind, **example, save=str(root / "like-megatron" / kind))
        for kind in MEGATRON_RUNS
    ]
    return root, losses | launch(runs, MEGATRON)


def find_names(folder: Path, name: str) -> Path:
    """Write the map of examples/ with the sizes of the small model."""
    path = folder / name
    text = (ROOT / "examples" / "name_maps" / name).read_text(encoding="utf-8")
    path.write_text(text.replace("hidden: 4096, heads: 32, kv_heads: 8", "hidden: 32, heads: 4, kv_heads: 2"))
    return path


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory) -> dict[str, list[float]]:
    """Losses of the runs that go on in the other framework."""
    root, _ = saved
    out = tmp_path_factory.mktemp("out")
    names = find_names(out, "llama-megatron.yaml")
    runs = []
    for case, kind in TO_MEGATRON.items():
        run = run_in_megatron(f"to megatron {case}", kind, steps=STEPS - SAVE_AT, load=str(out / case / "megatron"))
        source = root / "deepspeed" / case.split()[0] / "step-2"
        if case.endswith("universal"):
            go(source, out / case / "step-2", "dp=2,zero=1", "universal")
            source = out / case / "step-2"
        go(source, Path(run["load"]), run["topology"], "megatron", like=root / "like-megatron" / kind, names=names)
        runs.append(run)
    losses = launch(runs, MEGATRON)
    names = find_names(out, "megatron-llama.yaml")
    runs = []
    for case, kind in TO_DEEPSPEED.items():
        target = out / case / "step-2"
        run = run_in_deepspeed(f"to deepspeed {case}", kind, steps=STEPS - SAVE_AT, load=str(target))
        like = root / "like-deepspeed" / kind / "step-1"
        target_format = "universal" if case.endswith("universal") else "deepspeed"
        run["universal"] = target_format == "universal"
        go(root / "megatron" / case.split()[0], target, run["topology"], target_format, like=like, names=names)
        runs.append(run)
    return losses | launch_by_tp(runs)


def go(source: Path, target: Path, topology: str, target_format: str, **more) -> None:
    wanted = Conversion(
        source=source, target=target, topology=Topology.parse(topology), target_format=target_format, **more
    )
    report = convert(wanted, RunOptions(reread=True))
    assert report.verified
    assert report.witness["not_witnessed"] == 0


@pytest.mark.parametrize("case", TO_MEGATRON)
def test_megatron_goes_on_with_the_losses_of_deepspeed(case, saved, resumed):
    kind = case.split()[0]
    tolerance = TOLERANCE["bf16" if kind == "bf16" else "fp32"]
    assert resumed[f"to megatron {case}"] == pytest.approx(saved[1][f"deepspeed {kind}"][2:], abs=tolerance, rel=0)


@pytest.mark.parametrize("case", TO_DEEPSPEED)
def test_deepspeed_goes_on_with_the_losses_of_megatron(case, saved, resumed):
    kind = case.split()[0]
    tolerance = TOLERANCE["bf16" if kind == "bf16" else "fp32"]
    assert resumed[f"to deepspeed {case}"] == pytest.approx(saved[1][f"megatron {kind}"][2:], abs=tolerance, rel=0)
