"""What a job may use right now, as frozen data. Who counts it (and what counts as free) is `observe`'s business."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """One usable node.

    Attributes:
        free: accelerators on it that the job may use: those that nobody holds and those that the job itself holds.
    """

    name: str
    free: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """All usable nodes, in the order in which they should be taken.

    Attributes:
        max_accelerators: quota for the whole job; None for no limit.
    """

    nodes: tuple[NodeCapacity, ...] = ()
    max_accelerators: int | None = None

    def usable(self, per_node: int) -> tuple[str, ...]:
        """Names of the nodes that can run a pod with `per_node` accelerators; a node runs one pod of a job."""
        return tuple(node.name for node in self.nodes if node.free >= per_node)

    def num_usable(self, per_node: int) -> int:
        """How many such pods fit, within the quota."""
        count = sum(node.free >= per_node for node in self.nodes)
        return count if self.max_accelerators is None else min(count, max(0, self.max_accelerators) // per_node)

    def __str__(self) -> str:
        total = sum(node.free for node in self.nodes)
        quota = "" if self.max_accelerators is None else f", quota {self.max_accelerators}"
        return f"{total} free accelerators on {len(self.nodes)} nodes{quota}"
