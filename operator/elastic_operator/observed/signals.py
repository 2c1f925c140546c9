"""Detection of failures: signals of a running attempt, and the rule that confirms them.

Every symptom of a failure is a `Signal` with a kind, a subject and the time when it began. A node failure is confirmed
by one strong signal, by two weak ones from independent sources, or by one weak signal that has lasted for its grace
period. A planned signal counts after its grace period too, so that it can be withdrawn. All times are the operator's
own; `Observation.evidence_since` bounds them. The table `signal_kinds.KINDS` is the policy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping

from elastic_operator.observed.observation import CORDON, HEALTH, LeaseView, NodeView, Observation, PodView, Taint
from elastic_operator.observed.signal_kinds import KINDS, Kind, Weight, damped_seconds
from elastic_operator.observed.timeouts import Timeouts
from reshard.contract import TrainerPhase

TERMINATION_SLACK_SECONDS = 2.0
"""Time after the end of a pod's grace period in which the last commit may still arrive, and the clocks may differ."""

_PREEMPTED = ("PreemptionByScheduler", "PreemptionByKubeScheduler")
"""Reasons of the condition DisruptionTarget of a pod that the scheduler removes for one with a higher priority."""

_REJECTED = (
    "NodeAffinity",
    "NodeShutdown",
    "OutOfcpu",
    "OutOfmemory",
    "OutOfpods",
    "Preempting",
    "TopologyAffinityError",
    "UnexpectedAdmissionError",
)
"""Reasons of a failed pod of which the kubelet started no container; extended resources follow `OutOf` by their name.

A pod with reason `Evicted` is none of them: without DisruptionTarget it has exceeded a limit of its own.
"""

_LOST = ("ContainerStatusUnknown", "Unknown")
_FAILED_FOR_PODS = "BackoffLimitExceeded"
"""Reasons of a container whose end nobody saw, because its node or the container runtime restarted."""

_UNREACHABLE = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_CORDON = "node.kubernetes.io/unschedulable"
_PRESSURE = tuple(
    f"node.kubernetes.io/{name}" for name in ("memory-pressure", "disk-pressure", "pid-pressure", "network-unavailable")
)
"""Taints by conditions that come and go by themselves. A kubelet under real pressure evicts pods, which is a signal."""
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
        until: when a planned signal becomes a failure; None for never.
        num_withdrawn: how often a planned signal like this one was withdrawn from the node within the last hour.
        grace: grace period in seconds, if it is not that of the kind.
        is_doubtful: True for a strong signal that needs a grace period of `suspectSeconds` here.
    """

    kind: Kind
    since: float
    message: str
    node: str = ""
    pod: str = ""
    until: float | None = None
    is_doubtful: bool = False
    num_withdrawn: int = 0
    grace: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of applying the confirmation rule to all signals.

    Attributes:
        lost_nodes: nodes that are confirmed lost.
        failure: the signal that ends the attempt, or None; the gravest if there are several.
        planned: signals that ask for a drain, after their grace period.
        suspects: nodes with an unconfirmed signal; no pod is placed on them.
        wake_at: when the next grace period ends, of a signal or of a pod; None if none is running.
    """

    lost_nodes: tuple[str, ...] = ()
    failure: Signal | None = None
    planned: tuple[Signal, ...] = ()
    suspects: tuple[str, ...] = ()
    wake_at: float | None = None


def judge(signals: Iterable[Signal], graces: Mapping[str, float], now: float) -> Verdict:
    """Apply the confirmation rule. `graces` holds the grace periods that `Meaning.grace` names, in seconds."""
    signals = sorted(signals, key=lambda signal: (list(Kind).index(signal.kind), signal.since, signal.node, signal.pod))
    all_planned = [signal for signal in signals if KINDS[signal.kind].weight is Weight.PLANNED]
    ends = {signal: signal.since + _find_grace(signal, graces) for signal in all_planned}
    # Where pods already have to stop, the cordon or taint that explains it needs no grace.
    leaving = {signal.node for signal in all_planned if ends[signal] <= now and signal.node}
    planned = tuple(signal for signal in all_planned if ends[signal] <= now or signal.node in leaving)
    wake = [end for end in ends.values() if end > now]
    wake += [signal.until for signal in planned if signal.until is not None]
    unplanned = [signal for signal in signals if KINDS[signal.kind].weight is not Weight.PLANNED]
    sources: dict[str, set[str]] = {}
    for signal in unplanned:
        if signal.node and signal.since <= now and not signal.is_doubtful:
            sources.setdefault(signal.node, set()).add(KINDS[signal.kind].source)
    confirmed: list[Signal] = []
    for signal in unplanned:
        meaning = KINDS[signal.kind]
        is_seconded = meaning.takes_node and meaning.source in (here := sources.get(signal.node, ())) and len(here) >= 2
        grace = _find_grace(signal, graces)
        is_strong = meaning.weight is Weight.STRONG and not signal.is_doubtful
        if is_strong or signal.since + grace <= now or is_seconded:
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


