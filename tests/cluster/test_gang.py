"""Gang scheduling by Kubernetes' own PodGroups: the real API server, Job controller and scheduler, with gates on.

Nodes are played, because nothing has to run: a pod is placed, or it is not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.kubectl import Kubectl
from tests.cluster.jobs import Operator
from tests.cluster.own_api_server import daemon, own_api_server, play_node
from tests.cluster.test_rights import training_job

pytestmark = [pytest.mark.cluster, pytest.mark.own_api_server]

GATES = "--feature-gates=GenericWorkload=true,GangScheduling=true"
TEAM = "team"
NODES = ["gpu-1", "gpu-2", "gpu-3"]
PENDING_SECONDS = 5


@pytest.fixture
def kubectl(tmp_path: Path) -> Iterator[Kubectl]:
    """A cluster with three nodes of two GPUs, and no scheduler yet."""
    with contextlib.ExitStack() as stack:
        flags = (GATES, "--runtime-config=scheduling.k8s.io/v1alpha2=true")
        client = stack.enter_context(own_api_server(*flags))
        config = client.kubeconfig
        stack.enter_context(daemon(tmp_path, "kube-controller-manager", config, "--controllers=job-controller"))
        client("create", "namespace", TEAM)
        client("create", "serviceaccount", "default", "-n", TEAM)
        for name in NODES:
            play_node(client, name)
        client.apply(*_bound_claim())
        yield client


def _bound_claim() -> list[dict[str, Any]]:
    """Return the job's claim as the controller that is not there would leave it, and its volume."""
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    claim = {"kind": "PersistentVolumeClaim", "name": "ckpt", "namespace": TEAM}
    volume = {"capacity": {"storage": "1Gi"}, "hostPath": {"path": "/nowhere"}, "claimRef": claim}
    meta = {"name": "ckpt", "namespace": TEAM, "annotations": {"pv.kubernetes.io/bind-completed": "yes"}}
    request = {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": "ckpt"}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "ckpt"}, "spec": {**common, **volume}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": {**common, **request}},
    ]


def _pods(kubectl: Kubectl) -> list[dict[str, Any]]:
    return list(kubectl.get("pods", "-n", TEAM).get("items", []))


def _placed(kubectl: Kubectl) -> list[str]:
    return [item["spec"]["nodeName"] for item in _pods(kubectl) if item["spec"].get("nodeName")]


def _unschedulable(kubectl: Kubectl) -> int:
    conditions = [item for pod in _pods(kubectl) for item in pod.get("status", {}).get("conditions", [])]
    return sum(item["type"] == "PodScheduled" and item.get("reason") == "Unschedulable" for item in conditions)


def _is_deleted(kubectl: Kubectl, group: str) -> bool:
    found = kubectl.get("podgroups.scheduling.k8s.io", group, "-n", TEAM)
    return not found or "deletionTimestamp" in found["metadata"]


def _wait(what: str, condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.3)


def test_no_pod_of_an_attempt_is_placed_before_all_can_be(kubectl: Kubectl, tmp_path: Path) -> None:
    job = training_job(
        TEAM, gang="Kubernetes", nodes={"min": 3, "max": 3}, batch={"globalSamples": 12, "microSamples": 2}
    )
    operator = Operator(kubectl.kubeconfig, TEAM, tmp_path / "operator.log", "--no-leader-election")
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: print((tmp_path / "operator.log").read_text()[-5000:]))
        stack.callback(operator.stop)
        kubectl.apply(job)
        _wait("three pods", lambda: len(_pods(kubectl)) == 3)
        group = kubectl.get("podgroups.scheduling.k8s.io", "gpt-a1", "-n", TEAM)
        assert group["spec"]["schedulingPolicy"]["gang"]["minCount"] == 3
        # A node is taken between the plan and the placement of the pods: two of three pods would find a node.
        kubectl("cordon", "gpu-3")
        stack.enter_context(daemon(tmp_path, "kube-scheduler", kubectl.kubeconfig, GATES))
        _wait("three pods that find no node", lambda: _unschedulable(kubectl) == 3)
        time.sleep(PENDING_SECONDS)
        assert _placed(kubectl) == []
        kubectl("uncordon", "gpu-3")
        _wait("three placed pods", lambda: sorted(_placed(kubectl)) == NODES)
        # The PodGroup goes with its attempt; Kubernetes keeps it as long as a pod names it, and no kubelet ends these.
        kubectl("patch", "etj", "gpt", "-n", TEAM, "--type=merge", "-p", '{"spec":{"suspend":true}}')
        _wait("the PodGroup to be deleted", lambda: _is_deleted(kubectl, "gpt-a1"))
