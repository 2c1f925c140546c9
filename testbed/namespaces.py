"""The test bed as a provider: its nodes are Linux namespaces of this machine."""

from __future__ import annotations

from pathlib import Path

from testbed import cluster, faults, machine, storage
from testbed.paths import CONTROL_PLANE, kubeconfig, run_dir
from testbed.provider import Size


class NamespaceCluster:
    """`testbed.provider.Provider` without Docker."""

    def up(self, size: Size) -> None:
        """See `testbed.cluster.up`."""
        cluster.up(
            num_gpu_nodes=size.num_gpu_nodes,
            gpus_per_node=size.gpus_per_node,
            resources=size.resources,
            fast_clocks=size.fast_clocks,
        )

    def down(self) -> None:
        """Remove the cluster without a trace."""
        cluster.down()

    def machines(self) -> dict[str, bool]:
        """The control plane and the nodes, and whether they are switched on."""
        if not run_dir().exists():
            return {}
        names = (CONTROL_PLANE, *(node.name for node in cluster.members()))
        return {name: machine.is_running(name) for name in names}

    def kubeconfig(self) -> Path:
        """Credentials of the cluster that is up."""
        cluster.members()
        return kubeconfig()

    def load_images(self) -> None:
        """See `testbed.cluster.ensure_images`."""
        cluster.ensure_images()

    def kill_node(self, node: str) -> None:
        """SIGKILL of everything on the node."""
        faults.kill_node(node)

    def heal_node(self, node: str) -> None:
        """Switch the node on again, whatever was done to it."""
        faults.heal_node(node)

    def fail_gpu(self, node: str, device: str) -> None:
        """Make a GPU unhealthy."""
        faults.fail_gpu(node, device)

    def heal_gpu(self, node: str, device: str) -> None:
        """Make a GPU healthy again."""
        faults.heal_gpu(node, device)

    def make_volume(self, name: str) -> Path:
        """Make a folder that all nodes see."""
        return storage.make_volume(name)

    def on_node(self, path: Path) -> Path:
        """Return the same path: nodes share this machine's files."""
        return path
