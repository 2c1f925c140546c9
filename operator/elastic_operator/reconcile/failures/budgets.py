"""Budgets and backoff by class of failure: charge a recovery, end the wait after progress, find what is exceeded."""

from __future__ import annotations

import dataclasses

from elastic_operator.api.failure_policy import ClassBudget, FailureClass
from elastic_operator.api.serialization import Time
from elastic_operator.api.spec import RecoverySpec, spec_hash
from elastic_operator.api.status import FailureCount, RestartBudget, Status
from elastic_operator.observed import commit_history
from elastic_operator.observed.failure_classes import CLASSES, Budget, Progress, classify_failure
from elastic_operator.reconcile.context import Context

FIRST_BACKOFF_SECONDS = 10.0
"""Pause before the next attempt after the second failure of a class in a row; it doubles with each further one."""

LAST_BACKOFF_SECONDS = 300.0
"""Longest such pause."""


def double_pause(first_seconds: float, last_seconds: float, count: int) -> float:
    """Return the length in seconds of a pause that doubles each time, up to a bound; `count` is 1 for the first one."""
    return min(last_seconds, first_seconds * 2.0 ** min(count - 1, 16))


def backoff_seconds(in_a_row: int) -> float:
    """Return the pause after so many failures of one class without progress; the first one costs no time."""
    return 0.0 if in_a_row <= 1 else double_pause(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS, in_a_row - 1)


def find_limit(recovery: RecoverySpec, name: FailureClass) -> ClassBudget | None:
    """Return the limit of the budget that a class has for itself; None if it has none."""
    own = next((item for item in recovery.budgets if item.failure_class is name), None)
    if own is None and CLASSES[name].budget is Budget.OWN:
        shared = recovery.restart_budget
        return ClassBudget(failure_class=name, limit=shared.limit, window_seconds=shared.window_seconds)
    return own


def charge(context: Context, status: Status, cause: str, *, is_ignored: bool = False) -> Status:
    """Count one unplanned recovery, charge it to the budgets of its class, and set the time of the next attempt.

    Args:
        context: inputs of the decision.
        status: status of the job.
        cause: cause of the recovery.
        is_ignored: True for a failure that is charged to no budget; the next attempt still waits.
    """
    name = classify_failure(cause)
    old = _find(status, name)
    in_a_row = old.in_a_row + 1
    seconds = backoff_seconds(in_a_row)
    charged = _charge_own(old, context, None if is_ignored else context.now)
    new = dataclasses.replace(
        charged,
        times=_postpone(charged.times, seconds),
        total=old.total + 1,
        in_a_row=in_a_row,
        commit_step=max(old.commit_step, status.checkpoint.step),
        retry_time=Time(context.now + seconds) if seconds else None,
        spec_hash=spec_hash(context.spec),
    )
    if seconds:
        context.emit(
            "RestartDelayed",
            f"the next attempt is planned in {seconds:.0f} s: {in_a_row} failures of class {name} in a row without "
            f"{CLASSES[name].progress.value}",
            warning=True,
        )
    others = (item for item in status.failure_counts if item.failure_class != name)
    status = dataclasses.replace(
        status, failure_counts=tuple(sorted((*others, new), key=lambda item: item.failure_class))
    )
    if CLASSES[name].budget is not Budget.SHARED:
        return status
    shared = _charge_shared(status.restart_budget, context, None if is_ignored else context.now)
    shared = dataclasses.replace(shared, times=_postpone(shared.times, seconds))
    return dataclasses.replace(status, restart_budget=shared)


def revoke(status: Status, cause: str, *, is_charged: bool) -> Status:
    """Undo the last `charge`, because the cause was another one.

    Args:
        status: status of the job.
        cause: cause with which the recovery was charged.
        is_charged: False if it was charged to no budget.
    """
    name = classify_failure(cause)
    old = _find(status, name)
    if old.total == 0:
        return status  # retried by hand since then
    seconds = backoff_seconds(old.in_a_row)
    times = _postpone(old.times[:-1] if is_charged else old.times, -seconds)
    new = dataclasses.replace(
        old, times=times, used=len(times), total=old.total - 1, in_a_row=max(0, old.in_a_row - 1), retry_time=None
    )
    counts = (new if item.failure_class == name else item for item in status.failure_counts)
    status = dataclasses.replace(status, failure_counts=tuple(item for item in counts if item.total))
    if CLASSES[name].budget is not Budget.SHARED:
        return status
    shared = status.restart_budget
    times = _postpone(shared.times[:-1] if is_charged else shared.times, -seconds)
    return dataclasses.replace(status, restart_budget=dataclasses.replace(shared, times=times, used=len(times)))


