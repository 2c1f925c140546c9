"""Reads the cluster: a fresh look at one job's objects, and shared looks at nodes and at accelerators in use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from lightkube import AsyncClient
from lightkube.core.exceptions import ApiError
from lightkube.operators import not_in

from elastic_operator.caches import Nodes, Renewals
from elastic_operator.held import Held, add_held, held_by_others
from elastic_operator.observation import Observation, attempt_of, job_view, lease_view, pod_view
from elastic_operator.resources import JOB, LEASE, NODE, POD, TRAINING_JOB
from reshard.contract import Label

NODE_LEASES = "kube-node-lease"

LIVE: dict[str, Any] = {"status.phase": not_in(["Succeeded", "Failed"])}
"""Field selector of pods that hold what they asked for."""

FRESH_SECONDS = 1.0
"""A look at the accelerators in use that is not older counts as fresh."""

SECOND_OPINION_SECONDS = 1.0
"""A look at the kubelets' Leases that is not older will do where a node is not Ready."""

USED_SECONDS = 10.0
"""How old the accelerators in use may be where nothing is about to be planned."""


class Observer:
    """All reading. Holds caches, decides nothing."""

    def __init__(self, client: AsyncClient, nodes: Nodes) -> None:
        self._client = client
        self._nodes = nodes
        self._renewals = Renewals()
        self._used: Held = {}
        self._used_at = 0.0
        self._used_lock = asyncio.Lock()
        self._leases_lock = asyncio.Lock()

    async def training_job(self, namespace: str, name: str) -> dict[str, Any] | None:
        """A fresh copy of the resource, None if it does not exist."""
        try:
            return dict(await self._client.get(TRAINING_JOB, name, namespace=namespace))
        except ApiError as error:
            if error.status.code == 404:
                return None
            raise

    async def pods(self, namespace: str, job: str) -> list[Mapping[str, Any]]:
        """All pods of one job, straight from the API."""
        return [item async for item in self._client.list(POD, namespace=namespace, labels=_labels(job))]

    async def look(self, namespace: str, job: str, resource: str, *, fresh: bool) -> Observation:
        """Everything about one job. `fresh`: read the accelerators in use again."""
        pods, jobs, leases, used = await asyncio.gather(
            self.pods(namespace, job),
            self._list(JOB, namespace, job),
            self._list(LEASE, namespace, job),
            self._used_by_others(namespace, job, resource, FRESH_SECONDS if fresh else USED_SECONDS),
        )
        held = {name for item in pods if (name := (item.get("spec") or {}).get("nodeName"))}
        nodes = self._nodes.views()
        if any(name in nodes and nodes[name].ready != "True" for name in held):
            # A second opinion about a node that looks lost, at once.
            await self.refresh_node_leases(max_age_seconds=SECOND_OPINION_SECONDS)
        now = time.time()
        nodes = self._nodes.views()
        views = [
            lease_view(
                item,
                self._renewals.seen(
                    f"{namespace}/{item['metadata']['name']}", (item.get("spec") or {}).get("renewTime") or "", now
                ),
            )
            for item in leases
        ]
        return Observation(
            nodes={**self._nodes.offering(resource), **{name: nodes[name] for name in held if name in nodes}},
            pods=tuple(pod_view(item) for item in pods),
            jobs=tuple(job_view(item) for item in jobs),
            leases={attempt_of(item["metadata"]): view for item, view in zip(leases, views, strict=True)},
            used=used,
            capacity_fresh=fresh or now - self._used_at <= FRESH_SECONDS,
        )

    async def refresh_nodes(self) -> None:
        """List all nodes: at the start, and now and then to drop ghosts."""
        items = [item async for item in self._client.list(NODE, chunk_size=500)]
        self._nodes.refresh(items, time.time())

    async def refresh_node_leases(self, *, max_age_seconds: float = 0.0) -> None:
        """List all kubelets' Leases, if the last look is older: one request, whatever the number of jobs."""
        async with self._leases_lock:
            now = time.time()
            if now - self._nodes.polled_at <= max_age_seconds:
                return
            async for item in self._client.list(LEASE, namespace=NODE_LEASES, chunk_size=500):
                self._nodes.renew(item, time.time())
            self._nodes.polled(now)

    def stale_nodes(self) -> list[str]:
        """Nodes whose kubelet has not renewed its Lease for suspiciously long; `signals` judges them."""
        return [
            name
            for name, node in self._nodes.views().items()
            if node.lease_age_seconds is not None and node.lease_age_seconds > node.lease_duration_seconds / 2
        ]

    async def _list(self, kind: Any, namespace: str, job: str) -> list[Mapping[str, Any]]:
        return [item async for item in self._client.list(kind, namespace=namespace, labels=_labels(job))]

    async def _used_by_others(self, namespace: str, job: str, resource: str, max_age: float) -> dict[str, int]:
        async with self._used_lock:
            if time.time() - self._used_at > max_age:
                used: Held = {}
                # One at a time: all pods of a large cluster at once are hundreds of megabytes.
                async for item in self._client.list(POD, namespace="*", fields=LIVE, chunk_size=500):
                    add_held(used, item)
                self._used, self._used_at = used, time.time()
        return held_by_others(self._used, namespace, job, resource)


def _labels(job: str) -> dict[str, Any]:
    return {str(Label.JOB): job}
