"""The fleet: what each node's accelerators do, which pods of jobs run there, and totals. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Phase
from elastic_operator.observed.observation import Key, NodeView, PodView
from elastic_operator.observed.signal_kinds import Kind
from elastic_operator.observed.signals import detect_node_signals
from elastic_operator.web.pages.snapshot import Snapshot

READY, CORDONED = "Ready", "Cordoned"

_STATES = {
    Kind.NODE_NOT_READY: "Not ready",
    Kind.NODE_LEASE_STALE: "Silent",
    Kind.NODE_OUT_OF_SERVICE: "Out of service",
}
_GPU_SUFFIX = "/gpu"
_ORDER = {
    str(phase): position
    for position, phase in enumerate((
        Phase.FAILED, Phase.WAITING, Phase.PENDING, Phase.RESHARDING, Phase.STOPPING, Phase.DRAINING, Phase.STARTING,
        Phase.SUSPENDED, Phase.RUNNING, Phase.COMPLETE,
    ))
}  # fmt: skip
"""Phases in the order in which they deserve a look."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A live pod of a job on a node."""

    job: Key
    role: str
    attempt: int
    index: int | None
    phase: str
    gpus: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """The accelerators of one kind on one node. Each counts once: jobs + others + out + free = total.

    Attributes:
        state: `Ready`, `Cordoned`, `Unhealthy`, `Not ready`, `Silent` or `Out of service`.
        reason: why it is not Ready.
        jobs: accelerators that pods of jobs hold.
        others: accelerators that other pods hold; 0 if `is_usage_known` is False.
        out: accelerators that cannot be used: broken devices, and idle ones of a node whose state is not Ready. All
            accelerators of a node that is lost or seems so.
        pods: live pods of jobs there.
        is_usage_known: False if pods of other namespaces are not watched; `free` is then an upper bound.
    """

    name: str
    resource: str
    state: str = READY
    reason: str = ""
    total: int = 0
    jobs: int = 0
    others: int = 0
    out: int = 0
    pods: tuple[Pod, ...] = ()
    is_usage_known: bool = True

    @property
    def free(self) -> int:
        """Accelerators that a pod may still get."""
        return max(0, self.total - self.jobs - self.others - self.out)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Everything that the page of the fleet counts, once for each snapshot.

    Attributes:
        keys: the jobs, those that deserve a look first.
        phases: number of jobs by phase; unreadable resources are `Unreadable`.
        nodes: nodes with accelerators, those that deserve a look first.
    """

    snapshot: Snapshot
    keys: tuple[Key, ...]
    phases: Mapping[str, int]
    nodes: tuple[NodeUse, ...]

    def count(self, use: str) -> int:
        """Return the sum over all nodes of `total`, `jobs`, `others`, `out` or `free`."""
        return sum(getattr(node, use) for node in self.nodes)


def survey(snapshot: Snapshot) -> Inventory:
    """Count what a snapshot holds."""
    records = snapshot.records
    keys = sorted(records, key=lambda key: (_rank(snapshot, key), key))
    phases = Counter(record.status.phase if record else "Unreadable" for record in records.values())
    nodes = sorted(_uses(snapshot), key=lambda use: (use.state == READY, not use.pods, use.name, use.resource))
    return Inventory(snapshot=snapshot, keys=tuple(keys), phases=phases, nodes=tuple(nodes))


def _rank(snapshot: Snapshot, key: Key) -> int:
    record = snapshot.records[key]
    return -1 if record is None else _ORDER.get(record.status.phase, 0)


def _uses(snapshot: Snapshot) -> Iterator[NodeUse]:
    named = {
        record.spec.accelerator.resource
        for record in snapshot.records.values()
        if record is not None and isinstance(record.spec, Spec)
    }
    by_node = _pods_by_node(snapshot)
    for name, node in snapshot.nodes.items():
        for resource in _list_resources(node, named):
            yield _use(snapshot, node, resource, by_node.get(name, []))


def _list_resources(node: NodeView, named: Collection[str]) -> list[str]:
    """Return the accelerators of a node: what jobs name, or if it has none of that, whatever is called .../gpu."""
    offered = [name for name, count in node.capacity.items() if count > 0]
    return [name for name in offered if name in named] or [name for name in offered if name.endswith(_GPU_SUFFIX)]


def _pods_by_node(snapshot: Snapshot) -> dict[str, list[tuple[Key, PodView]]]:
    found: dict[str, list[tuple[Key, PodView]]] = {}
    for key in snapshot.pods:
        for pod in snapshot.own_pods(key):
            if pod.node and not pod.terminal:
                found.setdefault(pod.node, []).append((key, pod))
    return found


def _use(snapshot: Snapshot, node: NodeView, resource: str, found: list[tuple[Key, PodView]]) -> NodeUse:
    state, reason = find_state(snapshot, node)
    pods = tuple(_place(key, pod, resource) for key, pod in found if _is_of(pod, resource))
    held, total = sum(pod.gpus for pod in pods), node.capacity[resource]
    jobs, others, out = min(held, total), 0, 0
    if snapshot.used is not None:
        others = min(max(0, snapshot.used.get(resource, {}).get(node.name, 0) - held), total - jobs)
    idle = total - jobs - others
    if state in _STATES.values():
        jobs, others, out = 0, 0, total
    elif state != READY:
        out = idle
    else:
        out = min(idle, max(0, total - node.allocatable.get(resource, 0)))
    return NodeUse(
        name=node.name,
        resource=resource,
        state=state,
        reason=reason,
        total=total,
        jobs=jobs,
        others=others,
        out=out,
        pods=tuple(sorted(pods, key=lambda pod: (pod.job, pod.attempt, pod.index or 0, pod.role))),
        is_usage_known=snapshot.used is not None,
    )


def find_state(snapshot: Snapshot, node: NodeView) -> tuple[str, str]:
    """Return the state of a node, and why it is not Ready."""
    signals = detect_node_signals(node, node.name, snapshot.limits, snapshot.time)
    if signals:
        return _STATES[signals[0].kind], signals[0].message
    if node.unhealthy:
        return "Unhealthy", "; ".join(node.unhealthy)
    if node.unschedulable:
        return CORDONED, "the node is cordoned"
    return READY, ""


def _is_of(pod: PodView, resource: str) -> bool:
    """Return whether a pod holds the resource, or holds none at all, as a reshard pod does."""
    return resource in pod.requests or not any(pod.requests.values())


def _place(key: Key, pod: PodView, resource: str) -> Pod:
    return Pod(
        job=key,
        role=pod.role,
        attempt=pod.attempt,
        index=pod.index,
        phase=pod.phase,
        gpus=pod.requests.get(resource, 0),
    )
