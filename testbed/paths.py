"""Folders of the test bed, and its fixed names and addresses."""

from __future__ import annotations

import os
from pathlib import Path

BRIDGE = "etj0"
CGROUP = "etj-testbed"
CONTROL_PLANE = "control-plane"
CONTROL_PLANE_ADDRESS = "10.99.0.1"
HOST_ADDRESS = "10.99.0.254"
NODE_NETWORK_BITS = 24
SERVICE_NETWORK = "10.96.0.0/16"
KUBERNETES_SERVICE_ADDRESS = "10.96.0.1"
MACHINE_DIR = Path("/run/etj-testbed")
"""Folder that all cache folders share: a machine has the names and addresses above only once."""


def cache_dir() -> Path:
    """Downloads and builds live here; it may be kept between checkouts and deleted at any time."""
    explicit = os.environ.get("ETJ_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic-training-operator"


def state_dir() -> Path:
    """The running cluster: keys, logs, etcd, container images. Removed by `down`."""
    return cache_dir() / "testbed"


def run_dir() -> Path:
    """Return the folder of the running cluster; it is there as long as the cluster is."""
    return state_dir() / "run"


def kubeconfig() -> Path:
    """Credentials of the cluster's admin."""
    return run_dir() / "admin.conf"


def node_address(index: int) -> str:
    """Address of node `index` (from 1) on the bridge."""
    return f"10.99.0.{10 + index}"


def pod_network(index: int) -> str:
    """Pods of node `index` live here."""
    return f"10.88.{index}.0/24"
