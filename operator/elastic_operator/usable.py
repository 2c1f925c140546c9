"""Which nodes a job may be planned on, and how much of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from elastic_operator.capacity import Capacity, NodeCapacity
from elastic_operator.observation import NodeView, Observation, Taint


def capacity(world: Observation, resource: str, template: Mapping[str, Any], avoid: Collection[str]) -> Capacity:
    """Free accelerators on every node that could take a pod of the job.

    What the job itself holds counts as free: it is given back before the next attempt starts.

    Args:
        template: PodTemplateSpec of the training pods; its tolerations, node selector and required node affinity
            count.
        avoid: nodes that are lost, suspect or excluded.
    """
    pod = template.get("spec") or {}
    nodes = [
        NodeCapacity(name=node.name, free=free)
        for node in world.nodes.values()
        if node.name not in avoid
        and node.ready == "True"
        and not node.unschedulable
        and all(tolerates(pod.get("tolerations") or (), taint) for taint in node.taints if taint.effect != _SOFT)
        and matches(node, pod)
        and (free := _free(node, resource, world)) > 0
    ]
    # Fullest nodes first: they take the largest pods. The name decides ties, so that plans are stable.
    return Capacity(nodes=tuple(sorted(nodes, key=lambda node: (-node.free, node.name))))


def tolerates(tolerations: Sequence[Mapping[str, Any]], taint: Taint) -> bool:
    """A pod with these tolerations may be placed on, and stays on, a node with this taint (core/v1 semantics)."""
    return any(
        (not item.get("effect") or item["effect"] == taint.effect)
        and (not item.get("key") or item["key"] == taint.key)
        and (item.get("operator", "Equal") == "Exists" or (item.get("value") or "") == taint.value)
        for item in tolerations
        if item.get("key") or item.get("operator") == "Exists"
    )


def matches(node: NodeView, pod: Mapping[str, Any]) -> bool:
    """The node has what the pod's node selector and required node affinity ask for."""
    if any(node.labels.get(key) != value for key, value in (pod.get("nodeSelector") or {}).items()):
        return False
    affinity = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms")
    if terms is None:
        return True
    return any(
        all(_matches(item, node.labels.get(item["key"])) for item in term.get("matchExpressions") or ())
        and all(_matches(item, node.name) for item in term.get("matchFields") or ())
        for term in terms
    )


_SOFT = "PreferNoSchedule"


def _free(node: NodeView, resource: str, world: Observation) -> int:
    # A device may be reported Unhealthy in a pod a moment before the node's allocatable shrinks.
    unhealthy = sum(pod.unhealthy_devices for pod in world.pods if pod.node == node.name and not pod.terminal)
    offered = node.allocatable.get(resource, 0)
    healthy = min(offered, node.capacity.get(resource, offered) - unhealthy)
    return max(0, healthy - world.used.get(node.name, 0))


def _matches(requirement: Mapping[str, Any], value: str | None) -> bool:
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
