"""Nodes that are not dead: cut off, frozen, or with a hung kubelet. Their training must be replaced and fenced."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed import faults
from tests.cluster.jobs import LIGHT, Run, resumed

pytestmark = pytest.mark.cluster

FAULTS: dict[str, tuple[Callable[[str], None], Callable[[str], None]]] = {
    "cut": (faults.unplug, faults.plug),
    "freeze": (faults.freeze_node, faults.thaw_node),
    "hang": (faults.hang_kubelet, faults.resume_kubelet),
}
SETTLED_SECONDS = 8


def commits(checkpoints: Path, attempt: int) -> list[str]:
    """Commits that an attempt has written so far."""
    return sorted(path.parent.name for path in checkpoints.glob(f"gpt/a{attempt}/*/COMMIT.json"))


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.soak_only) if name != "cut" else name for name in FAULTS]
)
def test_a_node_that_only_seems_dead_is_replaced_and_its_training_never_writes_again(
    fault: str, run: Run, checkpoints: Path
) -> None:
    hurt, heal = FAULTS[fault]
    run.submit([*LIGHT, "100000", "2", "0"])
    run.until("a commit", lambda status: status.get("checkpoint", {}).get("step", 0) > 0)
    (pod,) = run.workers()
    node = pod["spec"]["nodeName"]
    hurt(node)
    status = run.until("attempt 2", resumed(1), 120)
    assert status["recoveries"][-1]["lost"] == [node]
    assert status["current"]["resume"]["step"] > 0
    (new,) = [item for item in run.workers() if item["metadata"]["labels"]["elastictraining.dev/attempt"] == "2"]
    assert new["spec"]["nodeName"] != node
    heal(node)
    run.cluster.wait(lambda: run.cluster.node_is_ready(node), what=f"{node} to be Ready")
    # Nobody could tell a node that was cut off; what it wrote meanwhile lies in the folder of its own attempt.
    time.sleep(SETTLED_SECONDS)
    written = commits(checkpoints, 1)
    time.sleep(SETTLED_SECONDS)
    assert commits(checkpoints, 1) == written, "attempt 1 goes on writing beside attempt 2"
    assert [item["metadata"]["labels"]["elastictraining.dev/attempt"] for item in run.workers()] == ["2"]
    status = run.status()
    assert (status["attempt"], status["phase"]) == (2, "Running")
    assert status["checkpoint"]["attempt"] == 2
