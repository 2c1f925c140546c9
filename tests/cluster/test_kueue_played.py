"""The real Kueue and the real operator beside a lone API server: what Kueue says, step by step, and what follows.

Job controller, kubelets and training are played (`PlayedCluster`), because only the exchange with Kueue counts here.
`test_kueue.py` has pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.credentials import read_kubeconfig
from elastic_operator.client.resources import JOB, LEASE, POD, TRAINING_JOB, ResourceKind
from elastic_operator.cluster.informer import Informer
from elastic_operator.cluster.watch_stream import WatchedCollection
from testbed import kueue
from testbed.kubectl import Kubectl
from tests.cluster.jobs import Operator, free_port
from tests.cluster.own_api_server import own_api_server
from tests.cluster.played_cluster import GPU, PlayedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.own_api_server]

ROOT = Path(__file__).parents[2]
API = "kueue.x-k8s.io/v1beta2"
TEAM = "team"
LABELS = {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "low"}
SECONDS = 60
QUICK = ("--stop-grace-seconds=0", "--heartbeat-seconds=1000", "--node-stable-seconds=0.05")
OTHER_NAMESPACES = {
    "matchExpressions": [
        {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", kueue.NAMESPACE]}
    ]
}
EVERY_JOB: Mapping[str, Any] = {
    "manageJobsWithoutQueueName": True,
    "managedJobsNamespaceSelector": OTHER_NAMESPACES,
    "integrations": {
        "frameworks": ["batch/job"],
        "externalFrameworks": ["ElasticTrainingJob.v1beta1.elastictraining.dev"],
    },
}
"""Kueue manages all Jobs, but not those of the kind (docs/queues.md)."""


class QueueingClient(KubernetesClient):
    """Puts the job of a `PlayedCluster` into a queue.

    Attributes:
        notes: annotations of the job's template.
    """

    notes: Mapping[str, str] = {}

    async def create(self, kind: ResourceKind, body: Mapping[str, Any], **params: str) -> dict[str, Any]:
        if kind == TRAINING_JOB:
            template = {**body["spec"]["template"], "metadata": {"annotations": dict(self.notes)}}
            spec = {**body["spec"], "template": template}
            body = {**body, "metadata": {**body["metadata"], "labels": LABELS}, "spec": spec}
        return await super().create(kind, body, **params)


class Stage:
    """A played cluster with one job in a queue, and Kueue."""

    def __init__(self, kubectl: Kubectl, played: PlayedCluster, *, is_topological: bool) -> None:
        self.kubectl, self.played, self.is_topological = kubectl, played, is_topological
        self.page_port = free_port()

    def set_quota(self, nodes: int, **spec: Any) -> None:
        """Give the ClusterQueue quota for this number of nodes with two GPUs each."""
        amounts = {GPU: 2 * nodes, "cpu": 100, "memory": "100Gi"}
        quota = [{"name": name, "nominalQuota": amount} for name, amount in amounts.items()]
        groups = [{"coveredResources": list(amounts), "flavors": [{"name": "f", "resources": quota}]}]
        self.kubectl.apply({
            "apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": "q"},
            "spec": {
                "namespaceSelector": {}, "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": groups, "stopPolicy": "None", **spec,
            },
        })  # fmt: skip

    def make_queues(self, nodes: int) -> None:
        """Create everything; nodes of the flavor are in two racks, the first two in one."""
        for number, name in enumerate(self.played.nodes):
            rack = "a" if number < 2 else "b"
            self.kubectl("label", "node", name, f"rack={rack}", f"kubernetes.io/hostname={name}", "pool=gpus")
        levels = [{"nodeLabel": "rack"}, {"nodeLabel": "kubernetes.io/hostname"}]
        flavor = {"nodeLabels": {"pool": "gpus"}, **({"topologyName": "racks"} if self.is_topological else {})}
        self.kubectl.apply(
            {"apiVersion": API, "kind": "Topology", "metadata": {"name": "racks"}, "spec": {"levels": levels}},
            {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "f"}, "spec": flavor},
        )
        for name, value in (("low", 10), ("high", 1000)):
            priority = {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": name}}
            self.kubectl.apply({**priority, "value": value})
        meta = {"name": "team", "namespace": TEAM}
        self.kubectl.apply({"apiVersion": API, "kind": "LocalQueue", "metadata": meta, "spec": {"clusterQueue": "q"}})
        self.set_quota(nodes)

    def ask_urgently(self) -> None:
        """Ask for one node with a higher priority."""
        limits = {"limits": {GPU: "2"}, "requests": {"cpu": "1"}}
        pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "a", "resources": limits}]}
        reference = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"}
        self.kubectl.apply({
            "apiVersion": API, "kind": "Workload", "metadata": {"name": "urgent", "namespace": TEAM},
            "spec": {
                "queueName": "team", "priority": 1000, "priorityClassRef": reference,
                "podSets": [{"name": "main", "count": 1, "template": {"spec": pod}}],
            },
        })  # fmt: skip

    def workloads(self) -> dict[str, dict[str, Any]]:
        items = self.kubectl.get("workloads.kueue.x-k8s.io", "-n", TEAM).get("items", [])
        return {item["metadata"]["name"]: item for item in items}

    def delete(self, *workloads: str) -> None:
        self.kubectl("delete", "workloads.kueue.x-k8s.io", *workloads, "-n", TEAM)

    def is_true(self, name: str, condition: str) -> bool:
        found = self.workloads().get(name, {}).get("status", {}).get("conditions", [])
        return any(item["type"] == condition and item["status"] == "True" for item in found)

    def assigned(self, name: str) -> int:
        (pods,) = self.workloads()[name]["status"]["admission"]["podSetAssignments"]
        return int(pods["count"])

    def runs(self, attempt: int, nodes: int) -> bool:
        status = self.played.status
        found = status.get("attempt"), status.get("phase"), status.get("replicas")
        return found == (attempt, "Running", nodes)

    async def until(self, what: str, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + SECONDS
        while not await asyncio.to_thread(condition):
            status = dict(self.played.status)
            assert time.monotonic() < deadline, f"waited {SECONDS} s for {what}; {status}; {self.workloads()}"
            await asyncio.sleep(0.2)

    def read_page(self, path: str) -> str:
        """Read a page of the operator's status page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.page_port}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    def told(self) -> list[tuple[str, bool, int]]:
        """Cause, whether it was planned, and lost steps of every recovery and pause."""
        status = self.played.status
        changes = [*status.get("recoveries", []), *status.get("pauses", [])]
        changes.sort(key=lambda item: int(item["fromAttempt"]))
        return [(item["cause"], item.get("planned", False), item.get("lostSteps", 0)) for item in changes]


