"""The cluster as it would be after a change that a person asks about. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Status
from elastic_operator.observed.observation import NodeView, Observation, attempt_of, node_view, pod_view
from elastic_operator.observed.pod_usage import PodUsage
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.reconcile.context import Context, capacity
from reshard.contract import Label

NEW_NODE = "new-{}"
"""Name of a node that is assumed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is asked about.

    Attributes:
        lose: accelerators lost, by node; None for the whole node.
        num_gpus: accelerators that the job may use in all; None for as many as there are.
        add_nodes: further nodes, each with the most accelerators that a pod of the job takes.
    """

    lose: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    num_gpus: int | None = None
    add_nodes: int = 0


def parse_lose(items: Iterable[str]) -> dict[str, int | None]:
    """`gpu-1` (the node), `gpu-1:2` (two accelerators of it).

    Raises:
        ValueError: something else.
    """
    found: dict[str, int | None] = {}
    for item in items:
        name, colon, text = item.partition(":")
        if not name or (colon and not (text.isdigit() and int(text))):
            raise ValueError(f"{item!r}: expected NODE, or NODE:GPUS with a whole number above 0")
        found[name] = int(text) if colon else None
    return found


def observe(
    nodes: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]], namespace: str, job: str, resource: str
) -> Observation:
    """What the operator would see of nodes and pods; Jobs and Leases are not needed for a plan.

    The job's pods are told by their labels here: Jobs are not read, and nothing is done by what this says.

    Args:
        pods: live pods of all namespaces.
    """
    held_by_pods = PodUsage()
    mine = []
    for item in pods:
        meta = item["metadata"]
        if meta["namespace"] == namespace and (meta.get("labels") or {}).get(Label.JOB) == job and attempt_of(meta):
            mine.append(pod_view(item))
        else:
            held_by_pods.put(item)
    held = {pod.node for pod in mine}
    views = [node_view(item) for item in nodes]
    return Observation(
        nodes={view.name: view for view in views if view.name in held or view.capacity.get(resource, 0) > 0},
        pods=tuple(mine),
        used=held_by_pods.by_others((), resource),
    )


def apply(context: Context, status: Status, change: Change) -> Observation:
    """The world after the change.

    Raises:
        PluginError: a node that is to be lost does not exist.
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
    """So many accelerators in all: full nodes first, those of the running attempt before others; or assumed ones."""
    spec, world = context.spec, context.world
    resource = spec.accelerator.resource
    hosts = {pod.node for pod in world.pods if pod.attempt == status.attempt and not pod.terminal}
    left = num_gpus
    for node in sorted(
        capacity(context, status).in_order(), key=lambda node: (-node.free, node.name not in hosts, node.name)
    ):
        take = min(left, node.free)
        left -= take
        offered = world.nodes[node.name].allocatable.get(resource, 0)
        world = _with_accelerators(world, resource, node.name, offered - node.free + take, drop=take == 0)
    most = max(spec.accelerator.per_node)
    whole, rest = divmod(left, most)
    return _with_new_nodes(world, spec, whole, rest=rest)


def _with_new_nodes(world: Observation, spec: Spec, count: int, rest: int = 0) -> Observation:
    """Assumed nodes that any pod of the job may be placed on; the last one with `rest` accelerators, if any."""
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
