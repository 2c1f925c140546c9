"""Count the accelerators that a job may use now. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from elastic_operator.observed.capacity import Capacity, NodeCapacity, sort_nodes
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.pod_usage import UsageByOthers
from elastic_operator.observed.schedulability import count_healthy_devices, is_schedulable


def count_capacity(world: Observation, resource: str, template: Mapping[str, Any], avoid: Collection[str]) -> Capacity:
    """Count the free accelerators on every node that can take a pod of the job.

    Accelerators that the job itself holds count as free, because the job releases them before its next attempt starts.
    If `world` shares its nodes with other jobs (`NodePool`), only nodes that differ for this job are counted again.

    Args:
        world: what the operator sees.
        resource: extended resource of the accelerators, for instance `nvidia.com/gpu`.
        template: PodTemplateSpec of the training pods; its tolerations, node selector and required node affinity
            count.
        avoid: nodes that are lost, suspect or excluded.
    """
    pod = template.get("spec") or {}
    nodes, used = world.nodes, world.used
    if not isinstance(nodes, NodePool) or not isinstance(used, UsageByOthers) or nodes.resource != resource:
        return Capacity(nodes=sort_nodes(_count(world, resource, pod, nodes.keys() - set(avoid))))
    special = used.share.keys() | {item.node for item in world.pods if item.unhealthy_devices and item.node}
    own = _count(world, resource, pod, (name for name in special if name in nodes and name not in avoid))
    return Capacity(nodes=sort_nodes(own), pool=nodes.pool(pod, used), without=frozenset(special.union(avoid)))


def _count(world: Observation, resource: str, pod: Mapping[str, Any], names: Iterable[str]) -> Iterable[NodeCapacity]:
    unhealthy: dict[str, int] = {}
    for item in world.pods:
        if item.node and not item.terminal:
            unhealthy[item.node] = unhealthy.get(item.node, 0) + item.unhealthy_devices
    for name in names:
        node = world.nodes[name]
        free = count_healthy_devices(node, resource, unhealthy.get(name, 0)) - world.used.get(name, 0)
        if free > 0 and is_schedulable(node, pod):
            yield NodeCapacity(name=name, free=free)