def is_limited(recovery: RecoverySpec, cause: str) -> bool:
    """Return whether recoveries with this cause are charged to a budget."""
    name = classify_failure(cause)
    return CLASSES[name].budget is Budget.SHARED or find_limit(recovery, name) is not None


def find_exceeded(status: Status, cause: str) -> str:
    """Return the sentence that says which budget the last recovery exceeded; empty if none."""
    name = classify_failure(cause)
    shared, own = status.restart_budget, _find(status, name)
    if CLASSES[name].budget is Budget.SHARED and shared.used > shared.limit:
        return f"{shared.used} unplanned restarts within {shared.window_seconds} s exceed the budget of {shared.limit}"
    if own.limit is not None and own.used > own.limit:
        return (
            f"{own.used} unplanned restarts of class {name} within {own.window_seconds} s exceed the budget of "
            f"{own.limit}"
        )
    return ""


def refresh(context: Context, status: Status) -> Status:
    """Drop recoveries outside of the windows, and end the backoff of the classes that have seen progress."""
    counts: list[FailureCount] = []
    for item in status.failure_counts:
        kept = _charge_own(item, context, None)
        if item.in_a_row and _has_progress(status, item):
            kept = dataclasses.replace(kept, in_a_row=0, retry_time=None)
        counts.append(kept)
    return dataclasses.replace(
        status,
        failure_counts=tuple(counts),
        restart_budget=_charge_shared(status.restart_budget, context, None),
    )


def find_backoff(context: Context, status: Status) -> FailureCount | None:
    """Return the class for which the next attempt has to wait now, or None."""
    waiting = [item for item in status.failure_counts if item.retry_time is not None and item.retry_time > context.now]
    if not waiting:
        return None
    last = max(waiting, key=lambda item: item.retry_time or 0.0)
    return last if last.spec_hash == spec_hash(context.spec) else None


def _find(status: Status, name: FailureClass) -> FailureCount:
    found = next((item for item in status.failure_counts if item.failure_class == name), None)
    return found or FailureCount(failure_class=name)


def _has_progress(status: Status, item: FailureCount) -> bool:
    newest = commit_history.find_newest(status.checkpoint, below=status.attempt + 1)
    if newest is not None and newest.step > item.commit_step and commit_history.is_own(status, newest):
        return True
    current = status.current
    return (
        CLASSES[_parse_class(item.failure_class)].progress is Progress.STEP
        and current is not None
        and current.first_step_time is not None
    )


def _parse_class(text: str) -> FailureClass:
    """Return the class with this name; a class that only a newer operator knows is treated as a crash."""
    return FailureClass(text) if text in FailureClass.__members__.values() else FailureClass.CRASH


def _charge_own(item: FailureCount, context: Context, now: float | None) -> FailureCount:
    limit = find_limit(context.spec.recovery, _parse_class(item.failure_class))
    if limit is None:
        return dataclasses.replace(item, limit=None, used=0, window_seconds=0, times=())
    times = _keep_times(item.times, context.now, now, window_seconds=limit.window_seconds, limit=limit.limit)
    return dataclasses.replace(
        item, limit=limit.limit, used=len(times), window_seconds=limit.window_seconds, times=times
    )


def _charge_shared(budget: RestartBudget, context: Context, now: float | None) -> RestartBudget:
    rules = context.spec.recovery.restart_budget
    times = _keep_times(budget.times, context.now, now, window_seconds=rules.window_seconds, limit=rules.limit)
    return RestartBudget(limit=rules.limit, used=len(times), window_seconds=rules.window_seconds, times=times)


def _postpone(times: tuple[Time, ...], seconds: float) -> tuple[Time, ...]:
    """Move times by a pause that begins now, so that the pause takes no part of the window.

    Otherwise a program that fails after some minutes would never exceed its budget: fewer failures fit the window.
    """
    return tuple(Time(moment + seconds) for moment in times) if seconds else times


def _keep_times(
    times: tuple[Time, ...], present: float, added: float | None, *, window_seconds: int, limit: int
) -> tuple[Time, ...]:
    """Return the times inside the window, with `added` as the newest unless it is None."""
    kept = [moment for moment in times if present - moment < window_seconds]
    if added is not None:
        kept.append(Time(added))
    # One more than the limit is enough to know that it is exceeded.
    return tuple(kept[-(limit + 1) :])
