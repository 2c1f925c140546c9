"""A launched attempt: detect completion and failures, follow drains, and consider planned changes."""

from __future__ import annotations

import dataclasses

from elastic_operator.api.serialization import Time
from elastic_operator.api.spec import spec_hash
from elastic_operator.api.status import Current, Drain, Growth, Phase, Progress, Status, short
from elastic_operator.observed import signals
from elastic_operator.observed.observation import LeaseView
from elastic_operator.observed.signal_kinds import Kind
from elastic_operator.observed.signals import Signal, Verdict, detect_pod_signals
from elastic_operator.planning import growth, planner
from elastic_operator.reconcile import effective_spec, next_attempt, progress, recovery
from elastic_operator.reconcile.context import (
    Context,
    find_avoided_nodes,
    find_capacity,
    find_lost_nodes,
    find_suspect_nodes,
    find_toleration_seconds,
)
from elastic_operator.reconcile.failures import faults, node_exclusions, placement_limits
from elastic_operator.reconcile.failures.pinned_topology import is_retry_due
from elastic_operator.reconcile.next_attempt import restrict_to_topology
from reshard.contract import TrainerPhase
from reshard.errors import TopologyError

HORIZON_SECONDS = 4 * 3600.0
"""Expected duration of an attempt on more nodes, in the comparison with the cost of a restart."""

PROVISION_SECONDS = 900.0
"""How long an attempt that waits for an autoscaler keeps the nodes that it has got, after the last of them. As Cluster
Autoscaler 1.33's --max-node-provision-time."""

RESTART_SECONDS = 60.0
"""Assumed cost of a planned restart if none has been measured."""


def run(context: Context, status: Status, current: Current) -> Status:
    """Take one step for a launched attempt."""
    lease = context.world.leases.get(status.attempt)
    if lease is not None and (refusal := lease.owner_error):
        return recovery.fail_as_not_owner(context, status, refusal)
    verdict = judge_attempt(context, status, current)
    if _is_complete(context, status, current, verdict):
        step = progress.find_latest_step(context, status)
        others = next((pod.outlived_by for pod in context.world.workers(status.attempt) if pod.outlived_by), "")
        advice = f"{others} goes on, so its pods are deleted: declare it in initContainers, with restartPolicy Always"
        text = f"training is complete after step {step}, in attempt {status.attempt}"
        context.emit("Complete", f"{text}; {advice}" if others else text)
        reported = dataclasses.replace(status.progress or Progress(), phase=TrainerPhase.COMPLETE, step=step)
        status = progress.update_goodput(dataclasses.replace(status, progress=reported), context.now)
        return dataclasses.replace(
            status,
            phase=Phase.COMPLETE,
            reason="TrainingComplete",
            message=f"complete after step {step}",
            drain=None,
            growth=None,
            finish_time=Time(context.now),
        )
    drain = status.drain or _find_request_to_leave(context, status)
    if drain is not None and lease is not None and lease.phase == TrainerPhase.DRAINED:
        context.emit("Drained", f"attempt {status.attempt} has committed step {status.checkpoint.step} and exits")
        return _end_attempt(context, status, drain)
    failure = verdict.failure
    if failure is not None and not (failure.kind is Kind.UNSCHEDULABLE and is_wait_best(context, status, current)):
        return _handle_failure(context, status, verdict, failure)
    if status.drain is not None:
        return _follow_drain(context, status, status.drain)
    return _consider_change(context, status, current, lease, verdict)


def judge_attempt(context: Context, status: Status, current: Current) -> Verdict:
    """Detect signals of the attempt's pods, nodes, devices and Lease, and apply the confirmation rule."""
    key = (status.attempt, current.launch_time, bool(current.job_uid), current.first_step_time is not None)
    return context.judge(key, lambda: _detect_signals(context, status, current))


