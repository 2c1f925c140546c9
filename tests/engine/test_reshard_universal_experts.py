"""Mixtures of experts in universal checkpoints: AutoEP's stacks at any ep, DeepSpeed's own at ep=1 and any pp."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.errors import UnsupportedError
from reshard.topology import Topology
from tests.engine.reshard_run import launch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: make setup"),
]

TOLERANCE = 1e-6
RANK = Path(__file__).with_name("universal_rank.py")
SOURCES = {"autoep": "dp=2,ep=2,zero=1", "moe": "dp=2,ep=2,zero=1", "moe-pipeline": "pp=2,dp=2,ep=2,zero=1"}
TARGETS = {
    "autoep": ("dp=2,ep=1,zero=1", "dp=4,ep=4,zero=1"),
    "moe": ("dp=2,ep=1,zero=1",),
    "moe-pipeline": ("pp=3,dp=1,zero=1",),
}


def universal(source: Path, target: Path, topology: str) -> Path:
    wanted = Conversion(source=source, target=target, topology=Topology.parse(topology), target_format="universal")
    convert(wanted, RunOptions(reread=True, sync=False))
    return target


@pytest.mark.parametrize("model", TARGETS)
def test_experts_go_on_with_the_losses_of_the_uninterrupted_run(model, tmp_path):
    source = tmp_path / "native" / "step-00000002"
    run = {"name": "whole", "model": model, "topology": SOURCES[model], "steps": 5, "save_at": 2, "save": str(source)}
    expected = launch([run], RANK)["whole"][2:]
    folder = universal(source, tmp_path / "universal" / "step-00000002", TARGETS[model][0])
    for target in TARGETS[model]:
        run = {"name": target, "model": model, "topology": target, "steps": 3, "load": str(folder)}
        assert launch([run], RANK)[target] == pytest.approx(expected, abs=TOLERANCE, rel=0), target
    if model != "autoep":
        with pytest.raises(UnsupportedError, match="would load the experts of the first one"):
            universal(source, tmp_path / "refused" / "step-00000002", "dp=2,ep=2,zero=1")
