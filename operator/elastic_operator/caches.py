"""What the operator remembers between looks at the cluster: nodes, and when heartbeats changed by its own clock.

Lists are not mirrored: a watch that was cut may miss deletions, and a ghost of a pod would block a launch for ever.
Nodes are, as listing thousands of them for every job would be too slow; `refresh` drops the ghosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_operator.monitors import NO_RULES, Rules
from elastic_operator.observation import NodeView, node_view
from elastic_operator.wire import parse_time


class Renewals:
    """When something that other machines write was seen to change. Their clocks do not matter."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}

    def seen(self, key: str, value: str, now: float) -> float:
        """Time at which `value` was first seen for `key`."""
        known = self._seen.get(key)
        if known is None or known[0] != value:
            self._seen[key] = known = (value, now)
        return known[1]


class Nodes:
    """All nodes of the cluster. `rules` say which conditions and labels mean that a node should be left."""

    def __init__(self, rules: Rules = NO_RULES) -> None:
        self._rules = rules
        self._views: dict[str, NodeView] = {}
        self._leases: dict[str, tuple[float, float]] = {}
        self._skews: dict[str, float] = {}
        self.polled_at = 0.0

    def update(self, node: Mapping[str, Any], now: float) -> bool:
        """Take up one node; True if anything that matters has changed."""
        view, old = node_view(node, self._rules), self._views.get(node["metadata"]["name"])
        same = old is not None and old.allocatable == view.allocatable
        view = dataclasses.replace(view, allocatable_since=old.allocatable_since if same and old else now)
        self._views[view.name] = view
        return view != old

    def remove(self, name: str) -> None:
        """The node does not exist any more."""
        self._views.pop(name, None)
        self._leases.pop(name, None)
        self._skews.pop(name, None)

    def refresh(self, nodes: Iterable[Mapping[str, Any]], now: float) -> None:
        """Replace all by a fresh list."""
        names = set()
        for node in nodes:
            names.add(node["metadata"]["name"])
            self.update(node, now)
        for name in set(self._views) - names:
            self.remove(name)

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

    def views(self, now: float) -> dict[str, NodeView]:
        """All nodes, with what is known of their Leases.

        Time that has passed since they were read is no evidence against a node.
        """
        unread = max(0.0, now - self.polled_at)
        return {
            name: dataclasses.replace(
                view, lease_renewed_at=self._leases[name][0] + unread, lease_duration_seconds=self._leases[name][1]
            )
            if name in self._leases
            else view
            for name, view in self._views.items()
        }
