"""Detection: what has happened to a running attempt.

Every sign of trouble is a `Signal` with a kind, a subject and the time since when it holds. A loss is confirmed by one
strong signal, by two weak ones from independent sources, or by one weak one that has lasted for its grace. The table
`KINDS` is the policy; `docs/operations.md` prints it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping

from elastic_operator.observed.observation import LeaseView, NodeView, Observation, PodView, Taint
from elastic_operator.observed.timeouts import Timeouts
from reshard.contract import TrainerPhase


class Kind(enum.StrEnum):
    """Names of signals, gravest first; also the reasons in conditions, events and metrics."""

    NODE_DELETED = "NodeDeleted"
    NODE_OUT_OF_SERVICE = "NodeOutOfService"
    NODE_NOT_READY = "NodeNotReady"
    NODE_LEASE_STALE = "NodeLeaseStale"
    HEARTBEAT_STALE = "HeartbeatStale"
    DEVICE_UNHEALTHY = "DeviceUnhealthy"
    DEVICE_MISSING = "DeviceMissing"
    RESUME_REFUSED = "ResumeRefused"
    POD_DISRUPTED = "PodDisrupted"
    POD_FAILED = "PodFailed"
    JOB_FAILED = "JobFailed"
    POD_DELETED = "PodDeleted"  # the Job controller does so to the rest of a failed Job
    JOB_DELETED = "JobDeleted"
    HANG = "Hang"
    IMAGE = "ContainerCannotStart"
    UNSCHEDULABLE = "Unschedulable"
    STARTUP_TIMEOUT = "StartupTimeout"
    NODE_UNHEALTHY = "NodeUnhealthy"
    NODE_CORDONED = "NodeCordoned"
    NODE_TAINTED = "NodeTainted"


class Weight(enum.Enum):
    """How much one signal of a kind says."""

    STRONG = "confirms at once"
    WEAK = "needs a second source, or its grace"
    PLANNED = "drain first"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Row of the policy table.

    Attributes:
        source: who says it; two weak signals confirm a loss only if these differ.
        takes_node: the node is gone with it, not only the pod.
        grace: attribute of `recovery` or of `Timeouts` that holds the grace of a weak signal.
    """

    source: str
    weight: Weight
    takes_node: bool
    grace: str = ""


KINDS: Mapping[Kind, Meaning] = {
    Kind.NODE_DELETED: Meaning(source="node", weight=Weight.STRONG, takes_node=True),
    Kind.NODE_OUT_OF_SERVICE: Meaning(source="taint", weight=Weight.STRONG, takes_node=True),
    Kind.NODE_NOT_READY: Meaning(source="node", weight=Weight.WEAK, takes_node=True, grace="suspect_seconds"),
    Kind.NODE_LEASE_STALE: Meaning(source="lease", weight=Weight.WEAK, takes_node=True, grace="suspect_seconds"),
    Kind.HEARTBEAT_STALE: Meaning(source="heartbeat", weight=Weight.WEAK, takes_node=False, grace="suspect_seconds"),
    Kind.DEVICE_UNHEALTHY: Meaning(source="device", weight=Weight.STRONG, takes_node=False),
    Kind.DEVICE_MISSING: Meaning(source="allocatable", weight=Weight.WEAK, takes_node=False, grace="device_seconds"),
    Kind.POD_DISRUPTED: Meaning(source="pod", weight=Weight.STRONG, takes_node=False),
    Kind.POD_DELETED: Meaning(source="pod", weight=Weight.STRONG, takes_node=False),
    Kind.POD_FAILED: Meaning(source="pod", weight=Weight.STRONG, takes_node=False),
    Kind.JOB_FAILED: Meaning(source="job", weight=Weight.STRONG, takes_node=False),
    Kind.JOB_DELETED: Meaning(source="job", weight=Weight.STRONG, takes_node=False),
    Kind.RESUME_REFUSED: Meaning(source="trainer", weight=Weight.STRONG, takes_node=False),
    Kind.HANG: Meaning(source="progress", weight=Weight.WEAK, takes_node=False, grace="hang_seconds"),
    Kind.IMAGE: Meaning(source="container", weight=Weight.WEAK, takes_node=False, grace="image_seconds"),
    Kind.UNSCHEDULABLE: Meaning(
        source="scheduler", weight=Weight.WEAK, takes_node=False, grace="unschedulable_seconds"
    ),
    Kind.STARTUP_TIMEOUT: Meaning(source="startup", weight=Weight.WEAK, takes_node=False, grace="startup_seconds"),
    # The node still works, so there is time to commit; if there is not, its pods fail and that is a signal of its own.
    Kind.NODE_UNHEALTHY: Meaning(source="health", weight=Weight.PLANNED, takes_node=False),
    Kind.NODE_CORDONED: Meaning(source="node", weight=Weight.PLANNED, takes_node=False),
    Kind.NODE_TAINTED: Meaning(source="taint", weight=Weight.PLANNED, takes_node=False),
}

