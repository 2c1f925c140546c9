"""What a command needs from a cluster, whatever its nodes are made of. Pure.

Two things offer it: `testbed.namespaces.NamespaceCluster` and `testbed.kind.cluster.KindCluster`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

RESOURCES = ("amd.com/gpu", "nvidia.com/gpu")
"""Names under which a GPU node offers its simulated devices, unless others are asked for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is asked of a cluster.

    Attributes:
        num_gpu_nodes: nodes with simulated GPUs, beside the one without.
        gpus_per_node: simulated devices of each.
        resources: names under which the same devices are offered.
        fast_clocks: notice a dead node within seconds instead of Kubernetes' own 50 s.
    """

    num_gpu_nodes: int = 3
    gpus_per_node: int = 2
    resources: tuple[str, ...] = RESOURCES
    fast_clocks: bool = True


class Provider(Protocol):
    """A cluster on this machine that can be made, hurt and removed. Every method may raise a TestbedError."""

    def up(self, size: Size) -> None:
        """Bring the cluster up with this checkout's images; keep one that is up already and equal."""

    def down(self) -> None:
        """Remove the cluster, whatever state it is in."""

    def machines(self) -> dict[str, bool]:
        """Names of all nodes, and whether they are switched on. Empty without a cluster."""

    def kubeconfig(self) -> Path:
        """File with the admin's credentials of the cluster that is up."""

    def load_images(self) -> None:
        """Build this checkout's images as far as sources have changed, and bring them onto the nodes."""

    def kill_node(self, node: str) -> None:
        """Power loss: end everything on the node at once."""

    def heal_node(self, node: str) -> None:
        """Switch the node on again, with all its GPUs healthy."""

    def fail_gpu(self, node: str, device: str) -> None:
        """Make a GPU unhealthy."""

    def heal_gpu(self, node: str, device: str) -> None:
        """Make a GPU healthy again."""

    def make_volume(self, name: str) -> Path:
        """Make a folder of this machine that all nodes see, for a volume."""

    def on_node(self, path: Path) -> Path:
        """Return where a node sees a folder of this machine."""
