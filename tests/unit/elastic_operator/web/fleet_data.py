"""Snapshots for the tests of the status page: a recorded recovery beside other jobs, and a large fleet."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from elastic_operator.api.serialization import format_time, parse_time
from elastic_operator.observed.observation import JobView, Key, NodeView, PodView, node_view, pod_view
from elastic_operator.reconcile.record import Record, read_record
from elastic_operator.web.pages.snapshot import Snapshot

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "plugin/data/recorded_recovery.json").read_text())
GPU = "amd.com/gpu"
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
GPT: Key = ("demo", "gpt")
HOSTILE = (
    "</td></style></title><script>document.title='owned'</script><img src=x onerror=alert(1)>'\"` --> ]]> "
    "\x1b]52;c;eA==\x07\u202e\n" + "A" * 5000
)


def record_of(stage: str, name: str = "gpt", *, seconds: float = 0.0, **status: Any) -> Record:
    """A job as it was recorded, under a name, that many seconds later, with other fields of its status."""
    job = json.loads(_TIME.sub(lambda found: _later(found[0], seconds), json.dumps(RECORDED[stage]["job"])))
    job["metadata"] |= {"name": name, "uid": f"uid-{name}"}
    job["status"] |= status
    return read_record(job)


def _later(text: str, seconds: float) -> str:
    moment = parse_time(text)
    assert moment is not None
    return format_time(moment + seconds)


def pods_of(stage: str, name: str = "gpt", *, move: dict[str, str] | None = None) -> tuple[PodView, ...]:
    """The recorded pods, each controlled by a Job of its attempt, on other nodes if `move` says so."""
    found = []
    for item in copy.deepcopy(RECORDED[stage]["pods"]):
        labels = item["metadata"]["labels"]
        suffix = "-reshard" if labels["elastictraining.dev/role"] == "reshard" else ""
        job = f"{name}-a{labels['elastictraining.dev/attempt']}{suffix}"
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": f"uid-{job}", "controller": True}
        item["metadata"] |= {"name": item["metadata"]["name"].replace("gpt", name, 1), "ownerReferences": [owner]}
        node = item["spec"].get("nodeName")
        item["spec"]["nodeName"] = (move or {}).get(node, node)
        found.append(pod_view(item))
    return tuple(found)


def jobs_of(pods: tuple[PodView, ...], name: str) -> tuple[JobView, ...]:
    """The Jobs that control pods, each controlled by the resource."""
    return tuple(
        JobView(name=job, uid=f"uid-{job}", attempt=1, role="worker", owner=f"uid-{name}")
        for job in dict.fromkeys(pod.owner_name for pod in pods)
    )


def gpu_node(name: str, gpus: int = 8, **fields: Any) -> NodeView:
    return NodeView(name=name, **{"capacity": {GPU: gpus}, "allocatable": {GPU: gpus}, **fields})


def small_fleet() -> Snapshot:
    """A job that recovers, one that runs, one that waits, one that failed, and a node of each state."""
    time = RECORDED["resharding"]["time"]
    move = {"gpu-1": "gpu-5", "gpu-2": "gpu-6", "gpu-3": "gpu-7"}
    pods = {GPT: pods_of("resharding"), ("vision", "resnet"): pods_of("drained", "resnet", move=move)}
    nodes = {node["metadata"]["name"]: node_view(node) for node in RECORDED["resharding"]["nodes"]}
    nodes |= {
        name: gpu_node(name, 2)
        for name in ("gpu-5", "gpu-6", "gpu-7")
    }  # fmt: skip
    nodes["gpu-8"] = gpu_node("gpu-8", 8, allocatable={GPU: 6}, unhealthy=())
    nodes["gpu-9"] = gpu_node("gpu-9", 8, unschedulable=True)
    nodes["gpu-10"] = gpu_node("gpu-10", 8, unhealthy=("condition AmdGpuHealthy=False: uncorrectable ECC errors",))
    resnet = record_of("drained", "resnet", seconds=-3600)
    stopped = {"gpus": 0, "replicas": 0, "topologyText": ""}
    waiting = record_of(
        "drained", "llama", seconds=-200, phase="Waiting", reason="NoCapacity", message="no topology fits", **stopped
    )
    failed = record_of(
        "drained", "moe", seconds=-9000, phase="Failed", reason="BudgetSpent", message="10 restarts", **stopped
    )
    return Snapshot(
        time=time,
        records={
            GPT: record_of("resharding"),
            ("vision", "resnet"): resnet,
            ("nlp", "llama"): waiting,
            ("nlp", "moe"): failed,
        },
        nodes=nodes,
        pods=pods,
        jobs={key: jobs_of(found, key[1]) for key, found in pods.items()},
        used={
            GPU: {
                "gpu-8": 3,
                **{pod.node: 2 for found in pods.values() for pod in found if pod.node and pod.role == "worker"},
            }
        },
    )


def quiet_fleet() -> Snapshot:
    """The recorded job after all of its recoveries, alone."""
    pods = pods_of("drained")
    nodes = {node["metadata"]["name"]: node_view(node) for node in RECORDED["drained"]["nodes"]}
    return Snapshot(
        time=RECORDED["drained"]["time"],
        records={GPT: record_of("drained")},
        nodes=nodes,
        pods={GPT: pods},
        jobs={GPT: jobs_of(pods, "gpt")},
        used={GPU: {pod.node: 2 for pod in pods if pod.node and not pod.terminal}},
    )


def large_fleet(num_jobs: int, num_nodes: int) -> Snapshot:
    """Many jobs of one pod each, and many nodes."""
    record, pods = record_of("drained"), pods_of("drained")
    (pod,) = [item for item in pods if item.role == "worker" and item.index == 0 and not item.terminal][:1]
    records: dict[Key, Record | None] = {}
    own: dict[Key, tuple[PodView, ...]] = {}
    jobs: dict[Key, tuple[JobView, ...]] = {}
    for number in range(num_jobs):
        key = ("team", f"job-{number:04}")
        job = dataclasses.replace(record.job, name=key[1], namespace=key[0], uid=f"uid-{key[1]}")
        records[key] = dataclasses.replace(record, job=job)
        owner = f"{key[1]}-a4"
        own[key] = (
            dataclasses.replace(pod, node=f"n{number % max(1, num_nodes):05}", owner=f"uid-{owner}", owner_name=owner),
        )
        jobs[key] = (JobView(name=owner, uid=f"uid-{owner}", attempt=4, role="worker", owner=job.uid),)
    nodes = {f"n{number:05}": gpu_node(f"n{number:05}") for number in range(num_nodes)}
    return Snapshot(time=RECORDED["drained"]["time"], records=records, nodes=nodes, pods=own, jobs=jobs, used={GPU: {}})