def _find_grace(signal: Signal, graces: Mapping[str, float]) -> float:
    """Return the grace period of a signal in seconds."""
    if signal.grace is not None:
        return signal.grace
    seconds = graces.get("suspect_seconds" if signal.is_doubtful else KINDS[signal.kind].grace, 0.0)
    return damped_seconds(seconds, signal.num_withdrawn)


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


def detect_signals_of_node(world: Observation, name: str, limits: Timeouts, now: float) -> list[Signal]:
    """Detect signals of one node that runs pods of the job, in the light of what happens to the cluster.

    If most Node objects are removed at once, that is more likely an error of the control plane (a restored backup, a
    cloud controller) than a loss of the nodes, so it needs a grace period. No age counts from before
    `evidence_since`.
    """
    node = world.nodes.get(name)
    found = detect_node_signals(node, name, limits, now)
    if node is None and world.is_widespread:
        since = min(now, world.removed.get(name, 0.0))
        found = [dataclasses.replace(signal, since=since, is_doubtful=True) for signal in found]
    return [_not_before(signal, world.evidence_since) for signal in found]


def detect_shutdown(node: NodeView | None, pods: Collection[PodView], now: float) -> Signal | None:
    """Detect that a kubelet shuts its node down, which is then not Ready, while pods there have time for a commit."""
    if node is None or not node.is_shutting_down or not pods:
        return None
    until = (node.ready_since or now) + max(pod.grace_seconds for pod in pods) + TERMINATION_SLACK_SECONDS
    message = f"node {node.name} shuts down"
    signal = Signal(kind=Kind.POD_TERMINATING, node=node.name, since=now, message=message, until=until)
    return signal if now < until else None


def _describe_not_ready(node: NodeView) -> str:
    silent = ": the kubelet does not report" if node.ready == "Unknown" else ""
    return f"node {node.name} is not Ready (Ready is {node.ready}{silent})"


def is_start_failure(pod: PodView) -> bool:
    """Return whether the pod's container fails to start, and does not only wait for its image or volumes."""
    return pod.waiting_reason in _CANNOT_START


def detect_planned_signals(node: NodeView, tolerated: Mapping[Taint, float], now: float) -> list[Signal]:
    """Detect that an administrator or a health controller wants a node to be emptied.

    Args:
        node: the node.
        tolerated: how long the pods tolerate taints, in seconds; inf for ever. Half of a time is for a withdrawal, the
            other half for the commit.
        now: seconds since the epoch.
    """
    if node.unhealthy:
        message = f"node {node.name} is unhealthy: {'; '.join(node.unhealthy)}"
        since = now if node.unhealthy_since is None else node.unhealthy_since
        count = node.count_withdrawals(HEALTH, now)
        return [Signal(kind=Kind.NODE_UNHEALTHY, node=node.name, since=since, message=message, num_withdrawn=count)]
    if node.unschedulable:
        message = f"node {node.name} was cordoned"
        since = now if node.cordoned_since is None else node.cordoned_since
        count = node.count_withdrawals(CORDON, now)
        return [Signal(kind=Kind.NODE_CORDONED, node=node.name, since=since, message=message, num_withdrawn=count)]
    return [
        Signal(
            kind=Kind.NODE_TAINTED,
            node=node.name,
            since=now if taint.since is None else taint.since,
            message=f"node {node.name} was tainted {taint.key}={taint.value}:{taint.effect}",
            num_withdrawn=node.count_withdrawals(taint.label, now),
            grace=tolerated[taint] / 2 if taint in tolerated else None,
        )
        for taint in node.taints
        if taint.effect in ("NoSchedule", "NoExecute")
        and tolerated.get(taint) != math.inf
        and taint.key not in (*_UNREACHABLE, *_PRESSURE, _OUT_OF_SERVICE, _CORDON)
    ]


