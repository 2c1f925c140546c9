"""Jobs in a queue of the real Kueue: partial quota, eviction, growth, recovery. No step and no budget is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from testbed import kueue
from testbed.errors import CannotRunHereError, TestbedError
from tests.cluster.conftest import Cluster
from tests.cluster.jobs import LIGHT, Run, victim

pytestmark = [pytest.mark.cluster, pytest.mark.soak_only]

GPU = "amd.com/gpu"
THREE_RANKS = "tests/golden/deepspeed-0.19.8/zero2-dp3/step-00000002"
TWO_RANKS = "tests/golden/deepspeed-0.19.8/bf16-dp2/step-00000002"
NEVER = "1000000"
"""Steps between commits: nothing is committed except on request."""
API = "kueue.x-k8s.io/v1beta2"
QUEUED_SECONDS = 20


@pytest.fixture(scope="module")
def manager(cluster: Cluster) -> Iterator[None]:
    """Kueue's manager, with two priorities."""
    if not cluster.is_testbed:
        pytest.skip("starts Kueue beside the API server: only on the test bed")
    try:
        kueue.ensure()
    except (CannotRunHereError, TestbedError) as error:
        pytest.skip(f"there is no Kueue: {error}")
    kueue.start()
    try:
        for name, value in (("high", 1000), ("low", 10)):
            priority = {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": name}}
            cluster.apply({**priority, "value": value})
        yield
    finally:
        kueue.stop()


class Queue:
    """A ClusterQueue for one namespace, with one flavor, and the LocalQueue `team` in front of it."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def make(self, nodes: int, **flavor: Any) -> None:
        """Create everything, with quota for this number of nodes with one GPU each."""
        name = self.namespace
        self.cluster.apply(
            {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": flavor},
            self._cluster_queue(nodes),
            {
                "apiVersion": API, "kind": "LocalQueue", "metadata": {"name": "team", "namespace": name},
                "spec": {"clusterQueue": name},
            },
        )  # fmt: skip

    def set_quota(self, nodes: int) -> None:
        self.cluster.apply(self._cluster_queue(nodes))

    def remove(self) -> None:
        kubectl = self.cluster.kubectl
        kubectl("delete", "workloads.kueue.x-k8s.io", "--all", "-n", self.namespace, "--wait=false", check=False)
        kubectl("delete", "localqueue", "team", "-n", self.namespace, "--wait=false", check=False)
        for kind in ("clusterqueue", "resourceflavor"):
            kubectl("delete", kind, self.namespace, "--wait=false", "--ignore-not-found", check=False)

    def _cluster_queue(self, nodes: int) -> dict[str, Any]:
        amounts = {GPU: nodes, "cpu": 100, "memory": "100Gi"}
        quota = [{"name": name, "nominalQuota": amount} for name, amount in amounts.items()]
        return {
            "apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": self.namespace},
            "spec": {
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [
                    {"coveredResources": list(amounts), "flavors": [{"name": self.namespace, "resources": quota}]},
                ],
            },
        }  # fmt: skip

    def workload(self, name: str) -> dict[str, Any]:
        return self.cluster.get("workloads.kueue.x-k8s.io", name, "-n", self.namespace)

    def is_true(self, name: str, condition: str) -> bool:
        found = self.workload(name).get("status", {}).get("conditions", [])
        return any(item["type"] == condition and item["status"] == "True" for item in found)

    def urgent(self, gpus: int = 2) -> None:
        """Ask for quota with a higher priority, as another team would."""
        pod = {"restartPolicy": "Never", "containers": [
            {"name": "main", "image": "a", "resources": {"limits": {GPU: "1"}, "requests": {"cpu": "1"}}},
        ]}  # fmt: skip
        self.cluster.apply({
            "apiVersion": API, "kind": "Workload", "metadata": {"name": "urgent", "namespace": self.namespace},
            "spec": {
                "queueName": "team", "priority": 1000,
                "priorityClassRef": {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"},
                "podSets": [{"name": "main", "count": gpus, "template": {"spec": pod}}],
            },
        })  # fmt: skip


@pytest.fixture
def queue(cluster: Cluster, manager: None, namespace: str) -> Iterator[Queue]:
    made = Queue(cluster, namespace)
    yield made
    made.remove()


def submit(run: Run, given: str = THREE_RANKS, **spec: Any) -> None:
    """Queue a light training for one GPU of each of up to three nodes, which commits only on request.

    Args:
        run: the job.
        given: what its first commit is a copy of; of as many ranks as the first attempt has.
        spec: other fields.
    """
    run.submit(
        [*LIGHT, "1000000", NEVER, "0", given, "carry"],
        labels={"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "low"},
        pod_spec={"terminationGracePeriodSeconds": 30},
        **{
            "accelerator": {"resource": GPU, "perNode": [1]},
            "nodes": {"min": 1, "max": 3},
            "parallelism": {"zeroStage": 2},
            "batch": {"globalSamples": 12, "microSamples": 2},
            "reshard": {"mode": "Materialize"},
            "recovery": {"scaleUpStableSeconds": 2},
            **spec,
        },
    )


def trains(run: Run, attempt: int, replicas: int) -> dict[str, Any]:
    """Wait until an attempt makes steps on that many nodes."""

    def has_stepped(status: dict[str, Any]) -> bool:
        step = status.get("progress", {}).get("step", 0)
        is_there = status.get("attempt") == attempt and status.get("phase") == "Running"
        return is_there and step > status["current"].get("resume", {}).get("step", 0)

    status = run.until(f"attempt {attempt}", has_stepped, 120)
    assert status["replicas"] == replicas
    return status


def jobs(run: Run) -> list[dict[str, Any]]:
    return list(run.cluster.get("jobs", "-n", run.namespace).get("items", []))


def condition(status: dict[str, Any]) -> tuple[str, str]:
    found = next(item for item in status["conditions"] if item["type"] == "QuotaReserved")
    return found["status"], found["message"]


def assert_nothing_was_lost(status: dict[str, Any], *causes: str) -> None:
    changes = [*status.get("recoveries", []), *status.get("pauses", [])]
    changes.sort(key=lambda item: int(item["fromAttempt"]))
    told = [(item["cause"], item.get("planned"), item.get("lostSteps", 0)) for item in changes]
    assert told == [(cause, True, 0) for cause in causes], json.dumps(changes, indent=1)
    assert status.get("restartBudget", {}).get("used", 0) == 0
    assert not status.get("failureCounts")


def test_a_job_waits_for_quota_without_a_job_or_a_budget_then_starts_once_on_the_flavors_nodes(
    queue: Queue, run: Run, testbed: Cluster
) -> None:
    testbed.kubectl("label", "node", "gpu-1", "gpu-2", "pool=a")
    try:
        queue.make(0, nodeLabels={"pool": "a"})
        submit(run)
        waiting = run.until(
            "the queue", lambda status: status.get("reason") == "Queued" and "quota" in status["message"]
        )
        assert waiting["phase"] == "Waiting"
        time.sleep(QUEUED_SECONDS)
        assert jobs(run) == []
        assert run.workers() == []
        assert run.status()["attempt"] == 0
        queue.set_quota(3)
        status = trains(run, 1, 2)  # quota for three nodes, two of them have the flavor's label
        assert condition(status)[0] == "True"
        assert len(jobs(run)) == 1
        assert {pod["spec"]["nodeName"] for pod in run.workers()} == {"gpu-1", "gpu-2"}
        assert not status.get("recoveries")
        assert status.get("restartBudget", {}).get("used", 0) == 0
    finally:
        testbed.kubectl("label", "node", "gpu-1", "gpu-2", "pool-")


def test_quota_for_two_of_three_nodes_trains_on_two_and_more_quota_lets_the_job_grow(queue: Queue, run: Run) -> None:
    queue.make(2)
    submit(run, TWO_RANKS, parallelism={"zeroStage": 1})
    status = trains(run, 1, 2)
    assert condition(status) == ("True", f"Workload gpt-q1 is admitted by ClusterQueue {run.namespace}: 2 of 3 nodes")
    run.cluster.wait(lambda: queue.workload("gpt-q2"), what="the request for a third node")
    assert not queue.is_true("gpt-q2", "QuotaReserved")
    assert not any("kueue" in label for job in jobs(run) for label in job["metadata"]["labels"])
    queue.set_quota(3)
    grown = trains(run, 2, 3)
    assert_nothing_was_lost(grown, "CapacityReturned")
    run.cluster.wait(lambda: not queue.workload("gpt-q1"), what="the replaced Workload to go")


def test_a_preemption_commits_before_the_pods_end_and_the_job_goes_on_when_quota_is_back(
    queue: Queue, run: Run
) -> None:
    queue.make(3)
    submit(run)
    before = trains(run, 1, 3)
    queue.urgent(2)
    run.cluster.wait(lambda: queue.is_true("urgent", "Admitted"), what="the preemptor to be admitted")
    # Its quota is that of the pods: none of the first attempt is left.
    assert {pod["metadata"]["labels"]["elastictraining.dev/attempt"] for pod in run.workers()} <= {"2"}
    small = trains(run, 2, 1)
    assert_nothing_was_lost(small, "QueueEviction")
    assert small["checkpoint"]["step"] >= before["progress"]["step"] - 1
    run.cluster.kubectl("delete", "workload", "urgent", "-n", run.namespace)
    grown = trains(run, 3, 3)
    assert_nothing_was_lost(grown, "QueueEviction", "CapacityReturned")


def test_the_quota_is_kept_through_the_loss_of_a_node(queue: Queue, run: Run, testbed: Cluster) -> None:
    queue.make(3)
    submit(run, recovery={"suspectSeconds": 3, "batchWindowSeconds": 1, "scaleUpStableSeconds": 600})
    trains(run, 1, 3)
    run.cluster.kubectl("annotate", "etj", "gpt", "-n", run.namespace, "elastictraining.dev/drain-requested=1")
    trains(run, 2, 3)  # from a commit
    testbed.kill_node(victim(run))
    status = trains(run, 3, 2)
    held = queue.workload("gpt-q1")
    assert held["status"]["admission"]["podSetAssignments"][0]["count"] == 3
    assert queue.is_true("gpt-q1", "Admitted")
    assert status.get("restartBudget", {}).get("used", 0) == 0


def test_a_suspended_job_gives_its_quota_to_others_and_gets_it_back(queue: Queue, run: Run) -> None:
    queue.make(3)
    submit(run)
    trains(run, 1, 3)
    run.patch(suspend=True)
    run.until_phase("Suspended")
    run.cluster.wait(lambda: not queue.is_true("gpt-q1", "QuotaReserved"), what="the quota to be released")
    assert queue.workload("gpt-q1")["spec"]["active"] is False
    run.patch(suspend=False)
    assert_nothing_was_lost(trains(run, 2, 3), "Suspended")
    # A job that has ended holds nothing.
    run.cluster.kubectl("delete", "etj", "gpt", "-n", run.namespace)
    run.cluster.wait(lambda: not queue.workload("gpt-q1"), what="the Workload to be collected")
