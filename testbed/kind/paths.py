"""Folders of the cluster on kind, and what lies in them."""

from __future__ import annotations

from pathlib import Path

from testbed.paths import cache_dir

KIND_VERSION = "v0.33.0"
"""Of the kind that is fetched, and of the node image that is built here."""


def build_dir() -> Path:
    """Programs and node image; made once, and kept."""
    return cache_dir() / f"kind-{KIND_VERSION.removeprefix('v')}"


def run_dir() -> Path:
    """The running cluster, and the Docker daemon of its own. Removed by `down`."""
    return cache_dir() / "kind"


def kubeconfig() -> Path:
    """Credentials of the cluster's admin."""
    return run_dir() / "admin.conf"


def volumes_dir() -> Path:
    """Folders that all nodes see."""
    return run_dir() / "volumes"
