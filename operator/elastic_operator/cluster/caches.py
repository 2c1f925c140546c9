"""Caches of nodes, of deleted pods, and of the times at which the operator first saw what other machines report.

No age compares the clocks of two machines: it counts from when the operator saw a change. `store` holds the job
resources, Jobs, pods and Leases.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_operator.api.serialization import parse_time
from elastic_operator.cluster.availability import Availability, WidespreadSilence
from elastic_operator.observed import signals
from elastic_operator.observed.health_monitors import NO_RULES, Rules
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import (
    CORDON,
    HEALTH,
    WITHDRAWAL_SECONDS,
    JobView,
    Key,
    LeaseView,
    NodeView,
    PodView,
    job_view,
    lease_view,
    node_view,
    pod_view,
)
from reshard.contract import LeaseKey

WIDESPREAD_SHARE = 0.55
"""Share of silent nodes above which the failure is widespread; the node lifecycle controller uses the same share."""

WIDESPREAD_NODES = 3
"""Number of silent nodes below which no failure is widespread."""

REMOVAL_SECONDS = 600.0
"""Time for which a removed node counts as silent in the decision whether a failure is widespread."""

KEPT_SECONDS = 15.0
"""Time for which a deleted pod is kept: longer than `reassessment.PEER_SECONDS`, after which nothing asks for it."""

_MISSED_SHARE, _MISSED_SECONDS = 0.25, 2.0
"""Share of a Lease's duration after which a kubelet renews it, and the least age that counts as a missed renewal."""

_STALE_SHARE, _STALE_SECONDS = 0.5, 5.0
"""Share of a Lease's duration after which the Lease counts as stale, and the least such age."""


