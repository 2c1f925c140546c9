"""A lane: one job that goes through the same recoveries again and again, each time with another fault.

Its operator is one of two. `OperatorInProcess` is the real controller with the real client, caches and informers in
this process, wired as in `elastic_operator.main`; an informer replaces kopf's watch of the resources, and there is no
leader election. To kill it means: the proxy forwards nothing more of what it sends, its tasks are cancelled, and its
memory is dropped. `OperatorProcess` is `elastic-operator run`, killed by SIGKILL; it takes seconds to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.credentials import Credentials
from elastic_operator.client.resources import TRAINING_JOB
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.diagnostics import Diagnostics
from elastic_operator.cluster.informer import Informer
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.shutdown import cancel_tasks
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.cluster.watch_stream import WatchedCollection
from elastic_operator.cluster.writer import ClusterWriter
from elastic_operator.controller import JobController
from elastic_operator.observed.timeouts import Timeouts
from tests.cluster.fault_proxy import CLIENT_SECONDS, FaultProxy, Rule, View
from tests.cluster.played_cluster import PlayedCluster

LIMITS = Timeouts(
    heartbeat_seconds=1000,
    stop_grace_seconds=1,
    node_stable_seconds=0.05,
    resync_seconds=2,
    reshard_backoff_seconds=0.2,
)
QUIET_SECONDS = 0.2
"""A recovery has ended when the operator has sent nothing for so long."""

RECOVERY_SECONDS = 180.0
"""Longest time of a recovery, whatever was injected; two loaded processors need a minute."""

_PROGRAM = """
import sys
from elastic_operator import main
print("the operator of", main.__file__, file=sys.stderr, flush=True)
sys.exit(main.main())
"""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """A recovery.

    Attributes:
        begin: makes the failure, or brings the capacity back.
        nodes: number of nodes of the next attempt.
        restarts: the operator dies before the failure, and the next one finds it when it starts.
    """

    name: str
    begin: Callable[[PlayedCluster], Awaitable[None]]
    cause: str
    nodes: int
    reshards: bool
    planned: bool = False
    restarts: bool = False

    @property
    def changes_nodes(self) -> bool:
        """True if the next recovery needs this one before it."""
        return self.cause in ("NodeNotReady", "CapacityReturned")


SCENARIOS = (
    Scenario("node lost", PlayedCluster.lose_node, "NodeNotReady", nodes=2, reshards=True),
    Scenario("pod crashed", PlayedCluster.crash_pod, "PodFailed", nodes=2, reshards=False),
    Scenario("node returned", PlayedCluster.return_node, "CapacityReturned", nodes=3, reshards=True, planned=True),
    Scenario("operator restarted", PlayedCluster.crash_pod, "PodFailed", nodes=3, reshards=False, restarts=True),
)


class LaneError(Exception):
    """A recovery did not end as it must."""


class OperatorInProcess:
    """One life of an operator: from its start with empty memory until it is killed."""

    def __init__(self, address: str, token: str) -> None:
        credentials = Credentials(server=address, token=token)
        self._client = KubernetesClient(credentials, read_seconds=CLIENT_SECONDS)
        self._watches = KubernetesClient(credentials, max_connections=0)
        self._nodes = nodes = NodeCache()
        renewals = RenewalCache()
        self._store = ClusterStore(nodes, renewals)
        self._reader = ClusterReader(self._client, nodes, renewals, self._store, ())
        writer = ClusterWriter(self._client, self._reader)
        self._controller = JobController(self._reader, writer, Diagnostics(self._client, writer), LIMITS)
        self._store.listener = self._controller
        self._resources = Informer(
            WatchedCollection(kind=TRAINING_JOB), self._store.put_record, lambda key: self._store.drop_record(key, "")
        )
        self._tasks: list[asyncio.Task[None]] = [asyncio.create_task(self._run())]

    async def _run(self) -> None:
        while True:
            try:
                await self._reader.refresh_node_leases()
                await self._reader.list_pending_starts()
                break
            except Exception as error:  # the process would end, and its kubelet start it again
                logger.warning("the operator cannot start: %s", error)
                await asyncio.sleep(0.2)
        self._tasks.append(asyncio.create_task(self._note_availability()))
        self._tasks += [asyncio.create_task(informer.follow(self._watches)) for informer in self._store.informers]
        await asyncio.gather(*(informer.has_synced.wait() for informer in self._store.informers))
        await self._resources.follow(self._watches)

    async def _note_availability(self) -> None:
        """Note polls as successful. There are no kubelets whose Leases could be listed again and again."""
        while True:
            self._nodes.mark_polled(time.time())
            await asyncio.sleep(2)

    async def kill(self) -> None:
        """Cancel every task; nothing is written after `View.kill`."""
        await cancel_tasks(self._tasks)
        await self._controller.stop()
        await self._watches.close()
        await self._client.close()


class OperatorProcess:
    """One life of `elastic-operator run`.

    Args:
        folder: for its kubeconfig and its log.
        python_path: folders with the code of another release; empty for this checkout.
    """

    def __init__(self, address: str, token: str, folder: Path, python_path: Sequence[Path] = ()) -> None:
        config = folder / f"{address.rsplit('/', 2)[1]}.conf"
        context = {"name": "lane", "context": {"cluster": "lane", "user": "lane"}}
        document = {
            "apiVersion": "v1", "kind": "Config", "current-context": "lane", "contexts": [context],
            "clusters": [{"name": "lane", "cluster": {"server": address}}],
            "users": [{"name": "lane", "user": {"token": token}}],
        }  # fmt: skip
        config.write_text(json.dumps(document))
        limits = dataclasses.asdict(LIMITS)
        options = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
        environment = os.environ.copy()
        if python_path:
            environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in python_path)
        command = [sys.executable, "-P", "-c", _PROGRAM, "run"]
        command += ["--kubeconfig", str(config), "--no-leader-election", *options]
        self.log = config.with_suffix(".log")
        with open(self.log, "ab") as stream:
            self._process = subprocess.Popen(command, stderr=stream, env=environment)

    async def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()
        await asyncio.to_thread(self._process.wait)


class Lane:
    """One job, its cluster and its operators.

    Args:
        proxy: the way to the API server.
        cluster: the job's cluster.
        start: starts an operator with the address of the API server that it gets.
    """

    def __init__(
        self, proxy: FaultProxy, cluster: PlayedCluster, start: Callable[[str], OperatorInProcess | OperatorProcess]
    ) -> None:
        self.cluster = cluster
        self.view = View(cluster.namespace, self._killed)
        self._proxy = proxy
        self._start = start
        self._is_killed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        proxy.add(self.view)

    @contextlib.asynccontextmanager
    async def run(self) -> Any:
        """Create the job, and let an operator bring it to train."""
        tasks = [asyncio.create_task(self._operate()), asyncio.create_task(self.cluster.run())]
        self.view.arm(None)
        try:
            await self.cluster.create()
            self._tasks = tasks
            await self.until("the first attempt", lambda: self._trains(1, 3))
            yield self
        finally:
            await cancel_tasks(tasks)

    async def recover(self, scenario: Scenario, rule: Rule | None) -> None:
        """Go through one recovery with a fault.

        Raises:
            LaneError: it did not converge, or something happened twice.
        """
        before = dict(self.cluster.status)
        attempt = before["attempt"] + 1
        self.view.arm(rule)
        if scenario.restarts:
            self.view.kill()
        await scenario.begin(self.cluster)
        await self.until(f"attempt {attempt}", lambda: self._trains(attempt, scenario.nodes))
        problems = [*self.cluster.problems, *_check(scenario, before, self.cluster.status)]
        if unfenced := await self.cluster.unfenced():
            problems.append(f"expected nothing of earlier attempts, found {', '.join(unfenced)}")
        if problems:
            raise LaneError("; ".join(problems))

    def _trains(self, attempt: int, nodes: int) -> bool:
        status = self.cluster.status
        return (
            bool(self.cluster.problems)
            or status.get("attempt", 0) > attempt
            or (
                status.get("attempt") == attempt
                and status.get("phase") == "Running"
                and status.get("nodesText", "").startswith(f"{nodes}/")
                and status.get("checkpoint", {}).get("attempt") == attempt
                and not self.cluster.leftovers()
                and self.view.quiet_seconds > QUIET_SECONDS
            )
        )

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait until something holds.

        Raises:
            LaneError: it does not hold within RECOVERY_SECONDS, or the cluster is not played any more.
        """
        deadline = time.monotonic() + RECOVERY_SECONDS
        while not holds():
            for task in self._tasks:
                if task.done():
                    raise LaneError(f"a task of the lane ended: {task.exception()!r}")
            if time.monotonic() > deadline:
                status = self.cluster.status
                found = {key: status.get(key) for key in ("attempt", "phase", "nodesText", "reason", "message")}
                found["commit of attempt"] = status.get("checkpoint", {}).get("attempt")
                raise LaneError(f"no {what} within {RECOVERY_SECONDS} s: {found}, {self.cluster.remains()}")
            await asyncio.sleep(0.05)

    def _killed(self) -> None:
        self._is_killed.set()

    async def _operate(self) -> None:
        """Start an operator; when it is killed, the next one."""
        while True:
            self._is_killed.clear()
            operator = self._start(self._proxy.address(self.view))
            try:
                await self._is_killed.wait()
            finally:
                await operator.kill()


