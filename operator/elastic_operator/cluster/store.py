"""What the watches have told: every job's objects, all nodes and what their pods hold, as views and without requests.

Good enough to see that nothing is to be done. What is to be done is decided from a fresh look (`observe`): a watch may
lag, or be cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from elastic_operator.api.spec import SpecError
from elastic_operator.cluster import unreadable_objects
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.informer import Id, Informer
from elastic_operator.cluster.resources import JOB, LEASE, NODE, POD
from elastic_operator.cluster.watch_stream import Object, WatchedCollection
from elastic_operator.observed.observation import (
    JobView,
    Key,
    LeaseView,
    Observation,
    PodView,
    job_view,
    lease_view,
    pod_view,
)
from elastic_operator.observed.ownership import own_jobs, own_leases, own_pods
from elastic_operator.observed.pod_usage import PodUsage
from elastic_operator.reconcile.record import Record, read_record
from reshard.contract import Label

OURS = str(Label.JOB)
"""Label selector of what belongs to some job."""

OTHERS = f"!{Label.JOB}"
LIVE = "status.phase!=Succeeded,status.phase!=Failed"

_T = TypeVar("_T")


class ObjectsByJob(Generic[_T]):
    """Views of one kind, by the job that their objects belong to."""

    def __init__(self, view: Callable[[Object], _T]) -> None:
        self._view = view
        self._views: dict[Key, dict[str, _T]] = {}
        self._owners: dict[Id, Key] = {}

    def __len__(self) -> int:
        """Number of jobs that have objects."""
        return len(self._views)

    def of(self, key: Key) -> Sequence[_T]:
        """Views of one job's objects."""
        return tuple(self._views.get(key, {}).values())

    def put(self, item: Object) -> bool:
        """Take up one object; True if its view has changed."""
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

    def drop(self, name: Id) -> Key | None:
        """Forget one object; the job that it belonged to, None if it was not known."""
        key = self._owners.pop(name, None)
        if key is not None:
            self._views[key].pop(name[1], None)
            if not self._views[key]:
                del self._views[key]
        return key


class Listener(Protocol):
    """Who wants to know what has changed."""

    def wake(self, key: Key) -> None:
        """Something of a job has changed."""

    def node_changed(self, name: str) -> None:
        """A node has changed, come or gone."""

    def heartbeat(self, key: Key, lease: Mapping[str, Any]) -> None:
        """A Lease of a job has come or changed."""


