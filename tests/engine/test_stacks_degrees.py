"""The DeepSpeed stack with tensor and pipeline parallelism, resharded to other degrees: losses of a quiet run."""

from pathlib import Path

import pytest

from reshard.api import reshard
from reshard.topology import Topology
from tests.engine.stack_run import Pods
from tests.engine.test_stacks_deepspeed import FP32, make_folder

pytestmark = [pytest.mark.engine, pytest.mark.soak_only]

SCRIPT = str(Path(__file__).with_name("stack_degrees_rank.py"))
STEPS = 6


def train(root, topology, how, steps, **extra):
    with Pods(SCRIPT, root, topology, how, str(steps), folder=root, **extra) as pods:
        return pods.finish()


@pytest.mark.parametrize(
    ("how", "source", "targets"),
    [
        ("pipeline", "pp=2,dp=1,zero=1", ("tp=2,dp=1,zero=1", "dp=2,zero=1")),
        ("autotp", "tp=2,dp=1,zero=1", ("dp=2,zero=1", "tp=2,dp=2,zero=1")),
    ],
)
def test_it_goes_on_at_other_degrees_with_the_same_losses(tmp_path, how, source, targets):
    quiet = train(make_folder(tmp_path / "quiet"), source, how, STEPS)
    assert sorted(quiet) == list(range(1, STEPS + 1))
    train(make_folder(tmp_path / "first"), source, how, 3)
    for number, target in enumerate(targets, 2):
        root = make_folder(tmp_path / f"target-{number}")
        folder = root / f"a{number}" / "step-00000003"
        reshard(tmp_path / "first" / "a1" / "step-00000003", folder, Topology.parse(target))
        resume = {"ETJ_ATTEMPT": str(number), "ETJ_RESUME": str(folder)}
        losses = train(root, target, how, STEPS, **resume)
        assert losses == pytest.approx({step: quiet[step] for step in (4, 5, 6)}, **FP32)
