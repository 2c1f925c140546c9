"""Count the accelerators that a job may use now, as the scheduler would place its pods. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from elastic_operator.observed.capacity import (
    VOLUMES,
    Capacity,
    NodeCapacity,
    PlacementRules,
    Supply,
    sort_nodes,
)
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import WORKER, Observation
from elastic_operator.observed.placement.pod_constraints import NO_CONSTRAINTS, PodConstraints, list_domains
from elastic_operator.observed.placement.pod_resources import PODS
from elastic_operator.observed.placement.schedulability import (
    count_healthy_devices,
    count_node_room,
    is_schedulable,
    list_other_requests,
    reaches_volumes,
)
from elastic_operator.observed.placement.volumes import describe_reach
from elastic_operator.observed.pod_usage import UsageByOthers

_PLACE_IS_LOST = ("PreemptionByScheduler", "PreemptionByKubeScheduler", "TerminationByKubelet")
"""Reasons of DisruptionTarget after which the node of a training pod has no place for its successor: another pod has
got it, or the node shuts down. Neither is visible otherwise before the pod has ended."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodRules:
    """What besides the template's requests decides where the pods of a job fit.

    Attributes:
        max_per_node: largest number of the job's pods on a node.
        constraints: rules about pods of the same job.
    """

    max_per_node: int = 1
    constraints: PodConstraints = NO_CONSTRAINTS


ONE_POD_PER_NODE = PodRules()


def count_capacity(
    world: Observation,
    resource: str,
    template: Mapping[str, Any],
    avoid: Collection[str],
    rules: PodRules = ONE_POD_PER_NODE,
) -> Capacity:
    """Count the free accelerators on every node that can take a pod of the job and reaches its volumes.

    Accelerators that the job itself holds count as free, because the job releases them before its next attempt starts.
    If `world` shares its nodes with other jobs (`NodePool`), only nodes that differ for this job are counted again.

    Args:
        world: what the operator sees.
        resource: extended resource of the accelerators, for instance `nvidia.com/gpu`.
        template: PodTemplateSpec of the training pods; its requests, tolerations, node selector and required node
            affinity count.
        avoid: nodes that are lost, suspect or excluded.
        rules: what else decides where the pods fit.
    """
    pod = template.get("spec") or {}
    capacity = _count_usable(world, resource, pod, avoid, rules)
    return dataclasses.replace(capacity, supply=_count_supply(world, resource, pod, avoid, capacity.pool.taking))


def _count_supply(
    world: Observation,
    resource: str,
    pod: Mapping[str, Any],
    avoid: Collection[str],
    taking: Collection[str] | None,
) -> Supply:
    """Count the nodes that offer the accelerators; `taking` are those that take the pods, None if not known."""
    nodes = world.nodes
    offering: Collection[str] = nodes.keys()
    if taking is None:
        offering = {
            name for name, item in nodes.items() if item.allocatable.get(resource) or item.capacity.get(resource)
        }
        taking = {name for name in offering if is_schedulable(nodes[name], pod)}
    avoided = [name for name in set(avoid) if name in offering]
    barred = len(offering) - len(taking) - sum(name not in taking for name in avoided)
    return Supply(resource=resource, num_nodes=len(offering), num_avoided=len(avoided), num_barred=barred)


def _count_usable(
    world: Observation, resource: str, pod: Mapping[str, Any], avoid: Collection[str], rules: PodRules
) -> Capacity:
    nodes, used = world.nodes, world.used
    if rules.constraints:
        return _count_with_constraints(world, resource, pod, avoid, rules)
    if not isinstance(nodes, NodePool) or not isinstance(used, UsageByOthers) or nodes.resource != resource:
        own, shortages = _count(world, resource, pod, nodes.keys() - set(avoid), rules.max_per_node)
        return Capacity(nodes=sort_nodes(own), shortages=shortages, volumes=describe_reach(world.volumes))
    special = used.share.keys() | {item.node for item in world.pods if item.unhealthy_devices and item.node}
    special |= _find_lost_places(world)
    # Pods of the job without accelerators, such as reshard pods, hold other resources.
    special |= used.of(PODS).share.keys()
    names = (name for name in special if name in nodes and name not in avoid)
    own, shortages = _count(world, resource, pod, names, rules.max_per_node)
    without = frozenset(special.union(avoid))
    pool = nodes.pool(pod, used, rules.max_per_node, world.volumes)
    volumes = describe_reach(world.volumes)
    return Capacity(nodes=sort_nodes(own), pool=pool, without=without, shortages=shortages, volumes=volumes)


def _count_with_constraints(
    world: Observation, resource: str, pod: Mapping[str, Any], avoid: Collection[str], rules: PodRules
) -> Capacity:
    """Count every node for this job alone, because the result depends on more than one node."""
    names = world.nodes.keys() - set(avoid)
    own, shortages = _count(world, resource, pod, names, rules.max_per_node)
    placement = PlacementRules(
        constraints=rules.constraints,
        labels={node.name: world.nodes[node.name].labels for node in own},
        # The operator excludes nodes by node affinity, so they count for no domain.
        domains=list_domains(rules.constraints, (world.nodes[name] for name in names), pod),
    )
    volumes = describe_reach(world.volumes)
    return Capacity(nodes=sort_nodes(own), shortages=shortages, volumes=volumes, placement=placement)


def _find_lost_places(world: Observation) -> set[str]:
    return {item.node for item in world.pods if item.role == WORKER and item.disruption in _PLACE_IS_LOST and item.node}


def _count(
    world: Observation, resource: str, pod: Mapping[str, Any], names: Iterable[str], max_per_node: int
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
        if not reaches_volumes(node, world.volumes):
            shortages[name] = VOLUMES
            continue
        room, scarcest = count_node_room(node, needed, others)
        if room:
            nodes.append(NodeCapacity(name=name, free=free, room=min(room, max_per_node)))
        else:
            shortages[name] = scarcest
    return nodes, shortages
