"""A mapping of nodes that counts how often a reader goes through all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import NodeView


class CountingNodes(dict[str, NodeView]):
    """Nodes by name; `walks` is the number of iterations over all nodes."""

    walks = 0

    def __iter__(self) -> Iterator[str]:
        self.walks += 1
        return super().__iter__()

    def keys(self) -> Any:
        self.walks += 1
        return super().keys()

    def values(self) -> Any:
        self.walks += 1
        return super().values()

    def items(self) -> Any:
        self.walks += 1
        return super().items()


def count_walks(pool: NodePool) -> CountingNodes:
    """Replace the nodes of `pool` by nodes that count, and return these."""
    nodes = CountingNodes(pool._nodes)
    pool._nodes = nodes
    return nodes
