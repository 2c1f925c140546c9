"""The decision: `decide(job, spec, status, world, limits, now) -> Decision`. Pure and total; no I/O, no clock.

A decision is a status and the actions that follow from it. `decide` takes one step after another until the status does
not change any more, so one pass goes as far as the facts allow: from a confirmed node loss to the creation of the
reshard Job. `actions_for_status` compares that status with the cluster.
"""

from __future__ import annotations

import dataclasses
import logging

from elastic_operator.api.conditions import Type, find, set_condition
from elastic_operator.api.serialization import Time
from elastic_operator.api.spec import Spec, SpecError
from elastic_operator.api.status import Phase, Status, edit_last_change
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.manifests.reshard_pod import ReshardImage
from elastic_operator.observed import ownership, pod_diagnosis
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile import goodput, launch, next_attempt, progress, recovery, running, user_requests
from elastic_operator.reconcile.actions import Decision, Event
from elastic_operator.reconcile.context import Context, select_running_pods, select_stale_pods
from elastic_operator.reconcile.failures import reassessment, refused_commits
from elastic_operator.reconcile.failures.budgets import find_backoff
from elastic_operator.reconcile.failures.pinned_topology import lift_pin_after_edit
from elastic_operator.reconcile.lifetime import deadline
from elastic_operator.reconcile.lifetime.expiry import find_expiry
from elastic_operator.reconcile.pending_actions import actions_for_status
from elastic_operator.reconcile.queueing.pause import pause_without_quota
from elastic_operator.reconcile.queueing.standing import find_standing
from elastic_operator.reconcile.status_summary import summarize_status

logger = logging.getLogger(__name__)

MAX_STEPS = 16
"""Maximum number of steps in a pass; a pass that needs more is a defect of this package."""

UNSETTLED = "DecisionUnsettled"
"""Reason of the event that reports such a pass."""


def decide(
    job: JobRef,
    spec: Spec,
    status: Status,
    world: Observation,
    *,
    limits: Timeouts,
    now: float,
    reshard_image: ReshardImage | None = None,
) -> Decision:
    """Decide what to write and what to do now.

    Args:
        job: the resource.
        spec: its valid spec.
        status: its stored status.
        world: what the operator sees of the cluster.
        limits: times of the operator.
        now: seconds since the epoch.
        reshard_image: the operator's image for reshard pods; None to reshard in the training image.
    """
    context = Context(job=job, spec=spec, world=world, limits=limits, now=now, reshard_image=reshard_image)
    begin = status = ownership.record_job_uids(_with_start_time(status, now), world)
    for _ in range(MAX_STEPS):
        after = _take_step(context, status)
        if after is None:
            return Decision(status=status, needs_fresh_capacity=True)
        if after == status:
            break
        status = after
    else:
        return _decide_unsettled(context, begin, status)
    status = deadline.record_activity(_with_finish_time(status, now), now)
    actions = actions_for_status(context, status)
    return Decision(
        status=summarize_status(context, status),
        actions=actions,
        events=tuple(context.events),
        reshards=tuple(context.reshards),
        requeue_seconds=max(0.05, _next_deadline(context, status) - now),
    )


def _decide_unsettled(context: Context, begin: Status, last: Status) -> Decision:
    """Leave the status as it is, report the defect and try again after `resync_seconds`.

    An exception would be raised again in every pass, and would appear in the log only.
    """
    message = (
        f"expected a decision within {MAX_STEPS} steps, found none (attempt {begin.attempt} led to {last.attempt}, "
        f"phase {last.phase}): this is a defect of the operator; nothing was changed, and the next pass tries again. "
        "Please report it with the status of this job and the output of `kubectl get nodes`"
    )
    logger.error("%s/%s: %s", context.job.namespace, context.job.name, message)
    return Decision(
        status=begin,
        actions=actions_for_status(context, begin),
        events=(Event(reason=UNSETTLED, message=message, warning=True),),
        requeue_seconds=context.limits.resync_seconds,
    )


def refuse(job: JobRef, error: SpecError, status: Status, *, limits: Timeouts, now: float) -> Decision:
    """Decide about an invalid spec: report the problems and leave running pods alone."""
    message = "; ".join(error.problems)
    old = find(status.conditions, Type.SPEC_VALID)
    conditions = set_condition(
        status.conditions,
        Type.SPEC_VALID,
        False,
        reason=error.reason,
        message=message,
        now=now,
        generation=job.generation,
    )
    is_idle = status.current is None and not status.terminal
    is_reported = old is not None and old.status == "False" and old.message == message
    return Decision(
        status=dataclasses.replace(
            status,
            conditions=conditions,
            observed_generation=job.generation,
            phase=Phase.PENDING if is_idle else status.phase,
            reason=error.reason if is_idle else status.reason,
            message=message[:4096] if is_idle else status.message,
        ),
        events=() if is_reported else (Event(reason=error.reason, message=message, warning=True),),
        requeue_seconds=limits.resync_seconds,
    )