_UNREACHABLE = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_CORDON = "node.kubernetes.io/unschedulable"
_CANNOT_START = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One sign of trouble.

    Attributes:
        node: node concerned, empty if none.
        since: when it began, in seconds since the epoch.
    """

    kind: Kind
    since: float
    message: str
    node: str = ""
    pod: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the signals amount to.

    Attributes:
        lost_nodes: nodes that are confirmed lost.
        failure: the signal that ends the attempt, or None. The gravest one if there are several.
        planned: signals that ask for a drain.
        suspects: nodes with an unconfirmed signal: nothing is placed on them.
        wake_at: when the next grace ends, if nothing else happens.
    """

    lost_nodes: tuple[str, ...] = ()
    failure: Signal | None = None
    planned: tuple[Signal, ...] = ()
    suspects: tuple[str, ...] = ()
    wake_at: float | None = None


def judge(signals: Iterable[Signal], graces: Mapping[str, float], now: float) -> Verdict:
    """Apply the rule of confirmation. `graces` holds the seconds that `Meaning.grace` names."""
    signals = sorted(signals, key=lambda signal: (list(Kind).index(signal.kind), signal.since, signal.node, signal.pod))
    planned = tuple(signal for signal in signals if KINDS[signal.kind].weight is Weight.PLANNED)
    serious = [signal for signal in signals if KINDS[signal.kind].weight is not Weight.PLANNED]
    confirmed: list[Signal] = []
    wake: list[float] = []
    for signal in serious:
        meaning = KINDS[signal.kind]
        sources = {KINDS[other.kind].source for other in serious if other.node == signal.node and signal.node}
        grace = graces.get(meaning.grace, 0.0)
        if meaning.weight is Weight.STRONG or signal.since + grace <= now or (meaning.takes_node and len(sources) >= 2):
            confirmed.append(signal)
        else:
            wake.append(signal.since + grace)
    lost = sorted({signal.node for signal in confirmed if signal.node and KINDS[signal.kind].takes_node})
    doubtful = {signal.node for signal in serious if signal.node and KINDS[signal.kind].takes_node}
    return Verdict(
        lost_nodes=tuple(lost),
        failure=confirmed[0] if confirmed else None,
        planned=planned,
        suspects=tuple(sorted(doubtful - set(lost))),
        wake_at=min(wake, default=None),
    )


def node_signals(node: NodeView | None, name: str, limits: Timeouts, now: float) -> list[Signal]:
    """Signals of one node that pods of ours run on; `node` is None if it does not exist."""
    if node is None:
        return [Signal(kind=Kind.NODE_DELETED, node=name, since=now, message=f"node {name} does not exist any more")]
    found: list[Signal] = []
    if node.ready != "True":
        since = node.ready_since or now
        found.append(Signal(kind=Kind.NODE_NOT_READY, node=name, since=since, message=_not_ready(node)))
    stale_after = max(node.lease_duration_seconds / 2, limits.node_lease_floor_seconds)
    age = node.lease_age_seconds
    if age is not None and age > stale_after:
        since = now - age + stale_after
        message = f"the kubelet of node {name} has not renewed its Lease for {age:.0f} s"
        found.append(Signal(kind=Kind.NODE_LEASE_STALE, node=name, since=since, message=message))
    if any(taint.key == _OUT_OF_SERVICE for taint in node.taints):
        message = f"node {name} is tainted {_OUT_OF_SERVICE}"
        found.append(Signal(kind=Kind.NODE_OUT_OF_SERVICE, node=name, since=now, message=message))
    return found


def _not_ready(node: NodeView) -> str:
    silent = ": nothing is heard of its kubelet" if node.ready == "Unknown" else ""
    return f"node {node.name} is not Ready (Ready is {node.ready}{silent})"


def planned_signals(node: NodeView, tolerated: Collection[Taint], now: float) -> list[Signal]:
    """Signals of a node that its administrator, or a health controller, wants emptied."""
    if node.unhealthy:
        message = f"node {node.name} is unhealthy: {'; '.join(node.unhealthy)}"
        return [Signal(kind=Kind.NODE_UNHEALTHY, node=node.name, since=now, message=message)]
    if node.unschedulable:
        return [Signal(kind=Kind.NODE_CORDONED, node=node.name, since=now, message=f"node {node.name} was cordoned")]
    return [
        Signal(
            kind=Kind.NODE_TAINTED,
            node=node.name,
            since=now,
            message=f"node {node.name} was tainted {taint.key}={taint.value}:{taint.effect}",
        )
        for taint in node.taints
        if taint.effect in ("NoSchedule", "NoExecute")
        and taint not in tolerated
        and taint.key not in (*_UNREACHABLE, _OUT_OF_SERVICE, _CORDON)
    ]