class ClusterStore:
    """All that is remembered, and the watches that keep it true, but for the resources themselves, which kopf watches.

    Args:
        namespaces: the only ones served; empty for all.

    Attributes:
        listener: is told of every change; set before the watches begin.
        held: what is remembered of pods, whoever they belong to.
    """

    listener: Listener

    def __init__(self, nodes: NodeCache, renewals: RenewalCache, namespaces: Sequence[str] = ()) -> None:
        self.held = PodUsage()
        self._nodes = nodes
        self._renewals = renewals
        self._records: dict[Key, Record | None] = {}
        self._starts: dict[Key, tuple[str, str]] = {}
        self.lists_all_resources = False
        self._pods: ObjectsByJob[PodView] = ObjectsByJob(pod_view)
        self._jobs: ObjectsByJob[JobView] = ObjectsByJob(job_view)
        self._leases: ObjectsByJob[LeaseView] = ObjectsByJob(self._lease_view)
        places = tuple(namespaces) or ("",)

        def mirrors(
            kind: Any, put: Callable[[Object], None], drop: Callable[[Id], None], labels: str
        ) -> list[Informer]:
            return [
                Informer(WatchedCollection(kind=kind, namespace=place, labels=labels), put, drop) for place in places
            ]

        self.world = [
            Informer(WatchedCollection(kind=NODE), self._put_node, self._drop_node),
            *mirrors(JOB, self._put_job, self._drop_job, OURS),
            *mirrors(LEASE, self._put_lease, self._drop_lease, OURS),
            *mirrors(POD, self._put_pod, self._drop_pod, OURS),
        ]
        self._sees_all_pods = not namespaces
        if self._sees_all_pods:
            source = WatchedCollection(kind=POD, labels=OTHERS, fields=LIVE)
            self.world.append(Informer(source, self.held.put, lambda pod: self.held.drop(pod, ours=False)))

    @property
    def live(self) -> bool:
        """Everything has been listed and is being watched."""
        return all(mirror.live for mirror in self.world)

    @property
    def knows_held(self) -> bool:
        """`held` is true now. Where single namespaces are served, pods elsewhere may be listed, but not watched."""
        return self._sees_all_pods and self.live

    @property
    def num_jobs(self) -> int:
        """So many there are at least. The resources themselves come one after another at the start."""
        return max(len(self._records), len(self._jobs))

    def put_record(self, resource: Object, *, listed: bool = False) -> None:
        """Take up a resource, which may have changed.

        What is older than what is remembered is passed over: the answer to a write is here before the watch tells of
        it. `listed`: it is so now, whatever its version, which a restored API server may have begun again.
        """
        meta = resource["metadata"]
        key = (meta["namespace"], meta["name"])
        before = self._records.get(key)
        if before is not None and before.job.uid == meta["uid"] and not listed and _precedes(meta, before.version):
            return
        try:
            self._records[key] = read_record(resource, before)
        except Exception as error:
            # Whatever is wrong with it is wrong with this one alone; the fresh look says it again.
            unreadable_objects.tell("elastictrainingjobs", key, meta.get("resourceVersion") or "", error)
            self._records[key] = None
        self._remember_start(key, self._records[key])
        if before is None or self._records[key] != before:
            self.listener.wake(key)

    def drop_record(self, key: Id, uid: str) -> None:
        """Forget a resource that is gone, unless another of its name is there already."""
        known = self._records.get(key)
        if known is None or known.job.uid == uid:
            self.forget(key)
            self.listener.wake(key)

    def forget(self, key: Id) -> None:
        """The same, where whoever cares knows it."""
        self._records.pop(key, None)
        self._starts.pop(key, None)

    def starts(self, key: Key) -> frozenset[tuple[str, str]] | None:
        """Claims, each with a folder in it, that other jobs of a job's namespace are about to start from.

        None until all resources have been listed once: they are told one after another at the start.
        """
        if not self.lists_all_resources:
            return None
        return frozenset(start for other, start in self._starts.items() if other != key and other[0] == key[0])

    def _remember_start(self, key: Key, record: Record | None) -> None:
        self._starts.pop(key, None)
        if record is None or isinstance(record.spec, SpecError):
            return
        checkpoint, status = record.spec.checkpoint, record.status
        again = status.current is not None and status.current.resume.external and not status.current.resume.ready
        if checkpoint.start_from and (again or status.started_from is None) and not status.terminal:
            self._starts[key] = (checkpoint.claim_name, checkpoint.start_from)

    def list_all(self, resources: Iterable[Object]) -> None:
        """Take up what all resources are about to start from, before the first pass."""
        for resource in resources:
            meta = resource["metadata"]
            try:
                self._remember_start((meta["namespace"], meta["name"]), read_record(resource))
            except Exception as error:
                unreadable_objects.tell("elastictrainingjobs", (meta["namespace"], meta["name"]), "", error)
        self.lists_all_resources = True

    def known(self, key: Key) -> Record | None:
        """A job as it was told last."""
        return self._records.get(key)

    def record(self, key: Key) -> Record | None:
        """A job, None where a fresh look is needed to know."""
        return self.known(key) if self.live else None

    def look(self, key: Key, resource: str) -> Observation:
        """What is remembered about one job; `used` counts only what `knows_held` says. Nothing of one not known."""
        record = self.known(key)
        if record is None:
            return Observation(nodes=self._nodes.offering(resource), capacity_fresh=self.knows_held)
        known = record.status.job_uids
        jobs = own_jobs(self._jobs.of(key), record.job)
        uids = {job.uid for job in jobs} | set(known)
        pods = own_pods(self._pods.of(key), key[1], uids)
        return Observation(
            nodes=self._nodes.around(resource, pods),
            pods=pods,
            jobs=jobs,
            leases=own_leases(self._leases.of(key), record.job),
            used=self.held.by_others(uids, resource),
            capacity_fresh=self.knows_held,
            starts=self.starts(key),
        )

    def _lease_view(self, lease: Object) -> LeaseView:
        return lease_view(lease, self._renewals.of(lease, time.time()))

    def _put_node(self, node: Object) -> None:
        if self._nodes.update(node, time.time()):
            self.listener.node_changed(node["metadata"]["name"])

    def _drop_node(self, node: Id) -> None:
        self._nodes.remove(node[1])
        self.listener.node_changed(node[1])

    def _put_job(self, job: Object) -> None:
        if self._jobs.put(job):
            self._woken(_owner(job))

    def _drop_job(self, job: Id) -> None:
        self._woken(self._jobs.drop(job))

    def _put_pod(self, pod: Object) -> None:
        self.held.put(pod)
        if self._pods.put(pod):
            self._woken(_owner(pod))

    def _drop_pod(self, pod: Id) -> None:
        self.held.drop(pod, ours=True)
        self._woken(self._pods.drop(pod))

    def _put_lease(self, lease: Object) -> None:
        self._leases.put(lease)
        if _owner(lease) in self._records:
            self.listener.heartbeat(_owner(lease), lease)

    def _drop_lease(self, lease: Id) -> None:
        self._renewals.forget("/".join(lease))
        self._woken(self._leases.drop(lease))

    def _woken(self, key: Key | None) -> None:
        """Something of a job has changed; one that is not known yet is looked at when it is."""
        if key in self._records:
            self.listener.wake(key)


def _precedes(meta: Mapping[str, Any], version: str) -> bool:
    """An object's version is an earlier one; they are numbers (KEP-5504), and what is none is not compared."""
    own = meta.get("resourceVersion") or ""
    return own.isdigit() and version.isdigit() and int(own) < int(version)


def _owner(item: Object) -> Key:
    meta = item["metadata"]
    return meta["namespace"], meta["labels"][OURS]
