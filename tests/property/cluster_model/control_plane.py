"""What the controllers of Kubernetes do: node lifecycle, taint eviction, garbage collection, Jobs, scheduling."""

from __future__ import annotations

from typing import Any

from elastic_operator.api.serialization import format_time, parse_time
from reshard.contract import Label
from tests.property.cluster_model.cluster import GPU, INDEX, NODES, Cluster, role_of

NOT_READY_SECONDS = 6.0
_TERMINAL = ("Succeeded", "Failed")


def run(cluster: Cluster) -> None:
    """Let each controller act once."""
    if not cluster.is_api_up:
        return
    _update_nodes(cluster)
    for pod in list(cluster.pods.values()):
        _evict(cluster, pod)
        _collect(cluster, pod)
    for job in cluster.jobs():
        _run_job(cluster, job)
    for pod in cluster.pods.values():
        if pod["status"]["phase"] == "Pending" and "nodeName" not in pod["spec"]:
            _schedule(cluster, pod)


def _update_nodes(cluster: Cluster) -> None:
    for name in NODES:
        if name in cluster.killed or not cluster.reaches_api("kubelet", name):
            since = cluster.lost_since.setdefault(name, cluster.now)
            if name not in cluster.silent and cluster.now - since >= NOT_READY_SECONDS:
                cluster.set_ready(name, "Unknown")
        else:
            cluster.lost_since.pop(name, None)
            cluster.set_ready(name, "True")


def _evict(cluster: Cluster, pod: dict[str, Any]) -> None:
    """Evict a pod from a node with a taint NoExecute, as the taint manager does."""
    node = pod["spec"].get("nodeName")
    taints = cluster.nodes[node]["spec"].get("taints") or () if node else ()
    is_tainted = any(taint["effect"] == "NoExecute" for taint in taints)
    if is_tainted and pod["status"]["phase"] not in _TERMINAL and "deletionTimestamp" not in pod["metadata"]:
        disrupt(cluster, pod, "DeletionByTaintManager", 30.0)


def disrupt(cluster: Cluster, pod: dict[str, Any], reason: str, grace: float) -> None:
    """Delete a pod and say why in its condition DisruptionTarget."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    pod["status"]["conditions"] = [condition | {"lastTransitionTime": format_time(cluster.now)}]
    cluster.delete_pod(pod, grace)


def _collect(cluster: Cluster, pod: dict[str, Any]) -> None:
    """Delete a pod without a Job, and one that has no node to wait for."""
    owner = cluster.objects.get(("Job", pod["metadata"]["ownerJob"]))
    if owner is None or owner["metadata"]["uid"] != pod["metadata"]["ownerUid"]:
        cluster.delete_pod(pod)
    if "deletionTimestamp" in pod["metadata"] and "nodeName" not in pod["spec"]:
        del cluster.pods[pod["metadata"]["name"]]
        cluster.touch()


def _run_job(cluster: Cluster, job: dict[str, Any]) -> None:
    if job["status"].get("conditions"):
        return
    pods = [pod for pod in cluster.pods.values() if pod["metadata"]["ownerUid"] == job["metadata"]["uid"]]
    phases = [pod["status"]["phase"] for pod in pods]
    count = job["spec"].get("completions") or 1
    limit = job["spec"].get("activeDeadlineSeconds")
    created = parse_time(job["metadata"]["creationTimestamp"]) or cluster.now
    if "Failed" in phases:
        _fail_job(cluster, job, pods, "BackoffLimitExceeded")
    elif phases.count("Succeeded") == count:
        job["status"]["conditions"] = [{"type": "Complete", "status": "True"}]
        cluster.touch()
    elif limit is not None and cluster.now - created >= limit:
        _fail_job(cluster, job, pods, "DeadlineExceeded")
    else:
        taken = {pod["metadata"]["labels"][INDEX] for pod in pods}
        for index in range(count):
            if str(index) not in taken:
                cluster.make_pod(job, index)


def _fail_job(cluster: Cluster, job: dict[str, Any], pods: list[dict[str, Any]], reason: str) -> None:
    job["status"]["conditions"] = [{"type": "Failed", "status": "True", "reason": reason}]
    cluster.touch()
    for pod in pods:
        if pod["status"]["phase"] not in _TERMINAL:
            cluster.delete_pod(pod)


def _schedule(cluster: Cluster, pod: dict[str, Any]) -> None:
    is_conversion = role_of(pod) == "reshard"
    if not (is_conversion and not cluster.has_room):
        avoided, needed = _avoided_nodes(pod), pod["metadata"]["gpus"]
        avoided |= set() if is_conversion else cluster.blocked
        for name in NODES:
            if name not in avoided and _is_open(cluster, name) and _free_devices(cluster, name) >= needed:
                pod["spec"]["nodeName"] = name
                placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": format_time(cluster.now)}
                pod["status"] = {"phase": "Pending", "conditions": [placed]}
                cluster.touch()
                return
    if not pod["status"].get("conditions"):
        text = "0/3 nodes are available"
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
        pod["status"]["conditions"] = [condition]
        cluster.touch()


def _avoided_nodes(pod: dict[str, Any]) -> set[str]:
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    (terms, *_) = required.get("nodeSelectorTerms", [{}])
    return {field["values"][0] for field in terms.get("matchFields", [])}


def _is_open(cluster: Cluster, name: str) -> bool:
    spec = cluster.nodes[name]["spec"]
    return cluster.ready(name)["status"] == "True" and not spec.get("unschedulable") and not spec.get("taints")


def _free_devices(cluster: Cluster, name: str) -> int:
    held = sum(
        pod["metadata"]["gpus"]
        for pod in cluster.pods.values()
        if pod["spec"].get("nodeName") == name and pod["status"]["phase"] not in _TERMINAL
    )
    return int(cluster.nodes[name]["status"]["allocatable"][GPU]) - held


def is_making_pods(job: dict[str, Any]) -> bool:
    """Return whether the Job controller may still create training pods for a Job."""
    return job["metadata"]["labels"][Label.ROLE] == "worker" and not job["status"].get("conditions")