def _with_start_time(status: Status, now: float) -> Status:
    return status if status.start_time is not None else dataclasses.replace(status, start_time=Time(now))


def _with_finish_time(status: Status, now: float) -> Status:
    """Set the finish time of a job that has ended; its goodput does not change after that."""
    if not status.terminal or status.finish_time is not None:
        return status
    return dataclasses.replace(progress.update_goodput(status, now), finish_time=Time(now), queue_time=None)


def _take_step(context: Context, status: Status) -> Status | None:
    """Take one step; return the same status if there is none, None if the capacity must be read first."""
    status = user_requests.handle_resume_from(context, user_requests.handle_retry(context, status))
    if status.terminal:
        return status
    status = reassessment.reassess(context, progress.apply_reports(context, status))
    if status.terminal:
        return status
    status = lift_pin_after_edit(context, status)
    status = user_requests.handle_drain(context, status)
    if context.spec.suspend:
        return _suspend(context, status)
    if status.phase == Phase.SUSPENDED:
        context.emit("Resumed", "spec.suspend is false: the job goes on")
        status = dataclasses.replace(status, phase=Phase.PENDING, reason="", message="")
    if deadline.is_exceeded(context, status):
        return deadline.stop(context, status)
    standing = find_standing(context, status)
    if not standing.may_run:
        return pause_without_quota(context, status, standing)
    current = status.current
    if current is None:
        status = recovery.record_stop(context, status, select_running_pods(context, status))
        chosen = refused_commits.follow_choice(context, status)
        if chosen != status or find_backoff(context, status) is not None:
            return chosen
        queued = dataclasses.replace(status, queue_time=status.queue_time or Time(context.now))
        return next_attempt.plan_next(context, queued) if context.world.capacity_fresh else None
    if current.launch_time is None:
        return launch.prepare(context, status, current) if context.world.capacity_fresh else None
    return running.run(context, status, current)


def _suspend(context: Context, status: Status) -> Status:
    current = status.current
    if current is not None and current.launch_time is not None:
        if status.drain is None:
            return running.start_drain(context, status, goodput.SUSPENDED, "spec.suspend is true")
        return running.run(context, status, current)
    status = dataclasses.replace(status, current=None, drain=None, growth=None, queue_time=None)
    status = recovery.record_pause(context, status, goodput.SUSPENDED, "spec.suspend is true")
    last = status.changes[-1] if status.changes else None
    running_pods = [pod for pod in select_stale_pods(context, status) if not pod.terminal]
    if running_pods:
        return status if status.phase != Phase.SUSPENDED else dataclasses.replace(status, phase=Phase.STOPPING)
    if last is not None and last.cause in goodput.PAUSES and last.stop_time is None:
        status = edit_last_change(status, stop_time=Time(context.now))
    if status.phase != Phase.SUSPENDED:
        step = status.checkpoint.step
        context.emit("Suspended", f"nothing runs any more; the newest commit is of step {step}")
    return dataclasses.replace(
        status, phase=Phase.SUSPENDED, reason="Suspended", message="spec.suspend is true; nothing runs"
    )


def _next_deadline(context: Context, status: Status) -> float:
    """Return when to look again if nothing happens before then."""
    now, policy = context.now, context.spec.recovery
    moments = [now + context.limits.resync_seconds]
    current = status.current
    if status.terminal:
        expiry = find_expiry(context, status)
        return moments[0] if expiry is None or expiry <= now else min(moments[0], expiry)
    if status.drain is not None:
        moments.append(status.drain.start_time + policy.drain_seconds)
    end = deadline.find_deadline(context.spec, status)
    moments += [] if end is None else [end]
    if status.growth is not None:
        moments.append(status.growth.since + policy.scale_up_stable_seconds)
    if status.reshard is not None and status.reshard.retry_time is not None:
        moments.append(status.reshard.retry_time)
    backoff = find_backoff(context, status)
    if current is None and backoff is not None and backoff.retry_time is not None:
        moments.append(backoff.retry_time)
    moments += [item.until for item in status.excluded_nodes if item.until is not None]
    moments += [
        pod.deleted_at + policy.force_delete_seconds
        for pod in context.world.pods
        if pod.deleted_at is not None and not pod.terminal
    ]
    if current is not None and current.launch_time is not None:
        if current.schedule_time is None:
            moments.append(now + pod_diagnosis.PATIENCE_SECONDS)
        verdict = running.judge_attempt(context, status, current)
        moments += [] if verdict.wake_at is None else [verdict.wake_at]
        if verdict.suspects:
            moments.append(now + 1.0)  # to look for a second signal
        lease = context.world.leases.get(status.attempt)
        if lease is not None and lease.renewed_at is not None:
            moments.append(lease.renewed_at + context.limits.heartbeat_stale_seconds + 0.1)
    if not status.launched and status.phase != Phase.SUSPENDED:
        # No watch reports the accelerators that other jobs release.
        moments.append(now + (10.0 if status.phase == Phase.WAITING else 2.0))
    return min((moment for moment in moments if moment > now), default=now + 1.0)
