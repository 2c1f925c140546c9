"""Accelerators that a job may use now, by node. `capacity_count` computes them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from elastic_operator.observed.placement.pod_constraints import PodConstraints, count_pods
from elastic_operator.observed.placement.pod_resources import HOST_PORT, PODS

VOLUMES = "persistent volumes"
"""Stands for a resource in `shortages`: the node does not reach the volumes of the pods."""

NOT_OFFERED = "no node offers"
"""Start of the clause that `Capacity.describe_supply` returns if no node has such accelerators."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """A node that the job may use.

    Attributes:
        free: accelerators that no pod holds, plus those that the job itself holds.
        room: largest number of the job's pods there, as far as other resources and the spec permit.
    """

    name: str
    free: int
    room: int = 1

    def num_pods(self, per_node: int) -> int:
        """Return how many pods with `per_node` accelerators fit."""
        return min(self.free // per_node, self.room) if per_node > 0 else 0


class Pool:
    """Free accelerators by node, counted once and shared by all jobs.

    Attributes:
        nodes: by name; only nodes with at least one free accelerator and room for a pod.
        total: number of their free accelerators.
        shortages: resource that a node lacks for a pod (or `VOLUMES`), by name of the node; these nodes are not in
            `nodes`.
        taking: nodes that take the pods as far as conditions, taints and the template say, with or without free
            accelerators; None if that is not known.
    """

    def __init__(
        self,
        nodes: Iterable[NodeCapacity] = (),
        shortages: Mapping[str, str] = MappingProxyType({}),
        taking: Collection[str] | None = None,
    ) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.shortages = shortages
        self.taking = taking
        self.total = sum(node.free for node in self.nodes.values())
        self._alike = [
            (NodeCapacity(name="", free=free, room=room), count)
            for (free, room), count in collections.Counter(
                (item.free, item.room) for item in self.nodes.values()
            ).items()
        ]

    def num_pods(self, per_node: int) -> int:
        """Count the pods with `per_node` accelerators that fit on all nodes."""
        return sum(node.num_pods(per_node) * count for node, count in self._alike)


NO_POOL = Pool()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Number of nodes that offer the accelerators, and of those that the job cannot use.

    Attributes:
        num_nodes: nodes that offer them.
        num_avoided: those of them that are lost, suspect or excluded.
        num_barred: others that do not take the pods: not Ready, cordoned, tainted, or not what the template selects.
    """

    resource: str
    num_nodes: int
    num_avoided: int = 0
    num_barred: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """Rules of the pod template about where the job's pods may be in relation to each other.

    Attributes:
        labels: labels of the nodes, by name.
        domains: domains of each topology spread constraint.
    """

    constraints: PodConstraints
    labels: Mapping[str, Mapping[str, str]]
    domains: tuple[frozenset[str], ...]

    def num_pods(self, nodes: Iterable[NodeCapacity], per_node: int) -> int:
        """Count the pods with `per_node` accelerators that fit on the nodes."""
        rooms = {node.name: node.num_pods(per_node) for node in nodes}
        return count_pods(self.constraints, rooms, self.labels, self.domains)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """All nodes that a job may use: `nodes`, and the nodes of `pool` that are not in `without`.

    The size of `nodes` and `without` depends on the job, not on the cluster.

    Attributes:
        nodes: nodes that are counted for this job alone, in planning order; none of them is counted in `pool` too.
        pool: nodes that are counted once for all jobs.
        without: nodes of `pool` that this job may not use, or that are in `nodes`.
        max_accelerators: quota for the whole job; None for no limit.
        max_nodes: number of nodes for which a queueing system has admitted the job; None for no limit.
        num_placed: number of pods that the scheduler could place when it had not as much room as was counted; None if
            it has always had.
        overcount: number of pods by which the count was too large then.
        shortages: resource that a node lacks for a pod, of the nodes that are counted for this job alone.
        volumes: clause that says from where the volumes of the job can be reached; empty if from everywhere.
        placement: rules about the pods of the job; None if there are none. With it, `pool` is empty.
        supply: nodes that offer the accelerators, usable or not; None if they were not counted.
    """

    nodes: tuple[NodeCapacity, ...] = ()
    pool: Pool = NO_POOL
    without: frozenset[str] = frozenset()
    max_accelerators: int | None = None
    max_nodes: int | None = None
    num_placed: int | None = None
    overcount: int = 0
    shortages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    volumes: str = ""
    placement: PlacementRules | None = None
    supply: Supply | None = None

    def sorted_nodes(self) -> tuple[NodeCapacity, ...]:
        """Return all usable nodes in planning order (see `sort_nodes`)."""
        if not self.pool.nodes:
            return self.nodes
        shared = (node for name, node in self.pool.nodes.items() if name not in self.without)
        return sort_nodes((*self.nodes, *shared))

    def usable(self, per_node: int) -> tuple[str, ...]:
        """Return the names of nodes on which a pod with `per_node` accelerators fits."""
        return tuple(node.name for node in self.sorted_nodes() if node.num_pods(per_node))

    def num_usable(self, per_node: int) -> int:
        """Count the pods with `per_node` accelerators that fit, within the quota."""
        if self.placement is not None:
            count = self.placement.num_pods(self.nodes, per_node)
        else:
            shared, names = self.pool.nodes, self.without
            barred = sum(shared[name].num_pods(per_node) for name in names if name in shared)
            count = self.pool.num_pods(per_node) - barred + sum(node.num_pods(per_node) for node in self.nodes)
        if self.num_placed is not None:
            # More nodes than then may have room for more pods, and a node that is gone since may be a useless one.
            count = min(count, max(self.num_placed, count - self.overcount))
        if self.max_nodes is not None:
            count = min(count, self.max_nodes)
        return count if self.max_accelerators is None else min(count, max(0, self.max_accelerators) // per_node)

    @property
    def _num_nodes(self) -> int:
        return len(self.pool.nodes) - sum(name in self.pool.nodes for name in self.without) + len(self.nodes)

    def describe_supply(self) -> str:
        """Return a clause that says which nodes offer the accelerators, and why the job cannot use the others."""
        if self.supply is None:
            return ""
        supply = self.supply
        if not supply.num_nodes:
            return f"{NOT_OFFERED} {supply.resource}"
        shared = self.pool.shortages
        lacking = len(shared) - sum(name in shared for name in self.without) + len(self.shortages)
        held = supply.num_nodes - supply.num_avoided - supply.num_barred - lacking - self._num_nodes
        parts = (
            (supply.num_avoided, "lost, suspect or excluded"),
            (supply.num_barred, "not Ready, cordoned, tainted or not selected by the template"),
            (held, "without a healthy accelerator that is free"),
        )
        texts = [f"{count} {text}" for count, text in parts if count > 0]
        return f"of {supply.num_nodes} nodes that offer {supply.resource}: {', '.join(texts)}" if texts else ""

    def __str__(self) -> str:
        barred = [self.pool.nodes[name].free for name in self.without if name in self.pool.nodes]
        total = self.pool.total - sum(barred) + sum(node.free for node in self.nodes)
        count = self._num_nodes
        quota = "" if self.max_accelerators is None else f", quota {self.max_accelerators}"
        quota += "" if self.max_nodes is None else f", admitted for {self.max_nodes} nodes"
        quota += "" if self.num_placed is None else f", {self.overcount} pods fewer than fit by the operator's count"
        shared = (resource for node, resource in self.pool.shortages.items() if node not in self.without)
        totals = collections.Counter([*shared, *self.shortages.values()])
        texts = [self._describe_shortage(name, n) for name, n in sorted(totals.items())]
        lacking = f" ({', '.join(texts)})" if texts else ""
        rules = "" if self.placement is None else ", subject to the template's pod affinity and topology spread"
        return f"{total} free accelerators on {count} nodes{lacking}{quota}{rules}"

    def _describe_shortage(self, resource: str, num_nodes: int) -> str:
        if resource == VOLUMES:
            return f"{self.volumes}: {num_nodes} more nodes"
        if resource.startswith(HOST_PORT):
            return f"{resource} taken on {num_nodes} more"
        return f"too {'few' if resource == PODS else 'little'} {resource} on {num_nodes} more"


def sort_nodes(nodes: Iterable[NodeCapacity]) -> tuple[NodeCapacity, ...]:
    """Sort nodes by free accelerators, most first, then by name.

    Nodes with the most free accelerators take the largest pods; the name makes plans stable.
    """
    return tuple(sorted(nodes, key=lambda node: (-node.free, node.name)))
