"""A store of what the watches deliver: views of every job's objects and of all nodes, and the accelerator usage.

The store is sufficient to see that a job needs no action. Actions are decided from a fresh read
(`ClusterReader.observe`), because a watch may lag or be interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from elastic_operator.api.claim_path import Start
from elastic_operator.api.spec import SpecError
from elastic_operator.client.resources import JOB, LEASE, LIVE, NODE, POD, WORKLOAD, ResourceKind
from elastic_operator.cluster import unreadable_objects
from elastic_operator.cluster.caches import DeletedPods, NodeCache, RenewalCache
from elastic_operator.cluster.informer import Id, Informer
from elastic_operator.cluster.watch_stream import Object, WatchedCollection, is_older_version
from elastic_operator.observed.observation import (
    JobView,
    Key,
    LeaseView,
    Observation,
    PodView,
)
from elastic_operator.observed.ownership import select_own_jobs, select_own_leases, select_own_pods
from elastic_operator.observed.pending_starts import find_start, read_folder
from elastic_operator.observed.pod_usage import PodUsage
from elastic_operator.observed.queueing.workloads import WorkloadView, workload_view
from elastic_operator.reconcile.record import Record, read_record
from reshard.contract import Label

OURS = str(Label.JOB)
"""Label selector of objects that belong to a job."""

OTHERS = f"!{Label.JOB}"

_T = TypeVar("_T")


class ObjectsByJob(Generic[_T]):
    """Views of objects of one kind by the job to which the objects belong."""

    def __init__(self, view: Callable[[Object], _T]) -> None:
        self._view = view
        self._views: dict[Key, dict[str, _T]] = {}
        self._owners: dict[Id, Key] = {}

    def __len__(self) -> int:
        """Return the number of jobs that have objects."""
        return len(self._views)

    def get(self, key: Key) -> Sequence[_T]:
        """Return the views of one job's objects."""
        return tuple(self._views.get(key, {}).values())

    def all(self) -> dict[Key, tuple[_T, ...]]:
        """Return the views of all objects by job."""
        return {key: tuple(views.values()) for key, views in self._views.items()}

    def put(self, item: Object) -> bool:
        """Store one object; return whether its view changed."""
        meta = item["metadata"]
        key, view = (meta["namespace"], meta["labels"][OURS]), self._view(item)
        if self._owners.setdefault((meta["namespace"], meta["name"]), key) != key:
            self.drop((meta["namespace"], meta["name"]))
            self._owners[meta["namespace"], meta["name"]] = key
        views = self._views.setdefault(key, {})
        if views.get(meta["name"]) == view:
            return False
        views[meta["name"]] = view
        return True

    def find(self, name: Id) -> _T | None:
        """Return the view of one object, None if the object is unknown."""
        key = self._owners.get(name)
        return None if key is None else self._views[key].get(name[1])

    def drop(self, name: Id) -> Key | None:
        """Remove one object; return the job to which it belonged, or None if the object was unknown."""
        key = self._owners.pop(name, None)
        if key is not None:
            self._views[key].pop(name[1], None)
            if not self._views[key]:
                del self._views[key]
        return key


class Listener(Protocol):
    """Receives changes of the store."""

    def wake(self, key: Key) -> None:
        """Handle a change of a job or of one of its objects."""

    def node_changed(self, name: str) -> None:
        """Handle a new, changed or deleted node."""

    def lease_changed(self, key: Key, lease: Mapping[str, Any]) -> None:
        """Handle a new or changed Lease of a job."""


