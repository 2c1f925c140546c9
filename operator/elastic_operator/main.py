"""Entry point of `elastic-operator run`: it connects the components and serves until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import kopf

from elastic_operator import probes
from elastic_operator.api.serialization import parse_time
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.credentials import Credentials, read_kubeconfig, service_account
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.diagnostics import Diagnostics
from elastic_operator.cluster.handlers import make_registry
from elastic_operator.cluster.informer import Informer
from elastic_operator.cluster.leader_election import EXIT_NOT_LEADER, Leader
from elastic_operator.cluster.own_account import find_own_account
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.shutdown import cancel_tasks, handle_exception_at_exit
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.cluster.writer import ClusterWriter
from elastic_operator.controller import JobController
from elastic_operator.logs import configure_logging
from elastic_operator.manifests.forbidden_accounts import Boundary
from elastic_operator.metrics import exporter
from elastic_operator.settings import URL_VARIABLE, Settings, read_settings
from elastic_operator.webhook.client import WebhookClient
from elastic_operator.webhook.outbox import Outbox

if TYPE_CHECKING:
    from elastic_operator.web.site import Site

NODE_LEASE_SECONDS = 5.0
"""Time between two reads of the kubelets' Leases."""

FIRST_LISTS_SECONDS = 120.0
"""Maximum time that the first pass waits until every collection was listed and is watched."""

LAST_NOTIFICATIONS_SECONDS = 3.0
"""Maximum time that the end of the process waits until queued notifications are sent."""

logger = logging.getLogger(__name__)


def main() -> int:
    """Run the operator; return the exit code."""
    settings = read_settings(sys.argv[1:])
    configure_logging(settings)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(settings))
    return 0


async def serve(settings: Settings) -> None:
    """Become the leader, then run the controller until SIGTERM or SIGINT."""
    client = KubernetesClient(_read_credentials(settings))
    stop, started = asyncio.Event(), asyncio.Event()
    _handle_signals(stop)
    leader = None
    if settings.leader_election:
        leader = Leader(client, settings.lease_namespace, settings.identity, name=settings.lease_name)
    exporter.serve(settings.metrics_port, leads=lambda: leader is None or leader.state.is_leading)
    if settings.health_port:
        pages = {
            "/healthz": lambda: probes.liveness(leader.state if leader is not None else None),
            "/readyz": lambda: probes.readiness(leader.state if leader is not None else None, started=started.is_set()),
        }
        await probes.serve(settings.health_port, pages)
    site = await _open_site(settings, leader)
    try:
        if leader is None or await _unless_stopped(stop, leader.acquire()):
            await _serve_as_leader(settings, client, leader, stop, started, site=site)
    finally:
        if site is not None:
            site.close()
        if leader is not None and leader.state.is_leading:
            await leader.release()
        await client.close()
        asyncio.get_running_loop().set_exception_handler(handle_exception_at_exit)


def _handle_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _open_site(settings: Settings, leader: Leader | None) -> Site | None:
    """Serve the status page if it is on; it tells of jobs from when this process leads."""
    if not settings.status_page_port:
        return None
    # Imported here: without the page its modules need no memory.
    from elastic_operator.web import server
    from elastic_operator.web.site import Site

    site = Site(lambda: _describe_leader(leader), lambda: leader.leader_page if leader is not None else "")
    if leader is not None:
        leader.page_address = settings.status_page_address
    await server.serve(settings.status_page_port, site.respond)
    return site


def _describe_leader(leader: Leader | None) -> str:
    if leader is None or leader.state.is_leading:
        return "This replica is about to lead, and has not read the cluster yet."
    pod = leader.state.holder.rpartition("_")[0]
    where = f" The leader is {pod}: kubectl port-forward pod/{pod} leads to it." if pod else ""
    return f"This replica stands by, and knows of no jobs.{where}"


def _read_credentials(settings: Settings) -> Credentials:
    if settings.kubeconfig is None:
        return service_account(settings.environment)
    return read_kubeconfig([settings.kubeconfig], None, settings.environment)


