"""Detection of failures: signals of a running attempt, and the rule that confirms them.

Every symptom of a failure is a `Signal` with a kind, a subject and the time when it began. A node failure is confirmed
by one strong signal, by two weak ones from independent sources, or by one weak signal that has lasted for its grace
period. The table `KINDS` is the policy; `docs/operations.md` prints it.
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
    POD_DELETED = "PodDeleted"  # less grave than JobFailed: the Job controller deletes the pods of a failed Job
    JOB_DELETED = "JobDeleted"
    HANG = "Hang"
    IMAGE = "ContainerCannotStart"
    UNSCHEDULABLE = "Unschedulable"
    STARTUP_TIMEOUT = "StartupTimeout"
    NODE_UNHEALTHY = "NodeUnhealthy"
    NODE_CORDONED = "NodeCordoned"
    NODE_TAINTED = "NodeTainted"


class Weight(enum.Enum):
    """Strength with which a signal of a kind indicates a failure."""

    STRONG = "confirms at once"
    WEAK = "needs a second source, or its grace"
    PLANNED = "drain first"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Row of the policy table.

    Attributes:
        source: component that reports it; two weak signals confirm a node failure only if their sources differ.
        takes_node: True if the whole node is lost, not only the pod.
        grace: attribute of `recovery` or of `Timeouts` that holds the grace period of a weak signal.
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
    # The node still works, so the job can commit first. If it stops working, its pods fail, which is another signal.
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
    """One symptom of a failure.

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
    """Result of applying the confirmation rule to all signals.

    Attributes:
        lost_nodes: nodes that are confirmed lost.
        failure: the signal that ends the attempt, or None; the gravest if there are several.
        planned: signals that ask for a drain.
        suspects: nodes with an unconfirmed signal; no pod is placed on them.
        wake_at: when the next grace period ends; None if none is running.
    """

    lost_nodes: tuple[str, ...] = ()
    failure: Signal | None = None
    planned: tuple[Signal, ...] = ()
    suspects: tuple[str, ...] = ()
    wake_at: float | None = None


def judge(signals: Iterable[Signal], graces: Mapping[str, float], now: float) -> Verdict:
    """Apply the confirmation rule. `graces` holds the grace periods that `Meaning.grace` names, in seconds."""
    signals = sorted(signals, key=lambda signal: (list(Kind).index(signal.kind), signal.since, signal.node, signal.pod))
    planned = tuple(signal for signal in signals if KINDS[signal.kind].weight is Weight.PLANNED)
    unplanned = [signal for signal in signals if KINDS[signal.kind].weight is not Weight.PLANNED]
    confirmed: list[Signal] = []
    wake: list[float] = []
    for signal in unplanned:
        meaning = KINDS[signal.kind]
        sources = {KINDS[other.kind].source for other in unplanned if other.node == signal.node and signal.node}
        grace = graces.get(meaning.grace, 0.0)
        if meaning.weight is Weight.STRONG or signal.since + grace <= now or (meaning.takes_node and len(sources) >= 2):
            confirmed.append(signal)
        else:
            wake.append(signal.since + grace)
    lost = sorted({signal.node for signal in confirmed if signal.node and KINDS[signal.kind].takes_node})
    doubtful = {signal.node for signal in unplanned if signal.node and KINDS[signal.kind].takes_node}
    return Verdict(
        lost_nodes=tuple(lost),
        failure=confirmed[0] if confirmed else None,
        planned=planned,
        suspects=tuple(sorted(doubtful - set(lost))),
        wake_at=min(wake, default=None),
    )


def detect_node_signals(node: NodeView | None, name: str, limits: Timeouts, now: float) -> list[Signal]:
    """Detect signals of one node that runs pods of the job; `node` is None if it does not exist."""
    if node is None:
        return [Signal(kind=Kind.NODE_DELETED, node=name, since=now, message=f"node {name} does not exist any more")]
    signals: list[Signal] = []
    if node.ready != "True":
        since = node.ready_since or now
        signals.append(Signal(kind=Kind.NODE_NOT_READY, node=name, since=since, message=_describe_not_ready(node)))
    stale_after = max(node.lease_duration_seconds / 2, limits.node_lease_floor_seconds)
    age = node.lease_age_seconds
    if age is not None and age > stale_after:
        since = now - age + stale_after
        message = f"the kubelet of node {name} has not renewed its Lease for {age:.0f} s"
        signals.append(Signal(kind=Kind.NODE_LEASE_STALE, node=name, since=since, message=message))
    if any(taint.key == _OUT_OF_SERVICE for taint in node.taints):
        message = f"node {name} is tainted {_OUT_OF_SERVICE}"
        signals.append(Signal(kind=Kind.NODE_OUT_OF_SERVICE, node=name, since=now, message=message))
    return signals


def _describe_not_ready(node: NodeView) -> str:
    silent = ": the kubelet does not report" if node.ready == "Unknown" else ""
    return f"node {node.name} is not Ready (Ready is {node.ready}{silent})"


