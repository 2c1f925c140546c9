"""Volumes that every node sees at the same time, as a shared file system would be: folders of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.paths import state_dir
from testbed.shell import run

LIMITED = "limited"
LIMITED_MEBIBYTES = 160
"""A volume that can be filled, with room for ten commits of the tests' training. It is there from the start,
because nodes do not see mounts that come later."""


def make_volume(name: str, *, limit_mebibytes: int = 0) -> Path:
    """A folder for a volume; with a limit, a file system of exactly that size.

    A limited volume must be made before the nodes are switched on: their view of mounts is a copy. `up` makes the one
    called `LIMITED`.
    """
    folder = state_dir() / "volumes" / name
    folder.mkdir(parents=True, exist_ok=True)
    if limit_mebibytes and not folder.is_mount():
        run("mount", "-t", "tmpfs", "-o", f"size={limit_mebibytes}m", f"etj-{name}", folder)
    return folder


def claim(namespace: str, name: str, folder: Path, *, terms: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """PersistentVolume on `folder` and the PersistentVolumeClaim `namespace/name` bound to it.

    Args:
        namespace: namespace of the claim.
        name: name of the claim.
        folder: result of `make_volume`.
        terms: node selector terms of the nodes that reach the volume; none for all nodes.
    """
    volume = f"{namespace}-{name}"
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
    }
    affinity = {"nodeAffinity": {"required": {"nodeSelectorTerms": list(terms)}}} if terms else {}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                **spec,
                **affinity,
                "capacity": {"storage": "100Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(folder), "type": "Directory"},
                "claimRef": {"namespace": namespace, "name": name},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {**spec, "volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}},
        },
    ]