def detect_device_signals(
    node: NodeView,
    pods: Iterable[PodView],
    used_by_others: int,
    resource: str,
    *,
    now: float,
    step_time: float = 0.0,
    short_since: float | None = None,
) -> list[Signal]:
    """Detect failing or missing accelerators under the job's running pods on one node.

    Args:
        node: the node.
        pods: the job's running pods there.
        used_by_others: accelerators that other pods hold there.
        resource: name of the accelerators.
        now: seconds since the epoch.
        step_time: when a step was last seen to finish. A node that offers no device at all has lost its device plugin,
            which harms nobody; the devices work as long as the training finishes steps.
        short_since: when the pods were first seen to hold more than the node offers; None if that is not known.
    """
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
    held, offered = _count_held(pods, resource, used_by_others), node.allocatable.get(resource, 0)
    if offered < held and node.ready == "True":
        # Pods may come to hold more without any change of the node, for instance while one pod replaces another.
        since = max(short_since or 0.0, node.allocatable_since or 0.0) or now
        message = f"node {node.name} offers {offered} {resource}, but its pods hold {held}"
        kind = Kind.DEVICE_MISSING
        if offered == 0:
            kind, since = Kind.DEVICE_PLUGIN_GONE, max(since, step_time)
            message = f"{message}, and they have finished no step for {max(0.0, now - since):.0f} s"
        signals.append(Signal(kind=kind, node=node.name, since=since, message=message))
    return signals


def _count_held(pods: Iterable[PodView], resource: str, used_by_others: int) -> int:
    return sum(pod.requests.get(resource, 0) for pod in pods) + used_by_others


def find_short_nodes(world: Observation, attempt: int, resource: str) -> list[str]:
    """Return the nodes that offer fewer accelerators than the pods on them hold, among those of an attempt's pods."""
    running: dict[str, list[PodView]] = {}
    for pod in world.workers(attempt):
        if pod.node in world.nodes and pod.phase == "Running":
            running.setdefault(pod.node or "", []).append(pod)
    return [
        name
        for name, pods in running.items()
        if world.nodes[name].allocatable.get(resource, 0) < _count_held(pods, resource, world.used.get(name, 0))
    ]


def detect_pod_signals(pod: PodView, now: float) -> list[Signal]:
    """Detect signals of one training pod of the running attempt."""
    node, name = pod.node or "", pod.name
    on_node = f" on node {node}" if node else ""
    leave_by = None if pod.leave_by is None else pod.leave_by + TERMINATION_SLACK_SECONDS
    if leave_by is not None and now < leave_by:
        message = f"pod {name}{on_node} has to stop ({pod.disruption or 'it was deleted by someone else'})"
        return [Signal(kind=Kind.POD_TERMINATING, node=node, pod=name, since=now, message=message, until=leave_by)]
    if pod.disruption:
        is_preempted = pod.disruption in _PREEMPTED
        message = f"pod {name}{on_node} is being {'preempted' if is_preempted else 'disrupted'}: {pod.disruption}"
        kind = Kind.POD_PREEMPTED if is_preempted else Kind.POD_DISRUPTED
        return [Signal(kind=kind, node=node, pod=name, since=now, message=message)]
    if pod.phase == "Failed" and pod.exit_code is None and _is_rejection(pod.status_reason):
        message = f"the kubelet of node {node} rejected pod {name}: {pod.status_reason}"
        return [Signal(kind=Kind.POD_REJECTED, node=node, pod=name, since=now, message=message)]
    if pod.outcome == "Failed" and pod.exit_reason in _LOST:
        message = f"pod {name}{on_node} was lost in a restart of its node: {pod.exit_reason}"
        return [Signal(kind=Kind.POD_LOST, node=node, pod=name, since=now, message=message)]
    if pod.outcome == "Failed":
        code = "no exit code" if pod.exit_code is None else f"exit code {pod.exit_code}"
        code = "a container beside the training, which ended with exit code 0" if pod.exit_code == 0 else code
        reason = pod.status_reason or pod.exit_reason
        others = f", while {pod.outlived_by} goes on" if pod.outlived_by else ""
        message = f"pod {name}{on_node} failed with {code}{f' ({reason})' if reason else ''}{others}"
        return [Signal(kind=Kind.POD_FAILED, node=node, pod=name, since=now, message=message)]
    if pod.deleted_at is not None:
        message = f"pod {name}{on_node} was deleted by someone else"
        return [Signal(kind=Kind.POD_DELETED, node=node, pod=name, since=now, message=message)]
    if is_start_failure(pod):
        since = pod.cannot_start_since or pod.created_at or now
        message = f"pod {name}{on_node} cannot start: {pod.waiting_reason}: {pod.waiting_message}"
        return [Signal(kind=Kind.IMAGE, node=node, pod=name, since=since, message=message)]
    if pod.unschedulable and not node:
        since = pod.unschedulable_since or pod.created_at or now
        message = f"pod {name} finds no node: {pod.unschedulable}"
        return [Signal(kind=Kind.UNSCHEDULABLE, pod=name, since=since, message=message)]
    return []


