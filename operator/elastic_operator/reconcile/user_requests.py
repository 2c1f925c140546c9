"""Requests: `kubectl etj drain` (commit, exit, start again), `kubectl etj retry` (go on after Failed), `resumeFrom`.

A request is an annotation on the resource. Its value is an opaque token; a token that differs from
`status.drainRequest` or `status.retryRequest` is a new request. So the operator needs no right to write the resource,
and each request is answered once, by whichever replica reads it. `spec.checkpoint.resumeFrom` acts once likewise.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.status import Phase, RestartBudget, Status, edit_last_change
from elastic_operator.reconcile import running
from elastic_operator.reconcile.context import Context
from elastic_operator.reconcile.failures.refused_commits import ASKING, COMMIT_UNKNOWN, note_choice
from reshard.contract import TrainerPhase

CAUSE = "ManualDrain"
"""Cause of the planned change that answers a drain request."""

INTERRUPTIBLE_PHASES = (TrainerPhase.TRAINING, TrainerPhase.SAVING)
"""Phases in which the training loop reads requests and can commit."""


def handle_drain(context: Context, status: Status) -> Status:
    """Answer a new drain request: drain, or report why there is nothing to drain."""
    request = context.job.drain_request
    if not request or request == status.drain_request:
        return status
    status = dataclasses.replace(status, drain_request=request)
    if status.attempt == 0 or status.drain is not None or context.spec.suspend:
        # No attempt has run yet (the manifest contained the annotation), or a drain or suspension is under way.
        return status
    lease = context.world.leases.get(status.attempt) if status.launched else None
    if lease is None or lease.phase not in INTERRUPTIBLE_PHASES:
        step = status.checkpoint.step
        text = f"no training loop runs that could commit; the newest commit is of step {step}"
        context.emit("DrainNotPossible", f"a drain was requested by hand, but {text}", warning=True)
        return status
    status = dataclasses.replace(status, placement_limit=None)
    return running.start_drain(context, status, CAUSE, "a drain was requested by hand")


def can_retry_conversion(status: Status, now: float) -> bool:
    """Return whether a conversion has failed and waits, so that a retry request affects a job that has not Failed."""
    reshard, current = status.reshard, status.current
    is_paused = reshard is not None and reshard.retry_time is not None and reshard.retry_time > now
    is_converting = current is not None and not current.resume.ready and is_paused
    return not status.terminal and (status.pinned is not None or is_converting)


def _retry_conversion(context: Context, status: Status) -> Status:
    """Convert the checkpoint again without a wait, with all retries, to whichever topology is best."""
    context.emit("RetryRequested", "requested by hand: the checkpoint may be converted again at once")
    reshard = status.reshard
    if reshard is not None:
        reshard = dataclasses.replace(reshard, failures=0, interruptions=0, retry_time=None)
    return dataclasses.replace(status, reshard=reshard, pinned=None, pin=None)


def handle_retry(context: Context, status: Status) -> Status:
    """Answer a new retry request: continue a Failed job from its newest commit, with fresh budgets and without a wait.

    The recovery that ended in Failed stays open, so that its record and the goodput cover the whole time without
    training.
    """
    request = context.job.retry_request
    if not request or request == status.retry_request:
        return status
    status = dataclasses.replace(status, retry_request=request)
    if status.phase != Phase.FAILED:
        # Otherwise nothing has failed: the manifest contained the annotation, or the job runs, or it is Complete.
        return _retry_conversion(context, status) if can_retry_conversion(status, context.now) else status
    context.emit(
        "RetryRequested", f"requested by hand after {status.reason}: the job goes on with a fresh restart budget"
    )
    return _begin_again(status)


def handle_resume_from(context: Context, status: Status) -> Status:
    """Note a new value of `spec.checkpoint.resumeFrom`; a job that has stopped to ask for it goes on."""
    noted = note_choice(context, status)
    is_asking = status.phase == Phase.FAILED and status.reason in ASKING
    is_answer = noted.resume_choice is not None or status.reason == COMMIT_UNKNOWN
    return _begin_again(noted) if noted != status and is_asking and is_answer else noted


def _begin_again(status: Status) -> Status:
    """Return the status of a Failed job that goes on."""
    last = status.changes[-1] if status.changes else None
    if last is not None and last.first_step_time is None:
        status = edit_last_change(status, to="", to_attempt=0, start_mode="", plan_time=None)
    return dataclasses.replace(
        status,
        phase=Phase.PENDING,
        reason="",
        message="",
        current=None,
        reshard=None,
        pinned=None,
        pin=None,
        placement_limit=None,
        restart_budget=RestartBudget(),
        failure_counts=(),
        finish_time=None,
        active_since=None,
        active_seconds=0.0,
    )
