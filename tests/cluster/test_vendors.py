"""Losses under the names of both vendors.

The test bed offers the same simulated GPUs as amd.com/gpu and as nvidia.com/gpu, each with a device plugin that speaks
the kubelet's real API. The trainings are light, the checkpoints and their conversion are real.
"""

from __future__ import annotations

from typing import Any

import pytest

from testbed import faults
from tests.cluster.jobs import LIGHT, Run, resumed, victim

pytestmark = pytest.mark.cluster

GOLDEN = "tests/golden/deepspeed-0.19.8"
VENDORS = (pytest.param("amd.com/gpu", marks=pytest.mark.soak_only), "nvidia.com/gpu")
"""The other tests of this tier take amd.com/gpu."""


def saved(status: dict[str, Any]) -> bool:
    return status.get("phase") == "Running" and status.get("checkpoint", {}).get("step", 0) > 0


@pytest.mark.parametrize("resource", VENDORS)
def test_a_lost_node_is_left_and_the_checkpoint_converted(run: Run, resource: str) -> None:
    run.submit(
        [*LIGHT, "100000", "2", "0", f"{GOLDEN}/zero2-dp3/step-00000002"],
        accelerator={"resource": resource, "perNode": [1]},
        nodes={"min": 1, "max": 3},
        parallelism={"zeroStage": 2},
        batch={"globalSamples": 12, "microSamples": 2},
    )
    before = run.until("a commit on 3 nodes", saved)
    assert before["topologyText"] == "tp=1,pp=1,dp=3,zero=2"
    node = victim(run)
    run.cluster.kill_node(node)
    after = run.until("attempt 2", resumed(1))
    assert after["topologyText"] == "tp=1,pp=1,dp=2,zero=2"
    assert after["recoveries"][-1]["lost"] == [node]
    assert after["reshard"]["verified"] is True
    assert after["current"]["resume"]["step"] >= before["checkpoint"]["step"]


@pytest.mark.parametrize("resource", VENDORS)
def test_a_sick_gpu_halves_the_pods_where_no_whole_node_is_left(run: Run, resource: str) -> None:
    """2 -> 1 per node; the node selector takes away the spare nodes."""
    run.submit(
        [*LIGHT, "100000", "2", "0", f"{GOLDEN}/bf16-dp2/step-00000002"],
        pod_spec={"nodeSelector": {"kubernetes.io/hostname": "gpu-2"}},
        accelerator={"resource": resource, "perNode": [2, 1]},
        batch={"globalSamples": 12, "microSamples": 2},
    )
    before = run.until("a commit", saved)
    assert (before["topologyText"], before["gpus"]) == ("tp=1,pp=1,dp=2,zero=1", 2)
    faults.fail_gpu("gpu-2", "gpu0")
    after = run.until("attempt 2", resumed(1))
    assert (after["topologyText"], after["gpus"]) == ("tp=1,pp=1,dp=1,zero=1", 1)
    assert after["recoveries"][-1]["cause"] in ("DeviceUnhealthy", "DeviceMissing")
    assert not after["recoveries"][-1].get("lost"), "the node itself is not lost"
    assert after["reshard"]["verified"] is True
    (pod,) = run.workers()
    assert pod["spec"]["containers"][0]["resources"]["limits"][resource] == "1"
    assert pod["spec"]["nodeName"] == "gpu-2"