def _check(scenario: Scenario, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what happened twice, or otherwise than it must."""
    problems = []
    attempt = before["attempt"] + 1
    if after["attempt"] != attempt:
        problems.append(f"expected attempt {attempt}, found {after['attempt']}")
    recoveries = after["recoveries"]
    records = [(item["fromAttempt"], item["toAttempt"]) for item in recoveries]
    if len(set(records)) < len(records) or records[-1] != (before["attempt"], attempt):
        problems.append(f"expected one record of the recovery, found {records}")
    if recoveries[-1]["cause"] != scenario.cause:
        problems.append(f"expected cause {scenario.cause}, found {recoveries[-1]['cause']}")
    if "firstStepTime" not in recoveries[-1]:
        problems.append("the recovery has no first step")
    used = [sum(count["total"] for count in status.get("failureCounts", ())) for status in (before, after)]
    if used[1] - used[0] != (0 if scenario.planned else 1):
        problems.append(f"the failure was counted {used[1] - used[0]} times")
    if scenario.reshards:
        reshard = after.get("reshard", {})
        if reshard.get("attempt") != attempt or not reshard.get("verified"):
            problems.append(f"expected a verified conversion for attempt {attempt}, found {reshard}")
    if after.get("reshard", {}).get("failures"):
        problems.append(f"a conversion failed: {after['reshard']}")
    return problems
