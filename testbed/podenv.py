"""Pods with this machine's torch and DeepSpeed, so that no image with gigabytes of them has to be built. Pure.

`host_python` runs all of the machine's own Python; `example_image` runs the example's image as any cluster would, and
mounts only what that image lacks.
"""

from __future__ import annotations

import copy
import sys
import sysconfig
from pathlib import Path
from typing import Any

from testbed.extensions import folder as extensions_folder
from testbed.images import HOST_PYTHON
from testbed.project import CHECKOUT, EXAMPLE
from testbed.rootfs import USER

_FRAMEWORKS = "/opt/frameworks"


def machine_folders() -> dict[str, tuple[str, bool]]:
    """Folders of this machine that `host_python` mounts at the same place: by volume, each with True for read-only."""
    base, prefix = Path(sys.base_prefix), Path(sys.prefix)
    mounts = {
        "host-usr": ("/usr", True),
        "host-python": (str(base), True),
        "host-venv": (str(prefix), True),
        "host-checkout": (str(CHECKOUT), True),
        "host-extensions": (str(extensions_folder()), False),
    }
    if base.is_relative_to("/usr"):
        del mounts["host-python"]
    if prefix.is_relative_to(CHECKOUT):
        del mounts["host-venv"]
    return mounts


def host_python(template: dict[str, Any], *, machine: Path = Path("/")) -> dict[str, Any]:
    """A PodTemplateSpec whose containers run this virtual environment, mounted read-only from the machine.

    Replaces each container's image; keeps its command, resources and environment. `python`, `torchrun` and `reshard`
    are on PATH, the checkout is the working folder, and torch's compiled extensions come from the cache.

    Args:
        template: of the pods.
        machine: folder of a node below which the node has this machine's folders.
    """
    result = copy.deepcopy(template)
    spec = result.setdefault("spec", {})
    mounts = machine_folders()
    volumes: list[dict[str, Any]] = [
        {"name": name, "hostPath": {"path": str(machine / path.lstrip("/")), "type": "DirectoryOrCreate"}}
        for name, (path, _) in mounts.items()
    ]
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    spec.setdefault("volumes", []).extend(volumes)
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
        "HOME": "/tmp",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(extensions_folder()),
        "PYTHONUNBUFFERED": "1",
    }
    for container in [*spec.get("containers", []), *spec.get("initContainers", [])]:
        container |= {"image": HOST_PYTHON, "imagePullPolicy": "Never", "workingDir": str(CHECKOUT)}
        given = {item["name"] for item in container.setdefault("env", [])}
        container["env"] += [{"name": key, "value": value} for key, value in environment.items() if key not in given]
        container.setdefault("volumeMounts", []).extend(
            {"name": name, "mountPath": path, "readOnly": read_only} for name, (path, read_only) in mounts.items()
        )
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    return result


def example_image(template: dict[str, Any]) -> dict[str, Any]:
    """A PodTemplateSpec whose containers run the example's image, unprivileged, with the machine's torch and DeepSpeed.

    Replaces each container's image; keeps its command, resources and environment. `python` is on PATH, and the working
    folder is /app, which holds examples/.
    """
    result = copy.deepcopy(template)
    spec = result.setdefault("spec", {})
    spec["securityContext"] = {
        "runAsUser": USER,
        "runAsGroup": USER,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        **spec.get("securityContext", {}),
    }
    spec.setdefault("volumes", []).extend(
        [
            {"name": "frameworks", "hostPath": {"path": sysconfig.get_path("purelib"), "type": "Directory"}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ]
    )
    environment = {"PYTHONPATH": _FRAMEWORKS, "HOME": "/tmp", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for container in [*spec.get("containers", []), *spec.get("initContainers", [])]:
        container |= {"image": EXAMPLE, "imagePullPolicy": "Never", "workingDir": "/app"}
        container["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        given = {item["name"] for item in container.setdefault("env", [])}
        container["env"] += [{"name": key, "value": value} for key, value in environment.items() if key not in given]
        container.setdefault("volumeMounts", []).extend(
            [
                {"name": "frameworks", "mountPath": _FRAMEWORKS, "readOnly": True},
                {"name": "tmp", "mountPath": "/tmp"},
                {"name": "shm", "mountPath": "/dev/shm"},
            ]
        )
    return result
