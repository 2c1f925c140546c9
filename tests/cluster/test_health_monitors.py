"""Conditions and labels of the vendors' health monitors, and the operator's reaction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import LIGHT, Operator, Run, resumed

pytestmark = pytest.mark.cluster


@pytest.fixture
def monitored(testbed: Any, namespace: str, crd: None, checkpoints: Path, log: Path) -> Iterator[Run]:
    """A job whose operator listens to health monitors; what they say is withdrawn afterwards."""
    operator = Operator(
        testbed.kubeconfig, namespace, log, "--no-leader-election",
        "--unhealthy-node-conditions=GpuMemWatch,AMDGPU*", "--unhealthy-node-labels=gpu.example.com/health=bad*",
    )  # fmt: skip
    job = Run(testbed, namespace)
    yield job
    job.remove()
    operator.stop()
    for number in (1, 2, 3):
        testbed.kubectl("label", "node", f"gpu-{number}", "gpu.example.com/health-")
        patch_condition(testbed, f"gpu-{number}", {"$patch": "delete", "type": "AMDGPUXgmi"})


def patch_condition(testbed: Any, node: str, condition: dict[str, str]) -> None:
    patch = json.dumps({"status": {"conditions": [condition]}})
    testbed.kubectl("patch", "node", node, "--subresource=status", "--type=strategic", "-p", patch)


@pytest.mark.soak_only
def test_a_node_that_a_health_monitor_complains_of_is_drained_and_avoided(monitored: Run) -> None:
    monitored.submit([*LIGHT, "100000", "0", "0"])
    monitored.until_phase("Running")
    (pod,) = monitored.workers()
    first = pod["spec"]["nodeName"]
    condition = {"type": "AMDGPUXgmi", "status": "True", "reason": "Xgmi", "message": "link 3 of GPU 0 is down"}
    patch_condition(monitored.cluster, first, condition)
    status = monitored.until("attempt 2", resumed(1))
    recovery = status["recoveries"][-1]
    assert (recovery["cause"], recovery["planned"], recovery["lostSteps"]) == ("NodeUnhealthy", True, 0)
    assert recovery["message"] == (f"node {first} is unhealthy: condition AMDGPUXgmi is True (link 3 of GPU 0 is down)")
    (pod,) = monitored.workers()
    second = pod["spec"]["nodeName"]
    monitored.cluster.kubectl("label", "node", second, "gpu.example.com/health=bad-fan", "--overwrite")
    monitored.until("attempt 3", resumed(2))
    (pod,) = monitored.workers()
    assert pod["spec"]["nodeName"] not in (first, second)