@contextlib.asynccontextmanager
async def _stage(config: Path, folder: Path, nodes: int, notes: Mapping[str, str]) -> AsyncIterator[Stage]:
    credentials = read_kubeconfig([config], None, {})
    client, watches = QueueingClient(credentials), KubernetesClient(credentials, max_connections=0)
    client.notes = notes
    played = PlayedCluster(client, TEAM)
    stage = Stage(Kubectl(config), played, is_topological=bool(notes))
    labels = "elastictraining.dev/job-name"
    sources = (
        WatchedCollection(kind=JOB, namespace=TEAM, labels=labels),
        WatchedCollection(kind=POD, namespace=TEAM, labels=labels),
        WatchedCollection(kind=LEASE, namespace=TEAM, labels=labels),
        WatchedCollection(kind=TRAINING_JOB, namespace=TEAM),
    )

    def follower(source: WatchedCollection) -> Informer:
        def put(item: Mapping[str, Any]) -> None:
            played.put(source.plural, dict(item))

        return Informer(source, put, lambda name: played.drop(source.plural, name[1]))

    await played.create()
    tasks = [asyncio.create_task(follower(source).follow(watches)) for source in sources]
    tasks.append(asyncio.create_task(played.run()))
    stage.make_queues(nodes)
    log = folder / "operator.log"
    operator = Operator(
        config, TEAM, log, "--no-leader-election", f"--status-page-port={stage.page_port}", *QUICK
    )  # fmt: skip
    try:
        yield stage
    finally:
        operator.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
        await watches.close()
        print(log.read_text()[-8000:])


