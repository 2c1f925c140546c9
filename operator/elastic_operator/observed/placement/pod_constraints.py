"""Rules of a pod template about where the pods of one job may be in relation to each other. Pure.

Sources: Kubernetes 1.36, pkg/scheduler/framework/plugins/interpodaffinity and podtopologyspread. Only required rules
whose label selector matches the job's own pods are counted. What a rule says about other pods is left to the scheduler.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from elastic_operator.observed.observation import NodeView
from elastic_operator.observed.placement.schedulability import matches_node_affinity, toleration_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A required topology spread constraint.

    Attributes:
        key: label of nodes; its values are the domains.
        max_skew: by how many pods a domain may exceed the domain with the fewest.
        min_domains: with fewer domains, the fewest pods of a domain count as 0.
        honors_affinity: only nodes that match the node selector and node affinity belong to domains.
        honors_taints: only nodes whose taints the pods tolerate belong to domains.
    """

    key: str
    max_skew: int
    min_domains: int = 1
    honors_affinity: bool = True
    honors_taints: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodConstraints:
    """Required rules about the pods of one job.

    Attributes:
        together: labels of nodes; all pods are on nodes with the same value of each.
        apart: labels of nodes; no two pods are on nodes with the same value of one of them.
        spread: topology spread constraints.
    """

    together: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    spread: tuple[Spread, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.together or self.apart or self.spread)


NO_CONSTRAINTS = PodConstraints()


def parse_pod_constraints(pod: Mapping[str, Any], labels: Mapping[str, str], namespace: str) -> PodConstraints:
    """Return the rules of a pod spec that refer to pods with the given labels in the given namespace."""
    affinity = _mapping(pod.get("affinity"))
    return PodConstraints(
        together=tuple(_list_topology_keys(affinity.get("podAffinity"), labels, namespace)),
        apart=tuple(_list_topology_keys(affinity.get("podAntiAffinity"), labels, namespace)),
        spread=tuple(_parse_spread(pod, labels)),
    )


def list_domains(
    constraints: PodConstraints, nodes: Iterable[NodeView], pod: Mapping[str, Any]
) -> tuple[frozenset[str], ...]:
    """Return the domains of each topology spread constraint: values of its label on the nodes that count for it."""
    spread = constraints.spread
    domains: list[set[str]] = [set() for _ in spread]
    for node in nodes:
        if not all(item.key in node.labels for item in spread):
            continue
        is_matched = matches_node_affinity(node, pod)
        is_tolerated = all(
            toleration_seconds(pod.get("tolerations") or (), taint) > 0
            for taint in node.taints
            if taint.effect in ("NoSchedule", "NoExecute")
        )
        for item, values in zip(spread, domains, strict=True):
            if (is_matched or not item.honors_affinity) and (is_tolerated or not item.honors_taints):
                values.add(node.labels[item.key])
    return tuple(map(frozenset, domains))


def count_pods(
    constraints: PodConstraints,
    rooms: Mapping[str, int],
    labels: Mapping[str, Mapping[str, str]],
    domains: tuple[frozenset[str], ...] = (),
) -> int:
    """Return how many pods of one job fit at once.

    With several rules of one kind, the result can be too high: then some pods find no node.

    Args:
        constraints: the rules.
        rooms: number of pods that fit on each node as far as its resources allow.
        labels: labels of these nodes.
        domains: result of `list_domains`.
    """
    needed = {*constraints.together, *(item.key for item in constraints.spread)}
    groups: dict[tuple[str, ...], dict[str, int]] = {}
    for name, room in rooms.items():
        if room > 0 and needed <= labels[name].keys():
            group = tuple(labels[name][key] for key in constraints.together)
            groups.setdefault(group, {})[name] = room
    counts = (
        _count_spread(constraints.spread, _keep_apart(constraints.apart, group, labels), labels, domains)
        for group in groups.values()
    )
    return max(counts, default=0)


def _keep_apart(
    keys: tuple[str, ...], rooms: Mapping[str, int], labels: Mapping[str, Mapping[str, str]]
) -> Mapping[str, int]:
    """Return the number of pods on each node if no two share a domain; nodes without the label are in no domain."""
    if not keys:
        return rooms
    taken: set[tuple[str, str]] = set()
    chosen: dict[str, int] = {}
    for name, room in rooms.items():
        places = {(key, labels[name][key]) for key in keys if key in labels[name]}
        if places & taken:
            continue
        taken |= places
        chosen[name] = 1 if places else room
    return chosen


def _count_spread(
    spread: tuple[Spread, ...],
    rooms: Mapping[str, int],
    labels: Mapping[str, Mapping[str, str]],
    domains: tuple[frozenset[str], ...],
) -> int:
    total = sum(rooms.values())
    for item, values in zip(spread, domains, strict=True):
        counts: collections.Counter[str] = collections.Counter()
        for name, room in rooms.items():
            counts[labels[name][item.key]] += room
        fewest = min((counts[value] for value in values), default=0) if len(values) >= item.min_domains else 0
        total = min(total, sum(min(count, fewest + item.max_skew) for count in counts.values()))
    return total


def _list_topology_keys(part: Any, labels: Mapping[str, str], namespace: str) -> Iterator[str]:
    for term in _mappings(_mapping(part).get("requiredDuringSchedulingIgnoredDuringExecution")):
        key = term.get("topologyKey")
        if (
            isinstance(key, str)
            and _is_namespace_meant(term, namespace)
            and _selects(term.get("labelSelector"), labels)
        ):
            yield key


def _is_namespace_meant(term: Mapping[str, Any], namespace: str) -> bool:
    names, selector = term.get("namespaces"), term.get("namespaceSelector")
    if isinstance(selector, Mapping):
        return not selector or (isinstance(names, list) and namespace in names)
    return not names or (isinstance(names, list) and namespace in names)


def _parse_spread(pod: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[Spread]:
    for item in _mappings(pod.get("topologySpreadConstraints")):
        key, skew, least = item.get("topologyKey"), item.get("maxSkew"), item.get("minDomains")
        if not isinstance(key, str) or not _is_count(skew) or not _selects(item.get("labelSelector"), labels):
            continue
        if item.get("whenUnsatisfiable") == "DoNotSchedule":
            yield Spread(
                key=key,
                max_skew=skew,
                min_domains=least if _is_count(least) else 1,
                honors_affinity=item.get("nodeAffinityPolicy", "Honor") == "Honor",
                honors_taints=item.get("nodeTaintsPolicy", "Ignore") == "Honor",
            )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _selects(selector: Any, labels: Mapping[str, str]) -> bool:
    """Return whether a LabelSelector matches the labels; an absent one matches nothing, an empty one everything."""
    if not isinstance(selector, Mapping):
        return False
    exact = _mapping(selector.get("matchLabels"))
    return all(labels.get(key) == value for key, value in exact.items()) and all(
        _meets(item, labels) for item in _mappings(selector.get("matchExpressions"))
    )


def _meets(requirement: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = requirement.get("key"), requirement.get("values")
    values = values if isinstance(values, list) else []
    match requirement.get("operator"):
        case "In":
            return labels.get(str(key)) in values
        case "NotIn":
            return labels.get(str(key)) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case _:
            return False


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    return (item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else iter(())