def _is_rejection(reason: str) -> bool:
    return reason in _REJECTED or (reason.startswith("OutOf") and "/" in reason)


def detect_lease_signals(
    lease: LeaseView | None,
    *,
    rank_0_node: str,
    placed_time: float | None,
    started: bool,
    limits: Timeouts,
    now: float,
    floor: float = 0.0,
) -> list[Signal]:
    """Detect signals from the attempt's Lease: silence, a hang, a refused commit, a start that takes too long.

    Args:
        lease: the Lease, None if there is none.
        rank_0_node: node of rank 0, empty if it has none.
        placed_time: when the last pod got a node, None while pods wait for one; the start is timed from then.
        started: True once the attempt has completed a step.
        limits: times of the operator.
        now: seconds since the epoch.
        floor: no age counts from before this time.
    """
    signals: list[Signal] = []
    if lease is not None and (error := lease.resume_error):
        message = f"rank 0 refused the commit: {error}"
        signals.append(Signal(kind=Kind.RESUME_REFUSED, since=now, message=message))
    if lease is not None and lease.renewed_at is not None:
        renewed = max(lease.renewed_at, floor)
        age = now - renewed
        if age > limits.heartbeat_stale_seconds:
            since = renewed + limits.heartbeat_stale_seconds
            message = f"rank 0 has been silent for {age:.0f} s"
            signals.append(Signal(kind=Kind.HEARTBEAT_STALE, node=rank_0_node, since=since, message=message))
        elif lease.phase == TrainerPhase.TRAINING and lease.step_seen_at is not None:
            since = max(lease.step_seen_at, floor)
            message = (
                f"step {lease.step} was the last to finish, {max(0.0, now - since):.0f} s ago, while rank 0 is alive"
            )
            signals.append(Signal(kind=Kind.HANG, since=since, message=message))
    if not started and placed_time is not None:
        message = f"no step was finished within {now - placed_time:.0f} s after all pods had a node"
        signals.append(Signal(kind=Kind.STARTUP_TIMEOUT, since=max(placed_time, floor), message=message))
    return signals


def _find_placed_time(pods: Collection[PodView], launch_time: float) -> float | None:
    """Return when the last pod got a node, None while no pod has one or some pod waits for one."""
    if not pods or any(not pod.node and not pod.terminal for pod in pods):
        return None
    return max(launch_time, *(pod.scheduled_at or launch_time for pod in pods))


def _detect_training_pods(pods: Collection[PodView], now: float) -> list[Signal]:
    """Detect signals of all training pods.

    A pod that finds no node counts from when the last of its peers got one: nodes may join one after another.
    """
    placed = max((pod.scheduled_at for pod in pods if pod.node and pod.scheduled_at is not None), default=0.0)
    return [
        dataclasses.replace(signal, since=max(signal.since, placed)) if signal.kind is Kind.UNSCHEDULABLE else signal
        for pod in pods
        for signal in detect_pod_signals(pod, now)
    ]