def play(
    folder: Path,
    nodes: int,
    story: Callable[[Stage], Any],
    configuration: Mapping[str, Any] | None = None,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Let a story happen in a cluster with Kueue and quota for this number of nodes.

    Args:
        folder: for logs and keys.
        nodes: number of nodes of the quota.
        story: what happens.
        configuration: fields of Kueue's configuration.
        notes: annotations of the job's template; with any, the flavor has a topology.
    """

    async def run(config: Path) -> None:
        async with _stage(config, folder, nodes, notes or {}) as stage:
            await story(stage)
            assert stage.played.problems == []

    with own_api_server() as kubectl:
        with kueue.beside(kubectl.kubeconfig, folder, **(configuration or {})):
            asyncio.run(run(kubectl.kubeconfig))
        kueue.remove(kubectl)
        kinds = [item["metadata"]["name"] for item in kubectl.get("crd")["items"]]
        assert kinds == ["elastictrainingjobs.elastictraining.dev"]


async def _grow_and_be_preempted(stage: Stage) -> None:
    await stage.until("a start on two nodes", lambda: stage.runs(1, 2))
    await stage.until("a request for the third", lambda: "gpt-q2" in stage.workloads())
    stage.set_quota(3)
    await stage.until("the growth", lambda: stage.runs(2, 3))
    await stage.until("the old Workload to go", lambda: list(stage.workloads()) == ["gpt-q2"])
    stage.ask_urgently()
    await stage.until("the preemptor to be admitted", lambda: stage.is_true("urgent", "Admitted"))
    await stage.until("the job on two nodes", lambda: stage.runs(3, 2))
    stage.delete("urgent")
    await stage.until("the job on three nodes", lambda: stage.runs(4, 3))
    planned = [("CapacityReturned", True, 0), ("QueueEviction", True, 0), ("CapacityReturned", True, 0)]
    assert stage.told() == planned
    await stage.played.lose_node()
    await stage.until("the rest of the nodes", lambda: stage.runs(5, 2))
    assert stage.told() == [*planned, ("NodeNotReady", False, 0)]
    (name,) = stage.workloads()
    assert (stage.assigned(name), stage.is_true(name, "Admitted")) == (3, True)
    assert stage.played.status.get("restartBudget", {}).get("used", 0) == 0
    # The same operator serves its status page, which is at most two seconds behind.
    await stage.until("the page to show the job", lambda: "3. NodeNotReady" in stage.read_page(f"/jobs/{TEAM}/gpt"))
    fleet = stage.read_page("/")
    assert f'<a href="jobs/{TEAM}/gpt">{TEAM}/gpt</a>' in fleet
    assert "NodeNotReady, lost " in fleet
    assert f"{TEAM}/gpt</a> attempt 5, pod 0" in fleet


def test_growth_and_preemption_lose_no_step_and_no_budget_and_a_lost_node_keeps_the_quota(tmp_path: Path) -> None:
    play(tmp_path, 2, _grow_and_be_preempted)


async def _stop_and_go(stage: Stage) -> None:
    await stage.until("a start", lambda: stage.runs(1, 3))
    assert not any(
        "kueue" in label for job in stage.played.objects["jobs"].values() for label in job["metadata"]["labels"]
    )
    await stage.until("the start to be told", lambda: stage.is_true("gpt-q1", "PodsReady"))
    stage.delete("gpt-q1")
    await stage.until("another Workload", lambda: stage.is_true("gpt-q1", "Admitted"))
    assert stage.runs(1, 3)
    stage.set_quota(3, stopPolicy="HoldAndDrain")
    await stage.until("the job to wait", lambda: stage.played.status.get("phase") == "Waiting")
    await stage.until("the quota to be released", lambda: not stage.is_true("gpt-q1", "QuotaReserved"))
    assert not stage.played.objects["jobs"]
    stage.set_quota(3)
    await stage.until("the job to go on", lambda: stage.runs(2, 3))
    assert stage.told() == [("QueueEviction", True, 0)]


def test_a_stopped_queue_and_a_deleted_workload_where_kueue_manages_every_job_of_other_kinds(tmp_path: Path) -> None:
    play(tmp_path, 3, _stop_and_go, EVERY_JOB)


async def _stay_in_a_rack(stage: Stage) -> None:
    await stage.until("a start in the larger rack", lambda: stage.runs(1, 2))
    (pods,) = stage.workloads()["gpt-q1"]["spec"]["podSets"]
    assert pods["topologyRequest"]["required"] == "rack"
    (job,) = stage.played.objects["jobs"].values()
    affinity = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (expression,) = term["matchExpressions"]
    assert expression == {"key": "kubernetes.io/hostname", "operator": "In", "values": stage.played.nodes[:2]}


def test_a_job_that_requires_one_rack_runs_on_the_nodes_that_kueue_assigns_there(tmp_path: Path) -> None:
    play(tmp_path, 3, _stay_in_a_rack, notes={"kueue.x-k8s.io/podset-required-topology": "rack"})
