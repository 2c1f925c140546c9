"""What every part of a decision may look at, and how it hands on events. No I/O, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Status
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.manifests.reshard_pod import ReshardImage
from elastic_operator.observed import capacity_count, commit_history, signals
from elastic_operator.observed.capacity import Capacity
from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import Observation, PodView
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Event, ReshardOutcome


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Inputs of one decision. `events` and `reshards` are filled while it is made, in order, without repetition."""

    job: JobRef
    spec: Spec
    world: Observation
    limits: Timeouts
    now: float
    reshard_image: ReshardImage | None = None
    events: list[Event] = dataclasses.field(default_factory=list)
    reshards: list[ReshardOutcome] = dataclasses.field(default_factory=list)

    def emit(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Tell people."""
        event = Event(reason=reason, message=message, warning=warning)
        if event not in self.events:
            self.events.append(event)

    @property
    def graces(self) -> Mapping[str, float]:
        """Every grace that `signals.KINDS` names, in seconds."""
        recovery = self.spec.recovery
        return {
            "suspect_seconds": recovery.suspect_seconds,
            "hang_seconds": recovery.hang_seconds,
            "device_seconds": self.limits.device_seconds,
            "image_seconds": self.limits.image_seconds,
            "unschedulable_seconds": self.limits.unschedulable_seconds,
            "startup_seconds": self.limits.startup_seconds,
        }


def lost_nodes(context: Context, status: Status) -> frozenset[str]:
    """Nodes with pods of ours on which nothing of ours can be trusted to stop.

    Confirmed by signals of the node itself, or confirmed earlier and still not Ready.
    """
    world = context.world
    names = {pod.node for pod in world.pods if pod.node and not pod.terminal}
    confirmed: set[str] = set()
    for name in names:
        found = signals.node_signals(world.nodes.get(name), name, context.limits, context.now)
        confirmed.update(signals.judge(found, context.graces, context.now).lost_nodes)
    earlier = {item.name for item in status.excluded_nodes if item.until is None}
    still = {name for name in names & earlier if name not in world.nodes or world.nodes[name].ready != "True"}
    return frozenset(confirmed | still)


def suspect_nodes(context: Context) -> frozenset[str]:
    """Nodes with pods of ours and any sign of being lost, confirmed or not."""
    names = {pod.node for pod in context.world.pods if pod.node and not pod.terminal}
    nodes = context.world.nodes
    return frozenset(name for name in names if signals.node_signals(nodes.get(name), name, context.limits, context.now))


def avoided_nodes(context: Context, status: Status) -> frozenset[str]:
    """Nodes that a new attempt is not placed on: excluded, with a stale Lease, or called unhealthy by a monitor.

    The scheduler knows neither of the last two, so they have to be kept out of its choice.
    """
    return doubtful_nodes(context) | {item.name for item in status.excluded_nodes}


def doubtful_nodes(context: Context) -> frozenset[str]:
    """All nodes with any sign of being lost (not Ready, a stale Lease) or that a monitor calls unhealthy."""
    nodes = context.world.nodes
    fleet = nodes if isinstance(nodes, NodePool) else NodePool(context.spec.accelerator.resource, nodes)
    return fleet.suspects(context.limits, context.now)


def capacity(context: Context, status: Status, *, forgive: bool = False) -> Capacity:
    """What the job may use now. `forgive`: also nodes that hurt before and show no sign of being lost now.

    A forgiven node that the plan of the next step avoids again would be planned on and given up without end.
    """
    avoid = doubtful_nodes(context) if forgive else avoided_nodes(context, status)
    if forgive:
        avoid |= {item.name for item in status.excluded_nodes if item.until is None}
    return capacity_count.capacity(context.world, context.spec.accelerator.resource, context.spec.template, avoid)


def stopped_pods(context: Context, status: Status) -> tuple[PodView, ...]:
    """Training pods that must not run: all but those of the launched current attempt."""
    keep = status.attempt if status.launched else -1
    return tuple(pod for pod in context.world.pods if pod.role == "worker" and pod.attempt != keep)


def is_read(context: Context) -> bool:
    """Return whether a start of another job may read in this job's checkpoint folder: then nothing is removed there."""
    own, starts = context.spec.checkpoint, context.world.starts
    return starts is None or commit_history.is_read_by(starts, own.claim_name, own.path)
