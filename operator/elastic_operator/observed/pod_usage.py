"""Count the resources that pods hold, by node. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from elastic_operator.observed.observation import controller_of
from elastic_operator.observed.placement.pod_resources import PODS, pod_requests
from reshard.contract import Label

PodId = tuple[str, str]
"""Namespace and name of a pod."""

_VERSIONS = itertools.count(1)

_Claim = tuple[str, str, bool, Mapping[str, int]]
"""Node, UID of the controlling Job, whether the pod has the operator's label, and requests by resource name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A pod that holds a resource.

    Attributes:
        pod: namespace and name.
        owner: UID of the controlling Job; empty if there is none.
        count: what it holds.
    """

    pod: PodId
    owner: str
    node: str
    count: int


class PodUsage:
    """Count the resources of live pods, incrementally: a change costs the same in a cluster of any size."""

    def __init__(self) -> None:
        self._version = next(_VERSIONS)
        self._claims: dict[PodId, _Claim] = {}
        self._totals: dict[str, dict[str, int]] = {}
        self._shares: dict[tuple[str, str], dict[str, int]] = {}  # only pods with the operator's label
        self._holders: dict[str, tuple[int, tuple[Holder, ...]]] = {}  # with the version that they are of

    def put(self, pod: Mapping[str, Any]) -> None:
        """Add or update a core/v1 Pod."""
        meta, claim = pod["metadata"], _parse_claim(pod)
        key = (meta["namespace"], meta["name"])
        if claim == self._claims.get(key):
            return
        self._release(key)
        if claim is not None:
            self._claims[key] = claim
            self._add(claim, 1)

    def drop(self, pod: PodId, *, ours: bool) -> None:
        """Remove a deleted pod, unless the other watch has put it again.

        Args:
            pod: namespace and name.
            ours: True if the watch of pods with the operator's label reports the deletion, False for the watch of all
                others. A pod whose label changes leaves one watch and enters the other, in any order.
        """
        claim = self._claims.get(pod)
        if claim is not None and claim[2] == ours:
            self._release(pod)

    def totals(self, resource: str) -> Mapping[str, int]:
        """Return what all pods hold of a resource, by node."""
        return self._totals.get(resource, {})

    def all_accelerators(self) -> dict[str, dict[str, int]]:
        """Return what all pods hold of each extended resource, by resource and node."""
        return {resource: dict(counts) for resource, counts in self._totals.items() if "/" in resource}

    def holders(self, resource: str) -> tuple[Holder, ...]:
        """Return all pods that hold a resource, the largest share first; listed once for all jobs until it changes."""
        version, found = self._holders.get(resource, (0, ()))
        if version != self._version:
            listed = (
                Holder(pod=pod, owner=owner, node=node, count=requests[resource])
                for pod, (node, owner, _, requests) in self._claims.items()
                if requests.get(resource)
            )
            found = tuple(sorted(listed, key=lambda item: (-item.count, item.pod)))
            self._holders[resource] = (self._version, found)
        return found

    def by_others(self, uids: Collection[str], resource: str) -> UsageByOthers:
        """Return what other pods than those of the given Jobs hold of a resource, by node."""

        def of(name: str) -> UsageByOthers:
            return self.by_others(uids, name)

        def holders() -> Iterator[Holder]:
            return (item for item in self.holders(resource) if item.owner not in uids)

        shares = [share for uid in uids if (share := self._shares.get((uid, resource)))]
        if len(shares) <= 1:
            return UsageByOthers(self.totals(resource), shares[0] if shares else {}, self._version, of, holders)
        merged: dict[str, int] = {}
        for share in shares:
            for node, count in share.items():
                _add_to_count(merged, node, count)
        return UsageByOthers(self.totals(resource), merged, self._version, of, holders)

    def _release(self, pod: PodId) -> None:
        claim = self._claims.pop(pod, None)
        if claim is not None:
            self._add(claim, -1)

    def _add(self, claim: _Claim, sign: int) -> None:
        node, owner, is_labelled, requests = claim
        self._version = next(_VERSIONS)
        for resource, count in requests.items():
            _add_to_count(self._totals.setdefault(resource, {}), node, sign * count)
            if owner and is_labelled:
                shares = self._shares.setdefault((owner, resource), {})
                _add_to_count(shares, node, sign * count)
                if not shares:
                    del self._shares[owner, resource]


class UsageByOthers(Mapping[str, int]):
    """What pods hold of one resource on each node, less one job's share; nodes with none are missing.

    A view of a `PodUsage`, valid until that changes.

    Attributes:
        totals: what all pods hold, by node.
        share: what the job holds, by node.
        version: differs if `totals` differ.
        of: returns the same for another resource; without it, no pod holds any.
        holders: returns the other pods that hold some, the largest share first.
    """

    def __init__(
        self,
        totals: Mapping[str, int],
        share: Mapping[str, int],
        version: int,
        of: Callable[[str], UsageByOthers] | None = None,
        holders: Callable[[], Iterable[Holder]] = tuple,
    ) -> None:
        self.totals = totals
        self.share = share
        self.version = version
        self.of = of or (lambda _: UsageByOthers({}, {}, version))
        self.holders = holders

    def __getitem__(self, node: str) -> int:
        count = self.totals[node] - self.share.get(node, 0)
        if not count:
            raise KeyError(node)
        return count

    def __iter__(self) -> Iterator[str]:
        return (node for node, total in self.totals.items() if total != self.share.get(node, 0))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _add_to_count(counts: dict[str, int], node: str, by: int) -> None:
    count = counts.get(node, 0) + by
    if count:
        counts[node] = count
    else:
        counts.pop(node, None)


def _parse_claim(pod: Mapping[str, Any]) -> _Claim | None:
    """Return what a pod holds; None if the scheduler has not placed it."""
    if not _is_placed(pod):
        return None
    spec, meta = pod["spec"], pod["metadata"]
    requests = {**pod_requests(spec), PODS: 1}
    is_labelled = bool((meta.get("labels") or {}).get(Label.JOB))
    owner = controller_of(meta, "Job").get("uid", "")
    return spec["nodeName"], owner, is_labelled, requests


def _is_placed(pod: Mapping[str, Any]) -> bool:
    """Return whether the scheduler has bound a pod to its node, or the kubelet has admitted it.

    The creator of a pod may write any `spec.nodeName`, so that field proves nothing. The binding and the kubelet set
    the condition PodScheduled. A pod without this condition holds no devices yet; a pod that the kubelet rejects never
    holds any.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    if not spec.get("nodeName") or status.get("phase") in ("Succeeded", "Failed"):
        return False
    scheduled = any(
        item.get("type") == "PodScheduled" and item.get("status") == "True" for item in status.get("conditions") or ()
    )
    return scheduled or status.get("phase") == "Running"
