"""Decide which nodes a pod may be placed on, and count their working devices. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_operator.observed.observation import NodeView, Taint
from elastic_operator.observed.placement.pod_resources import PODS, count_room, pod_requests
from elastic_operator.observed.placement.volumes import ClaimView


def is_schedulable(node: NodeView, pod: Mapping[str, Any]) -> bool:
    """Return whether the scheduler would place a pod with this spec on the node and keep it there, devices aside."""
    return (
        node.ready == "True"
        and not node.unschedulable
        and all(tolerates(pod.get("tolerations") or (), taint) for taint in node.taints if taint.effect != _SOFT)
        and matches_node_affinity(node, pod)
    )


def would_take_pod(node: NodeView, pod: Mapping[str, Any], resource: str, num_devices: int) -> bool:
    """Return whether the scheduler would place a pod with so many devices on the node if no other pod were there."""
    if node.allocatable.get(resource, 0) < num_devices or not is_schedulable(node, pod):
        return False
    return count_node_room(node, list_other_requests(pod, resource), {})[0] > 0


def list_other_requests(pod: Mapping[str, Any], resource: str) -> list[tuple[str, int]]:
    """Return what a pod with this spec requests besides its accelerators, and its place among the node's pods."""
    requests = {**pod_requests(pod), PODS: 1}
    return sorted((name, count) for name, count in requests.items() if name != resource and count)


def count_node_room(
    node: NodeView, needed: Iterable[tuple[str, int]], others: Mapping[str, Mapping[str, int]]
) -> tuple[int, str]:
    """Return how many equal pods fit on a node, devices aside, and the resource that admits no more of them.

    Args:
        node: the node.
        needed: what the pod requests besides its accelerators.
        others: what other pods hold, by resource and node.
    """
    used = {name: nodes.get(node.name, 0) for name, nodes in others.items()}
    return count_room(needed, {**node.builtin, **node.allocatable}, used)


def count_healthy_devices(node: NodeView, resource: str, num_unhealthy: int = 0) -> int:
    """Count the working devices of a node.

    A device may be reported Unhealthy in a pod a moment before the node's allocatable shrinks; `num_unhealthy` counts
    such devices.
    """
    offered = node.allocatable.get(resource, 0)
    return min(offered, node.capacity.get(resource, offered) - num_unhealthy)


def tolerates(tolerations: Sequence[Mapping[str, Any]], taint: Taint) -> bool:
    """Return whether a pod with these tolerations may be placed and stay on a tainted node (core/v1 semantics)."""
    return toleration_seconds(tolerations, taint) == math.inf


def toleration_seconds(tolerations: Sequence[Mapping[str, Any]], taint: Taint) -> float:
    """Return how long a pod with these tolerations may stay on a tainted node: 0 for not at all, inf for ever.

    The first toleration that matches decides, as in the taint eviction controller.
    """
    for item in tolerations:
        if (
            (item.get("key") or item.get("operator") == "Exists")
            and (not item.get("effect") or item["effect"] == taint.effect)
            and (not item.get("key") or item["key"] == taint.key)
            and (item.get("operator", "Equal") == "Exists" or (item.get("value") or "") == taint.value)
        ):
            seconds = item.get("tolerationSeconds")
            return math.inf if seconds is None or taint.effect != "NoExecute" else max(0.0, float(seconds))
    return 0.0


def matches_node_affinity(node: NodeView, pod: Mapping[str, Any]) -> bool:
    """Return whether the node satisfies the pod's node selector and required node affinity."""
    if any(node.labels.get(key) != value for key, value in (pod.get("nodeSelector") or {}).items()):
        return False
    affinity = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms")
    return terms is None or matches_terms(node, terms)


def matches_terms(node: NodeView, terms: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a node matches one of the node selector terms; an empty term matches no node."""
    return any(
        bool(term.get("matchExpressions") or term.get("matchFields"))
        and all(_meets_requirement(item, node.labels.get(item["key"])) for item in term.get("matchExpressions") or ())
        and all(_meets_requirement(item, node.name) for item in term.get("matchFields") or ())
        for term in terms
    )


def reaches_volumes(node: NodeView, claims: Iterable[ClaimView]) -> bool:
    """Return whether a node reaches the volumes of all claims, as far as the operator knows."""
    return all(item.terms is None or matches_terms(node, item.terms) for item in claims)


_SOFT = "PreferNoSchedule"


def _meets_requirement(requirement: Mapping[str, Any], value: str | None) -> bool:
    values = requirement.get("values") or []
    match requirement["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and value.isdigit() and int(value) > int(values[0])
        case "Lt":
            return value is not None and value.isdigit() and int(value) < int(values[0])
        case _:
            return False
