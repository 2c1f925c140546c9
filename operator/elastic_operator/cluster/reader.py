"""Reads the cluster: a fresh look at one job's objects, and shared looks at nodes and at accelerators in use."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

from lightkube import AsyncClient
from lightkube.core.exceptions import ApiError
from lightkube.operators import exists

from elastic_operator.api.spec import Spec, SpecError
from elastic_operator.cluster import unreadable_objects
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.request_coalescer import RequestCoalescer
from elastic_operator.cluster.resources import JOB, LEASE, LIVE, POD, REVISION, TRAINING_JOB
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.observed.observation import (
    JobView,
    Key,
    Observation,
    PodView,
    job_view,
    lease_view,
    pod_view,
)
from elastic_operator.observed.ownership import own_jobs, own_leases, own_pods, predecessors_pods
from elastic_operator.observed.pod_usage import PodUsage
from elastic_operator.reconcile import effective_spec
from elastic_operator.reconcile.record import Record
from reshard.contract import Label

NODE_LEASES = "kube-node-lease"

FRESH_SECONDS = 1.0
"""A look at the accelerators in use that is not older counts as fresh."""

SECOND_OPINION_SECONDS = 1.0
"""A look at the kubelets' Leases that is not older will do where a node is not Ready."""

USED_SECONDS = 10.0
"""How old the accelerators in use may be where nothing is about to be planned."""

_CHUNK = 500

_T = TypeVar("_T")


