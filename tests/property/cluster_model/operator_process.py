"""The operator under test, without its HTTP calls: caches, views, `decide`, and the actions as the writer does them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from elastic_operator.api.serialization import format_time, parse_time, to_wire
from elastic_operator.api.spec import Spec, parse_spec
from elastic_operator.api.status import Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.observed.commit_history import format_released
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.ownership import (
    select_own_jobs,
    select_own_leases,
    select_own_pods,
    select_predecessors,
)
from elastic_operator.observed.pod_usage import PodUsage
from elastic_operator.observed.queueing.workloads import QueueView, select_own_workloads
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import (
    Create,
    Decision,
    DeleteJob,
    DeletePod,
    DeleteWorkload,
    LaunchAttempt,
    PatchWorkload,
    ReleaseCommits,
    RequestDrain,
    RequestStop,
    RevokeAttempt,
)
from elastic_operator.reconcile.decide import UNSETTLED, decide
from reshard.contract import LeaseKey, Request
from tests.property.cluster_model import kueue
from tests.property.cluster_model.cluster import GPU, NODES, UID, Cluster, owner_of

POLL_SECONDS = 5.0
_OBJECTS = ("PodDisruptionBudget", "RoleBinding", "Role", "ServiceAccount", "Service", "Lease")


class CrashError(Exception):
    """The operator dies here."""


class RetryError(Exception):
    """The API server or a last check has refused a write; the next pass reads again."""


class OperatorProcess:
    """One process of the operator; after a crash another one takes its place.

    Args:
        cluster: what it observes and changes.
        on_launch: called with each training Job before it is created.

    Attributes:
        wake_time: when it looks again if nothing happens before.
        seen_version: version of the cluster that the last pass has read.
    """

    def __init__(self, cluster: Cluster, on_launch: Callable[[dict[str, Any]], None]) -> None:
        self._cluster = cluster
        self._on_launch = on_launch
        self._nodes, self._renewals, self._usage = NodeCache(), RenewalCache(), PodUsage()
        self._counted: set[str] = set()
        self._spec: tuple[int, Spec] | None = None
        self.wake_time = 0.0
        self.seen_version = -1
        self.poll()

    def poll(self) -> None:
        """List the kubelets' Leases, as the operator does every few seconds."""
        cluster = self._cluster
        if not cluster.reaches_api("operator"):
            return
        for name in NODES:
            since = cluster.lost_since.get(name, cluster.killed.get(name, cluster.now))
            meta = {"name": name}
            renewed = format_time(min(since, cluster.now) + cluster.skews[name])
            lease = {"metadata": meta, "spec": {"renewTime": renewed, "leaseDurationSeconds": 40}}
            self._nodes.renew(lease, cluster.now)
        self._nodes.mark_polled(cluster.now)

    @property
    def is_due(self) -> bool:
        """True if something has changed since the last pass, or its time to look again has come."""
        return self._cluster.version != self.seen_version or self._cluster.now >= self.wake_time

    def observe(self, status: Status) -> Observation:
        """Return what the operator sees of the job."""
        cluster, job = self._cluster, self._cluster.job
        for node in cluster.nodes.values():
            self._nodes.update(node, cluster.now)
        self._count_usage()
        all_jobs = [self._renewals.date_job(item, cluster.now) for item in cluster.jobs()]
        jobs = select_own_jobs(all_jobs, job)
        uids = {item.uid for item in jobs} | set(status.job_uids)
        dated = (self._renewals.date_pod(pod, cluster.now) for pod in cluster.pods.values())
        pods = select_own_pods(dated, job.name, uids)
        leases = [item for (kind, _), item in cluster.objects.items() if kind == "Lease"]
        return Observation(
            nodes=self._nodes.views_for(GPU, pods),
            pods=pods,
            jobs=jobs,
            leases=select_own_leases((self._renewals.date_lease(item, cluster.now) for item in leases), job),
            used=self._usage.by_others(uids, GPU),
            evidence_since=self._nodes.evidence_since(cluster.now),
            is_widespread=self._nodes.has_widespread_failure(),
            queue=self._observe_queue(),
        )

    def _count_usage(self) -> None:
        for name in self._counted - self._cluster.pods.keys():
            self._usage.drop(("ns", name), ours=True)
        for pod in self._cluster.pods.values():
            self._usage.put(pod)
        self._counted = set(self._cluster.pods)

    def _observe_queue(self) -> QueueView | None:
        if self._cluster.quota is None:
            return None
        return QueueView(workloads=select_own_workloads(kueue.views(self._cluster), UID))

    def run_pass(self, status: Status, crash_after: int | None = None) -> Status:
        """Read, decide, write, act; return the status that is stored then.

        Args:
            status: the stored status.
            crash_after: number of writes after which the operator dies; None for never.

        Raises:
            CrashError: the operator has died.
        """
        cluster = self._cluster
        self.seen_version = cluster.version
        world = self.observe(status)
        decision = decide(cluster.job, self._read_spec(), status, world, limits=Timeouts(), now=cluster.now)
        assert not decision.needs_fresh_capacity
        assert not [event for event in decision.events if event.reason == UNSETTLED], "every decision settles"
        self.wake_time = cluster.now + decision.requeue_seconds
        num_writes = 0

        def count() -> None:
            nonlocal num_writes
            if crash_after is not None and num_writes >= crash_after:
                raise CrashError
            num_writes += 1

        count()
        if decision.status != status:
            cluster.status = to_wire(decision.status)
        self._act(decision, count)
        return decision.status

    def _read_spec(self) -> Spec:
        generation = self._cluster.generation
        if self._spec is None or self._spec[0] != generation:
            self._spec = (generation, parse_spec(self._cluster.spec))
        return self._spec[1]

    def _act(self, decision: Decision, count: Callable[[], None]) -> None:
        try:
            for action in decision.actions:
                self._execute(action, count)
        except RetryError:
            self.wake_time = self._cluster.now + 1.0

    def _execute(self, action: Any, count: Callable[[], None]) -> None:
        cluster = self._cluster
        match action:
            case Create(manifest=manifest):
                count()
                self._create(dict(manifest))
            case LaunchAttempt():
                self._launch(action, count)
            case DeleteJob(name=name, uid=uid):
                count()
                self._delete("Job", name, uid)
            case DeleteWorkload(name=name, uid=uid):
                count()
                self._delete("Workload", name, uid)
            case PatchWorkload(name=name, uid=uid, version=version, changes=changes):
                count()
                if not kueue.patch(cluster, name, uid, version, changes):
                    raise RetryError
            case DeletePod(name=name, uid=uid, grace_seconds=seconds):
                count()
                self._delete_pod(name, uid, seconds)
            case RevokeAttempt(name=name, owner=owner):
                for kind in _OBJECTS:
                    count()
                    item = cluster.objects.get((kind, name))
                    if item is not None and owner_of(item) == owner:
                        self._delete(kind, name, item["metadata"]["uid"])
            case RequestDrain(lease=name, uid=uid):
                count()
                self._annotate(name, uid, LeaseKey.REQUEST, Request.DRAIN)
            case RequestStop(lease=name, uid=uid):
                count()
                self._annotate(name, uid, LeaseKey.REQUEST, Request.STOP)
            case ReleaseCommits(lease=name, uid=uid, names=names):
                count()
                self._annotate(name, uid, LeaseKey.RELEASED, format_released(names))
            case _:
                raise AssertionError(f"an action that the model does not know: {action}")

    def _launch(self, action: LaunchAttempt, count: Callable[[], None]) -> None:
        """Create the objects of an attempt unless a pod of an older one, or of a predecessor, may run."""
        cluster, job = self._cluster, action.job
        dated = [self._renewals.date_pod(pod, cluster.now) for pod in cluster.pods.values()]
        all_jobs = [self._renewals.date_job(item, cluster.now) for item in cluster.jobs()]
        jobs = select_own_jobs(all_jobs, job)
        uids = {item.uid for item in jobs} | set(action.job_uids)
        for pod in select_own_pods(dated, job.name, uids):
            is_harmless = pod.terminal or pod.node in action.lost_nodes or pod.uid in action.stuck_pods
            if pod.role == "worker" and not is_harmless:
                raise RetryError
        if select_predecessors(dated, all_jobs, job, uids):
            cluster.effects["a launch waits for a predecessor's pods"] += 1
            raise RetryError
        for manifest in action.manifests:
            count()
            self._create(dict(manifest))

    def _create(self, manifest: dict[str, Any]) -> None:
        known = self._cluster.objects.get((manifest["kind"], manifest["metadata"]["name"]))
        if known is None:
            if manifest["kind"] == "Job" and "-reshard" not in manifest["metadata"]["name"]:
                self._on_launch(manifest)
            self._cluster.create(manifest)
        elif owner_of(known) != UID:
            self._cluster.effects["a predecessor has the name of an object"] += 1
            raise RetryError

    def _delete(self, kind: str, name: str, uid: str) -> None:
        item = self._cluster.objects.get((kind, name))
        if item is not None and item["metadata"]["uid"] == uid:
            del self._cluster.objects[kind, name]
            self._cluster.touch()

    def _delete_pod(self, name: str, uid: str, seconds: int) -> None:
        pod = self._cluster.pods.get(name)
        if pod is None or pod["metadata"]["uid"] != uid:
            return
        if seconds == 0:
            del self._cluster.pods[name]
            self._cluster.touch()
        else:
            self._cluster.delete_pod(pod, seconds)

    def _annotate(self, name: str, uid: str, key: LeaseKey, value: str) -> None:
        lease = self._cluster.objects.get(("Lease", name))
        if lease is not None and lease["metadata"]["uid"] == uid:
            lease["metadata"].setdefault("annotations", {})[str(key)] = str(value)
            self._cluster.touch()


def read_stored(wire: dict[str, Any]) -> Status:
    """Read a stored status as the next pass does; it must have no problem."""
    stored = read_status(json.loads(json.dumps(wire)))
    assert stored.problems == (), "the next pass can read the status"
    return stored.status


def deletion_time(pod: dict[str, Any]) -> float | None:
    """Return when a pod's grace period ends; None if it is not deleted."""
    return parse_time(pod["metadata"].get("deletionTimestamp"))
