"""`elastic-operator run`: wires the parts together and serves until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from typing import Any

import kopf
from lightkube import AsyncClient
from lightkube.config.kubeconfig import KubeConfig

from elastic_operator import metrics
from elastic_operator.apply import Applier
from elastic_operator.caches import Nodes
from elastic_operator.handlers import make_registry
from elastic_operator.leader import Leader
from elastic_operator.observe import Observer
from elastic_operator.settings import Settings, read
from elastic_operator.worker import Workers

NODE_LEASE_SECONDS = 5.0
"""How often the kubelets' Leases are read."""

NODE_REFRESH_SECONDS = 60.0
"""How often all nodes are listed, to drop those whose deletion was missed."""

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
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    leader = Leader(client, settings.lease_namespace, settings.identity)
    metrics.serve(settings.metrics_port)
    background: list[asyncio.Task[Any]] = []
    if settings.leader_election:
        if not await _unless_stopped(stop, leader.acquire()):
            return
        background.append(asyncio.create_task(leader.hold(), name="leader"))
    nodes = Nodes()
    observer = Observer(client, nodes)
    workers = Workers(observer, Applier(client, observer), settings.limits)
    await observer.refresh_nodes()
    await observer.refresh_node_leases()
    background.append(asyncio.create_task(_keep_looking(observer, workers), name="nodes"))
    try:
        await kopf.operator(
            registry=make_registry(settings, workers, nodes),
            standalone=True,
            clusterwide=settings.namespace is None,
            namespaces=[settings.namespace] if settings.namespace else [],
            liveness_endpoint=f"http://0.0.0.0:{settings.health_port}/healthz" if settings.health_port else None,
            stop_flag=stop,
        )
    finally:
        await workers.stop()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        if settings.leader_election:
            await leader.release()
        await client.close()


async def _keep_looking(observer: Observer, workers: Workers) -> None:
    """Poll what is not worth a watch: the kubelets' Leases, and all nodes now and then."""
    loop = asyncio.get_running_loop()
    refreshed = loop.time()
    while True:
        await asyncio.sleep(NODE_LEASE_SECONDS)
        try:
            await observer.refresh_node_leases()
            if loop.time() - refreshed > NODE_REFRESH_SECONDS:
                await observer.refresh_nodes()
                refreshed = loop.time()
        except Exception as error:
            # The next round tries again; the workers' own looks at the cluster report persistent trouble.
            logger.warning("reading nodes failed: %s", error)
            continue
        for node in observer.stale_nodes():
            workers.wake_node(node)


async def _unless_stopped(stop: asyncio.Event, work: Any) -> bool:
    """Run `work` to its end; False if the process was told to stop first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    for item in (task, stopped):
        if not item.done():
            item.cancel()
    return task.done() and not task.cancelled()


def configure_logging(settings: Settings) -> None:
    """One handler, on stderr; only this package and kopf's warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.json_logs else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("elastic_operator").setLevel(settings.log_level)


class TextFormatter(logging.Formatter):
    """For people: time, level, fields, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Put the fields before the message."""
        fields = getattr(record, "fields", None)
        if not fields:
            return super().format(record)
        head, _, message = super().format(record).partition(record.getMessage())
        return f"{head}{fields['job']} a{fields['attempt']} {fields['reason']}: {record.getMessage()}{message}"


class JsonFormatter(logging.Formatter):
    """For machines: one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Fields beside the message."""
        entry = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)
