"""Nodes that many jobs share. What depends on the nodes alone is computed once for all jobs. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic_operator.observed.capacity import VOLUMES, NodeCapacity, Pool
from elastic_operator.observed.observation import NodeView
from elastic_operator.observed.placement import schedulability
from elastic_operator.observed.placement.schedulability import count_healthy_devices, is_schedulable, reaches_volumes
from elastic_operator.observed.placement.volumes import ClaimView
from elastic_operator.observed.pod_usage import UsageByOthers
from elastic_operator.observed.signals import detect_node_signals
from elastic_operator.observed.timeouts import Timeouts

_MAX_CACHED_TEMPLATES = 16
"""Number of different sets of tolerations and selectors whose pools are cached."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """Working accelerators of the nodes where a pod may be placed, and those of them that do not reach its volumes."""

    counts: Mapping[str, int]
    unreachable: frozenset[str]


class NodePool(Mapping[str, NodeView]):
    """Immutable mapping of the nodes that offer one resource, with cached suspects and free accelerators.

    If a node changes, the caller makes a new NodePool.
    """

    def __init__(self, resource: str, nodes: Mapping[str, NodeView]) -> None:
        self.resource = resource
        self._nodes = nodes
        self._suspects: dict[Timeouts, frozenset[str]] = {}
        self._offers: dict[str, _Offer] = {}
        self._pools: dict[str, tuple[int, Pool]] = {}

    def __getitem__(self, name: str) -> NodeView:
        return self._nodes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, name: str, default: Any = None) -> Any:
        return self._nodes.get(name, default)

    def suspects(self, limits: Timeouts, now: float) -> frozenset[str]:
        """Return the nodes that a monitor calls unhealthy or that have any sign of being lost; independent of `now`."""
        if limits not in self._suspects:
            self._suspects[limits] = frozenset(
                name
                for name, node in self._nodes.items()
                if node.unhealthy or detect_node_signals(node, name, limits, now)
            )
        return self._suspects[limits]

    def pool(
        self, pod: Mapping[str, Any], used: UsageByOthers, max_pods: int = 1, claims: Sequence[ClaimView] = ()
    ) -> Pool:
        """Return the free accelerators on nodes that can take such pods, for a job that holds nothing itself.

        Args:
            pod: spec of the pods.
            used: what pods hold.
            max_pods: largest number of pods of one job on a node.
            claims: claims of the pods; jobs whose volumes are reached from the same nodes share one pool.
        """
        needed = schedulability.list_other_requests(pod, self.resource)
        facts = [needed, max_pods, *(pod.get(key) for key in ("tolerations", "nodeSelector", "affinity"))]
        facts.append([item.terms for item in claims if item.terms is not None])
        template = json.dumps(facts, sort_keys=True)
        version, pool = self._pools.get(template, (0, None))
        if pool is None or version != used.version:
            pool = self._count(self._offered(template, pod, claims), needed, used, max_pods)
            self._pools[template] = (used.version, pool)
        return pool

    def _count(self, offer: _Offer, needed: Sequence[tuple[str, int]], used: UsageByOthers, max_pods: int) -> Pool:
        totals, others = used.totals, {name: used.of(name).totals for name, _ in needed}
        nodes: list[NodeCapacity] = []
        shortages: dict[str, str] = {}
        for name, count in offer.counts.items():
            if (remaining := count - totals.get(name, 0)) <= 0:
                continue
            if name in offer.unreachable:
                shortages[name] = VOLUMES
                continue
            room, scarcest = schedulability.count_node_room(self._nodes[name], needed, others)
            if room:
                nodes.append(NodeCapacity(name=name, free=remaining, room=min(room, max_pods)))
            else:
                shortages[name] = scarcest
        return Pool(nodes, shortages, offer.counts.keys())

    def _offered(self, template: str, pod: Mapping[str, Any], claims: Sequence[ClaimView]) -> _Offer:
        if template not in self._offers:
            if len(self._offers) >= _MAX_CACHED_TEMPLATES:
                oldest = next(iter(self._offers))
                del self._offers[oldest]
                self._pools.pop(oldest, None)
            usable = [node for node in self._nodes.values() if is_schedulable(node, pod)]
            self._offers[template] = _Offer(
                counts={node.name: count_healthy_devices(node, self.resource) for node in usable},
                unreachable=frozenset(node.name for node in usable if not reaches_volumes(node, claims)),
            )
        return self._offers[template]
