"""What the kubelets do: start processes, report their ends, and end those whose pods were deleted."""

from __future__ import annotations

from typing import Any

from elastic_operator.api.serialization import format_time
from tests.property.cluster_model.cluster import NODES, SIDECAR, Cluster, role_of


def run(cluster: Cluster) -> None:
    """Let each kubelet that reaches the API server act once."""
    for node in NODES:
        if node not in cluster.killed and cluster.reaches_api("kubelet", node):
            _sync(cluster, node)


def _sync(cluster: Cluster, node: str) -> None:
    known = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    for process in [item for item in cluster.processes.values() if item.node == node]:
        if process.uid not in known and process.uid not in cluster.stuck:
            cluster.end(process, 137)
    for pod in [item for item in cluster.pods.values() if item["spec"].get("nodeName") == node]:
        _sync_pod(cluster, pod)
    cluster.unsynced.discard(node)


def _sync_pod(cluster: Cluster, pod: dict[str, Any]) -> None:
    meta = pod["metadata"]
    exit_ = cluster.exits.pop(meta["uid"], None)
    if exit_ is not None and pod["status"]["phase"] == "Running":
        cluster.terminate(pod, *exit_)
    if pod["status"]["phase"] == "Running" and meta["uid"] not in {*cluster.processes, *cluster.sidecars}:
        statuses = pod["status"].get("containerStatuses") or ()  # the node was restarted
        ends = (item["state"].get("terminated") for item in statuses if item["name"] != SIDECAR)
        known = next(ends, None) or {"exitCode": 255, "message": "", "reason": "Unknown"}
        cluster.terminate(pod, known["exitCode"], known["message"], known["reason"])
    deletion = meta.get("deletionTimestamp")
    if deletion is None:
        if pod["status"]["phase"] == "Pending" and not _has_no_image(cluster, pod):
            cluster.start(pod)
        return
    process = cluster.processes.get(meta["uid"])
    if deletion > format_time(cluster.now) or (process is not None and meta["uid"] in cluster.stuck):
        return
    if process is not None:
        cluster.end(process, 137)
        if meta.pop("graceful", False):  # the Job controller counts the pod before it goes
            cluster.sidecars.pop(meta["uid"], None)
            cluster.terminate(pod, *cluster.exits.pop(meta["uid"]))
            return
    cluster.exits.pop(meta["uid"], None)
    del cluster.pods[meta["name"]]
    cluster.touch()


def _has_no_image(cluster: Cluster, pod: dict[str, Any]) -> bool:
    """Show in a reshard pod that its image is missing; False if it can start."""
    if cluster.has_image or role_of(pod) != "reshard":
        return False
    if "containerStatuses" not in pod["status"]:
        waiting = {"name": "reshard", "state": {"waiting": {"reason": "ErrImagePull", "message": "no image"}}}
        pod["status"] = {**pod["status"], "phase": "Pending", "containerStatuses": [waiting]}
        cluster.touch()
    return True
