"""`elastic-operator run`: wires the parts together and serves until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

import kopf
from lightkube import AsyncClient
from lightkube.config.kubeconfig import KubeConfig

from elastic_operator import probes
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.diagnostics import Diagnostics
from elastic_operator.cluster.handlers import make_registry
from elastic_operator.cluster.informer import Informer
from elastic_operator.cluster.leader_election import LOST, Leader
from elastic_operator.cluster.own_account import own_account
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.shutdown import end, heed_at_the_end
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.cluster.watch_stream import connect
from elastic_operator.cluster.writer import ClusterWriter
from elastic_operator.controller import JobController
from elastic_operator.logs import configure_logging
from elastic_operator.manifests.forbidden_accounts import Boundary
from elastic_operator.metrics import exporter
from elastic_operator.settings import Settings, read

NODE_LEASE_SECONDS = 5.0
"""How often the kubelets' Leases are read."""

FIRST_LISTS_SECONDS = 120.0
"""How long the first look at a job waits until everything has been listed once, and is watched."""

logger = logging.getLogger(__name__)


def main() -> int:
    """Entry point."""
    settings = read(sys.argv[1:])
    configure_logging(settings)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(settings))
    return 0


async def serve(settings: Settings) -> None:
    """Become the leader, then watch, decide and act until a signal comes."""
    config = KubeConfig.from_file(settings.kubeconfig) if settings.kubeconfig else KubeConfig.from_service_account()
    client = AsyncClient(config=config, trust_env=False)
    stop, started = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    leader = None
    if settings.leader_election:
        leader = Leader(client, settings.lease_namespace, settings.identity, name=settings.lease_name)
    exporter.serve(settings.metrics_port, leads=lambda: leader is None or leader.standing.leading)
    if settings.health_port:
        pages = {
            "/healthz": lambda: probes.liveness(leader.standing if leader is not None else None),
            "/readyz": lambda: probes.readiness(
                leader.standing if leader is not None else None, started=started.is_set()
            ),
        }
        await probes.serve(settings.health_port, pages)
    try:
        if leader is None or await _unless_stopped(stop, leader.acquire()):
            await _work(settings, client, leader, stop, started)
    finally:
        if leader is not None and leader.standing.leading:
            await leader.release()
        await client.close()
        asyncio.get_running_loop().set_exception_handler(heed_at_the_end)


async def _work(
    settings: Settings, client: AsyncClient, leader: Leader | None, stop: asyncio.Event, started: asyncio.Event
) -> None:
    """Watch, decide and act as the leader."""
    nodes, renewals = NodeCache(settings.unhealthy_nodes), RenewalCache()
    remembered = ClusterStore(nodes, renewals, settings.namespaces)
    observer = ClusterReader(client, nodes, renewals, remembered, settings.namespaces)
    fence = leader.must_lead if leader is not None else lambda: None
    applier = ClusterWriter(client, observer, fence)
    boundary = Boundary(
        account=await own_account(client, settings.pod_account),
        allows_own_namespace=settings.allow_own_namespace,
        lease_name=settings.lease_name,
    )
    inquiries = Diagnostics(client, applier)
    workers = JobController(observer, applier, inquiries, settings.limits, settings.reshard_image, boundary=boundary)
    remembered.listener = workers
    background = [_in_background(leader.hold(), "leader")] if leader is not None else []
    http = connect(client.config)
    try:
        await observer.refresh_node_leases()
        await observer.list_starts()
        background += [_in_background(mirror.follow(http), str(mirror.source)) for mirror in remembered.world]
        await _begun(remembered.world, stop)
        background.append(_in_background(_keep_looking(observer, workers), "nodes"))
        await kopf.operator(
            registry=make_registry(settings, remembered),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=stop,
            ready_flag=started,
        )
    finally:
        await workers.stop()
        await end(background)
        await http.aclose()


async def _begun(mirrors: Sequence[Informer], stop: asyncio.Event) -> None:
    """Wait until everything is listed and watched: before, every job would be looked at by requests of its own.

    That is better than never, so after a while it has to do.
    """
    all_begun = asyncio.gather(*(mirror.begun.wait() for mirror in mirrors))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_unless_stopped(stop, all_begun), timeout=FIRST_LISTS_SECONDS)


def _in_background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run `work` beside everything else. It never ends by itself: if it fails, so does the process, at once."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.critical("task %r ended: exiting at once", name, exc_info=task.exception())
            os._exit(LOST)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


async def _keep_looking(observer: ClusterReader, workers: JobController) -> None:
    """Poll what is not worth a watch: the kubelets' Leases, which change hundreds of times a second."""
    while True:
        await asyncio.sleep(NODE_LEASE_SECONDS)
        try:
            await observer.refresh_node_leases()
        except Exception as error:
            # The next round tries again; the workers' own looks at the cluster report persistent trouble.
            logger.warning("reading the nodes' Leases failed: %s", error)
            continue
        for node in observer.stale_nodes():
            workers.wake_node(node)


async def _unless_stopped(stop: asyncio.Event, work: Awaitable[Any]) -> bool:
    """Run `work` to its end; False if the process was told to stop first."""
    task, stopped = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        return False
    await task
    return True