def _detect_signals(context: Context, status: Status, current: Current) -> list[Signal]:
    spec, limits = context.spec, context.limits
    nodes = (context.world.nodes.get(name) for name in {pod.node for pod in context.world.pods if pod.node})
    taints = (taint for node in nodes if node is not None for taint in node.taints)
    return signals.detect_attempt_signals(
        context.world,
        attempt=status.attempt,
        resource=spec.accelerator.resource,
        tolerated=find_toleration_seconds(context, taints, context.world.workers(status.attempt)),
        launch_time=current.launch_time or context.now,
        job_seen=bool(current.job_uid),
        started=current.first_step_time is not None,
        limits=limits,
        now=context.now,
    )


def start_drain(context: Context, status: Status, cause: str, message: str, nodes: tuple[str, ...] = ()) -> Status:
    """Begin a planned change: drain if a training loop can answer, else end the attempt at once."""
    drain = Drain(cause=cause, message=message, start_time=Time(context.now), nodes=nodes)
    if not _can_commit(context.world.leases.get(status.attempt)):
        return _end_attempt(context, status, drain)
    context.emit("DrainRequested", f"{message.removesuffix('.')}: attempt {status.attempt} is asked to commit and exit")
    return dataclasses.replace(status, drain=drain)


def _can_commit(lease: LeaseView | None) -> bool:
    """Return whether a training loop runs that reads requests."""
    return lease is not None and lease.phase not in ("", TrainerPhase.STARTING, TrainerPhase.RESTORING)


def _find_request_to_leave(context: Context, status: Status) -> Drain | None:
    """Return the drain that the training began by itself at SIGTERM, before the operator asked for one; else None.

    Without a pod that someone asked to stop, an attempt that calls itself drained has failed. Such a pod may be gone
    already, for instance if the operator was away meanwhile: nobody else removes pods of a running attempt.
    """
    pods, current = context.world.workers(status.attempt), status.current
    message = ""
    for pod in pods:
        node = context.world.nodes.get(pod.node or "")
        reasons = [
            pod.disruption,
            f"node {pod.node} shuts down" if node is not None and node.is_shutting_down else "",
            "it was deleted by someone else" if pod.deleted_at is not None else "",
        ]
        if why := next(filter(None, reasons), ""):
            message = f"pod {pod.name} had to stop ({why})"
            break
    if not message and current is not None and current.schedule_time is not None and len(pods) < current.num_nodes:
        message = f"{current.num_nodes - len(pods)} of {current.num_nodes} pods were deleted by someone else"
    return Drain(cause=Kind.POD_TERMINATING, message=message, start_time=Time(context.now)) if message else None


def _is_complete(context: Context, status: Status, current: Current, verdict: Verdict) -> bool:
    job, lease = context.world.job(status.attempt), context.world.leases.get(status.attempt)
    phase = lease.phase if lease else ""
    pods = context.world.workers(status.attempt)
    # A container beside the training may keep the Job from its end, or fail it.
    have_trained = len(pods) == current.num_nodes and all(pod.outcome and pod.exit_code == 0 for pod in pods)
    if have_trained or (job is not None and job.complete):
        return phase != TrainerPhase.DRAINED
    # The last step is done and committed, so the exit of the processes does not matter.
    return phase == TrainerPhase.COMPLETE and (verdict.failure is not None or all(pod.outcome for pod in pods))


def _handle_failure(context: Context, status: Status, verdict: Verdict, failure: Signal) -> Status:
    lost = set(verdict.lost_nodes) | find_lost_nodes(context, status)
    suspected = find_suspect_nodes(context)
    step = progress.find_latest_step(context, status)
    status = dataclasses.replace(status, progress=dataclasses.replace(status.progress or Progress(), step=step))
    is_of_pods = failure.kind in faults.OF_PODS
    if is_of_pods and suspected:
        cause, message = Kind.NODE_NOT_READY, f"lost, or about to be: {', '.join(sorted(suspected))}; {failure.message}"
        fault = faults.UNKNOWN
    elif is_of_pods and (waiting := _find_overdue_pods(context, status)):
        # Ranks give up when a peer has no node for too long.
        cause, message = Kind.UNSCHEDULABLE, f"{waiting[0].message}; {failure.message}"
        fault = faults.UNKNOWN
    else:
        pods = context.world.workers_ever(status.attempt)
        cause, (message, fault) = failure.kind, faults.find_fault(context, pods, failure)
    if cause is Kind.UNSCHEDULABLE and status.current is not None:
        status = _follow_scheduler(context, status, status.current, message)
    return recovery.recover(
        context,
        status,
        cause=cause,
        message=message,
        since=failure.since,
        lost=lost,
        suspected=suspected,
        fault=fault,
    )