async def _serve_as_leader(
    settings: Settings,
    client: KubernetesClient,
    leader: Leader | None,
    stop: asyncio.Event,
    started: asyncio.Event,
    *,
    site: Site | None,
) -> None:
    """Start the informers, the controller and kopf, and stop them at the end."""
    nodes, renewals = NodeCache(settings.unhealthy_nodes), RenewalCache()
    nodes.mark_started(time.time())
    if leader is not None and leader.failed_at is not None:
        nodes.mark_failed(leader.failed_at)
    store = ClusterStore(nodes, renewals, settings.namespaces)
    reader = ClusterReader(client, nodes, renewals, store, settings.namespaces)
    fence = leader.must_lead if leader is not None else lambda: None
    writer = ClusterWriter(client, reader, fence)
    boundary = Boundary(
        account=await find_own_account(client, settings.pod_account),
        allows_own_namespace=settings.allow_own_namespace,
        lease_name=settings.lease_name,
    )
    diagnostics = Diagnostics(client, writer)
    webhook, outbox = _open_outbox(settings, leader)
    controller = JobController(
        reader, writer, diagnostics, settings.limits, settings.reshard_image, boundary=boundary, outbox=outbox
    )
    store.listener = controller
    background = [_in_background(leader.hold(), "leader")] if leader is not None else []
    background += [_in_background(outbox.run(), "notifications")] if outbox is not None else []
    # Each watch keeps a connection, and there are three for each namespace that is served.
    watches = KubernetesClient(_read_credentials(settings), max_connections=0)
    try:
        await reader.refresh_node_leases()
        await reader.list_pending_starts()
        background += [_in_background(informer.follow(watches), str(informer.source)) for informer in store.informers]
        await _wait_for_sync(store.informers, stop)
        if site is not None:
            from elastic_operator.web.collect import take_snapshot

            site.take_snapshot = lambda: take_snapshot(store, nodes, settings.limits)
        background.append(_in_background(_poll_node_leases(reader, controller), "nodes"))
        ending = asyncio.create_task(_stop_passes(controller, stop, started))
        await kopf.operator(
            registry=make_registry(settings, store),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=stop,
            ready_flag=started,
        )
        ending.cancel()
    finally:
        await controller.stop()
        if outbox is not None:
            await outbox.drain(LAST_NOTIFICATIONS_SECONDS)
        await cancel_tasks(background)
        await watches.close()
        if webhook is not None:
            await webhook.close()


def _open_outbox(settings: Settings, leader: Leader | None) -> tuple[WebhookClient | None, Outbox | None]:
    """Create the queue of notifications if they are on; in any case, have the leader's Lease keep its mark."""
    if settings.notifications is None:
        if settings.lacks_webhook_url:
            logger.warning("notifications are off: expected the webhook's URL in $%s, found nothing", URL_VARIABLE)
        if leader is not None:
            # Otherwise facts of a time without notifications would be told when they are on again.
            leader.get_mark = lambda: ""
        return None, None
    webhook = WebhookClient(settings.notifications.url)
    if leader is None:
        return webhook, Outbox(webhook.post, settings.notifications)
    outbox = Outbox(
        webhook.post,
        settings.notifications,
        fence=leader.must_lead,
        since=parse_time(leader.notified_until[:64]),
    )
    leader.get_mark = outbox.settled_until
    return webhook, outbox


async def _wait_for_sync(informers: Sequence[Informer], stop: asyncio.Event) -> None:
    """Wait until every collection was listed and is watched, at most FIRST_LISTS_SECONDS.

    Before that every pass sends requests of its own, which is slow, but better than to wait forever.
    """
    all_synced = asyncio.gather(*(informer.has_synced.wait() for informer in informers))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_unless_stopped(stop, all_synced), timeout=FIRST_LISTS_SECONDS)


def _in_background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run `work`, which must never end, as a task; exit the process at once if it fails."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.critical("task %r ended: exiting at once", name, exc_info=task.exception())
            os._exit(EXIT_NOT_LEADER)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


async def _stop_passes(controller: JobController, stop: asyncio.Event, started: asyncio.Event) -> None:
    """Stop the passes as soon as the process is told to end.

    kopf takes the process's signals over when it starts, without setting the event that it was given; and at the end it
    waits 5 s for tasks that go on (kopf 1.45, `_core/reactor/running.py`). The next leader would wait as long.
    """
    await started.wait()
    _handle_signals(stop)
    await stop.wait()
    await controller.stop()


async def _poll_node_leases(reader: ClusterReader, controller: JobController) -> None:
    """Read the kubelets' Leases regularly; a watch would deliver hundreds of changes a second."""
    while True:
        await asyncio.sleep(NODE_LEASE_SECONDS)
        try:
            await reader.refresh_node_leases()
        except Exception as error:
            # The next round tries again; the passes of the controller report persistent errors.
            logger.warning("reading the nodes' Leases failed: %s; reading again in %g s", error, NODE_LEASE_SECONDS)
            continue
        for node in reader.stale_nodes():
            controller.wake_node(node)


async def _unless_stopped(stop: asyncio.Event, work: Awaitable[Any]) -> bool:
    """Wait for `work`; cancel it and return False if `stop` is set first."""
    task, stopped = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        return False
    await task
    return True