def device_signals(
    node: NodeView, pods: Iterable[PodView], used_by_others: int, resource: str, now: float
) -> list[Signal]:
    """Signals of accelerators under running pods of ours on one node."""
    pods = list(pods)
    found = [
        Signal(
            kind=Kind.DEVICE_UNHEALTHY,
            node=node.name,
            pod=pod.name,
            since=now,
            message=f"{pod.unhealthy_devices} {resource} of pod {pod.name} on node {node.name} are Unhealthy",
        )
        for pod in pods
        if pod.unhealthy_devices
    ]
    held = sum(pod.requests.get(resource, 0) for pod in pods) + used_by_others
    offered = node.allocatable.get(resource, 0)
    if offered < held and node.ready == "True":
        message = f"node {node.name} offers {offered} {resource}, but its pods hold {held}"
        since = now if node.allocatable_since is None else node.allocatable_since
        found.append(Signal(kind=Kind.DEVICE_MISSING, node=node.name, since=since, message=message))
    return found


def pod_signals(pod: PodView, now: float) -> list[Signal]:
    """Signals of one training pod of the running attempt."""
    node, name = pod.node or "", pod.name
    where = f" on node {node}" if node else ""
    if pod.disruption:
        message = f"pod {name}{where} is being disrupted: {pod.disruption}"
        return [Signal(kind=Kind.POD_DISRUPTED, node=node, pod=name, since=now, message=message)]
    if pod.phase == "Failed":
        code = "no exit code" if pod.exit_code is None else f"exit code {pod.exit_code}"
        reason = pod.status_reason or pod.exit_reason
        message = f"pod {name}{where} failed with {code}{f' ({reason})' if reason else ''}"
        return [Signal(kind=Kind.POD_FAILED, node=node, pod=name, since=now, message=message)]
    if pod.deleted_at is not None:
        message = f"pod {name}{where} was deleted by someone else"
        return [Signal(kind=Kind.POD_DELETED, node=node, pod=name, since=now, message=message)]
    since = pod.created_at or now
    if pod.waiting_reason in _CANNOT_START:
        message = f"pod {name}{where} cannot start: {pod.waiting_reason}: {pod.waiting_message}"
        return [Signal(kind=Kind.IMAGE, node=node, pod=name, since=since, message=message)]
    if pod.unschedulable and not node:
        message = f"pod {name} finds no node: {pod.unschedulable}"
        return [Signal(kind=Kind.UNSCHEDULABLE, pod=name, since=since, message=message)]
    return []


def lease_signals(
    lease: LeaseView | None, *, rank_0_node: str, launch_time: float, started: bool, limits: Timeouts, now: float
) -> list[Signal]:
    """Signals of the attempt's mailbox: silence, hang, a refused commit, a start that never ends."""
    found: list[Signal] = []
    if lease is not None and (error := lease.resume_error):
        message = f"rank 0 refused the commit: {error}"
        found.append(Signal(kind=Kind.RESUME_REFUSED, since=now, message=message))
    if lease is not None and lease.renewed_at is not None:
        age = now - lease.renewed_at
        if age > limits.heartbeat_stale_seconds:
            since = lease.renewed_at + limits.heartbeat_stale_seconds
            message = f"rank 0 has been silent for {age:.0f} s"
            found.append(Signal(kind=Kind.HEARTBEAT_STALE, node=rank_0_node, since=since, message=message))
        elif lease.phase == TrainerPhase.TRAINING and lease.step_at is not None:
            message = (
                f"step {lease.step} was the last to finish, {now - lease.step_at:.0f} s ago, while rank 0 is alive"
            )
            found.append(Signal(kind=Kind.HANG, since=lease.step_at, message=message))
    if not started:
        message = f"no step was finished within {now - launch_time:.0f} s of the launch"
        found.append(Signal(kind=Kind.STARTUP_TIMEOUT, since=launch_time, message=message))
    return found


def attempt_signals(
    world: Observation,
    *,
    attempt: int,
    resource: str,
    tolerated: Collection[Taint],
    launch_time: float,
    job_seen: bool,
    started: bool,
    limits: Timeouts,
    now: float,
) -> list[Signal]:
    """All signals of a launched attempt."""
    pods = world.workers(attempt)
    live = [pod for pod in pods if pod.node and not pod.terminal]
    found = [signal for pod in pods for signal in pod_signals(pod, now)]
    for name in sorted({pod.node for pod in live if pod.node}):
        node = world.nodes.get(name)
        found += node_signals(node, name, limits, now)
        if node is not None:
            here = [pod for pod in live if pod.node == name and pod.phase == "Running"]
            found += planned_signals(node, tolerated, now)
            found += device_signals(node, here, used_by_others=world.used.get(name, 0), resource=resource, now=now)
    rank_0_node = next((pod.node or "" for pod in live if pod.index == 0), "")
    found += lease_signals(
        world.leases.get(attempt),
        rank_0_node=rank_0_node,
        launch_time=launch_time,
        started=started,
        limits=limits,
        now=now,
    )
    job = world.job(attempt)
    if job is None and job_seen:
        found.append(Signal(kind=Kind.JOB_DELETED, since=now, message="the Job was deleted by someone else"))
    if job is not None and job.failed:
        message = f"Job {job.name} failed: {job.failed_reason}: {job.failed_message}"
        found.append(Signal(kind=Kind.JOB_FAILED, since=now, message=message))
    return found
