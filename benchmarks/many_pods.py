"""One job of 1,000 pods: how fast the operator launches it, reacts to a lost node, and stops what is left."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import sys
import time
from http import HTTPStatus
from typing import Any

from benchmarks import crowd
from benchmarks.apiserver import apiserver_with_crd
from benchmarks.controlling import operator_process, until
from elastic_operator.api.status import Phase
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import ApiError
from elastic_operator.client.credentials import read_kubeconfig
from elastic_operator.client.resources import JOB, LEASE, NODE, POD, TRAINING_JOB, ResourceKind
from reshard.contract import CommitRef, LeaseKey, TrainerPhase

NUM_PODS = 1000
NUM_ROUNDS = 20
_POLL_SECONDS = 0.01
_STEP = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Seconds of one life of the job.

    Attributes:
        launch: from the creation of the resource to the Job of its first attempt.
        reshard: from the deletion of a node to the reshard Job.
        stop: from the deletion of the node until every pod of the attempt is being deleted.
        processor: processor seconds of the operator from the deletion of the node until then.
    """

    launch: float
    reshard: float
    stop: float
    processor: float


def pods(repeat: int) -> str:
    """Table of the section: one row per phase, over all rounds."""
    del repeat
    rounds = asyncio.run(_measure())
    rows = [
        ("job created -> Job of 1,000 pods created", [item.launch for item in rounds]),
        ("node deleted -> reshard Job created", [item.reshard for item in rounds]),
        ("node deleted -> every pod is being deleted", [item.stop for item in rounds]),
        ("of it, processor time of the operator", [item.processor for item in rounds]),
    ]
    head = (
        f"| {len(rounds)} rounds, seconds | median | 99th percentile (of {len(rounds)}: the longest) |\n|---|---|---|\n"
    )
    return head + "".join(f"| {name} | {statistics.median(times):.2f} | {max(times):.2f} |\n" for name, times in rows)


async def _measure() -> list[_Round]:
    with apiserver_with_crd() as kubectl:
        client = KubernetesClient(read_kubeconfig([kubectl.kubeconfig], None, {}))
        await crowd.add_nodes(client, NUM_PODS)
        rounds = []
        with operator_process(kubectl.kubeconfig, "--node-stable-seconds=0.001") as process:
            for number in range(NUM_ROUNDS):
                rounds.append(await _live(client, f"job-{number:04d}", process.processor_seconds))
                sys.stdout.write(f"{rounds[-1]}\n")
                sys.stdout.flush()
        await client.close()
    return rounds


async def _live(client: KubernetesClient, name: str, processor_seconds: Any) -> _Round:
    """Create the job, let it train, delete one of its nodes, and remove everything."""
    begin = time.monotonic()
    await client.create(TRAINING_JOB, _manifest(name))
    await until(lambda: _exists(client, JOB, f"{name}-a1"), 1, poll_seconds=_POLL_SECONDS)
    launch = time.monotonic() - begin
    await crowd.add_pods(client)
    await _train(client, name)
    await until(lambda: _has_phase(client, name, Phase.RUNNING), 1, poll_seconds=_POLL_SECONDS)
    node = (await _pods(client))[0]["spec"]["nodeName"]
    before, begin = processor_seconds(), time.monotonic()
    await client.delete(NODE, node)
    await until(lambda: _exists(client, JOB, f"{name}-a2-reshard"), 1, poll_seconds=_POLL_SECONDS)
    reshard = time.monotonic() - begin
    await until(lambda: _are_stopped(client), 1, poll_seconds=_POLL_SECONDS)
    result = _Round(
        launch=launch, reshard=reshard, stop=time.monotonic() - begin, processor=processor_seconds() - before
    )
    await _remove(client, name)
    await crowd.add_node(client, node)
    return result


def _manifest(name: str) -> dict[str, Any]:
    """A job whose pods need 1,000 nodes, and whose layout differs on 999."""
    container = {"name": "train", "image": "train:1", "command": ["train"]}
    spec = {
        "accelerator": {"resource": crowd.RESOURCE, "perNode": [8]},
        "nodes": {"min": 1, "max": NUM_PODS, "allowed": [NUM_PODS // 2, NUM_PODS]},
        "batch": {"globalSamples": NUM_PODS, "microSamples": 1},
        "parallelism": {"tensor": [8]},
        "checkpoint": {"claimName": "ckpt", "path": name},
        "recovery": {"excludeNodeSeconds": 0},
        "template": {"spec": {"containers": [container]}},
    }
    meta = {"name": name, "namespace": crowd.NAMESPACE}
    return {
        "apiVersion": "elastictraining.dev/v1beta1", "kind": "ElasticTrainingJob", "metadata": meta, "spec": spec
    }  # fmt: skip


async def _train(client: KubernetesClient, name: str) -> None:
    """Report a step and a commit, as rank 0 would."""
    status = (await client.get(TRAINING_JOB, name, namespace=crowd.NAMESPACE))["status"]
    folder = f"/checkpoint/{name}/a1/step-{_STEP:08d}"
    commit = CommitRef(uri=folder, step=_STEP, samples=_STEP * NUM_PODS, attempt=1, topology=status["topology"])
    notes = {
        LeaseKey.PHASE: str(TrainerPhase.TRAINING),
        LeaseKey.STEP: str(_STEP),
        LeaseKey.SAMPLES: str(_STEP * NUM_PODS),
        LeaseKey.COMMIT: commit.to_json(),
    }
    change = {"metadata": {"annotations": notes}, "spec": {"renewTime": crowd.now()}}
    await client.patch(LEASE, f"{name}-a1", change, namespace=crowd.NAMESPACE)


async def _remove(client: KubernetesClient, name: str) -> None:
    """Delete what the garbage collector and the kubelets would delete."""
    await client.delete(TRAINING_JOB, name, namespace=crowd.NAMESPACE)
    at_once = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
    for kind in (JOB, LEASE, POD):
        names = [item["metadata"]["name"] async for item in client.list_objects(kind, namespace=crowd.NAMESPACE)]
        await crowd.in_parallel(_delete(client, kind, item, at_once) for item in names)


async def _delete(client: KubernetesClient, kind: ResourceKind, name: str, options: dict[str, Any]) -> None:
    try:
        await client.delete(kind, name, namespace=crowd.NAMESPACE, **options)
    except ApiError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise


async def _exists(client: KubernetesClient, kind: ResourceKind, name: str) -> bool:
    try:
        await client.get(kind, name, namespace=crowd.NAMESPACE)
    except ApiError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise
        return False
    return True


async def _has_phase(client: KubernetesClient, name: str, phase: Phase) -> bool:
    status = (await client.get(TRAINING_JOB, name, namespace=crowd.NAMESPACE)).get("status") or {}
    return bool(status.get("phase") == phase)


async def _pods(client: KubernetesClient) -> list[Any]:
    return [item async for item in client.list_objects(POD, namespace=crowd.NAMESPACE)]


async def _are_stopped(client: KubernetesClient) -> bool:
    return all("deletionTimestamp" in item["metadata"] for item in await _pods(client))
