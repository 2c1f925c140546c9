"""Leaving on request on a real cluster: kubectl drain, preemption, eviction, a suspended Job. No step is lost."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from testbed.errors import TestbedError
from tests.cluster.conftest import Cluster
from tests.cluster.jobs import LIGHT, Run
from tests.randomness import examples

pytestmark = pytest.mark.cluster

GPU = "amd.com/gpu"
GIVEN = "tests/golden/deepspeed-0.19.8/zero2-dp3/step-00000002"
INDEX = "batch.kubernetes.io/job-completion-index"
ONLY_OURS = "--pod-selector=elastictraining.dev/job-name=gpt"
ROUNDS = examples(1, soak=4)
NEVER = "1000000"
"""Steps between commits: nothing is committed except on request."""


def submit(run: Run, **recovery: Any) -> dict[str, Any]:
    """Start a light training on one GPU of each of three nodes, which commits only on request."""
    run.submit(
        [*LIGHT, "1000000", NEVER, "0", GIVEN, "carry"],
        pod_spec={"terminationGracePeriodSeconds": 30},
        accelerator={"resource": GPU, "perNode": [1]},
        nodes={"min": 1, "max": 3},
        parallelism={"zeroStage": 2},
        batch={"globalSamples": 12, "microSamples": 2},
        reshard={"mode": "Materialize"},
        recovery={"scaleUpStableSeconds": 2, **recovery},
    )
    return trains(run, attempt=1, replicas=3)


def trains(run: Run, attempt: int, replicas: int) -> dict[str, Any]:
    """Wait until an attempt makes steps on that many nodes."""

    def has_stepped(status: dict[str, Any]) -> bool:
        step = status.get("progress", {}).get("step", 0)
        is_there = status.get("attempt") == attempt and status.get("phase") == "Running"
        return is_there and step > status["current"].get("resume", {}).get("step", 0)

    status = run.until(f"attempt {attempt}", has_stepped, 120)
    assert status["replicas"] == replicas
    return status


def node_of(run: Run, index: int) -> str:
    return next(str(pod["spec"]["nodeName"]) for pod in run.workers() if pod["metadata"]["labels"][INDEX] == str(index))


def assert_nothing_was_lost(status: dict[str, Any], *causes: str) -> None:
    told = [(item["cause"], item.get("planned"), item.get("lostSteps")) for item in status["recoveries"]]
    assert told == [(cause, True, 0) for cause in causes], json.dumps(status["recoveries"], indent=1)
    assert status.get("restartBudget", {}).get("used", 0) == 0


def budgets(run: Run) -> list[dict[str, Any]]:
    """The PodDisruptionBudgets of the job."""
    return list(run.cluster.get("poddisruptionbudgets", "-n", run.namespace).get("items", []))


def evict(run: Run, pod: str) -> str:
    """Evict a pod; return why the API server refused that, or an empty string."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": run.namespace},
    }
    path = f"/api/v1/namespaces/{run.namespace}/pods/{pod}/eviction"
    try:
        run.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
    except TestbedError as error:
        return str(error)
    return ""


def test_draining_a_node_again_and_again_is_one_planned_shrink_and_one_growth_each_time(run: Run) -> None:
    status = submit(run)
    causes: list[str] = []
    for number in range(ROUNDS):
        node = node_of(run, number % 3)
        try:
            began = time.monotonic()
            run.cluster.kubectl("drain", node, ONLY_OURS, "--delete-emptydir-data", "--timeout=60s")
            print(f"round {number}: {node} drained in {time.monotonic() - began:.1f} s")
            small = trains(run, status["attempt"] + 1, 2)
            assert node not in {pod["spec"]["nodeName"] for pod in run.workers()}
        finally:
            run.cluster.kubectl("uncordon", node)
        status = trains(run, small["attempt"] + 1, 3)
        causes += ["NodeCordoned", "CapacityReturned"]
        assert_nothing_was_lost(status, *causes)


