"""Simulated GPUs on kind: the test bed's device plugin as a DaemonSet. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from testbed import podenv
from testbed.kind.configuration import MACHINE

NAME = "simulated-gpus"
NAMESPACE = "kube-system"
CONTROL = PurePosixPath("/var/lib/etj-gpus")
"""Folder of a node: a file in it named like a device makes that device unhealthy."""

_PLUGINS = "/var/lib/kubelet/device-plugins"


def daemon_set(resources: Sequence[str], gpus_per_node: int) -> dict[str, Any]:
    """Describe the DaemonSet: one container for each resource name, all of the same devices.

    The pods run this checkout with this machine's Python, so that no image of its own has to be built.
    """
    mounts = {"plugins": _PLUGINS, "control": str(CONTROL)}
    containers = [
        {
            "name": resource.partition(".")[0],
            "image": "replaced",
            "command": ["python", "-m", "testbed.device_plugin", resource, str(gpus_per_node), str(CONTROL)],
            "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
        }
        for resource in resources
    ]
    template = podenv.host_python(
        {
            "metadata": {"labels": {"app": NAME}},
            "spec": {
                "nodeSelector": {"etj-testbed/role": "gpu"},
                "priorityClassName": "system-node-critical",
                "tolerations": [{"operator": "Exists"}],
                "terminationGracePeriodSeconds": 1,
                "containers": containers,
                "volumes": [
                    {"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}}
                    for name, path in mounts.items()
                ],
            },
        },
        machine=Path(MACHINE),
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {"selector": {"matchLabels": {"app": NAME}}, "template": template},
    }
