"""Nodes and accelerators of a job as a picture in text. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_operator.api.status import Status
from elastic_operator.observed.observation import WORKER, NodeView, PodView, pod_view
from elastic_operator.plugin.pages.text import pluralize
from elastic_operator.plugin.pages.whatif import observe

SYMBOLS: Mapping[str, tuple[str, str]] = {
    "job": ("\N{BLACK SQUARE}", "#"),
    "others": ("\N{SQUARE WITH UPPER RIGHT TO LOWER LEFT FILL}", "o"),
    "free": ("\N{WHITE SQUARE}", "."),
    "broken": ("\N{MULTIPLICATION SIGN}", "x"),
    "unknown": ("?", "?"),
}
"""Symbol of one accelerator by its use, and its ASCII form."""

_MAX_DRAWN = 16
"""Accelerators of one node that are drawn one by one."""

_UNSEEN = "Unseen"
"""State of a node that a pod names and that the user may not read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node.

    Attributes:
        state: `Ready`, `NotReady`, `Lost`, `Cordoned`, `Avoided` or `Unseen`.
        total: accelerators of the node; those of the job's pods if the node cannot be read.
        job: accelerators that the job's training pods hold.
        others: accelerators that other pods hold.
        broken: accelerators that the node has and does not offer.
        pods: training pods of the job there, each with its attempt, index and phase.
        is_usage_known: False if pods of other namespaces cannot be read, so that nobody knows what is free.
    """

    name: str
    state: str
    total: int = 0
    job: int = 0
    others: int = 0
    broken: int = 0
    pods: tuple[str, ...] = ()
    is_usage_known: bool = True

    @property
    def free(self) -> int:
        """Accelerators that nobody holds."""
        return max(0, self.total - self.job - self.others - self.broken)

    @property
    def is_of_interest(self) -> bool:
        """True if the node runs the job, or is a reason of a change."""
        return bool(self.job or self.pods) or self.state not in ("Ready", _UNSEEN)


def find_node_states(
    status: Status,
    resource: str,
    own_pods: Sequence[Mapping[str, Any]],
    nodes: Sequence[Mapping[str, Any]] | None,
    live_pods: Sequence[Mapping[str, Any]] | None,
    *,
    job: tuple[str, str],
) -> tuple[NodeState, ...]:
    """Find the state of each node, those of the job first.

    Args:
        status: status of the job.
        resource: name of its accelerators.
        own_pods: pods of the job.
        nodes: all nodes; None if the user may not list them.
        live_pods: live pods of all namespaces; None if the user may not list them.
        job: namespace and name of the job.
    """
    workers = [view for view in map(pod_view, own_pods) if view.role == WORKER and view.node and not view.terminal]
    by_node: dict[str, list[PodView]] = {}
    for pod in workers:
        by_node.setdefault(str(pod.node), []).append(pod)
    lost = status.changes[-1].lost if status.changes and status.changes[-1].first_step_time is None else ()
    avoided = {item.name for item in status.excluded_nodes}
    if nodes is None:
        names = sorted({*by_node, *lost, *avoided})
        found = [_unseen(name, by_node.get(name, []), resource, lost=lost, avoided=avoided) for name in names]
    else:
        world = observe(nodes, live_pods or (), *job, resource)
        found = [
            _seen(view, by_node.get(view.name, []), world.used.get(view.name, 0), resource, lost=lost, avoided=avoided)
            for view in world.nodes.values()
            if view.capacity.get(resource, 0) or view.name in by_node
        ]
        gone = sorted(set(lost) - {item.name for item in found} - {pod.name for pod in workers})
        found += [NodeState(name=name, state="Lost") for name in gone]
        found = [dataclasses.replace(item, is_usage_known=live_pods is not None) for item in found]
    return tuple(sorted(found, key=lambda item: (not item.is_of_interest, item.name)))


def _seen(
    view: NodeView, pods: Sequence[PodView], others: int, resource: str, *, lost: Sequence[str], avoided: set[str]
) -> NodeState:
    total, offered = view.capacity.get(resource, 0), view.allocatable.get(resource, 0)
    held = sum(pod.requests.get(resource, 0) for pod in pods)
    state = "Cordoned" if view.unschedulable else "Avoided" if view.name in avoided else "Ready"
    if view.ready != "True":
        state = "NotReady"
    if view.name in lost:
        state = "Lost"
    return NodeState(
        name=view.name,
        state=state,
        total=max(total, held),
        job=held,
        others=min(others, max(0, total - held)),
        broken=total if view.ready != "True" and not held else max(0, min(total - offered, total - held)),
        pods=_describe(pods),
    )


def _unseen(name: str, pods: Sequence[PodView], resource: str, *, lost: Sequence[str], avoided: set[str]) -> NodeState:
    held = sum(pod.requests.get(resource, 0) for pod in pods)
    state = "Lost" if name in lost else "Avoided" if name in avoided else _UNSEEN
    return NodeState(name=name, state=state, total=held, job=held, pods=_describe(pods))


def _describe(pods: Sequence[PodView]) -> tuple[str, ...]:
    ordered = sorted(pods, key=lambda pod: (pod.attempt, pod.index or 0))
    return tuple(f"a{pod.attempt}-{pod.index if pod.index is not None else '?'} {pod.phase}" for pod in ordered)


def draw_gpus(node: NodeState, *, is_ascii: bool = False) -> str:
    """Draw the accelerators of a node, one symbol each; nodes with many get numbers instead."""
    is_dead = node.state in ("Lost", "NotReady")
    counts = {
        "broken" if is_dead else "job": node.job,
        "others": node.others,
        "free" if node.is_usage_known else "unknown": node.free,
    }
    counts["broken"] = counts.get("broken", 0) + node.broken
    if node.total > _MAX_DRAWN:
        return " ".join(f"{count} {use}" for use, count in counts.items() if count)
    return "".join(SYMBOLS[use][is_ascii] * count for use, count in counts.items()) or "-"


def summarize_rest(nodes: Sequence[NodeState]) -> str:
    """Describe nodes that are not listed one by one."""
    total, free = sum(node.total for node in nodes), sum(node.free for node in nodes)
    of_job = sum(node.job for node in nodes)
    job = f", {of_job} used by this job" if of_job else ""
    known = f"{free} free" if all(node.is_usage_known for node in nodes) else "how many are free is not known"
    return f"{pluralize(len(nodes), 'other node')}: {pluralize(total, 'accelerator')}{job}, {known}"