class RenewalCache:
    """Times at which the operator first saw the values that other machines write, independent of their clocks."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}

    def first_seen(self, key: str, value: str, now: float) -> float:
        """Return the time at which `value` was first seen for `key`; `now` if it is new."""
        known = self._seen.get(key)
        if known is None or known[0] != value or known[1] > now:  # later than now: the own clock was set back
            self._seen[key] = known = (value, now)
        return known[1]

    def date_lease(self, lease: Mapping[str, Any], now: float) -> LeaseView:
        """Return the view of a Lease with the times at which its renewal and its step were first seen."""
        meta, spec = lease["metadata"], lease.get("spec") or {}
        key, uid = f"{meta['namespace']}/{meta['name']}", meta.get("uid") or ""
        step = (meta.get("annotations") or {}).get(LeaseKey.STEP) or ""
        return lease_view(
            lease,
            self.first_seen(key, f"{uid} {spec.get('renewTime') or ''}", now),
            self.first_seen(f"{key}/step", f"{uid} {step}", now) if step else None,
        )

    def date_pod(self, pod: Mapping[str, Any], now: float) -> PodView:
        """Return the view of a pod with the times at which its troubles and its deletion were first seen."""
        view, meta = pod_view(pod), pod["metadata"]
        key = f"{meta['namespace']}/{meta['name']}"
        times: dict[str, Any] = {}
        if signals.is_start_failure(view):
            times["cannot_start_since"] = self.first_seen(f"{key}/start", view.uid, now)
        else:
            self._seen.pop(f"{key}/start", None)
        if view.unschedulable:
            times["unschedulable_since"] = self.first_seen(f"{key}/unschedulable", view.uid, now)
        if view.deleted_at is not None:
            # A deletionTimestamp is the end of the grace period.
            deletion = f"{view.uid} {meta['deletionTimestamp']}"
            times["deleted_at"] = self.first_seen(f"{key}/deletion", deletion, now) + view.deletion_grace_seconds
        if view.scheduled_at is not None:
            times["scheduled_at"] = self.first_seen(f"{key}/scheduled", view.uid, now)
        if view.has_failed:
            times["failed_at"] = self.first_seen(f"{key}/failed", view.uid, now)
        if view.disruption:
            times["disrupted_at"] = self.first_seen(f"{key}/disruption", f"{view.uid} {view.disruption}", now)
        return dataclasses.replace(view, **times) if times else view

    def date_job(self, job: Mapping[str, Any], now: float) -> JobView:
        """Return the view of a Job with the time at which it was first seen."""
        view, meta = job_view(job), job["metadata"]
        created_at = self.first_seen(f"{meta['namespace']}/{meta['name']}/job", view.uid, now)
        return dataclasses.replace(view, created_at=created_at)

    def forget(self, namespace: str, name: str) -> None:
        """Remove the times of a Lease, pod or Job that was deleted."""
        key = f"{namespace}/{name}"
        for suffix in _SUFFIXES:
            self._seen.pop(key + suffix, None)


_SUFFIXES = ("", "/step", "/start", "/unschedulable", "/deletion", "/failed", "/disruption", "/scheduled", "/job")


class DeletedPods:
    """Pods that had failed and were deleted within the last KEPT_SECONDS: evidence of where a failure began.

    The Job controller deletes the peers of a failed pod at once. The one that failed first may be among them if its
    kubelet is slow to report, and it may be gone before the next pass lists the pods. Times are monotonic, in seconds.
    """

    def __init__(self) -> None:
        self._pods: dict[Key, dict[str, tuple[float, PodView]]] = {}
        self._deletions: collections.deque[tuple[float, Key, str]] = collections.deque()

    def keep(self, key: Key, pod: PodView, now: float) -> None:
        """Keep a deleted pod of a job if it had failed."""
        self._drop_old(now)
        if pod.has_failed:
            self._pods.setdefault(key, {})[pod.uid] = (now, pod)
            self._deletions.append((now, key, pod.uid))

    def get(self, key: Key, now: float) -> tuple[PodView, ...]:
        """Return the kept pods of a job, oldest deletion first."""
        self._drop_old(now)
        return tuple(pod for _, pod in self._pods.get(key, {}).values())

    def _drop_old(self, now: float) -> None:
        while self._deletions and now - self._deletions[0][0] > KEPT_SECONDS:
            deletion, key, uid = self._deletions.popleft()
            kept = self._pods.get(key, {})
            if uid in kept and kept[uid][0] == deletion:  # a pod may be dropped twice, if a list comes in between
                del kept[uid]
            if not kept:
                self._pods.pop(key, None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _NodeLease:
    """A kubelet's Lease: its renewTime as it was written, and when that happened by the operator's clock."""

    text: str
    renewed_at: float
    duration_seconds: float


class NodeCache:
    """Views of all nodes of the cluster.

    Args:
        rules: conditions and labels of a node that jobs have to leave.
    """

    def __init__(self, rules: Rules = NO_RULES) -> None:
        self._rules = rules
        self._availability = Availability()
        self._silence = WidespreadSilence()
        self._removed: dict[str, float] = {}
        self._shortages: dict[Key, dict[str, float]] = {}
        self._views: dict[str, NodeView] = {}
        self._leases: dict[str, _NodeLease] = {}
        self._skews: dict[str, float] = {}
        self._merged: dict[str, NodeView] | None = None
        self._is_widespread: bool | None = None
        self._stale_count: int | None = None
        self._pools: dict[str, NodePool] = {}
        self.polled_at = 0.0
        self._listed_at = 0.0

    def update(self, node: Mapping[str, Any], now: float) -> bool:
        """Store one node; return whether its view changed."""
        old = self._views.get(node["metadata"]["name"])
        view = date_node(node_view(node, self._rules), old, now)
        if view == old:
            return False
        self._views[view.name] = view
        self._removed.pop(view.name, None)
        self._forget_merged()
        return True

    def remove(self, name: str, now: float) -> None:
        """Remove a node that was deleted."""
        if name in self._views:
            self._removed[name] = now
        for table in (self._views, self._leases, self._skews):
            table.pop(name, None)
        self._forget_merged()

    def renew(self, lease: Mapping[str, Any], now: float) -> None:
        """Store when a kubelet renewed its Lease, by the operator's clock."""
        name, spec = lease["metadata"]["name"], lease.get("spec") or {}
        text, known = spec.get("renewTime") or "", self._leases.get(name)
        written = parse_time(text)
        if written is None or (known is not None and known.text == text):
            return
        # The smallest difference ever seen between the operator's clock and the node's is close enough to the skew.
        skew = self._skews[name] = min(self._skews.get(name, now - written), now - written)
        # It was renewed since the last poll, whatever the node's clock says: that clock may have been set.
        renewed = min(max(written + skew, self.polled_at if known is not None else now), now)
        duration = float(spec.get("leaseDurationSeconds") or 40)
        self._leases[name] = _NodeLease(text=text, renewed_at=renewed, duration_seconds=duration)

    def mark_started(self, now: float) -> None:
        """Note that the polls begin; a first poll that comes late shows that the API server was away."""
        self._availability.record_start(now)

    def mark_failed(self, now: float) -> None:
        """Note that a request failed at `now`, before the first poll."""
        self._availability.record_failure(now)

    def mark_polled(self, now: float, ended: float | None = None) -> None:
        """Note that all Leases were read.

        Args:
            now: when the list began; the ages of the Leases refer to this time.
            ended: when the list ended; None for at once.
        """
        self._availability.record_success(now, ended)
        self.polled_at, self._listed_at = now, now if ended is None else ended
        self._removed = {name: at for name, at in self._removed.items() if abs(now - at) <= REMOVAL_SECONDS}
        self._forget_merged()
        is_long, settled_at = self._is_most(self._count_stale()), self._silence.settled_at
        self._silence.record_poll(now, is_widespread=self.has_widespread_failure(), is_long=is_long)
        if self._silence.settled_at != settled_at:
            self._forget_merged()

    def views(self) -> Mapping[str, NodeView]:
        """Return the views of all nodes, with the ages of their Leases.

        The mapping is computed once per change, because every pass of every job needs it. A Lease has the age that it
        had when it was read: the time that has passed since then is no evidence against a node.
        """
        if self._merged is None:
            floor = self.evidence_since(self._listed_at)
            self._merged = {name: self._merge(view, floor) for name, view in self._views.items()}
        return self._merged

    def evidence_since(self, now: float) -> float:
        """Return the time from which ages count: the end of the last interruption, and the time to reconnect."""
        return max(self._availability.evidence_since(now), self._silence.settled_at)

    def date_shortages(self, key: Key, short: Iterable[str], now: float) -> Mapping[str, float]:
        """Return since when each node is short of accelerators.

        Args:
            key: the job that looks.
            short: the nodes of its pods that are short now.
            now: seconds since the epoch.
        """
        known = self._shortages.pop(key, {})
        dated = {name: min(known.get(name, now), now) for name in short}
        if dated:
            self._shortages[key] = dated
        return dated

    @property
    def removed(self) -> Mapping[str, float]:
        """Removal times, by name, of nodes that were removed in the last REMOVAL_SECONDS and have not returned."""
        return self._removed

    def has_widespread_failure(self) -> bool:
        """Return whether most nodes seem to be lost, which the control plane or a network causes rather than nodes.

        A node counts from the first renewal that it misses: when all fall silent at once, the last of them misses one
        about when the Lease of the first is stale.
        """
        if self._is_widespread is None:
            self._is_widespread = self._is_most(self._count_silent(_MISSED_SHARE, _MISSED_SECONDS))
        return self._is_widespread

    def is_hold_over(self, now: float) -> bool:
        """Return whether a widespread failure has lasted for so long that silence counts again."""
        return self._silence.is_over(now, is_total=self._count_stale() == self._num_nodes)

    @property
    def _num_nodes(self) -> int:
        return len(self._views) + len(self._removed)

    def _count_stale(self) -> int:
        """Count the nodes that are removed, not Ready or have a stale Lease; once per change, as every pass asks."""
        if self._stale_count is None:
            self._stale_count = self._count_silent(_STALE_SHARE, _STALE_SECONDS)
        return self._stale_count

    def _count_silent(self, share: float, seconds: float) -> int:
        """Count the nodes that are removed, not Ready, or silent for that share of a Lease, at least `seconds`."""
        silent = sum(node.ready != "True" or _is_silent(node, share, seconds) for node in self.views().values())
        return silent + len(self._removed)

    def _is_most(self, num_nodes: int) -> bool:
        return num_nodes >= WIDESPREAD_NODES and num_nodes > WIDESPREAD_SHARE * self._num_nodes

    def stale_nodes(self) -> list[str]:
        """Return the nodes whose Lease is older than half of its duration; `signals` decides whether they are lost."""
        return [name for name, node in self.views().items() if _is_silent(node, _STALE_SHARE)]

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

    def _merge(self, view: NodeView, floor: float) -> NodeView:
        """Return the view with the age of its Lease, and without any time before `floor`."""
        times: dict[str, Any] = {}
        if (lease := self._leases.get(view.name)) is not None:
            age = max(0.0, self.polled_at - max(lease.renewed_at, floor))
            times = {"lease_age_seconds": age, "lease_duration_seconds": lease.duration_seconds}
        if floor > 0.0:
            times |= {name: max(since, floor) for name in _TIMES if (since := getattr(view, name)) is not None}
            times["taints"] = tuple(
                dataclasses.replace(taint, since=max(taint.since or 0.0, floor)) for taint in view.taints
            )
        return dataclasses.replace(view, **times) if times else view

    def _forget_merged(self) -> None:
        self._merged = self._is_widespread = self._stale_count = None
        self._pools.clear()


