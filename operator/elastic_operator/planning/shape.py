"""A shape: degrees of parallelism on a number of nodes, before the constraints are checked."""

from __future__ import annotations

import dataclasses

from reshard.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A topology on a number of nodes. Unlike `Topology` it may be impossible; `constraints` says why.

    Attributes:
        num_nodes: pods, one per node.
        per_node: accelerators of each pod.
        rank: position in the list of preferences; 0 if there is none.
    """

    num_nodes: int
    per_node: int
    tp: int
    pp: int
    dp: int
    ep: int = 1
    cp: int = 1
    zero: int = 1
    rank: int = 0

    @property
    def world_size(self) -> int:
        """Total number of accelerators."""
        return self.num_nodes * self.per_node

    @property
    def num_replicas(self) -> int:
        """Number of replicas that get different samples; with context parallelism `cp` of the `dp` ranks share one."""
        return self.dp // self.cp

    @property
    def topology(self) -> Topology:
        """The topology of this shape.

        Raises:
            TopologyError: the shape is impossible.
        """
        return Topology(tp=self.tp, pp=self.pp, dp=self.dp, ep=self.ep, cp=self.cp, zero=self.zero)

    def __str__(self) -> str:
        extra = "".join(f",{name}={getattr(self, name)}" for name in ("ep", "cp") if getattr(self, name) > 1)
        return f"tp={self.tp},pp={self.pp},dp={self.dp}{extra},zero={self.zero}"
