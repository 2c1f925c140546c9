"""Nodes as many jobs see them, with what follows from them alone found once and not once for each job. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_operator.observed.capacity import Pool
from elastic_operator.observed.observation import NodeView
from elastic_operator.observed.pod_usage import UsageByOthers
from elastic_operator.observed.schedulability import accepts, healthy
from elastic_operator.observed.signals import node_signals
from elastic_operator.observed.timeouts import Timeouts

_KINDS_OF_PODS = 16
"""For so many different sets of tolerations and selectors the pools are kept."""


class NodePool(Mapping[str, NodeView]):
    """Nodes that offer one resource. Nodes never change in it; a changed node makes another fleet.

    Attributes:
        walks: how often all nodes were gone through, for tests: it must not grow with the number of jobs.
    """

    def __init__(self, resource: str, nodes: Mapping[str, NodeView]) -> None:
        self.resource = resource
        self.walks = 0
        self._nodes = nodes
        self._suspects: dict[Timeouts, frozenset[str]] = {}
        self._offers: dict[str, dict[str, int]] = {}
        self._pools: dict[str, tuple[int, Pool]] = {}

    def __getitem__(self, name: str) -> NodeView:
        return self._nodes[name]

    def __iter__(self) -> Iterator[str]:
        self.walks += 1
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, name: str, default: Any = None) -> Any:
        """The node, or `default`."""
        return self._nodes.get(name, default)

    def suspects(self, limits: Timeouts, now: float) -> frozenset[str]:
        """Nodes that a monitor calls unhealthy, or with any sign of being lost; neither depends on the time."""
        if limits not in self._suspects:
            self.walks += 1
            self._suspects[limits] = frozenset(
                name for name, node in self._nodes.items() if node.unhealthy or node_signals(node, name, limits, now)
            )
        return self._suspects[limits]

    def pool(self, pod: Mapping[str, Any], used: UsageByOthers) -> Pool:
        """Free accelerators on the nodes that take such pods, as they are for a job that holds none itself."""
        kind = json.dumps([pod.get(key) for key in ("tolerations", "nodeSelector", "affinity")], sort_keys=True)
        version, pool = self._pools.get(kind, (0, None))
        if pool is None or version != used.version:
            self.walks += 1
            totals = used.totals
            free = {
                name: left
                for name, count in self._offered(kind, pod).items()
                if (left := count - totals.get(name, 0)) > 0
            }
            pool = Pool(free)
            self._pools[kind] = (used.version, pool)
        return pool

    def _offered(self, kind: str, pod: Mapping[str, Any]) -> Mapping[str, int]:
        if kind not in self._offers:
            if len(self._offers) >= _KINDS_OF_PODS:
                oldest = next(iter(self._offers))
                del self._offers[oldest]
                self._pools.pop(oldest, None)
            self._offers[kind] = {
                node.name: healthy(node, self.resource) for node in self._nodes.values() if accepts(node, pod)
            }
        return self._offers[kind]
