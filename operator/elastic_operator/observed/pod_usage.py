"""Who holds how many accelerators on which node: counted from pods. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from elastic_operator.observed.observation import controller_of, is_placed, pod_requests
from reshard.contract import Label

PodId = tuple[str, str]
"""Namespace and name of a pod."""

_VERSIONS = itertools.count(1)

_Claim = tuple[str, str, bool, Mapping[str, int]]
"""Node, UID of the Job that controls the pod, whether it has a label of ours, and extended resources by name."""


class PodUsage:
    """Extended resources that live pods hold, kept up to date pod by pod: a change costs the same in any cluster."""

    def __init__(self) -> None:
        self._version = next(_VERSIONS)
        self._claims: dict[PodId, _Claim] = {}
        self._totals: dict[str, dict[str, int]] = {}
        self._shares: dict[tuple[str, str], dict[str, int]] = {}  # only of pods with a label of ours

    def put(self, pod: Mapping[str, Any]) -> None:
        """Take up a core/v1 Pod as it is now."""
        meta, claim = pod["metadata"], _claim(pod)
        key = (meta["namespace"], meta["name"])
        if claim == self._claims.get(key):
            return
        self._release(key)
        if claim is not None:
            self._claims[key] = claim
            self._add(claim, 1)

    def drop(self, pod: PodId, *, ours: bool) -> None:
        """The pod is gone from those with our label (`ours`) or the others; one that changed sides was put anew."""
        known = self._claims.get(pod)
        if known is not None and known[2] == ours:
            self._release(pod)

    def totals(self, resource: str) -> Mapping[str, int]:
        """Accelerators that anybody holds, by node."""
        return self._totals.get(resource, {})

    def by_others(self, uids: Collection[str], resource: str) -> UsageByOthers:
        """Accelerators on each node that are held by other pods than those of the Jobs with these UIDs."""
        shares = [share for uid in uids if (share := self._shares.get((uid, resource)))]
        if len(shares) <= 1:
            return UsageByOthers(self.totals(resource), shares[0] if shares else {}, self._version)
        merged: dict[str, int] = {}
        for share in shares:
            for node, count in share.items():
                _change(merged, node, count)
        return UsageByOthers(self.totals(resource), merged, self._version)

    def _release(self, pod: PodId) -> None:
        claim = self._claims.pop(pod, None)
        if claim is not None:
            self._add(claim, -1)

    def _add(self, claim: _Claim, sign: int) -> None:
        node, owner, labelled, requests = claim
        self._version = next(_VERSIONS)
        for resource, count in requests.items():
            _change(self._totals.setdefault(resource, {}), node, sign * count)
            if owner and labelled:
                shares = self._shares.setdefault((owner, resource), {})
                _change(shares, node, sign * count)
                if not shares:
                    del self._shares[owner, resource]


class UsageByOthers(Mapping[str, int]):
    """What is held on each node, less one job's share: nodes where nothing is left are missing.

    A view of what `PodUsage` knows, for the time until that changes.

    Attributes:
        totals: what anybody holds, by node.
        share: what the job holds of it.
        version: another one wherever `totals` are others.
    """

    def __init__(self, totals: Mapping[str, int], share: Mapping[str, int], version: int) -> None:
        self.totals = totals
        self.share = share
        self.version = version

    def __getitem__(self, node: str) -> int:
        left = self.totals[node] - self.share.get(node, 0)
        if not left:
            raise KeyError(node)
        return left

    def __iter__(self) -> Iterator[str]:
        return (node for node, total in self.totals.items() if total != self.share.get(node, 0))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _change(counts: dict[str, int], node: str, by: int) -> None:
    left = counts.get(node, 0) + by
    if left:
        counts[node] = left
    else:
        counts.pop(node, None)


def _claim(pod: Mapping[str, Any]) -> _Claim | None:
    """What a pod holds; None for nothing."""
    if not is_placed(pod):
        return None
    spec, meta = pod["spec"], pod["metadata"]
    requests = pod_requests(spec)
    labelled = bool((meta.get("labels") or {}).get(Label.JOB))
    owner = controller_of(meta, "Job").get("uid", "")
    return (spec["nodeName"], owner, labelled, requests) if requests else None
