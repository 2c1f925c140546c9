"""Who holds how many accelerators on which node: counted from pods. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_operator.observation import pod_requests
from reshard.contract import Label

PodId = tuple[str, str]
"""Namespace and name of a pod."""

_VERSIONS = itertools.count(1)

_Claim = tuple[str, str, Mapping[str, int]]
"""Node, job (`namespace/name`; empty for pods that are not ours), and extended resources by name."""


class Held:
    """Extended resources that live pods hold, kept up to date pod by pod: a change costs the same in any cluster."""

    def __init__(self) -> None:
        self._version = next(_VERSIONS)
        self._claims: dict[PodId, _Claim] = {}
        self._totals: dict[str, dict[str, int]] = {}
        self._shares: dict[tuple[str, str], dict[str, int]] = {}

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
        """The pod is gone from those of jobs (`ours`) or from the others; one that changed sides was put anew."""
        known = self._claims.get(pod)
        if known is not None and bool(known[1]) == ours:
            self._release(pod)

    def totals(self, resource: str) -> Mapping[str, int]:
        """Accelerators that anybody holds, by node."""
        return self._totals.get(resource, {})

    def by_others(self, namespace: str, job: str, resource: str) -> Others:
        """Accelerators on each node that are held by other pods than those of one job."""
        share = self._shares.get((f"{namespace}/{job}", resource), {})
        return Others(self.totals(resource), share, self._version)

    def _release(self, pod: PodId) -> None:
        claim = self._claims.pop(pod, None)
        if claim is not None:
            self._add(claim, -1)

    def _add(self, claim: _Claim, sign: int) -> None:
        node, job, requests = claim
        self._version = next(_VERSIONS)
        for resource, count in requests.items():
            _change(self._totals.setdefault(resource, {}), node, sign * count)
            if job:
                shares = self._shares.setdefault((job, resource), {})
                _change(shares, node, sign * count)
                if not shares:
                    del self._shares[job, resource]


class Others(Mapping[str, int]):
    """What is held on each node, less one job's share: nodes where nothing is left are missing.

    A view of what `Held` knows, for the time until that changes.

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
    spec, meta = pod.get("spec") or {}, pod["metadata"]
    node = spec.get("nodeName")
    if not node or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return None
    requests = pod_requests(spec)
    job = (meta.get("labels") or {}).get(Label.JOB)
    return (node, f"{meta['namespace']}/{job}" if job else "", requests) if requests else None