def _find_overdue_pods(context: Context, status: Status) -> list[Signal]:
    """Return a signal for each pod that has found no node for longer than the grace period."""
    found = (signal for pod in context.world.workers(status.attempt) for signal in detect_pod_signals(pod, context.now))
    limit = context.limits.unschedulable_seconds
    return [item for item in found if item.kind is Kind.UNSCHEDULABLE and context.now - item.since >= limit]


def _end_attempt(context: Context, status: Status, drain: Drain) -> Status:
    step = progress.find_latest_step(context, status)
    status = dataclasses.replace(status, progress=dataclasses.replace(status.progress or Progress(), step=step))
    status = recovery.recover(
        context, status, cause=drain.cause, message=drain.message, since=drain.start_time, planned=True
    )
    return node_exclusions.exclude_left_nodes(context, status, drain)


def _follow_drain(context: Context, status: Status, drain: Drain) -> Status:
    limit = context.spec.recovery.drain_seconds
    if drain.cause == Kind.JOB_SUSPENDED and all(pod.terminal for pod in context.world.workers(status.attempt)):
        return _end_attempt(context, status, drain)
    if context.now - max(drain.start_time, context.world.evidence_since) < limit:
        return status
    text = f"attempt {status.attempt} did not drain within {limit} s: the job goes on with the commit of step"
    context.emit("DrainTimedOut", f"{text} {status.checkpoint.step}", warning=True)
    return _end_attempt(context, status, drain)


def _consider_change(
    context: Context, status: Status, current: Current, lease: LeaseView | None, verdict: Verdict
) -> Status:
    if verdict.planned:
        first = verdict.planned[0]
        if first.kind == Kind.POD_TERMINATING and not _can_commit(lease):
            # There is nothing to commit yet, so this is what it was without a grace period: an interrupted start.
            return _handle_failure(context, status, verdict, dataclasses.replace(first, kind=Kind.POD_DISRUPTED))
        nodes = tuple(sorted({signal.node for signal in verdict.planned if signal.node}))
        return start_drain(context, status, first.kind, first.message, nodes)
    if not is_node_count_permitted(context, current) or current.spec_hash != spec_hash(context.spec):
        return start_drain(context, status, "SpecChanged", effective_spec.describe_edit(current, context.spec))
    if current.first_step_time is None or lease is None or lease.phase != TrainerPhase.TRAINING:
        return status
    return consider_growth(context, status, current)


def is_wait_best(context: Context, status: Status, current: Current) -> bool:
    """Return whether an attempt whose pods find no node does better to wait than to be planned anew.

    It waits if a new plan would be the same and no pod has a node, or if nothing fits and it holds nothing that others
    could use: its pods then stay where the scheduler and an autoscaler see them. It keeps what it holds for a while.
    """
    pods = context.world.workers(status.attempt)
    best = next_attempt.find_best(context, status)
    if best is None and is_retry_due(context, status) and next_attempt.can_run_unpinned(context, status):
        return False
    if best is None:
        holding = [pod.scheduled_at or 0.0 for pod in pods if pod.node and not pod.terminal]
        limit = PROVISION_SECONDS if current.awaits_nodes else 0.0
        return not holding or context.now - max(*holding, context.world.evidence_since) < limit
    if (best.topology, best.num_nodes, best.per_node) != (
        current.topology,
        current.num_nodes,
        current.gpus_per_node,
    ):
        return False
    return not _has_readmitted_nodes(context, status, current) and not is_held_in_vain(context, status, current)


def _has_readmitted_nodes(context: Context, status: Status, current: Current) -> bool:
    """Return whether there is room on a node that was excluded at the launch, so that the pods must not be there."""
    readmitted = set(current.avoid) - find_avoided_nodes(context, status)
    return bool(readmitted.intersection(find_capacity(context, status).usable(current.gpus_per_node)))


