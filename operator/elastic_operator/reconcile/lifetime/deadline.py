"""The end of a job after `spec.activeDeadlineSeconds`. Pure.

A job is active from the launch of an attempt until it is suspended, waits for quota or ends; recoveries in between
count, because the job holds or wants its nodes then. The time is the sum of all such periods, so that a queueing system
that stops a job and lets it go on neither uses up its time nor gives it more.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Phase, Status
from elastic_operator.reconcile import running
from elastic_operator.reconcile.context import Context
from elastic_operator.reconcile.queueing.standing import QUEUED

EXCEEDED = "DeadlineExceeded"
"""Cause of the planned end, and reason of the phase Failed after it."""


def record_activity(status: Status, now: float) -> Status:
    """Begin a period of activity at a launch; add it to the sum when the job rests or has ended."""
    since, current = status.active_since, status.current
    is_resting = status.phase == Phase.SUSPENDED or (status.phase, status.reason) == (Phase.WAITING, QUEUED)
    if status.terminal or is_resting:
        if since is None:
            return status
        return dataclasses.replace(
            status, active_since=None, active_seconds=round(status.active_seconds + max(0.0, now - since), 3)
        )
    if since is None and current is not None and current.launch_time is not None:
        return dataclasses.replace(status, active_since=current.launch_time)
    return status


def find_deadline(spec: Spec, status: Status) -> float | None:
    """Return when the job's time is over, in seconds since the epoch; None if it has no limit, or no time passes."""
    if spec.active_deadline_seconds is None or status.active_since is None or status.terminal:
        return None
    return status.active_since + spec.active_deadline_seconds - status.active_seconds


def is_exceeded(context: Context, status: Status) -> bool:
    """Return whether the job's time is over."""
    limit = context.spec.active_deadline_seconds
    if limit is None:
        return False
    if status.active_since is None:
        return 0 < limit <= status.active_seconds
    return context.now >= status.active_since + limit - status.active_seconds


def stop(context: Context, status: Status) -> Status:
    """Let a launched attempt commit and exit, at most `recovery.drainSeconds`; then fail the job."""
    current = status.current
    text = f"spec.activeDeadlineSeconds {context.spec.active_deadline_seconds} has passed"
    if current is not None and current.launch_time is not None:
        if status.drain is None:
            return running.start_drain(context, status, EXCEEDED, text)
        return running.run(context, status, current)
    message = f"{text}; the newest commit is of step {status.checkpoint.step}"
    context.emit(EXCEEDED, f"{message}: the job fails", warning=True)
    return dataclasses.replace(
        status, phase=Phase.FAILED, reason=EXCEEDED, message=message, current=None, drain=None, growth=None
    )
