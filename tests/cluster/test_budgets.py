"""Failures and their causes on a real cluster: a node on which the program crashes, pods that find no node."""

from __future__ import annotations

import shlex
import time
from typing import Any

import pytest

from testbed import podenv
from tests.cluster.jobs import LIGHT, Run, elastic

pytestmark = pytest.mark.cluster

GPUS = "amd.com/gpu"
WAIT_SECONDS = 75.0
"""Longer than `unschedulable-seconds`."""


def node_with_gpus(run: Run) -> str:
    items = run.cluster.get("nodes")["items"]
    return next(str(item["metadata"]["name"]) for item in items if GPUS in item["status"]["allocatable"])


def preferred(node: str) -> dict[str, Any]:
    """An affinity that puts a pod on this node as long as it may."""
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": term}]}}


@pytest.mark.soak_only
def test_a_node_on_which_the_program_fails_twice_is_avoided(run: Run) -> None:
    bad = node_with_gpus(run)
    command = f'[ "$NODE" != {shlex.quote(bad)} ] || exit 7; exec {shlex.join([*LIGHT, "100000", "0", "0"])}'
    here = [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    template = podenv.host_python({"spec": {"containers": [{"name": "train", "env": here}]}})
    environment = template["spec"]["containers"][0]["env"]
    run.submit(["sh", "-c", command], pod={"env": environment}, pod_spec={"affinity": preferred(bad)})
    status = run.until("training elsewhere", lambda found: found.get("phase") == "Running")
    assert [(item["cause"], item["blamed"], item["exitCode"]) for item in status["recoveries"]] == [
        ("PodFailed", bad, 7),
        ("PodFailed", bad, 7),
    ]
    assert (status["attempt"], status["restartBudget"]["used"]) == (3, 2)
    assert [item["name"] for item in status["excludedNodes"]] == [bad]
    assert {"NodeExcluded", "RestartDelayed"} <= set(run.events())
    (pod,) = run.workers()
    assert pod["spec"]["nodeName"] != bad


FAIL_TOGETHER = """
if [ "$ETJ_ATTEMPT" -gt 2 ]; then exec {training}; fi
here="$ETJ_CHECKPOINT_ROOT-together-$ETJ_ATTEMPT"
if [ "$NODE" != {bad} ]; then
  touch "$here-$PET_NODE_RANK"
  until [ -e "$here" ]; do sleep 0.1; done
  exit 1
fi
until [ "$(ls -d "$here"-* | wc -l)" = 2 ]; do sleep 0.1; done
touch "$here"
exit 139
"""
"""In the first two attempts, the rank on one node dies as if of SIGSEGV once its two peers run, and they follow."""


@pytest.mark.soak_only
def test_the_node_of_the_rank_that_dies_first_is_avoided_although_all_pods_fail(run: Run) -> None:
    bad = node_with_gpus(run)
    command = FAIL_TOGETHER.format(bad=shlex.quote(bad), training=shlex.join([*LIGHT, "100000", "0", "0"]))
    here = [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    template = podenv.host_python({"spec": {"containers": [{"name": "train", "env": here}]}})
    environment = template["spec"]["containers"][0]["env"]
    run.submit(["sh", "-c", command], pod={"env": environment}, **elastic())
    status = run.until(
        "training elsewhere", lambda found: found.get("phase") == "Running" and found["attempt"] > 2, 180
    )
    assert [(item["cause"], item["blamed"], item["exitCode"]) for item in status["recoveries"]] == [
        ("PodFailed", bad, 139),
        ("PodFailed", bad, 139),
    ]
    assert (status["attempt"], status["restartBudget"]["used"]) == (3, 2)
    assert [item["name"] for item in status["excludedNodes"]] == [bad]
    assert "NodeExcluded" in run.events()
    assert bad not in {pod["spec"]["nodeName"] for pod in run.workers()}


@pytest.mark.soak_only
def test_pods_that_find_no_node_wait_in_one_job_and_cost_no_budget(run: Run) -> None:
    template = podenv.host_python({"spec": {"containers": [{"name": "wait", "command": ["sleep", "1000"]}]}})
    blocker = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "blocker", "namespace": run.namespace, "labels": {"blocks": "all"}},
        "spec": {**template["spec"], "terminationGracePeriodSeconds": 0},
    }
    run.cluster.apply(blocker)
    run.cluster.wait(
        lambda: run.cluster.get("pod", "blocker", "-n", run.namespace)["spec"].get("nodeName"), what="the other pod"
    )
    term = {"labelSelector": {"matchLabels": {"blocks": "all"}}, "topologyKey": "kubernetes.io/os"}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    run.submit([*LIGHT, "100000", "0", "0"], pod_spec={"affinity": apart})
    run.until("the scheduler's words", lambda found: found.get("reason") == "Unschedulable")
    condition = run.condition("Launched")
    assert (condition["status"], condition["reason"]) == ("False", "Unschedulable")
    assert "anti-affinity" in condition["message"]
    (before,) = run.workers()
    time.sleep(WAIT_SECONDS)
    (after,) = run.workers()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    status = run.status()
    assert (status["phase"], status["attempt"], status["reason"]) == ("Starting", 1, "Unschedulable")
    assert (status["restartBudget"]["used"], status.get("failureCounts", [])) == (0, [])
    run.cluster.kubectl("delete", "pod", "blocker", "-n", run.namespace, "--wait=false")
    status = run.until_phase("Running")
    assert (status["attempt"], status.get("recoveries", [])) == (1, [])
