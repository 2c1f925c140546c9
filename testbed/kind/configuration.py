"""Decide how kind is run and write its configuration. Pure, but for reading `cluster.yaml`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from testbed.provider import Size

NAME = "etj"
"""Of the cluster: kind names its containers after it."""

MACHINE = PurePosixPath("/host")
"""Folder of a node below which it has folders of this machine."""

NODE_IMAGE = "localhost/etj-kind-node:v1.36.3"
GRACE_SECONDS = 12
_BASE = Path(__file__).with_name("cluster.yaml")
_LEASE_SECONDS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """How a cluster is made on this machine.

    Attributes:
        own_daemon: start a Docker daemon of unpacked packages; else use the one that runs.
        own_image: create nodes from the image that is built here; else from the one that kind publishes.
    """

    own_daemon: bool
    own_image: bool


def route(*, daemon_answers: bool, image_arrives: bool) -> Route:
    """Choose the plainest way that works.

    Args:
        daemon_answers: a Docker daemon answers this user.
        image_arrives: that daemon has or can pull the image that kind publishes.
    """
    return Route(own_daemon=not daemon_answers, own_image=not (daemon_answers and image_arrives))


def on_node(path: Path) -> Path:
    """Return where a node sees a folder of this machine.

    Raises:
        ValueError: the path is not absolute.
    """
    return Path(MACHINE / PurePosixPath(path).relative_to("/"))


def configuration(
    size: Size, mounts: Mapping[Path, bool], *, cgroup_v1: bool = False, api_address: str = ""
) -> dict[str, Any]:
    """Write the Cluster that `kind create cluster --config` takes.

    Args:
        size: number of nodes, and clocks.
        mounts: folders of this machine that nodes see below `MACHINE`; True for read-only.
        cgroup_v1: the machine has control groups of version 1, which the kubelet accepts only when told.
        api_address: address at which the API server is published; empty for kind's own choice.
    """
    cluster: dict[str, Any] = yaml.safe_load(_BASE.read_text(encoding="utf-8"))
    control_plane, worker = cluster["nodes"][:2]
    nodes = [control_plane, *(worker for _ in range(size.num_gpu_nodes))]
    seen = [
        {"hostPath": str(path), "containerPath": str(on_node(path)), "readOnly": read_only}
        for path, read_only in sorted(mounts.items())
    ]
    cluster["nodes"] = [{**copy.deepcopy(node), "extraMounts": copy.deepcopy(seen)} for node in nodes]
    if api_address:
        cluster["networking"] = {"apiServerAddress": api_address}
    kubelet: dict[str, Any] = {}
    if cgroup_v1:
        # Where control groups of version 1 are left, capabilities may be missing that lowering oom_score_adj takes.
        kubelet |= {"failCgroupV1": False, "oomScoreAdj": 0}
    if size.fast_clocks:
        kubelet |= {"nodeLeaseDurationSeconds": _LEASE_SECONDS, "nodeStatusUpdateFrequency": "2s"}
        cluster["kubeadmConfigPatches"].append(yaml.safe_dump(_controller_manager()))
    if kubelet:
        cluster["kubeadmConfigPatches"].append(yaml.safe_dump({"kind": "KubeletConfiguration", **kubelet}))
    return cluster


def node_names(num_gpu_nodes: int) -> tuple[str, ...]:
    """Containers of the GPU nodes, as kind names them."""
    return tuple(f"{NAME}-worker{number if number > 1 else ''}" for number in range(1, num_gpu_nodes + 1))


def _controller_manager() -> dict[str, Any]:
    # A patch replaces the whole list: the first entry is kind's own.
    arguments = {"enable-hostpath-provisioner": "true", "node-monitor-grace-period": f"{GRACE_SECONDS}s"}
    return {
        "kind": "ClusterConfiguration",
        "controllerManager": {"extraArgs": [{"name": name, "value": value} for name, value in arguments.items()]},
    }