def is_held_in_vain(context: Context, status: Status, current: Current) -> bool:
    """Return whether an attempt of which only some pods have a node has waited long enough for the others.

    With `spec.nodes.autoscaling` a node may still come. Where a smaller attempt can run, the grace period of the signal
    is enough.
    """
    if not 0 < placement_limits.count_placed(context, status) < current.num_nodes:
        return False
    waited = context.now - placement_limits.find_last_placed_time(context, status, current)
    if context.spec.nodes.autoscaling or current.awaits_nodes:
        return waited >= PROVISION_SECONDS
    return _is_smaller_possible(context, status, current) or waited >= placement_limits.HELD_SECONDS


def _is_smaller_possible(context: Context, status: Status, current: Current) -> bool:
    """Return whether an attempt with only the pods that the scheduler has placed could run."""
    limited = placement_limits.limit_placement(context, status, current, is_smaller=True)
    return next_attempt.find_best(context, limited) is not None


def _follow_scheduler(context: Context, status: Status, current: Current, message: str) -> Status:
    """Limit the next plan to the pods that have a node, if the operator's own count would give the same plan again."""
    best = next_attempt.find_best(context, status)
    if best is None or best.num_nodes < current.num_nodes or _has_readmitted_nodes(context, status, current):
        return status
    if not is_held_in_vain(context, status, current):
        return status
    is_smaller = _is_smaller_possible(context, status, current)
    return placement_limits.limit_placement(context, status, current, message=message, is_smaller=is_smaller)


def is_node_count_permitted(context: Context, current: Current) -> bool:
    """Return whether the spec still permits this number of nodes."""
    return context.spec.nodes.permits(current.num_nodes)


def consider_growth(context: Context, status: Status, current: Current) -> Status:
    """Record that a better topology fits, and begin the change once it has fitted for long enough."""
    try:
        better = find_better(context, status, current)
    except (TopologyError, ArithmeticError):
        return status
    if better is None or not better[1].is_worth:
        return dataclasses.replace(status, growth=None)
    best, verdict = better
    text, observed = short(best.topology), status.growth
    if observed is None or (observed.topology, observed.num_nodes) != (text, best.num_nodes):
        observed = Growth(topology=text, num_nodes=best.num_nodes, since=Time(context.now))
        wait = context.spec.recovery.scale_up_stable_seconds
        context.emit("CapacityReturned", f"{verdict.reason} If it stays for {wait} s, the job grows.")
    status = dataclasses.replace(status, growth=observed)
    # Capacity counts as stable only after the attempt itself has run for as long.
    stable_since = max(observed.since, current.first_step_time or context.now)
    if context.now - stable_since < context.spec.recovery.scale_up_stable_seconds:
        return status
    return start_drain(context, status, "CapacityReturned", verdict.reason)


def find_better(
    context: Context, status: Status, current: Current, *, beyond_quota: bool = False
) -> tuple[planner.Candidate, growth.GrowthVerdict] | None:
    """Return another topology that fits better now, and whether it is worth a restart; None if there is none.

    Raises:
        TopologyError: the running topology is not possible any more.
        ArithmeticError: likewise.
    """
    spec = restrict_to_topology(context.spec, status.pinned)
    shape = planner.shape_of(current.topology, num_nodes=current.num_nodes, per_node=current.gpus_per_node)
    running = planner.evaluate(spec, shape)
    best = planner.best(spec, find_capacity(context, status, beyond_quota=beyond_quota), current.topology)
    if best is None or (best.topology == current.topology and best.num_nodes == current.num_nodes):
        return None
    return best, growth.evaluate_growth(
        running, best, restart_seconds=_restart_seconds(status), horizon_seconds=HORIZON_SECONDS
    )


def _restart_seconds(status: Status) -> float:
    measured = [past.seconds["total"] for past in status.recoveries if "total" in past.seconds]
    return max(measured, default=RESTART_SECONDS)
