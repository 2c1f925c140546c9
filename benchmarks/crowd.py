"""A large cluster on a bare API server: nodes with Leases, jobs, and the pods that a Job controller would make."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Coroutine, Iterable
from http import HTTPStatus
from typing import Any

from elastic_operator.api.serialization import format_time
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import ApiError
from elastic_operator.client.resources import JOB, LEASE, NODE, POD, TRAINING_JOB
from elastic_operator.observed.timeouts import Timeouts
from reshard.contract import LeaseKey, TrainerPhase

RESOURCE = "amd.com/gpu"
NAMESPACE = "default"
NODES_PER_JOB = 4
_NODE_LEASE_SECONDS = 1_000_000  # nobody renews it


async def in_parallel(calls: Iterable[Coroutine[Any, Any, object]], at_once: int = 64) -> None:
    """Await all, so many at a time."""
    slots = asyncio.Semaphore(at_once)

    async def one(call: Coroutine[Any, Any, object]) -> None:
        async with slots:
            await call

    every = list(calls)
    try:
        await asyncio.gather(*(one(call) for call in every))
    finally:
        for call in every:  # those that were not begun when this was cancelled
            if inspect.getcoroutinestate(call) == inspect.CORO_CREATED:
                call.close()


async def add_nodes(client: KubernetesClient, count: int) -> None:
    """Ready nodes of 8 accelerators, each with a kubelet's Lease."""

    async def add(number: int) -> None:
        name = f"gpu-{number:05d}"
        await add_node(client, name)
        spec = {"holderIdentity": name, "leaseDurationSeconds": _NODE_LEASE_SECONDS, "renewTime": now()}
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": "kube-node-lease"},
            "spec": spec,
        }
        await client.create(LEASE, lease)

    await in_parallel(add(number) for number in range(count))


async def add_node(client: KubernetesClient, name: str) -> None:
    """One such node, without the Lease."""
    gpus = {RESOURCE: "8", "cpu": "128", "memory": "1Ti", "pods": "110"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": now()}
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    await client.create(NODE, body)
    status = {"capacity": gpus, "allocatable": gpus, "conditions": [ready]}
    await client.patch(NODE, name, {"status": status}, subresource="status")


async def add_jobs(client: KubernetesClient, count: int) -> None:
    """Jobs of four nodes each."""
    container = {"name": "train", "image": "train:1", "command": ["train"]}
    spec = {
        "accelerator": {"resource": RESOURCE, "perNode": [8]},
        "nodes": {"min": 1, "max": NODES_PER_JOB},
        "batch": {"globalSamples": 1024, "microSamples": 1},
        "parallelism": {"tensor": [1, 2, 4, 8], "pipeline": [1, 2, 4]},
        "checkpoint": {"claimName": "ckpt", "path": "run"},
        "template": {"spec": {"containers": [container]}},
    }
    jobs = (
        {
            "apiVersion": "elastictraining.dev/v1beta1",
            "kind": "ElasticTrainingJob",
            "metadata": {"name": f"job-{number:04d}", "namespace": NAMESPACE},
            "spec": spec,
        }
        for number in range(count)
    )
    await in_parallel(client.create(TRAINING_JOB, job) for job in jobs)


async def add_pods(client: KubernetesClient) -> int:
    """Create the pods that the Job controller, the scheduler and the kubelets would have made of the Jobs."""
    jobs = [item async for item in client.list_objects(JOB, namespace=NAMESPACE)]

    async def add(job: Any, index: int, node: int) -> None:
        name = f"{job['metadata']['name']}-{index}"
        template = job["spec"]["template"]
        labels = {
            **template["metadata"]["labels"],
            "batch.kubernetes.io/job-name": job["metadata"]["name"],
            "batch.kubernetes.io/job-completion-index": str(index),
        }
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
        meta = {"name": name, "namespace": NAMESPACE, "labels": labels, "ownerReferences": [owner]}
        spec = {**template["spec"], "nodeName": f"gpu-{node:05d}", "restartPolicy": "Never"}
        await client.create(POD, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        await client.patch(POD, name, {"status": {"phase": "Running"}}, namespace=NAMESPACE, subresource="status")

    places = [(job, index) for job in jobs for index in range(job["spec"]["completions"])]
    await in_parallel(add(*place, node) for node, place in enumerate(places))
    return len(places)


class Reports:
    """Heartbeats of rank 0 of every job: renew the attempt's Lease in time, each time with one more step.

    Attributes:
        step: of all jobs.
        late: rounds after which a heartbeat may have been missed.
    """

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client
        self.step = 0
        self.late = 0

    async def run(self) -> None:
        """Never ends. Jobs that have lost their Lease fall silent."""
        names = [item["metadata"]["name"] async for item in self._client.list_objects(LEASE, namespace=NAMESPACE)]
        begin = now()
        while True:
            start = time.monotonic()
            await in_parallel((_renew(self._client, name, self.step + 1, begin) for name in names), at_once=8)
            self.step += 1
            seconds = time.monotonic() - start
            self.late += seconds > 2 * Timeouts().heartbeat_seconds
            await asyncio.sleep(max(0.0, Timeouts().heartbeat_seconds - seconds))


async def _renew(client: KubernetesClient, name: str, step: int, begin: str) -> None:
    notes = {
        LeaseKey.PHASE: str(TrainerPhase.TRAINING),
        LeaseKey.STEP: str(step),
        LeaseKey.SAMPLES: str(1024 * step),
        LeaseKey.LOSS: f"{10 / step:.6f}",
        LeaseKey.FIRST_STEP_TIME: begin,
        LeaseKey.STEP_TIME: now(),
    }
    change = {"metadata": {"annotations": notes}, "spec": {"renewTime": now()}}
    try:
        await client.patch(LEASE, name, change, namespace=NAMESPACE)
    except ApiError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise


def now() -> str:
    """The present as Leases state it."""
    return format_time(time.time())[:-1] + "000Z"
