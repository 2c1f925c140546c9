"""The operator in a large cluster: how long until every job has been looked at, with what memory and processor time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks import crowd
from benchmarks.apiserver import apiserver_with_crd
from benchmarks.checkpoints import OUTPUT
from elastic_operator.api.status import Phase
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.credentials import read_kubeconfig
from elastic_operator.client.resources import JOB, NODE, POD, TRAINING_JOB, ResourceKind
from elastic_operator.metrics.definitions import JOB_ATTEMPT

SIZES = ((500, 100), (1000, 200), (2000, 400))
"""Nodes and jobs. With 1,000 jobs that report, two processors are too few for the API server and the reports."""
LARGEST = (5000, 1000)
"""Nodes and jobs to which a line through the measured figures is extended."""
POLL_SECONDS = 1.0
"""Asking costs the operator, which writes thousands of lines of metrics, and the API server, which lists jobs."""
STEADY_SECONDS = 60
SETTLE_SECONDS = 15
_LIMIT_SECONDS = 600


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """Figures of one cluster: seconds, MiB of memory, and processors that the operator used."""

    launched: float
    first_start: float
    restart: float
    restart_processor: float
    memory: float
    at_rest: float
    reporting: float
    reaction: float


_HEAD = (
    "| cluster | all jobs launched | first start: every status written | restart: every job looked at | of it, "
    "operator's processor | memory | processors, at rest | processors, all jobs report steps | node deleted -> "
    "next attempt |\n|---|---|---|---|---|---|---|---|---|\n"
)


def operator(repeat: int) -> str:
    """Table of the section: one row per size of the cluster, and a line through them extended to a larger one."""
    del repeat  # a cold start takes its objects along; one run each
    measured = []
    rows = []
    for nodes, jobs in SIZES:
        figures, num_pods = asyncio.run(_measure(nodes, jobs))
        measured.append(figures)
        rows.append(_row(f"{nodes} nodes, {jobs} jobs, {num_pods} pods", figures))
        sys.stdout.write(rows[-1])
        sys.stdout.flush()
    nodes, jobs = LARGEST
    line = _extend(measured, [jobs for _, jobs in SIZES], jobs)
    return _HEAD + "".join(rows) + _row(f"*{nodes} nodes, {jobs} jobs: line through the rows above*", line)


def _row(cluster: str, figures: _Figures) -> str:
    return (
        f"| {cluster} | {figures.launched:.1f} s | {figures.first_start:.1f} s | {figures.restart:.1f} s "
        f"| {figures.restart_processor:.1f} s | {figures.memory:.0f} MiB | {figures.at_rest:.2f} "
        f"| {figures.reporting:.2f} | {figures.reaction:.1f} s |\n"
    )


def _extend(measured: list[_Figures], sizes: list[int], size: int) -> _Figures:
    """Fit a line by least squares to each figure, and return its values at `size`."""

    def at_size(name: str) -> float:
        slope, intercept = statistics.linear_regression(sizes, [getattr(figures, name) for figures in measured])
        return slope * size + intercept

    return _Figures(**{field.name: at_size(field.name) for field in dataclasses.fields(_Figures)})


async def _measure(num_nodes: int, num_jobs: int) -> tuple[_Figures, int]:
    """Measure a cluster; return its figures and the number of its pods."""
    with apiserver_with_crd() as kubectl:
        config = kubectl.kubeconfig
        client = KubernetesClient(read_kubeconfig([config], None, {}))
        await crowd.add_nodes(client, num_nodes)
        await crowd.add_jobs(client, num_jobs)
        with operator_process(config) as process:
            launched = await until(lambda: _count(client, JOB), num_jobs)
            del process
        num_pods = await crowd.add_pods(client)
        with operator_process(config) as process:
            first = await until(lambda: _looked_at(process.port), num_jobs)
            # The first look of many changes their status, and those changes are looked at as well.
            await asyncio.sleep(SETTLE_SECONDS)
            rest = await _busy(process)
        reports = crowd.Reports(client)
        async with _in_background(reports.run()):
            await until(lambda: _value(reports.step), 2)
            with operator_process(config) as process:
                await until(lambda: _count_running(client), num_jobs)
                await asyncio.sleep(SETTLE_SECONDS)
            with operator_process(config) as process:
                again = await until(lambda: _looked_at(process.port), num_jobs)
                cold = process.processor_seconds()
                await asyncio.sleep(SETTLE_SECONDS)
                running = await _busy(process)
                lost = await _lose_a_node(client)
                memory = process.memory()
        await client.close()
        if reports.late:
            raise RuntimeError(f"{reports.late} of {reports.step} rounds of heartbeats were late: nothing was measured")
    figures = _Figures(
        launched=launched,
        first_start=first,
        restart=again,
        restart_processor=cold,
        memory=memory / 2**20,
        at_rest=rest,
        reporting=running,
        reaction=lost,
    )
    return figures, num_pods


@contextlib.asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run something beside; if it has failed, so has the measurement."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        failed = task.done()
        task.cancel()
    if failed:
        await task


async def _busy(process: OperatorProcess) -> float:
    """Processors that it uses, over a while."""
    before = process.processor_seconds()
    await asyncio.sleep(STEADY_SECONDS)
    return (process.processor_seconds() - before) / STEADY_SECONDS


class OperatorProcess:
    """`elastic-operator run` as a process of this machine.

    Attributes:
        port: of its metrics.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.port = port
        self._view = psutil.Process(process.pid)

    def memory(self) -> int:
        """Largest resident set so far in bytes (VmHWM)."""
        status = Path(f"/proc/{self._view.pid}/status").read_text(encoding="ascii")
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024

    def processor_seconds(self) -> float:
        """Processor time that it has used so far."""
        times = self._view.cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def operator_process(config: Path, *options: str) -> Iterator[OperatorProcess]:
    """Start the operator for a cluster, and end it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = str(Path(sys.executable).with_name("elastic-operator"))
    command = [
        program,
        "run",
        "--kubeconfig",
        str(config),
        "--no-leader-election",
        "--metrics-port",
        str(port),
        *options,
    ]
    with open(OUTPUT / "operator.log", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield OperatorProcess(process, port)
        finally:
            process.terminate()
            process.wait(timeout=60)


async def until(count: Callable[[], Awaitable[int]], wanted: int, *, poll_seconds: float = POLL_SECONDS) -> float:
    """Wait until `count()` has reached `wanted`; return how many seconds that took.

    Raises:
        TimeoutError: it has not within ten minutes.
    """
    begin = time.monotonic()
    while (found := await count()) < wanted:
        if time.monotonic() - begin > _LIMIT_SECONDS:
            raise TimeoutError(f"{found} of {wanted} after {_LIMIT_SECONDS} s: see {OUTPUT}/operator.log")
        await asyncio.sleep(poll_seconds)
    return time.monotonic() - begin


async def _count(client: KubernetesClient, kind: ResourceKind) -> int:
    return len([item async for item in client.list_objects(kind, namespace=crowd.NAMESPACE)])


async def _count_running(client: KubernetesClient) -> int:
    found = [item async for item in client.list_objects(TRAINING_JOB, namespace=crowd.NAMESPACE)]
    return sum(item["status"]["phase"] == Phase.RUNNING for item in found)


async def _value(number: int) -> int:
    return number


async def _looked_at(port: int) -> int:
    """Jobs that the operator shows in its metrics, once it has looked at them; 0 while it does not answer."""
    try:
        text = await asyncio.to_thread(_scrape, port)
    except OSError:
        return 0
    return sum(line.startswith(f"{JOB_ATTEMPT.name}{{") for line in text.splitlines())


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


async def _lose_a_node(client: KubernetesClient) -> float:
    """Delete the first job's first node; seconds until the job's next attempt is decided."""
    name = "job-0000"
    pods = [
        item
        async for item in client.list_objects(
            POD, namespace=crowd.NAMESPACE, labels=f"elastictraining.dev/job-name={name}"
        )
    ]
    before = (await client.get(TRAINING_JOB, name, namespace=crowd.NAMESPACE))["status"]["attempt"]
    begin = time.monotonic()
    await client.delete(NODE, pods[0]["spec"]["nodeName"])
    while time.monotonic() - begin < _LIMIT_SECONDS:
        job = await client.get(TRAINING_JOB, name, namespace=crowd.NAMESPACE)
        if job["status"]["attempt"] > before:
            return time.monotonic() - begin
        await asyncio.sleep(0.05)
    raise TimeoutError(f"{name} did not react in {_LIMIT_SECONDS} s: see {OUTPUT}/operator.log")