def detect_planned_signals(node: NodeView, tolerated: Collection[Taint], now: float) -> list[Signal]:
    """Detect that an administrator or a health controller wants a node to be emptied."""
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


def detect_device_signals(
    node: NodeView, pods: Iterable[PodView], used_by_others: int, resource: str, now: float
) -> list[Signal]:
    """Detect failing or missing accelerators under the job's running pods on one node."""
    pods = list(pods)
    signals = [
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
        signals.append(Signal(kind=Kind.DEVICE_MISSING, node=node.name, since=since, message=message))
    return signals


def detect_pod_signals(pod: PodView, now: float) -> list[Signal]:
    """Detect signals of one training pod of the running attempt."""
    node, name = pod.node or "", pod.name
    on_node = f" on node {node}" if node else ""
    if pod.disruption:
        message = f"pod {name}{on_node} is being disrupted: {pod.disruption}"
        return [Signal(kind=Kind.POD_DISRUPTED, node=node, pod=name, since=now, message=message)]
    if pod.phase == "Failed":
        code = "no exit code" if pod.exit_code is None else f"exit code {pod.exit_code}"
        reason = pod.status_reason or pod.exit_reason
        message = f"pod {name}{on_node} failed with {code}{f' ({reason})' if reason else ''}"
        return [Signal(kind=Kind.POD_FAILED, node=node, pod=name, since=now, message=message)]
    if pod.deleted_at is not None:
        message = f"pod {name}{on_node} was deleted by someone else"
        return [Signal(kind=Kind.POD_DELETED, node=node, pod=name, since=now, message=message)]
    since = pod.created_at or now
    if pod.waiting_reason in _CANNOT_START:
        message = f"pod {name}{on_node} cannot start: {pod.waiting_reason}: {pod.waiting_message}"
        return [Signal(kind=Kind.IMAGE, node=node, pod=name, since=since, message=message)]
    if pod.unschedulable and not node:
        message = f"pod {name} finds no node: {pod.unschedulable}"
        return [Signal(kind=Kind.UNSCHEDULABLE, pod=name, since=since, message=message)]
    return []


def detect_lease_signals(
    lease: LeaseView | None, *, rank_0_node: str, launch_time: float, started: bool, limits: Timeouts, now: float
) -> list[Signal]:
    """Detect signals from the attempt's Lease: silence, a hang, a refused commit, a start that takes too long."""
    signals: list[Signal] = []
    if lease is not None and (error := lease.resume_error):
        message = f"rank 0 refused the commit: {error}"
        signals.append(Signal(kind=Kind.RESUME_REFUSED, since=now, message=message))
    if lease is not None and lease.renewed_at is not None:
        age = now - lease.renewed_at
        if age > limits.heartbeat_stale_seconds:
            since = lease.renewed_at + limits.heartbeat_stale_seconds
            message = f"rank 0 has been silent for {age:.0f} s"
            signals.append(Signal(kind=Kind.HEARTBEAT_STALE, node=rank_0_node, since=since, message=message))
        elif lease.phase == TrainerPhase.TRAINING and lease.step_at is not None:
            message = (
                f"step {lease.step} was the last to finish, {now - lease.step_at:.0f} s ago, while rank 0 is alive"
            )
            signals.append(Signal(kind=Kind.HANG, since=lease.step_at, message=message))
    if not started:
        message = f"no step was finished within {now - launch_time:.0f} s of the launch"
        signals.append(Signal(kind=Kind.STARTUP_TIMEOUT, since=launch_time, message=message))
    return signals


def detect_attempt_signals(
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
    """Detect all signals of a launched attempt."""
    pods = world.workers(attempt)
    live = [pod for pod in pods if pod.node and not pod.terminal]
    signals = [signal for pod in pods for signal in detect_pod_signals(pod, now)]
    for name in sorted({pod.node for pod in live if pod.node}):
        node = world.nodes.get(name)
        signals += detect_node_signals(node, name, limits, now)
        if node is not None:
            here = [pod for pod in live if pod.node == name and pod.phase == "Running"]
            signals += detect_planned_signals(node, tolerated, now)
            signals += detect_device_signals(
                node, here, used_by_others=world.used.get(name, 0), resource=resource, now=now
            )
    rank_0_node = next((pod.node or "" for pod in live if pod.index == 0), "")
    signals += detect_lease_signals(
        world.leases.get(attempt),
        rank_0_node=rank_0_node,
        launch_time=launch_time,
        started=started,
        limits=limits,
        now=now,
    )
    job = world.job(attempt)
    if job is None and job_seen:
        signals.append(Signal(kind=Kind.JOB_DELETED, since=now, message="the Job was deleted by someone else"))
    if job is not None and job.failed:
        message = f"Job {job.name} failed: {job.failed_reason}: {job.failed_message}"
        signals.append(Signal(kind=Kind.JOB_FAILED, since=now, message=message))
    return signals
