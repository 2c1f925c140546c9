"""The operator in a large cluster: how long until every job has been looked at, with what memory and processor time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks import crowd
from benchmarks.apiserver import apiserver
from benchmarks.checkpoints import OUTPUT, ROOT
from elastic_operator.api.status import Phase
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.credentials import read_kubeconfig
from elastic_operator.client.resources import JOB, NODE, POD, TRAINING_JOB, ResourceKind
from elastic_operator.metrics.definitions import JOB_ATTEMPT
from testbed.kubectl import Kubectl

SIZES = ((500, 100), (2000, 400))
"""Nodes and jobs. With 1,000 jobs that report, two processors are too few for the API server and the reports."""
POLL_SECONDS = 1.0
"""Asking costs the operator, which writes thousands of lines of metrics, and the API server, which lists jobs."""
STEADY_SECONDS = 60
SETTLE_SECONDS = 15
_LIMIT_SECONDS = 600


def operator(repeat: int) -> str:
    """Table of the section: one row per size of the cluster."""
    del repeat  # a cold start takes its objects along; one run each
    rows = []
    for nodes, jobs in SIZES:
        rows.append(asyncio.run(_measure(nodes, jobs)))
        sys.stdout.write(rows[-1])
        sys.stdout.flush()
    head = (
        "| cluster | all jobs launched | first start: every status written | restart: every job looked at | of it, "
        "operator's processor | memory | processors, at rest | processors, all jobs report steps | node deleted -> "
        "next attempt |\n|---|---|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(rows)


async def _measure(num_nodes: int, num_jobs: int) -> str:
    with apiserver() as config:
        kubectl = Kubectl(config)
        kubectl("apply", "--server-side", "-f", str(ROOT / "crds/elastictrainingjobs.yaml"))
        kubectl("wait", "--for=condition=Established", "crd/elastictrainingjobs.elastictraining.dev")
        client = KubernetesClient(read_kubeconfig([config], None, {}))
        await crowd.add_nodes(client, num_nodes)
        await crowd.add_jobs(client, num_jobs)
        with _operator(config) as process:
            launched = await _until(lambda: _count(client, JOB), num_jobs)
            del process
        num_pods = await crowd.add_pods(client)
        with _operator(config) as process:
            first = await _until(lambda: _looked_at(process.port), num_jobs)
            # The first look of many changes their status, and those changes are looked at as well.
            await asyncio.sleep(SETTLE_SECONDS)
            rest = await _busy(process)
        reports = crowd.Reports(client)
        async with _in_background(reports.run()):
            await _until(lambda: _value(reports.step), 2)
            with _operator(config) as process:
                await _until(lambda: _count_running(client), num_jobs)
                await asyncio.sleep(SETTLE_SECONDS)
            with _operator(config) as process:
                again = await _until(lambda: _looked_at(process.port), num_jobs)
                cold = process.processor_seconds()
                await asyncio.sleep(SETTLE_SECONDS)
                running = await _busy(process)
                lost = await _lose_a_node(client)
                memory = process.memory()
        await client.close()
        if reports.late:
            raise RuntimeError(f"{reports.late} of {reports.step} rounds of heartbeats were late: nothing was measured")
    return (
        f"| {num_nodes} nodes, {num_jobs} jobs, {num_pods} pods | {launched:.1f} s | {first:.1f} s | {again:.1f} s "
        f"| {cold:.1f} s | {memory / 2**20:.0f} MiB | {rest:.2f} | {running:.2f} | {lost:.1f} s |\n"
    )


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


async def _busy(process: _Process) -> float:
    """Processors that it uses, over a while."""
    before = process.processor_seconds()
    await asyncio.sleep(STEADY_SECONDS)
    return (process.processor_seconds() - before) / STEADY_SECONDS


class _Process:
    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.port = port
        self._view = psutil.Process(process.pid)

    def memory(self) -> int:
        """Largest resident set so far in bytes (VmHWM)."""
        status = Path(f"/proc/{self._view.pid}/status").read_text(encoding="ascii")
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024

    def processor_seconds(self) -> float:
        times = self._view.cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def _operator(config: Path) -> Iterator[_Process]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = str(Path(sys.executable).with_name("elastic-operator"))
    command = [program, "run", "--kubeconfig", str(config), "--no-leader-election", "--metrics-port", str(port)]
    with open(OUTPUT / "operator.log", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield _Process(process, port)
        finally:
            process.terminate()
            process.wait(timeout=60)


async def _until(count, wanted: int) -> float:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Seconds until `count()` has reached `wanted`."""
    begin = time.monotonic()
    while (found := await count()) < wanted:
        if time.monotonic() - begin > _LIMIT_SECONDS:
            raise TimeoutError(f"{found} of {wanted} after {_LIMIT_SECONDS} s: see {OUTPUT}/operator.log")
        await asyncio.sleep(POLL_SECONDS)
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