@pytest.fixture
def priority(testbed: Cluster, namespace: str) -> Any:
    """The name of a PriorityClass above that of the trainings."""
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": namespace}}
    testbed.apply({**body, "value": 1000})
    yield namespace
    testbed.kubectl("delete", "priorityclass", namespace)


@pytest.mark.parametrize(
    "index", [pytest.param(0, marks=pytest.mark.soak_only, id="rank-0"), pytest.param(2, id="another-node")]
)
def test_preemption_loses_no_step_and_the_job_grows_back(run: Run, priority: str, index: int) -> None:
    submit(run)
    node = node_of(run, index)
    container = {
        "name": "urgent", "image": "localhost/nowhere:1", "imagePullPolicy": "Never",
        "resources": {"limits": {GPU: "2"}},
    }  # fmt: skip
    spec = {
        "priorityClassName": priority,
        "nodeSelector": {"kubernetes.io/hostname": node},
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
    }
    meta = {"name": "urgent", "namespace": run.namespace}
    run.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    status = trains(run, 2, 2)
    assert_nothing_was_lost(status, "PodTerminating")
    assert "PreemptionByScheduler" in status["recoveries"][0]["message"]
    run.cluster.kubectl("delete", "pod", "urgent", "-n", run.namespace)
    assert_nothing_was_lost(trains(run, 3, 3), "PodTerminating", "CapacityReturned")


def test_an_eviction_waits_unless_the_budget_is_switched_off_and_then_loses_no_step(run: Run) -> None:
    submit(run)
    (pod,) = [item["metadata"]["name"] for item in run.workers() if item["metadata"]["labels"][INDEX] == "1"]
    budget = run.cluster.get("poddisruptionbudget", "gpt-a1", "-n", run.namespace)
    assert budget["spec"]["minAvailable"] == 3
    run.cluster.wait(
        lambda: (
            run.cluster.get("poddisruptionbudget", "gpt-a1", "-n", run.namespace)["status"].get("currentHealthy") == 3
        ),
        what="the disruption controller",
    )
    assert "violate the pod's disruption budget" in evict(run, pod)
    run.patch(recovery={"podDisruptionBudget": False})
    run.cluster.kubectl("annotate", "etj", "gpt", "-n", run.namespace, "elastictraining.dev/drain-requested=1")
    trains(run, 2, 3)
    assert budgets(run) == []
    (pod,) = [item["metadata"]["name"] for item in run.workers() if item["metadata"]["labels"][INDEX] == "1"]
    assert evict(run, pod) == ""
    status = trains(run, 3, 3)
    assert_nothing_was_lost(status, "ManualDrain", "PodTerminating")
    assert "EvictionByEvictionAPI" in status["recoveries"][1]["message"]


@pytest.mark.soak_only
def test_a_child_job_that_someone_suspends_commits_first(run: Run) -> None:
    submit(run)
    run.cluster.kubectl(
        "patch", "job", "gpt-a1", "-n", run.namespace, "--type=merge", "-p", '{"spec":{"suspend":true}}'
    )
    status = trains(run, 2, 3)
    # The Job controller deletes the pods at once, so the operator may see either first.
    assert [item["cause"] for item in status["recoveries"]] in (["JobSuspended"], ["PodTerminating"])
    assert_nothing_was_lost(status, status["recoveries"][0]["cause"])
    run.cluster.wait(lambda: not run.cluster.get("job", "gpt-a1", "-n", run.namespace), what="the Job to go")


@pytest.mark.soak_only
def test_nothing_protects_the_pods_of_a_job_that_is_complete_or_suspended(run: Run) -> None:
    run.submit([*LIGHT, "1000000", NEVER, "0"])
    run.until_phase("Running")
    assert [item["metadata"]["name"] for item in budgets(run)] == ["gpt-a1"]
    run.patch(suspend=True)
    run.until_phase("Suspended")
    assert budgets(run) == []
    run.remove()
    run.submit([*LIGHT, "10", "0", "0"], checkpoint={"claimName": "ckpt", "path": "other", "intervalSeconds": 1000})
    run.until_phase("Complete")
    run.cluster.wait(lambda: budgets(run) == [], what="the budget to go")
