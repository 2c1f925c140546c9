"""Applies a hypothetical change of nodes and accelerators to an observation. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Status
from elastic_operator.observed.observation import NodeView, Observation, attempt_of, node_view, pod_view
from elastic_operator.observed.pod_usage import PodUsage
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.reconcile.context import Context, find_capacity
from reshard.contract import Label

NEW_NODE = "new-{}"
"""Name of a hypothetical node."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A hypothetical change.

    Attributes:
        lose: accelerators lost, by node; None for the whole node.
        num_gpus: total number of accelerators that the job may use; None for no limit.
        add_nodes: number of new nodes, each with the largest number in `spec.accelerator.perNode`.
    """

    lose: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    num_gpus: int | None = None
    add_nodes: int = 0


def parse_lose(items: Iterable[str]) -> dict[str, int | None]:
    """Parse `gpu-1` (the whole node) and `gpu-1:2` (two of its accelerators), each alone or joined by commas.

    Raises:
        ValueError: an item has another form.
    """
    lose: dict[str, int | None] = {}
    for item in (part for text in items for part in text.split(",")):
        name, colon, text = item.partition(":")
        if not name or (colon and not (text.isdigit() and int(text))):
            raise ValueError(f"{item!r}: expected NODE, or NODE:GPUS with a whole number above 0")
        lose[name] = int(text) if colon else None
    return lose


def observe(
    nodes: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]], namespace: str, job: str, resource: str
) -> Observation:
    """Make the observation that the operator would have of nodes and pods; a plan needs no Jobs and Leases.

    The job's pods are identified by their labels, because Jobs are not read. This is safe here, because no action
    follows from the observation.

    Args:
        nodes: all nodes.
        pods: live pods of all namespaces.
        namespace: namespace of the job.
        job: name of the job.
        resource: name of its accelerators.
    """
    usage = PodUsage()
    own_pods = []
    for item in pods:
        meta = item["metadata"]
        if meta["namespace"] == namespace and (meta.get("labels") or {}).get(Label.JOB) == job and attempt_of(meta):
            own_pods.append(pod_view(item))
        else:
            usage.put(item)
    own_nodes = {pod.node for pod in own_pods}
    views = [node_view(item) for item in nodes]
    return Observation(
        nodes={view.name: view for view in views if view.name in own_nodes or view.capacity.get(resource, 0) > 0},
        pods=tuple(own_pods),
        used=usage.by_others((), resource),
    )


def apply_change(context: Context, status: Status, change: Change) -> Observation:
    """Return the observation after the change.

    Raises:
        PluginError: a node to lose does not exist.
    """
    world, resource = context.world, context.spec.accelerator.resource
    unknown = sorted(set(change.lose) - set(world.nodes))
    if unknown:
        there = ", ".join(sorted(world.nodes)) or "none"
        raise PluginError(Exit.REFUSED, f"no node {', '.join(unknown)} with {resource}; nodes that have it: {there}")
    for name, count in change.lose.items():
        left = 0 if count is None else world.nodes[name].allocatable.get(resource, 0) - count
        world = _with_accelerators(world, resource, name, max(0, left), drop=count is None)
    if change.num_gpus is not None:
        world = _limited(dataclasses.replace(context, world=world), status, change.num_gpus)
    return _with_new_nodes(world, context.spec, change.add_nodes)


def _with_accelerators(world: Observation, resource: str, name: str, count: int, *, drop: bool = False) -> Observation:
    nodes = dict(world.nodes)
    if drop:
        del nodes[name]
    else:
        node = nodes[name]
        nodes[name] = dataclasses.replace(node, allocatable={**node.allocatable, resource: count})
    return dataclasses.replace(world, nodes=nodes)


def _limited(context: Context, status: Status, num_gpus: int) -> Observation:
    """Limit the job to `num_gpus` accelerators, and add hypothetical nodes if there are fewer.

    Nodes with more free accelerators are used first, and among equal ones the nodes of the running attempt.
    """
    spec, world = context.spec, context.world
    resource = spec.accelerator.resource
    hosts = {pod.node for pod in world.pods if pod.attempt == status.attempt and not pod.terminal}
    left = num_gpus
    for node in sorted(
        find_capacity(context, status).sorted_nodes(), key=lambda node: (-node.free, node.name not in hosts, node.name)
    ):
        take = min(left, node.free)
        left -= take
        offered = world.nodes[node.name].allocatable.get(resource, 0)
        world = _with_accelerators(world, resource, node.name, offered - node.free + take, drop=take == 0)
    most = max(spec.accelerator.per_node)
    whole, rest = divmod(left, most)
    return _with_new_nodes(world, spec, whole, rest=rest)


def _with_new_nodes(world: Observation, spec: Spec, count: int, rest: int = 0) -> Observation:
    """Add hypothetical nodes on which every pod of the job may be placed.

    Args:
        world: the observation to extend.
        spec: spec of the job.
        count: number of nodes with the largest number of accelerators in `perNode`.
        rest: accelerators of one more node; 0 for no such node.
    """
    resource, most = spec.accelerator.resource, max(spec.accelerator.per_node)
    sizes = [most] * count + ([rest] if rest else [])
    pod = spec.template.get("spec") or {}
    nodes = dict(world.nodes)
    for number, gpus in enumerate(sizes, 1):
        name = NEW_NODE.format(number)
        nodes[name] = NodeView(
            name=name, labels=pod.get("nodeSelector") or {}, allocatable={resource: gpus}, capacity={resource: gpus}
        )
    return dataclasses.replace(world, nodes=nodes)
