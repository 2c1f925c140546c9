"""Caches of nodes, and of the times at which Leases changed by the operator's own clock.

`store` holds the job resources, Jobs, pods and Leases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_operator.api.serialization import parse_time
from elastic_operator.observed.health_monitors import NO_RULES, Rules
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import NodeView, PodView, node_view


class RenewalCache:
    """Times at which the operator first saw the values that other machines write, independent of their clocks."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}

    def first_seen(self, key: str, value: str, now: float) -> float:
        """Return the time at which `value` was first seen for `key`; `now` if it is new."""
        known = self._seen.get(key)
        if known is None or known[0] != value:
            self._seen[key] = known = (value, now)
        return known[1]

    def lease_first_seen(self, lease: Mapping[str, Any], now: float) -> float:
        """Return the time at which the current renewal of a Lease was first seen."""
        meta, spec = lease["metadata"], lease.get("spec") or {}
        return self.first_seen(f"{meta['namespace']}/{meta['name']}", spec.get("renewTime") or "", now)

    def forget(self, key: str) -> None:
        """Remove the entry of an object that was deleted."""
        self._seen.pop(key, None)


class NodeCache:
    """Views of all nodes of the cluster.

    Args:
        rules: conditions and labels of a node that jobs have to leave.
    """

    def __init__(self, rules: Rules = NO_RULES) -> None:
        self._rules = rules
        self._views: dict[str, NodeView] = {}
        self._leases: dict[str, tuple[float, float]] = {}
        self._skews: dict[str, float] = {}
        self._merged: dict[str, NodeView] | None = None
        self._pools: dict[str, NodePool] = {}
        self.polled_at = 0.0

    def update(self, node: Mapping[str, Any], now: float) -> bool:
        """Store one node; return whether its view changed."""
        view, old = node_view(node, self._rules), self._views.get(node["metadata"]["name"])
        is_same = old is not None and old.allocatable == view.allocatable
        view = dataclasses.replace(view, allocatable_since=old.allocatable_since if is_same and old else now)
        if view == old:
            return False
        self._views[view.name] = view
        self._forget_merged()
        return True

    def remove(self, name: str) -> None:
        """Remove a node that was deleted."""
        for table in (self._views, self._leases, self._skews):
            table.pop(name, None)
        self._forget_merged()

    def renew(self, lease: Mapping[str, Any], now: float) -> None:
        """Store the renewal time of a kubelet's Lease, corrected by the node's clock skew."""
        name, spec = lease["metadata"]["name"], lease.get("spec") or {}
        renewed = parse_time(spec.get("renewTime"))
        if renewed is None:
            return
        # The smallest difference ever seen between the operator's clock and the node's is close enough to the skew.
        skew = self._skews[name] = min(self._skews.get(name, now - renewed), now - renewed)
        self._leases[name] = (renewed + skew, float(spec.get("leaseDurationSeconds") or 40))

    def mark_polled(self, now: float) -> None:
        """Note that all Leases were read at `now`; the ages of the Leases refer to this time."""
        self.polled_at = now
        self._forget_merged()

    def views(self) -> Mapping[str, NodeView]:
        """Return the views of all nodes, with the ages of their Leases.

        The mapping is computed once per change, because every pass of every job needs it. A Lease has the age that it
        had when it was read: the time that has passed since then is no evidence against a node.
        """
        if self._merged is None:
            self._merged = {name: self._with_lease(view) for name, view in self._views.items()}
        return self._merged

    def pool(self, resource: str) -> NodePool:
        """Return the nodes that have devices of one kind."""
        if resource not in self._pools:
            nodes = {name: node for name, node in self.views().items() if node.capacity.get(resource, 0) > 0}
            self._pools[resource] = NodePool(resource, nodes)
        return self._pools[resource]

    def views_for(self, resource: str, pods: Iterable[PodView]) -> Mapping[str, NodeView]:
        """Return the nodes that have devices of one kind or run one of `pods`.

        Almost every job gets the same mapping object, which saves memory and comparisons.
        """
        pool, views = self.pool(resource), self.views()
        others = {pod.node: views[pod.node] for pod in pods if pod.node not in pool and pod.node in views and pod.node}
        return {**pool, **others} if others else pool

    def _with_lease(self, view: NodeView) -> NodeView:
        if view.name not in self._leases:
            return view
        renewed, duration = self._leases[view.name]
        return dataclasses.replace(
            view, lease_age_seconds=max(0.0, self.polled_at - renewed), lease_duration_seconds=duration
        )

    def _forget_merged(self) -> None:
        self._merged = None
        self._pools.clear()
