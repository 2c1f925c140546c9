"""Reads the cluster: fresh reads of one job's objects, and shared reads of nodes and of accelerators in use."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

from elastic_operator.api.spec import Spec, SpecError
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import AnswerError, ApiError, RequestError
from elastic_operator.client.resources import (
    JOB,
    LEASE,
    LIVE,
    POD,
    PRIORITY_CLASS,
    REVISION,
    TRAINING_JOB,
    WORKLOAD,
    ResourceKind,
    make_selectors,
)
from elastic_operator.cluster import unreadable_objects
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.contention.waiting_jobs import PriorityClasses, read_priority_classes
from elastic_operator.cluster.queue_reader import QueueReader, is_in_queue, refused_view
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.cluster.volume_reader import VolumeReader
from elastic_operator.cluster.watch_stream import is_older_version
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.observed.observation import (
    JobView,
    Key,
    NodeView,
    Observation,
    PodView,
    lease_view,
)
from elastic_operator.observed.ownership import (
    select_own_jobs,
    select_own_leases,
    select_own_pods,
    select_predecessors,
)
from elastic_operator.observed.pod_usage import PodUsage
from elastic_operator.observed.queueing.workloads import QueueView, workload_view
from elastic_operator.observed.signals import find_short_nodes
from elastic_operator.reconcile import effective_spec
from elastic_operator.reconcile.record import Record
from reshard.contract import Label

NODE_LEASES = "kube-node-lease"

FRESH_SECONDS = 1.0
"""Maximum age of the accelerator usage that counts as fresh."""

SECOND_OPINION_SECONDS = 1.0
"""Maximum age of the kubelets' Leases that a pass uses when a node is not Ready."""

USED_SECONDS = 10.0
"""Maximum age of the accelerator usage when no attempt is about to be planned."""

PRIORITY_SECONDS = 60.0
"""Maximum age of the values of the PriorityClasses, which are used only while several jobs wait."""

STALE_LIST_SECONDS = 60.0
"""Time for which lists that are older than the watch are refused. Then the versions of the API server must have
restarted: it was restored from a backup, and the watch has not noticed yet.
"""

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class NodesUnknownError(Exception):
    """The nodes are not known: without them every node of a job would count as deleted."""


class StaleListError(RequestError):
    """A list is older than what the watch of the same collection has delivered, so decisions would be made twice."""


