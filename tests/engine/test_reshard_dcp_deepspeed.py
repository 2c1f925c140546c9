"""From DeepSpeed to torch and back by DCP: losses of the run that never stopped, in unmodified frameworks."""

from pathlib import Path

import pytest

from reshard.api import Conversion, convert
from reshard.topology import Topology
from tests.engine import dcp_run, reshard_run

pytestmark = pytest.mark.engine

TO_TORCH = {
    "zero1 to fsdp": ("zero1", {"dp": 3}),
    "zero1 to plain torch": ("zero1", {"sharded": False}),
    "zero3 to nested fsdp": ("zero3", {"dp": 2, "style": "nested-without-schedule"}),
}
TO_DEEPSPEED = {"fsdp to zero1": ("torch", "zero1"), "fsdp to zero3": ("torch", "zero3")}
STAGES = {"zero1": "dp=2,zero=1", "zero3": "dp=2,zero=3"}
SAVED, STEPS = 5, 3  # the rate of the DeepSpeed runs is 2e-2 from step 4


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("dcp")


@pytest.fixture(scope="module")
def sources(root) -> dict[str, list[float]]:
    """Losses of runs that went on without a stop, from the step at which they saved."""
    run = {"steps": SAVED + STEPS, "save_at": SAVED}
    found = dcp_run.launch(
        [{**run, "name": "torch", "model": "deepspeed", "dp": 2, "lr": 2e-2, "save": str(root / "torch")}]
    )
    found |= reshard_run.launch(
        [
            {**run, "model": "flat", "name": name, "topology": topology, "save": str(root / name)}
            for name, topology in STAGES.items()
        ]
    )
    return {name: losses[SAVED:] for name, losses in found.items()}


@pytest.fixture(scope="module")
def resumed(root, sources) -> dict[str, list[float]]:
    """Losses of runs that loaded what was converted."""
    runs = []
    for name, (source, options) in TO_TORCH.items():
        target = root / name.replace(" ", "-")
        topology = Topology(dp=options.get("dp", 1), zero=3)
        convert(Conversion(source=root / source, target=target, topology=topology, target_format="dcp"))
        run = {"model": "deepspeed", "first": SAVED, "steps": STEPS}
        runs.append({**run, **options, "name": name, "load": str(target)})
    found = dcp_run.launch(runs)
    runs = []
    for name, (source, like) in TO_DEEPSPEED.items():
        target = root / name.replace(" ", "-")
        topology = Topology.parse(STAGES[like])
        convert(
            Conversion(
                source=root / source, target=target, topology=topology, target_format="deepspeed", like=root / like
            )
        )
        runs.append({"model": "flat", "name": name, "topology": STAGES[like], "steps": STEPS, "load": str(target)})
    return found | reshard_run.launch(runs)


@pytest.mark.parametrize("name", [*TO_TORCH, *TO_DEEPSPEED])
def test_losses_are_those_of_the_run_that_never_stopped(name, sources, resumed):
    assert resumed[name] == pytest.approx(sources[(TO_TORCH | TO_DEEPSPEED)[name][0]], abs=1e-6)


def test_the_runs_differ_from_each_other(sources):
    """Else a checkpoint of the wrong run would do."""
    assert abs(sources["torch"][0] - sources["zero1"][0]) > 1e-3