def detect_attempt_signals(
    world: Observation,
    *,
    attempt: int,
    resource: str,
    tolerated: Mapping[Taint, float],
    launch_time: float,
    job_seen: bool,
    started: bool,
    limits: Timeouts,
    now: float,
) -> list[Signal]:
    """Detect all signals of a launched attempt."""
    pods, lease = world.workers(attempt), world.leases.get(attempt)
    job = world.job(attempt)
    # A queueing system suspends a Job until it admits it; that time is not part of the start.
    is_queued = job is not None and job.suspended and not pods
    step_time = (lease.step_seen_at if lease is not None else None) or 0.0
    live = [pod for pod in pods if pod.node and not pod.outcome]
    signals = [_not_before(signal, world.evidence_since) for signal in _detect_training_pods(pods, now)]
    running: dict[str, list[PodView]] = {}
    for pod in live:
        here = running.setdefault(pod.node or "", [])
        if pod.phase == "Running":
            here.append(pod)
    for name, here in sorted(running.items(), key=lambda item: item[0]):
        node_signals = detect_signals_of_node(world, name, limits, now)
        shutdown = detect_shutdown(world.nodes.get(name), here, now)
        if shutdown is not None and all(signal.kind is Kind.NODE_NOT_READY for signal in node_signals):
            node_signals = [shutdown]
        signals += [signal for signal in node_signals if not _is_explained(signal, world, lease)]
        if (node := world.nodes.get(name)) is not None:
            found = detect_planned_signals(node, tolerated, now)
            found += detect_device_signals(
                node, here, world.used.get(name, 0), resource, now=now, step_time=step_time,
                short_since=world.short_since.get(name),
            )  # fmt: skip
            signals += [_not_before(signal, world.evidence_since) for signal in found]
    lease_signals = detect_lease_signals(
        lease,
        rank_0_node=next((pod.node or "" for pod in live if pod.index == 0), ""),
        placed_time=_find_placed_time(pods, launch_time),
        started=started or is_queued,
        limits=limits,
        now=now,
        floor=world.evidence_since,
    )
    # A rank 0 that has failed is silent for that reason.
    has_rank_0_failed = any(pod.index == 0 and pod.outcome == "Failed" for pod in pods)
    is_silence_explained = has_rank_0_failed or (world.is_widespread and not world.is_hold_over)
    signals += [item for item in lease_signals if not (is_silence_explained and item.kind is Kind.HEARTBEAT_STALE)]
    if job is None and job_seen:
        signals.append(Signal(kind=Kind.JOB_DELETED, since=now, message="the Job was deleted by someone else"))
    if job is not None and job.suspended and (pods or started):
        message = f"Job {job.name} was suspended by someone else"
        signals.append(Signal(kind=Kind.JOB_SUSPENDED, since=now, message=message))
    if job is not None and job.failed:
        # The Job controller keeps failed pods. If there is none, someone else deleted the pod that the Job counted.
        is_gone = all(pod.deleted_at is not None and pod.phase != "Failed" for pod in pods)
        is_deleted = is_gone and job.failed_reason == _FAILED_FOR_PODS
        message = f"Job {job.name} failed: {job.failed_reason}: {job.failed_message}"
        message += "; none of its pods has failed, so someone else deleted one" if is_deleted else ""
        kind = Kind.POD_DELETED if is_deleted else Kind.JOB_FAILED
        signals.append(Signal(kind=kind, since=now, message=message))
    return signals


def _not_before(signal: Signal, floor: float) -> Signal:
    """Return the signal with a grace period that begins at `floor` or later; strong signals have none."""
    has_grace = bool(KINDS[signal.kind].grace) or signal.is_doubtful
    return dataclasses.replace(signal, since=max(signal.since, floor)) if has_grace else signal


def _is_explained(signal: Signal, world: Observation, lease: LeaseView | None) -> bool:
    """Return whether a failure of most nodes of the cluster explains a weak or doubtful signal of one node.

    It does if a step finished after the signal began, because a step needs every node of the attempt. It also does if
    the training has fallen silent with the nodes: then nobody can report, for instance because the API server refuses
    writes. That holds for a bounded time, as long as the job could go on elsewhere.
    """
    is_weak = signal.is_doubtful or KINDS[signal.kind].weight is Weight.WEAK
    if not (world.is_widespread and is_weak):
        return False
    if lease is None or lease.renewed_at is None:
        return False
    if (lease.step_seen_at or 0.0) > signal.since:
        return True
    return lease.renewed_at <= signal.since and not world.is_hold_over