class ClusterStore:
    """The stored views, and the informers that update them. kopf watches the job resources (`handlers`).

    Args:
        nodes: cache of nodes.
        renewals: cache of the times at which Leases changed.
        namespaces: the namespaces to serve; empty for all.

    Attributes:
        listener: receives every change; set before the watches begin.
        pod_usage: accelerator usage of all pods, including pods that belong to no job.
        informers: one for each watched collection.
        has_listed_resources: the job resources were listed once, so `pending_starts` is complete.
    """

    listener: Listener

    def __init__(self, nodes: NodeCache, renewals: RenewalCache, namespaces: Sequence[str] = ()) -> None:
        self.pod_usage = PodUsage()
        self._nodes = nodes
        self._renewals = renewals
        self._records: dict[Key, Record | None] = {}
        self._pending_starts: dict[Key, tuple[str, Start]] = {}
        self.has_listed_resources = False
        self._pods: ObjectsByJob[PodView] = ObjectsByJob(lambda pod: self._renewals.date_pod(pod, time.time()))
        self._deleted_pods = DeletedPods()
        self._jobs: ObjectsByJob[JobView] = ObjectsByJob(lambda job: self._renewals.date_job(job, time.time()))
        self._leases: ObjectsByJob[LeaseView] = ObjectsByJob(self._lease_view)
        self._workloads: ObjectsByJob[WorkloadView] = ObjectsByJob(workload_view)
        places = tuple(namespaces) or ("",)

        def make_informers(
            kind: Any, put: Callable[[Object], None], drop: Callable[[Id], None], labels: str
        ) -> list[Informer]:
            return [
                Informer(WatchedCollection(kind=kind, namespace=place, labels=labels), put, drop) for place in places
            ]

        nodes_informer = Informer(WatchedCollection(kind=NODE), self._put_node, self._drop_node, may_become_empty=False)
        self._nodes_informer = nodes_informer
        self.informers = [
            nodes_informer,
            *make_informers(JOB, self._put_job, self._drop_job, OURS),
            *make_informers(LEASE, self._put_lease, self._drop_lease, OURS),
            *make_informers(POD, self._put_pod, self._drop_pod, OURS),
        ]
        self._workload_informers = [
            Informer(
                WatchedCollection(kind=WORKLOAD, namespace=place, labels=OURS),
                self._put_workload,
                self._drop_workload,
                is_optional=True,
            )
            for place in places
        ]
        self.informers += self._workload_informers
        self._sees_all_pods = not namespaces
        if self._sees_all_pods:
            source = WatchedCollection(kind=POD, labels=OTHERS, fields=LIVE)
            self.informers.append(
                Informer(source, self.pod_usage.put, lambda pod: self.pod_usage.drop(pod, ours=False))
            )

    @property
    def is_live(self) -> bool:
        """True if every collection was listed and its watch is open."""
        return all(informer.is_live for informer in self.informers)

    @property
    def has_listed_nodes(self) -> bool:
        """True if the nodes were listed at least once."""
        return self._nodes_informer.has_listed

    @property
    def is_usage_current(self) -> bool:
        """True if `pod_usage` is complete and current.

        It never is if only some namespaces are served: pods of other namespaces are listed, but not watched.
        """
        return self._sees_all_pods and self.is_live

    def watched_version(self, kind: ResourceKind, namespace: str) -> str:
        """Return the version of the newest change of the jobs' objects of one kind; empty before the first list.

        It counts while the watch is interrupted, too: the API server that answers next may be one that lags behind.

        Args:
            kind: kind of the objects.
            namespace: namespace that the watch has to include.
        """
        for informer in self.informers:
            source = informer.source
            if source.kind == kind and source.labels == OURS and source.namespace in ("", namespace):
                return informer.version
        return ""

    def workloads(self, key: Key) -> Sequence[WorkloadView] | None:
        """Return the stored Workloads with the label of a job; None if the cluster has no Kueue."""
        is_served = any(informer.is_served for informer in self._workload_informers)
        return self._workloads.get(key) if is_served else None

    @property
    def num_jobs(self) -> int:
        """Lower bound of the number of jobs; at the start the resources arrive one by one, after their Jobs."""
        return max(len(self._records), len(self._jobs))

    def put_record(self, resource: Object, *, listed: bool = False) -> None:
        """Store a resource that is new or may have changed.

        A version older than the stored one is ignored: the answer to a write arrives before the event of the watch.

        Args:
            resource: the resource as the API server sent it.
            listed: the resource was just read, so it replaces any stored version. A restored API server may have
                restarted its versions.
        """
        meta = resource["metadata"]
        key = (meta["namespace"], meta["name"])
        before = self._records.get(key)
        is_same = before is not None and before.job.uid == meta["uid"]
        version = meta.get("resourceVersion") or ""
        if before is not None and is_same and not listed and is_older_version(version, before.version):
            return
        try:
            self._records[key] = read_record(resource, before)
        except Exception as error:
            # The error concerns this resource only. The next pass reads the resource again and reports the error.
            unreadable_objects.report("elastictrainingjobs", key, meta.get("resourceVersion") or "", error)
            self._records[key] = None
        self._put_pending_start(key, self._records[key], resource)
        if before is None or self._records[key] != before:
            self.listener.wake(key)

    def drop_record(self, key: Id, uid: str) -> None:
        """Remove a deleted resource and wake its job, unless another resource of its name is already stored."""
        record = self._records.get(key)
        if record is None or record.job.uid == uid:
            self.forget(key)
            self.listener.wake(key)

    def forget(self, key: Id) -> None:
        """Remove a resource without notifying the listener."""
        self._records.pop(key, None)
        self._pending_starts.pop(key, None)
        self._nodes.date_shortages(key, (), 0.0)

    def pending_starts(self, key: Key) -> frozenset[Start] | None:
        """Return the other jobs of the namespace that are about to start from a folder.

        Returns None until all resources were listed once, because kopf delivers them one by one at the start.
        """
        if not self.has_listed_resources:
            return None
        starts = self._pending_starts.items()
        return frozenset(start for other, (_, start) in starts if other != key and other[0] == key[0])

    def _put_pending_start(self, key: Key, record: Record | None, resource: Object) -> None:
        """Store what a job is about to start from.

        A rejected edit and an unreadable resource end no conversion, so the folder of the last valid spec stays.
        """
        uid, before = self._pending_starts.pop(key, ("", None))
        if uid != resource["metadata"]["uid"]:
            before = None
        if record is None:
            start = before
        elif not isinstance(record.spec, SpecError):
            checkpoint = record.spec.checkpoint
            start = find_start(key[1], checkpoint.claim_name, checkpoint.start_from, record.status)
        else:
            claim, folder = (before.claim, before.folder) if before is not None else read_folder(resource["spec"])
            start = find_start(key[1], claim, folder, record.status)
        if start is not None:
            self._pending_starts[key] = (resource["metadata"]["uid"], start)

    def put_pending_starts(self, resources: Iterable[Object]) -> None:
        """Store the folders from which all resources will start, before the first pass."""
        for resource in resources:
            meta = resource["metadata"]
            try:
                self._put_pending_start((meta["namespace"], meta["name"]), read_record(resource), resource)
            except Exception as error:
                unreadable_objects.report("elastictrainingjobs", (meta["namespace"], meta["name"]), "", error)
        self.has_listed_resources = True

    def last_record(self, key: Key) -> Record | None:
        """Return the stored record of a job, or None."""
        return self._records.get(key)

    def all_records(self) -> dict[Key, Record | None]:
        """Return the stored records of all jobs; None for a resource that could not be read."""
        return dict(self._records)

    def all_pods(self) -> dict[Key, tuple[PodView, ...]]:
        """Return the pods with a job's label, by job; not all of them belong to it (`observed.ownership`)."""
        return self._pods.all()

    def all_jobs(self) -> dict[Key, tuple[JobView, ...]]:
        """Return the Jobs with a job's label, by job; not all of them belong to it."""
        return self._jobs.all()

    def records_in(self, namespace: str) -> list[Record]:
        """Return the stored records of all jobs in a namespace."""
        return [record for key, record in self._records.items() if key[0] == namespace and record is not None]

    def deleted_pods(self, key: Key) -> tuple[PodView, ...]:
        """Return pods with a job's label that had failed and were deleted a short while ago."""
        return self._deleted_pods.get(key, time.monotonic())

    def live_record(self, key: Key) -> Record | None:
        """Return the stored record of a job; None if it is unknown or the watches are not live."""
        return self.last_record(key) if self.is_live else None

    def observe(self, key: Key, resource: str) -> Observation:
        """Return the stored observation of one job, without its objects if the job is unknown.

        `used` of the observation is meaningful only while `is_usage_current` is True.
        """
        record = self.last_record(key)
        if record is None:
            return Observation(nodes=self._nodes.pool(resource), capacity_fresh=self.is_usage_current)
        job_uids = record.status.job_uids
        jobs = select_own_jobs(self._jobs.get(key), record.job)
        uids = {job.uid for job in jobs} | set(job_uids)
        pods = select_own_pods(self._pods.get(key), key[1], uids)
        now = time.time()
        return Observation(
            nodes=self._nodes.views_for(resource, pods),
            pods=pods,
            deleted_pods=select_own_pods(self.deleted_pods(key), key[1], uids),
            jobs=jobs,
            leases=select_own_leases(self._leases.get(key), record.job),
            used=self.pod_usage.by_others(uids, resource),
            capacity_fresh=self.is_usage_current,
            evidence_since=self._nodes.evidence_since(now),
            is_widespread=self._nodes.has_widespread_failure(),
            is_hold_over=self._nodes.is_hold_over(now),
            removed=dict(self._nodes.removed),
            starts=self.pending_starts(key),
        )

    def _lease_view(self, lease: Object) -> LeaseView:
        return self._renewals.date_lease(lease, time.time())

    def _put_node(self, node: Object) -> None:
        if self._nodes.update(node, time.time()):
            self.listener.node_changed(node["metadata"]["name"])

    def _drop_node(self, node: Id) -> None:
        self._nodes.remove(node[1], time.time())
        self.listener.node_changed(node[1])

    def _put_job(self, job: Object) -> None:
        if self._jobs.put(job):
            self._wake(_owner(job))

    def _drop_job(self, job: Id) -> None:
        self._renewals.forget(*job)
        self._wake(self._jobs.drop(job))

    def _put_pod(self, pod: Object) -> None:
        self.pod_usage.put(pod)
        if self._pods.put(pod):
            self._wake(_owner(pod))

    def _drop_pod(self, pod: Id) -> None:
        self.pod_usage.drop(pod, ours=True)
        self._renewals.forget(*pod)
        view, key = self._pods.find(pod), self._pods.drop(pod)
        if view is not None and key is not None:
            self._deleted_pods.keep(key, view, time.monotonic())
        self._wake(key)

    def _put_lease(self, lease: Object) -> None:
        self._leases.put(lease)
        if _owner(lease) in self._records:
            self.listener.lease_changed(_owner(lease), lease)

    def _drop_lease(self, lease: Id) -> None:
        self._renewals.forget(*lease)
        self._wake(self._leases.drop(lease))

    def _put_workload(self, workload: Object) -> None:
        if self._workloads.put(workload):
            self._wake(_owner(workload))

    def _drop_workload(self, workload: Id) -> None:
        self._wake(self._workloads.drop(workload))

    def _wake(self, key: Key | None) -> None:
        """Notify the listener of a change; a job that is not known yet gets a pass when its resource arrives."""
        if key in self._records:
            self.listener.wake(key)


def _owner(item: Object) -> Key:
    meta = item["metadata"]
    return meta["namespace"], meta["labels"][OURS]
