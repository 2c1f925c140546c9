"""A stream over several ranks: it goes on exactly at the same topology, and by the rule at another one."""

import json
import re
from pathlib import Path

import pytest

from tests.engine.stack_run import Pods
from tests.engine.test_stacks_deepspeed import make_folder

pytestmark = pytest.mark.engine

SCRIPT = str(Path(__file__).with_name("stream_rank.py"))


def train(root, topology, steps, **extra):
    """How the stream began on each rank, and the global batch of every step."""
    with Pods(SCRIPT, root, topology, str(steps), folder=root, **extra) as pods:
        pods.finish()
        samples = {int(step): json.loads(rows) for step, rows in re.findall(r"samples (\d+) (\[.*\])", pods.text)}
        return re.findall(r"start (\w+)", pods.text), samples


@pytest.mark.parametrize(
    ("topology", "how"),
    [
        pytest.param("dp=2,zero=3", "exact", marks=pytest.mark.soak_only),
        pytest.param("dp=3,zero=3", "skip", marks=pytest.mark.soak_only),
        ("dp=1,zero=3", "skip"),
    ],
)
def test_no_sample_is_repeated_or_skipped(tmp_path, topology, how):
    """The replicas take samples in turn, so the rule `skip` is exact, too."""
    starts, first = train(make_folder(tmp_path / "first"), "dp=2,zero=3", 3)
    assert set(starts) == {"first"}
    assert first == {step: [*range(12 * step, 12 * step + 12)] for step in range(3)}
    resume = {"ETJ_ATTEMPT": "2", "ETJ_RESUME": str(tmp_path / "first" / "a1" / "step-00000003")}
    starts, second = train(make_folder(tmp_path / "second"), topology, 5, **resume)
    assert set(starts) == {how}
    assert second == {step: [*range(12 * step, 12 * step + 12)] for step in (3, 4)}