_TIMES = ("ready_since", "allocatable_since", "cordoned_since", "unhealthy_since")


_MAX_WITHDRAWALS = 16
_BY_CONDITION = "node.kubernetes.io/"
"""Prefix of taints that Kubernetes derives from the node's state; they are no wish that the node be emptied."""


def date_node(view: NodeView, old: NodeView | None, now: float) -> NodeView:
    """Return the view of a node with the times at which the operator saw each part change."""

    def since(attribute: str, is_same: bool) -> float:
        known = getattr(old, attribute, None)
        return known if is_same and known is not None else now

    taints = {taint: taint.since for taint in old.taints} if old is not None else {}
    return dataclasses.replace(
        view,
        ready_since=since("ready_since", old is not None and old.ready == view.ready),
        allocatable_since=since("allocatable_since", old is not None and old.allocatable == view.allocatable),
        cordoned_since=since("cordoned_since", old is not None) if view.unschedulable else None,
        unhealthy_since=since("unhealthy_since", old is not None) if view.unhealthy else None,
        taints=tuple(dataclasses.replace(taint, since=taints.get(taint) or now) for taint in view.taints),
        withdrawals=_list_withdrawals(view, old, now) if old is not None else (),
    )


def _list_withdrawals(view: NodeView, old: NodeView, now: float) -> tuple[tuple[str, float], ...]:
    """Return what was withdrawn from a node within WITHDRAWAL_SECONDS, the newest last."""
    wanted = _list_planned(view)
    new = tuple((name, now) for name in _list_planned(old) if name not in wanted)
    if not new:
        return old.withdrawals
    recent = tuple(item for item in old.withdrawals if now - item[1] <= WITHDRAWAL_SECONDS)
    return (*recent, *new)[-_MAX_WITHDRAWALS:]


def _list_planned(view: NodeView) -> list[str]:
    """List the reasons to empty a node, by the names that `NodeView.withdrawals` uses."""
    flags = {CORDON: view.unschedulable, HEALTH: bool(view.unhealthy)}
    taints = {taint.label for taint in view.taints if not taint.key.startswith(_BY_CONDITION)}
    return [name for name, is_set in flags.items() if is_set] + sorted(taints)


def _is_silent(node: NodeView, share: float, seconds: float = 0.0) -> bool:
    age = node.lease_age_seconds
    return age is not None and age > max(node.lease_duration_seconds * share, seconds)
