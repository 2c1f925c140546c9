"""What a job may use right now. Who counts it (and what counts as free) is `observe`'s business."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """One usable node.

    Attributes:
        free: accelerators on it that the job may use: those that nobody holds and those that the job itself holds.
    """

    name: str
    free: int


class Pool:
    """Free accelerators by node, counted once for all jobs that see the same.

    Attributes:
        free: by name of the node, where there are any.
        total: accelerators.
    """

    def __init__(self, free: Mapping[str, int]) -> None:
        self.free = free
        self.total = sum(free.values())
        self._levels = collections.Counter(free.values())

    def num_with(self, free: int) -> int:
        """Nodes with at least so many."""
        return sum(count for level, count in self._levels.items() if level >= free)


NO_POOL = Pool({})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """All usable nodes: `nodes`, and those of `pool` that are not in `without`. Costs what is special about the job.

    Attributes:
        nodes: in the order in which they should be taken; none of them counts in `pool` as well.
        pool: what other jobs see, too.
        without: nodes that this job may not use, or that are in `nodes`.
        max_accelerators: quota for the whole job; None for no limit.
    """

    nodes: tuple[NodeCapacity, ...] = ()
    pool: Pool = NO_POOL
    without: frozenset[str] = frozenset()
    max_accelerators: int | None = None

    def in_order(self) -> tuple[NodeCapacity, ...]:
        """All usable nodes, in the order in which they should be taken."""
        if not self.pool.free:
            return self.nodes
        shared = (
            NodeCapacity(name=name, free=free) for name, free in self.pool.free.items() if name not in self.without
        )
        return in_order((*self.nodes, *shared))

    def usable(self, per_node: int) -> tuple[str, ...]:
        """Names of the nodes that can run a pod with `per_node` accelerators; a node runs one pod of a job."""
        return tuple(node.name for node in self.in_order() if node.free >= per_node)

    def num_usable(self, per_node: int) -> int:
        """How many such pods fit, within the quota."""
        barred = sum(self.pool.free.get(name, 0) >= per_node for name in self.without) if per_node > 0 else 0
        count = self.pool.num_with(per_node) - barred + sum(node.free >= per_node for node in self.nodes)
        return count if self.max_accelerators is None else min(count, max(0, self.max_accelerators) // per_node)

    def __str__(self) -> str:
        barred = [self.pool.free[name] for name in self.without if name in self.pool.free]
        total = self.pool.total - sum(barred) + sum(node.free for node in self.nodes)
        count = len(self.pool.free) - len(barred) + len(self.nodes)
        quota = "" if self.max_accelerators is None else f", quota {self.max_accelerators}"
        return f"{total} free accelerators on {count} nodes{quota}"


def in_order(nodes: Iterable[NodeCapacity]) -> tuple[NodeCapacity, ...]:
    """Fullest nodes first: they take the largest pods. The name decides ties, so that plans are stable."""
    return tuple(sorted(nodes, key=lambda node: (-node.free, node.name)))
