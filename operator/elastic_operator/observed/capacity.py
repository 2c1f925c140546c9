"""Accelerators that a job may use now, by node. `capacity_count` computes them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from elastic_operator.observed.pod_resources import PODS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """A node that the job may use.

    Attributes:
        free: accelerators that no pod holds, plus those that the job itself holds.
    """

    name: str
    free: int


class Pool:
    """Free accelerators by node, counted once and shared by all jobs.

    Attributes:
        free: by name of the node; only nodes with at least one free accelerator.
        total: sum of `free`.
        shortages: resource that a node lacks for a pod, by name of the node; these nodes are not in `free`.
    """

    def __init__(self, free: Mapping[str, int], shortages: Mapping[str, str] = MappingProxyType({})) -> None:
        self.free = free
        self.shortages = shortages
        self.total = sum(free.values())
        self._levels = collections.Counter(free.values())

    def num_with(self, free: int) -> int:
        """Count the nodes with at least `free` free accelerators."""
        return sum(count for level, count in self._levels.items() if level >= free)


NO_POOL = Pool({})


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
        shortages: resource that a node lacks for a pod, of the nodes that are counted for this job alone.
    """

    nodes: tuple[NodeCapacity, ...] = ()
    pool: Pool = NO_POOL
    without: frozenset[str] = frozenset()
    max_accelerators: int | None = None
    max_nodes: int | None = None
    shortages: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def sorted_nodes(self) -> tuple[NodeCapacity, ...]:
        """Return all usable nodes in planning order (see `sort_nodes`)."""
        if not self.pool.free:
            return self.nodes
        shared = (
            NodeCapacity(name=name, free=free) for name, free in self.pool.free.items() if name not in self.without
        )
        return sort_nodes((*self.nodes, *shared))

    def usable(self, per_node: int) -> tuple[str, ...]:
        """Return the names of nodes with at least `per_node` free accelerators; a node runs one pod of a job."""
        return tuple(node.name for node in self.sorted_nodes() if node.free >= per_node)

    def num_usable(self, per_node: int) -> int:
        """Count the pods with `per_node` accelerators that fit, within the quota."""
        barred = sum(self.pool.free.get(name, 0) >= per_node for name in self.without) if per_node > 0 else 0
        count = self.pool.num_with(per_node) - barred + sum(node.free >= per_node for node in self.nodes)
        if self.max_nodes is not None:
            count = min(count, self.max_nodes)
        return count if self.max_accelerators is None else min(count, max(0, self.max_accelerators) // per_node)

    def __str__(self) -> str:
        barred = [self.pool.free[name] for name in self.without if name in self.pool.free]
        total = self.pool.total - sum(barred) + sum(node.free for node in self.nodes)
        count = len(self.pool.free) - len(barred) + len(self.nodes)
        quota = "" if self.max_accelerators is None else f", quota {self.max_accelerators}"
        quota += "" if self.max_nodes is None else f", admitted for {self.max_nodes} nodes"
        shared = (resource for node, resource in self.pool.shortages.items() if node not in self.without)
        totals = collections.Counter([*shared, *self.shortages.values()])
        texts = [f"too {'few' if name == PODS else 'little'} {name} on {n} more" for name, n in sorted(totals.items())]
        lacking = f" ({', '.join(texts)})" if texts else ""
        return f"{total} free accelerators on {count} nodes{lacking}{quota}"


def sort_nodes(nodes: Iterable[NodeCapacity]) -> tuple[NodeCapacity, ...]:
    """Sort nodes by free accelerators, most first, then by name.

    Nodes with the most free accelerators take the largest pods; the name makes plans stable.
    """
    return tuple(sorted(nodes, key=lambda node: (-node.free, node.name)))
