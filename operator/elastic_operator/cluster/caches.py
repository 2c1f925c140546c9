"""What the operator remembers between looks at the cluster: nodes, and when heartbeats changed by its own clock.

Jobs, pods and the rest are in `remembered`.
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
    """When something that other machines write was seen to change. Their clocks do not matter."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}

    def seen(self, key: str, value: str, now: float) -> float:
        """Time at which `value` was first seen for `key`."""
        known = self._seen.get(key)
        if known is None or known[0] != value:
            self._seen[key] = known = (value, now)
        return known[1]

    def of(self, lease: Mapping[str, Any], now: float) -> float:
        """Time at which a Lease was first seen as it is."""
        meta, spec = lease["metadata"], lease.get("spec") or {}
        return self.seen(f"{meta['namespace']}/{meta['name']}", spec.get("renewTime") or "", now)

    def forget(self, key: str) -> None:
        """It does not exist any more."""
        self._seen.pop(key, None)


class NodeCache:
    """All nodes of the cluster. `rules` say which conditions and labels mean that a node should be left."""

    def __init__(self, rules: Rules = NO_RULES) -> None:
        self._rules = rules
        self._views: dict[str, NodeView] = {}
        self._leases: dict[str, tuple[float, float]] = {}
        self._skews: dict[str, float] = {}
        self._merged: dict[str, NodeView] | None = None
        self._offering: dict[str, NodePool] = {}
        self.polled_at = 0.0

    def update(self, node: Mapping[str, Any], now: float) -> bool:
        """Take up one node; True if anything that matters has changed."""
        view, old = node_view(node, self._rules), self._views.get(node["metadata"]["name"])
        same = old is not None and old.allocatable == view.allocatable
        view = dataclasses.replace(view, allocatable_since=old.allocatable_since if same and old else now)
        if view == old:
            return False
        self._views[view.name] = view
        self._forget_merged()
        return True

    def remove(self, name: str) -> None:
        """The node does not exist any more."""
        for table in (self._views, self._leases, self._skews):
            table.pop(name, None)
        self._forget_merged()

    def renew(self, lease: Mapping[str, Any], now: float) -> None:
        """Take up the Lease that a kubelet renews."""
        name, spec = lease["metadata"]["name"], lease.get("spec") or {}
        renewed = parse_time(spec.get("renewTime"))
        if renewed is None:
            return
        # The smallest difference ever seen between our clock and the node's is its skew, near enough.
        skew = self._skews[name] = min(self._skews.get(name, now - renewed), now - renewed)
        self._leases[name] = (renewed + skew, float(spec.get("leaseDurationSeconds") or 40))

    def polled(self, now: float) -> None:
        """All Leases have been read as they were at `now`."""
        self.polled_at = now
        self._forget_merged()

    def views(self) -> Mapping[str, NodeView]:
        """All nodes, with what is known of their Leases. Made once per change: every look at every job asks for it.

        Leases have the age that they had when they were read: time that has passed since is no evidence against a node.
        """
        if self._merged is None:
            self._merged = {name: self._with_lease(view) for name, view in self._views.items()}
        return self._merged

    def offering(self, resource: str) -> NodePool:
        """Those of `views` that have devices of one kind."""
        if resource not in self._offering:
            offering = {name: node for name, node in self.views().items() if node.capacity.get(resource, 0) > 0}
            self._offering[resource] = NodePool(resource, offering)
        return self._offering[resource]

    def around(self, resource: str, pods: Iterable[PodView]) -> Mapping[str, NodeView]:
        """Those that have devices of one kind or run one of these pods: the same mapping for almost every job."""
        offering, views = self.offering(resource), self.views()
        more = {
            pod.node: views[pod.node] for pod in pods if pod.node not in offering and pod.node in views and pod.node
        }
        return {**offering, **more} if more else offering

    def _with_lease(self, view: NodeView) -> NodeView:
        if view.name not in self._leases:
            return view
        renewed, duration = self._leases[view.name]
        return dataclasses.replace(
            view, lease_age_seconds=max(0.0, self.polled_at - renewed), lease_duration_seconds=duration
        )

    def _forget_merged(self) -> None:
        self._merged = None
        self._offering.clear()