class ClusterReader:
    """All reading. Holds caches, decides nothing."""

    def __init__(
        self,
        client: AsyncClient,
        nodes: NodeCache,
        renewals: RenewalCache,
        remembered: ClusterStore,
        namespaces: Sequence[str],
    ) -> None:
        self._client = client
        self._nodes = nodes
        self._renewals = renewals
        self._remembered = remembered
        self._namespaces = tuple(namespaces) or ("*",)
        self._training_jobs: RequestCoalescer[dict[str, Any] | None] = RequestCoalescer(
            self._one_training_job, self._all_training_jobs, _none
        )
        self._pods: RequestCoalescer[tuple[PodView, ...]] = RequestCoalescer(self._pods_of, self._all_pods, tuple)
        self._jobs: RequestCoalescer[tuple[JobView, ...]] = RequestCoalescer(self._jobs_of, self._all_jobs, tuple)
        self._leases: RequestCoalescer[tuple[Mapping[str, Any], ...]] = RequestCoalescer(
            self._leases_of, self._all_leases, tuple
        )
        self._used = PodUsage()
        self._used_at = 0.0
        self._used_lock = asyncio.Lock()
        self._leases_lock = asyncio.Lock()

    @property
    def num_jobs(self) -> int:
        """So many jobs there are at least."""
        return self._remembered.num_jobs

    async def training_job(self, namespace: str, name: str) -> dict[str, Any] | None:
        """A fresh copy of the resource, None if it does not exist."""
        return await self._training_jobs.get((namespace, name))

    def is_gone(self, key: Key, since: Record | None) -> bool:
        """Forget a resource that a look has not found; False if another of its name has come since the look began.

        Args:
            since: what was `known` when it began.
        """
        if self._remembered.known(key) is not since:
            return False
        self._remembered.forget(key)
        return True

    def known(self, key: Key) -> Record | None:
        """What was told of a resource, live or not."""
        return self._remembered.known(key)

    def read(self, resource: Mapping[str, Any], since: Record | None) -> None:
        """Remember what a look has found, whatever its version, unless more was told since the look began."""
        meta = resource["metadata"]
        if since is not None and self._remembered.known((meta["namespace"], meta["name"])) is since:
            self._remembered.put_record(resource, listed=True)

    async def recall(self, namespace: str, job: str) -> tuple[Record, Observation | None] | None:
        """What is remembered about one job, without requests; None where only a fresh look will do.

        There is no world where the spec names no resource.
        """
        key = (namespace, job)
        record = self._remembered.record(key)
        if record is None or record.deleting or record.problems:
            return None
        if isinstance(record.spec, SpecError):
            return record, None
        resource = record.spec.accelerator.resource
        await self._refresh_used(USED_SECONDS)
        world = self._remembered.look(key, resource)
        if any(world.nodes[pod.node].ready != "True" for pod in world.pods if pod.node and pod.node in world.nodes):
            return None  # a node that looks lost deserves a second opinion at once: see `look`
        if self._remembered.knows_held:
            return record, world
        return record, dataclasses.replace(world, used=self._used_by_others(record, world.jobs, resource))

    def wrote(self, resource: Mapping[str, Any]) -> None:
        """Remember what the API has answered to a write of a resource's status, unless another has taken its place."""
        meta = resource["metadata"]
        known = self._remembered.known((meta["namespace"], meta["name"]))
        if known is not None and known.job.uid == meta["uid"]:
            self._remembered.put_record(resource)

    async def revisions(self, namespace: str, job: str) -> list[Mapping[str, Any]]:
        """All specs that are kept of one job, straight from the API."""
        return [item async for item in self._list(REVISION, namespace, job)]

    async def accepted_spec(self, namespace: str, job: str, uid: str) -> Spec | None:
        """The spec that was kept last; None where there is none, or where it may not be read."""
        try:
            return effective_spec.newest(await self.revisions(namespace, job), uid)
        except ApiError as error:
            if error.status.code == HTTPStatus.FORBIDDEN:
                return None
            raise

    async def own_pods(self, job: JobRef, known: Collection[str]) -> tuple[tuple[PodView, ...], list[PodView]]:
        """A resource's own pods, straight from the API, and those that an earlier one of its name has left.

        Args:
            known: UIDs of its Jobs that were seen before.
        """
        # Pods first: whatever made one of them is then on the list of Jobs, or was known before.
        found = await self._pods_of((job.namespace, job.name))
        jobs = own_jobs(await self._jobs_of((job.namespace, job.name)), job)
        uids = {item.uid for item in jobs} | set(known)
        return own_pods(found, job.name, uids), predecessors_pods(found, job, uids)

    async def look(self, record: Record, resource: str, *, fresh: bool) -> Observation:
        """Everything about one job. `fresh`: read the accelerators in use again."""
        key = (record.job.namespace, record.job.name)
        found, every_job, leases, _ = await asyncio.gather(
            self._pods.get(key),
            self._jobs.get(key),
            self._leases.get(key),
            self._refresh_used(FRESH_SECONDS if fresh else USED_SECONDS),
        )
        jobs = own_jobs(every_job, record.job)
        pods = own_pods(found, key[1], {item.uid for item in jobs} | set(record.status.job_uids))
        nodes = self._nodes.views()
        if any(nodes[pod.node].ready != "True" for pod in pods if pod.node and pod.node in nodes):
            # A second opinion about a node that looks lost, at once.
            await self.refresh_node_leases(max_age_seconds=SECOND_OPINION_SECONDS)
        now = time.time()
        views = [lease_view(item, self._renewals.of(item, now)) for item in leases]
        return Observation(
            nodes=self._nodes.around(resource, pods),
            pods=pods,
            jobs=jobs,
            leases=own_leases(views, record.job),
            used=self._used_by_others(record, jobs, resource),
            capacity_fresh=fresh or self._remembered.knows_held or now - self._used_at <= FRESH_SECONDS,
            starts=self._remembered.starts(key),
        )

    async def list_starts(self) -> None:
        """Read once which jobs are about to start from a folder of another one: until then no commit is released."""
        try:
            found = await self._all_training_jobs()
        except ApiError as error:
            if error.status.code != HTTPStatus.NOT_FOUND:  # the kind is not there yet, and so no job is
                raise
            found = {}
        self._remembered.list_all([item for item in found.values() if item is not None])

    async def refresh_node_leases(self, *, max_age_seconds: float = 0.0) -> None:
        """List all kubelets' Leases, if the last look is older: one request, whatever the number of jobs."""
        async with self._leases_lock:
            now = time.time()
            if now - self._nodes.polled_at <= max_age_seconds:
                return
            async for item in self._client.list(LEASE, namespace=NODE_LEASES, chunk_size=_CHUNK):
                _read("leases", item, lambda lease: self._nodes.renew(lease, time.time()))
            self._nodes.polled(now)

    def stale_nodes(self) -> list[str]:
        """Nodes whose kubelet has not renewed its Lease for suspiciously long; `signals` judges them."""
        return [
            name
            for name, node in self._nodes.views().items()
            if node.lease_age_seconds is not None and node.lease_age_seconds > node.lease_duration_seconds / 2
        ]

    async def _one_training_job(self, key: Key) -> dict[str, Any] | None:
        try:
            return dict(await self._client.get(TRAINING_JOB, key[1], namespace=key[0]))
        except ApiError as error:
            if error.status.code == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def _all_training_jobs(self) -> dict[Key, dict[str, Any] | None]:
        return {
            (item["metadata"]["namespace"], item["metadata"]["name"]): dict(item)
            async for item in self._list(TRAINING_JOB)
        }

    async def _pods_of(self, key: Key) -> tuple[PodView, ...]:
        return _readable("pods", [item async for item in self._list(POD, *key)], pod_view)

    async def _all_pods(self) -> dict[Key, tuple[PodView, ...]]:
        return await self._by_job(POD, "pods", pod_view)

    async def _jobs_of(self, key: Key) -> tuple[JobView, ...]:
        return _readable("jobs", [item async for item in self._list(JOB, *key)], job_view)

    async def _all_jobs(self) -> dict[Key, tuple[JobView, ...]]:
        return await self._by_job(JOB, "jobs", job_view)

    async def _leases_of(self, key: Key) -> tuple[Mapping[str, Any], ...]:
        return _readable("leases", [item async for item in self._list(LEASE, *key)], _checked_lease)

    async def _all_leases(self) -> dict[Key, tuple[Mapping[str, Any], ...]]:
        return await self._by_job(LEASE, "leases", _checked_lease)

    async def _by_job(
        self, kind: Any, plural: str, view: Callable[[Mapping[str, Any]], _T]
    ) -> dict[Key, tuple[_T, ...]]:
        found: dict[Key, list[_T]] = {}
        async for item in self._list(kind, labels={str(Label.JOB): exists()}):
            meta = item["metadata"]
            views = found.setdefault((meta["namespace"], meta["labels"][Label.JOB]), [])
            views += _readable(plural, [item], view)
        return {key: tuple(items) for key, items in found.items()}

    async def _list(
        self, kind: Any, namespace: str = "", job: str = "", labels: dict[str, Any] | None = None
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Objects of one job, or of all that are served, in chunks: as raw objects they need tens of megabytes."""
        labels = {str(Label.JOB): job} if job else labels
        for place in (namespace,) if namespace else self._namespaces:
            async for item in self._client.list(kind, namespace=place, labels=labels, chunk_size=_CHUNK):
                yield item

    async def _refresh_used(self, max_age: float) -> None:
        """Read what pods hold again, where it is not watched and the last look is older."""
        if self._remembered.knows_held:
            return
        async with self._used_lock:
            if time.time() - self._used_at > max_age:
                used = PodUsage()
                # One at a time: all pods of a large cluster at once are hundreds of megabytes.
                async for item in self._client.list(POD, namespace="*", fields=LIVE, chunk_size=_CHUNK):
                    _read("pods", item, used.put)
                self._used, self._used_at = used, time.time()

    def _used_by_others(self, record: Record, jobs: Iterable[JobView], resource: str) -> Mapping[str, int]:
        """Accelerators in use, as they were read last, without those of a resource's own Jobs."""
        held = self._remembered.held if self._remembered.knows_held else self._used
        return held.by_others({job.uid for job in jobs} | set(record.status.job_uids), resource)


def _none() -> None:
    return None


def _read(plural: str, item: Mapping[str, Any], view: Callable[[Mapping[str, Any]], _T]) -> _T | None:
    """The view of one object; None for one that cannot be read, which is told and concerns no other."""
    try:
        return view(item)
    except Exception as error:
        meta = item["metadata"]
        unreadable_objects.tell(
            plural, (meta.get("namespace") or "", meta["name"]), meta.get("resourceVersion") or "", error
        )
        return None


def _readable(
    plural: str, items: Iterable[Mapping[str, Any]], view: Callable[[Mapping[str, Any]], _T]
) -> tuple[_T, ...]:
    """Views of those objects that can be read."""
    views = (_read(plural, item, view) for item in items)
    return tuple(found for found in views if found is not None)


def _checked_lease(lease: Mapping[str, Any]) -> Mapping[str, Any]:
    """The Lease itself: when it was renewed is only known once it is looked at. Raises where it cannot be read."""
    lease_view(lease, None)
    return lease