class ClusterReader:
    """Reads everything that a pass needs, from the API server or from the store. Makes no decisions."""

    def __init__(
        self,
        client: KubernetesClient,
        nodes: NodeCache,
        renewals: RenewalCache,
        store: ClusterStore,
        namespaces: Sequence[str],
    ) -> None:
        self._client = client
        self._nodes = nodes
        self._renewals = renewals
        self._store = store
        self._namespaces = tuple(namespaces) or ("",)
        self._usage = PodUsage()
        self._usage_time = 0.0
        self._usage_lock = asyncio.Lock()
        self._leases_lock = asyncio.Lock()
        self._stale_since: dict[str, float] = {}
        self._priorities, self._priorities_time = PriorityClasses(), float("-inf")
        self._queue_reader = QueueReader(client)
        self._volume_reader = VolumeReader(client)

    @property
    def num_jobs(self) -> int:
        """Lower bound of the number of jobs."""
        return self._store.num_jobs

    async def training_job(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Read the resource from the API server; return None if it does not exist."""
        try:
            return await self._client.get(TRAINING_JOB, name, namespace=namespace)
        except ApiError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            raise

    def forget_if_gone(self, key: Key, since: Record | None) -> bool:
        """Remove a resource that a read did not find from the store.

        Returns False, and removes nothing, if the store received another version since the read began.

        Args:
            key: namespace and name of the resource.
            since: the `last_record` before the read.
        """
        if self._store.last_record(key) is not since:
            return False
        self._store.forget(key)
        return True

    def last_record(self, key: Key) -> Record | None:
        """Return the stored record of a resource, even if the watches are not live."""
        return self._store.last_record(key)

    def other_jobs(self, job: JobRef) -> list[Record]:
        """Return the stored records of the other jobs in the namespace of a job."""
        return [record for record in self._store.records_in(job.namespace) if record.job.uid != job.uid]

    async def priority_classes(self) -> PriorityClasses:
        """Read the PriorityClasses, at most every PRIORITY_SECONDS; without the right to, all jobs have priority 0."""
        now = time.monotonic()
        if now - self._priorities_time > PRIORITY_SECONDS:
            try:
                objects = [item async for item in self._client.list_objects(PRIORITY_CLASS)]
            except ApiError as error:
                if error.code != HTTPStatus.FORBIDDEN:
                    raise
                logger.warning(
                    "waiting jobs are ordered by age alone: %s; grant the operator list of priorityclasses", error
                )
                objects = []
            self._priorities, self._priorities_time = read_priority_classes(objects), now
        return self._priorities

    def store_resource(self, resource: Mapping[str, Any], since: Record | None) -> None:
        """Store a resource that was read, unless the store received another version since the read began.

        The version is not compared, because a restored API server may have restarted its versions.

        Args:
            resource: the resource as it was read.
            since: the `last_record` before the read.
        """
        meta = resource["metadata"]
        if since is not None and self._store.last_record((meta["namespace"], meta["name"])) is since:
            self._store.put_record(resource, listed=True)

    async def read_from_store(self, namespace: str, job: str) -> tuple[Record, Observation | None] | None:
        """Return the stored record and observation of one job, without requests for its objects.

        Returns None if a fresh read is needed. The observation is None if the spec is invalid.
        """
        key = (namespace, job)
        record = self._store.live_record(key)
        if record is None or record.deleting or record.problems:
            return None
        if isinstance(record.spec, SpecError):
            return record, None
        resource = record.spec.accelerator.resource
        await self._refresh_usage(USED_SECONDS)
        world = dataclasses.replace(
            self._store.observe(key, resource), volumes=self._volume_reader.known_claims(record)
        )
        if _may_be_lost(world.pods, world.nodes, record.status.attempt):
            return None  # `observe` reads the kubelets' Leases before a node counts as lost
        stored_workloads = self._store.workloads(key) if is_in_queue(record) else None
        if stored_workloads is not None:
            world = dataclasses.replace(world, queue=await self._queue_reader.view(record, stored_workloads))
        if not self._store.is_usage_current:
            world = dataclasses.replace(world, used=self._used_by_others(record, world.jobs, resource))
        return record, self._date_shortages(record, world, resource)

    def store_written(self, resource: Mapping[str, Any]) -> None:
        """Store the API server's answer to a status write, unless the resource was replaced by another one."""
        meta = resource["metadata"]
        record = self._store.last_record((meta["namespace"], meta["name"]))
        if record is not None and record.job.uid == meta["uid"]:
            self._store.put_record(resource)

    async def revisions(self, namespace: str, job: str) -> list[Mapping[str, Any]]:
        """Read the ControllerRevisions with the accepted specs of one job from the API server."""
        return [item async for item in self._list(REVISION, namespace, job)]

    async def accepted_spec(self, namespace: str, job: str, uid: str) -> Spec | None:
        """Read the last accepted spec; return None if there is none, or if the operator may not read revisions."""
        try:
            return effective_spec.read_newest_spec(await self.revisions(namespace, job), uid)
        except ApiError as error:
            if error.code == HTTPStatus.FORBIDDEN:
                return None
            raise

    async def own_pods(
        self, job: JobRef, known: Collection[str]
    ) -> tuple[tuple[PodView, ...], list[PodView | JobView]]:
        """Read a job's own pods, and what a deleted resource of the same name has left behind.

        Args:
            job: the resource.
            known: UIDs of its Jobs that were observed before.
        """
        # Pods first: the Job that created a pod is then on the list of Jobs, or was known before.
        all_pods = await self._pods_of((job.namespace, job.name))
        all_jobs = await self._jobs_of((job.namespace, job.name))
        uids = {item.uid for item in select_own_jobs(all_jobs, job)} | set(known)
        return select_own_pods(all_pods, job.name, uids), select_predecessors(all_pods, all_jobs, job, uids)

    async def observe(self, record: Record, resource: str, *, fresh: bool) -> Observation:
        """Read everything about one job.

        Args:
            record: the resource.
            resource: name of its accelerators.
            fresh: read the accelerator usage again if it is older than FRESH_SECONDS.

        Raises:
            NodesUnknownError: the nodes were never listed, or the list is empty although pods have nodes.
        """
        if not self._store.has_listed_nodes:
            raise NodesUnknownError("the nodes of the cluster could not be listed yet, so nothing is decided")
        key = (record.job.namespace, record.job.name)
        # Pods after Jobs: a Job fails after its pods, so a failed Job is not seen without the pod that says why.
        all_jobs, volumes, _ = await asyncio.gather(
            self._jobs_of(key),
            self._volume_reader.read_claims(record, fresh=fresh),
            self._refresh_usage(FRESH_SECONDS if fresh else USED_SECONDS),
        )
        all_pods = await self._pods_of(key)
        # Leases last: rank 0 reports on its Lease before it exits, so the report is there if the exit was seen.
        leases = await self._leases_of(key)
        jobs = select_own_jobs(all_jobs, record.job)
        uids = {item.uid for item in jobs} | set(record.status.job_uids)
        pods, there = select_own_pods(all_pods, key[1], uids), {pod.uid for pod in all_pods}
        deleted_pods = tuple(pod for pod in self._store.deleted_pods(key) if pod.uid not in there)
        nodes = self._nodes.views()
        if not nodes and any(pod.node for pod in pods):
            raise NodesUnknownError("pods have nodes, but the list of nodes is empty, so nothing is decided")
        if _may_be_lost(pods, nodes, record.status.attempt):
            # The node may be lost: its kubelet's Lease decides, so it is read now.
            await self.refresh_node_leases(max_age_seconds=SECOND_OPINION_SECONDS)
        now = time.time()
        views = [self._renewals.date_lease(item, now) for item in leases]
        world = Observation(
            nodes=self._nodes.views_for(resource, pods),
            pods=pods,
            deleted_pods=select_own_pods(deleted_pods, key[1], uids),
            jobs=jobs,
            leases=select_own_leases(views, record.job),
            used=self._used_by_others(record, jobs, resource),
            capacity_fresh=fresh or self._store.is_usage_current or now - self._usage_time <= FRESH_SECONDS,
            evidence_since=self._nodes.evidence_since(now),
            is_widespread=self._nodes.has_widespread_failure(),
            is_hold_over=self._nodes.is_hold_over(now),
            removed=dict(self._nodes.removed),
            starts=self._store.pending_starts(key),
            queue=await self._read_queue(record) if is_in_queue(record) else None,
            volumes=volumes,
        )
        return self._date_shortages(record, world, resource)

    def _date_shortages(self, record: Record, world: Observation, resource: str) -> Observation:
        """Add since when nodes of the job's pods offer fewer accelerators than their pods hold."""
        short = find_short_nodes(world, record.status.attempt, resource)
        dated = self._nodes.date_shortages((record.job.namespace, record.job.name), short, time.time())
        return dataclasses.replace(world, short_since=dated) if dated else world

    async def _read_queue(self, record: Record) -> QueueView | None:
        """Read what Kueue says about a job; None if the cluster has no Kueue."""
        try:
            items = [item async for item in self._list(WORKLOAD, record.job.namespace, record.job.name)]
        except AnswerError as error:
            return refused_view(error)
        return await self._queue_reader.view(record, _readable("workloads", items, workload_view))

    async def list_pending_starts(self) -> None:
        """List which jobs will start from a folder of another job; before this list no commit is released."""
        try:
            resources = [item async for item in self._list(TRAINING_JOB)]
        except ApiError as error:
            if error.code != HTTPStatus.NOT_FOUND:  # without the CRD there are no jobs
                raise
            resources = []
        self._store.put_pending_starts(resources)

    async def refresh_node_leases(self, *, max_age_seconds: float = 0.0) -> None:
        """List all kubelets' Leases, unless the last list is at most `max_age_seconds` old."""
        async with self._leases_lock:
            now = time.time()
            if now - self._nodes.polled_at <= max_age_seconds:
                return
            async for item in self._client.list_objects(LEASE, namespace=NODE_LEASES):
                _read("leases", item, lambda lease: self._nodes.renew(lease, time.time()))
            self._nodes.mark_polled(now, ended=time.time())

    def stale_nodes(self) -> list[str]:
        """Return the nodes whose Lease is older than half of its duration; `signals` decides whether they are lost."""
        return self._nodes.stale_nodes()

    async def _pods_of(self, key: Key) -> tuple[PodView, ...]:
        pods = [item async for item in self._list(POD, *key)]
        return _readable("pods", pods, lambda pod: self._renewals.date_pod(pod, time.time()))

    async def _jobs_of(self, key: Key) -> tuple[JobView, ...]:
        jobs = [item async for item in self._list(JOB, *key)]
        return _readable("jobs", jobs, lambda job: self._renewals.date_job(job, time.time()))

    async def _leases_of(self, key: Key) -> tuple[Mapping[str, Any], ...]:
        return _readable("leases", [item async for item in self._list(LEASE, *key)], _checked_lease)

    async def _list(self, kind: ResourceKind, namespace: str = "", job: str = "") -> AsyncIterator[dict[str, Any]]:
        """List the objects of one job, or of all served jobs.

        Raises:
            StaleListError: the list is older than what the watch had delivered before the request.
        """
        labels = f"{Label.JOB}={job}" if job else ""
        for place in (namespace,) if namespace else self._namespaces:
            watched = self._store.watched_version(kind, place)
            async for items, version in self._client.pages(kind.path(place), make_selectors(labels, "")):
                self._refuse_stale_list(kind.path(place), version, watched)
                for item in items:
                    yield item

    def _refuse_stale_list(self, path: str, version: str, watched: str) -> None:
        """Raise if a list is older than the watch; after STALE_LIST_SECONDS accept it."""
        if not is_older_version(version, watched):
            self._stale_since.pop(path, None)
            return
        now = time.monotonic()
        if now - self._stale_since.setdefault(path, now) < STALE_LIST_SECONDS:
            raise StaleListError(
                f"{path}: expected a list of version {watched} or newer, as the watch has delivered, found version "
                f"{version}: the answer is out of date; reading again"
            )

    async def _refresh_usage(self, max_age: float) -> None:
        """List the accelerator usage of all pods, if it is not watched and the last list is older than `max_age`."""
        if self._store.is_usage_current:
            return
        async with self._usage_lock:
            if time.time() - self._usage_time > max_age:
                usage = PodUsage()
                # Pods are added one by one: all pods of a large cluster need hundreds of megabytes.
                async for item in self._client.list_objects(POD, fields=LIVE):
                    _read("pods", item, usage.put)
                self._usage, self._usage_time = usage, time.time()

    def _used_by_others(self, record: Record, jobs: Iterable[JobView], resource: str) -> Mapping[str, int]:
        """Return the last known accelerator usage by node, without the pods of the job itself."""
        usage = self._store.pod_usage if self._store.is_usage_current else self._usage
        return usage.by_others({job.uid for job in jobs} | set(record.status.job_uids), resource)


def _may_be_lost(pods: Iterable[PodView], nodes: Mapping[str, NodeView], attempt: int) -> bool:
    """Return whether a node of a job's pods is not Ready. Pods kept for their logs do not count.

    Args:
        pods: pods of the job.
        nodes: nodes of the cluster.
        attempt: current attempt of the job.
    """
    return any(
        nodes[pod.node].ready != "True"
        for pod in pods
        if pod.node and pod.node in nodes and (not pod.terminal or pod.attempt == attempt)
    )


def _read(plural: str, item: Mapping[str, Any], view: Callable[[Mapping[str, Any]], _T]) -> _T | None:
    """Return the view of one object; report an object that cannot be read, and return None."""
    try:
        return view(item)
    except Exception as error:
        meta = item["metadata"]
        unreadable_objects.report(
            plural, (meta.get("namespace") or "", meta["name"]), meta.get("resourceVersion") or "", error
        )
        return None


def _readable(
    plural: str, items: Iterable[Mapping[str, Any]], view: Callable[[Mapping[str, Any]], _T]
) -> tuple[_T, ...]:
    """Return the views of the objects that can be read."""
    views = (_read(plural, item, view) for item in items)
    return tuple(read_view for read_view in views if read_view is not None)


def _checked_lease(lease: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the Lease if it can be read; raise otherwise.

    `observe` makes the view later, because the view needs the time at which the renewal was first seen.
    """
    lease_view(lease, None)
    return lease
