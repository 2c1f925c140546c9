"""Count the accelerators that a job may use now, as the scheduler would place its pods. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from elastic_operator.observed.capacity import Capacity, NodeCapacity, sort_nodes
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import WORKER, Observation
from elastic_operator.observed.pod_resources import PODS
from elastic_operator.observed.pod_usage import UsageByOthers
from elastic_operator.observed.schedulability import (
    count_healthy_devices,
    find_node_shortage,
    is_schedulable,
    list_other_requests,
)

_PLACE_IS_LOST = ("PreemptionByScheduler", "PreemptionByKubeScheduler", "TerminationByKubelet")
"""Reasons of DisruptionTarget after which the node of a training pod has no place for its successor: another pod has
got it, or the node shuts down. Neither is visible otherwise before the pod has ended."""


def count_capacity(world: Observation, resource: str, template: Mapping[str, Any], avoid: Collection[str]) -> Capacity:
    """Count the free accelerators on every node that can take a pod of the job.

    Accelerators that the job itself holds count as free, because the job releases them before its next attempt starts.
    If `world` shares its nodes with other jobs (`NodePool`), only nodes that differ for this job are counted again.

    Args:
        world: what the operator sees.
        resource: extended resource of the accelerators, for instance `nvidia.com/gpu`.
        template: PodTemplateSpec of the training pods; its requests, tolerations, node selector and required node
            affinity count.
        avoid: nodes that are lost, suspect or excluded.
    """
    pod = template.get("spec") or {}
    nodes, used = world.nodes, world.used
    if not isinstance(nodes, NodePool) or not isinstance(used, UsageByOthers) or nodes.resource != resource:
        own, shortages = _count(world, resource, pod, nodes.keys() - set(avoid))
        return Capacity(nodes=sort_nodes(own), shortages=shortages)
    special = used.share.keys() | {item.node for item in world.pods if item.unhealthy_devices and item.node}
    special |= _find_lost_places(world)
    # Pods of the job without accelerators, such as reshard pods, hold other resources.
    special |= used.of(PODS).share.keys()
    own, shortages = _count(world, resource, pod, (name for name in special if name in nodes and name not in avoid))
    without = frozenset(special.union(avoid))
    return Capacity(nodes=sort_nodes(own), pool=nodes.pool(pod, used), without=without, shortages=shortages)


def _find_lost_places(world: Observation) -> set[str]:
    return {item.node for item in world.pods if item.role == WORKER and item.disruption in _PLACE_IS_LOST and item.node}


def _count(
    world: Observation, resource: str, pod: Mapping[str, Any], names: Iterable[str]
) -> tuple[list[NodeCapacity], Mapping[str, str]]:
    """Return the nodes that can take a pod, and the resource that each other node lacks for it."""
    needed = list_other_requests(pod, resource)
    used = world.used
    others = {name: used.of(name) for name, _ in needed} if isinstance(used, UsageByOthers) else {}
    nodes: list[NodeCapacity] = []
    shortages: dict[str, str] = {}
    unhealthy: dict[str, int] = {}
    for item in world.pods:
        if item.node and not item.terminal:
            unhealthy[item.node] = unhealthy.get(item.node, 0) + item.unhealthy_devices
    lost_places = _find_lost_places(world)
    for name in names:
        if name in lost_places:
            continue
        node = world.nodes[name]
        free = count_healthy_devices(node, resource, unhealthy.get(name, 0)) - world.used.get(name, 0)
        if free <= 0 or not is_schedulable(node, pod):
            continue
        if shortage := find_node_shortage(node, needed, others):
            shortages[name] = shortage
        else:
            nodes.append(NodeCapacity(name=name, free=free))
    return nodes, shortages
