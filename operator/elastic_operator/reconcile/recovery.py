"""End an attempt but not the job: record the recovery, exclude lost nodes, charge the restart budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from elastic_operator.api.conditions import Type, set_condition
from elastic_operator.api.serialization import Time
from elastic_operator.api.status import (
    MAX_RECOVERIES,
    ExcludedNode,
    Phase,
    Recovery,
    RestartBudget,
    Status,
    edit_last_recovery,
    short,
)
from elastic_operator.observed import commit_history, signals
from elastic_operator.observed.observation import PodView
from elastic_operator.reconcile import goodput
from elastic_operator.reconcile.context import POD_STUCK_TERMINATING, Context, select_stuck_pods
from reshard.contract import sentence

OFFENCES_UNTIL_EXCLUDED = 2
"""Number of recoveries that a node causes before it is avoided for `recovery.excludeNodeSeconds`, even if Ready."""

_MESSAGE_BYTES = 1024
"""Maximum size of a message in a recovery; a status holds ten recoveries and has to stay small."""


def recover(
    context: Context,
    status: Status,
    *,
    cause: str,
    message: str,
    since: float,
    lost: Collection[str] = (),
    suspected: Collection[str] = (),
    planned: bool = False,
) -> Status:
    """End the current attempt. The next pass plans its successor; `actions_for_status` stops its pods.

    Args:
        context: inputs of the decision.
        status: status of the job.
        cause: reason of the recovery, for instance a `signals.Kind`.
        message: one sentence for people.
        since: when the first signal began, seconds since the epoch.
        lost: nodes that are confirmed lost; they are excluded.
        suspected: nodes that are probably lost, for the record only.
        planned: True for a planned change, which does not count against the restart budget.
    """
    now = Time(context.now)
    named = {*lost, *suspected}
    record = _build_record(context, status, cause=cause, message=message, since=since, lost=named, planned=planned)
    is_merged = is_merged_with_last(context, status)
    context.emit(
        cause, f"{message.removesuffix('.')}; {_describe_ending(status, planned=planned)}", warning=not planned
    )
    if is_merged:
        previous = status.recoveries[-1]
        status = edit_last_recovery(
            status,
            cause=cause if named and not previous.lost else previous.cause,
            lost=tuple(sorted({*previous.lost, *named})),
            to="",
            to_attempt=0,
            plan_time=None,
            reshard_start_time=None,
            reshard_end_time=None,
        )
    else:
        status = dataclasses.replace(status, recoveries=(*status.recoveries, record)[-MAX_RECOVERIES:])
    lease = context.world.leases.get(status.attempt)
    refusal = (lease.resume_error if lease else "") or _find_out_of_memory(context, status)
    # Never resume again from a commit that rank 0 could not load, whatever else has ended the attempt.
    if refusal and status.current is not None and status.current.resume.uri:
        status = refuse_commit(context, status, status.current.resume.uri, refusal)
    status = dataclasses.replace(
        status, current=None, drain=None, growth=None, excluded_nodes=_exclude_nodes(context, status, lost, cause)
    )
    if planned or is_merged:
        return status
    budget = charge_budget(status.restart_budget, context, now)
    status = dataclasses.replace(status, restart_budget=budget)
    if budget.used > budget.limit:
        text = f"{budget.used} unplanned restarts within {budget.window_seconds} s exceed the budget of {budget.limit}"
        context.emit("RestartBudgetExceeded", f"{text}; the last one: {message}", warning=True)
        return dataclasses.replace(
            status, phase=Phase.FAILED, reason="RestartBudgetExceeded", message=f"{text}. Last cause: {message}"
        )
    return status


def _find_out_of_memory(context: Context, status: Status) -> str:
    """Return why a virtual commit should not be loaded again, empty if nothing indicates that.

    Loading a virtual commit takes memory that files on storage would not.
    """
    current = status.current
    if (
        current is None
        or current.first_step_time is not None
        or not commit_history.is_virtual(status.checkpoint, current)
    ):
        return ""
    killed = [pod.name for pod in context.world.workers(status.attempt) if pod.exit_reason == "OOMKilled"]
    return (
        f"{killed[0]} ran out of memory before the first step, perhaps because it loaded a virtual commit"
        if killed
        else ""
    )


def record_suspension(context: Context, status: Status) -> Status:
    """Record that an open recovery is suspended; the time that follows belongs to the suspension."""
    last = status.recoveries[-1] if status.recoveries else None
    if last is None or last.first_step_time is not None:
        return status
    if last.cause == goodput.SUSPENDED:
        return status if not last.to_attempt else edit_last_recovery(status, to="", to_attempt=0, plan_time=None)
    now = Time(context.now)
    record = Recovery(
        cause=goodput.SUSPENDED,
        message="spec.suspend is true",
        planned=True,
        from_=last.from_,
        from_attempt=status.attempt,
        signal_time=now,
        detect_time=now,
        # The steps done so far; steps that a failure lost are counted in the record of that failure.
        last_step=status.progress.step if status.progress else 0,
    )
    return dataclasses.replace(status, recoveries=(*status.recoveries, record)[-MAX_RECOVERIES:])


def _describe_ending(status: Status, *, planned: bool) -> str:
    """Return the words for an event that say what happens to the current attempt."""
    attempt = f"attempt {status.attempt}"
    if not status.launched:
        return f"{attempt}, which was not launched yet, gets a new plan"
    step = status.progress.step if status.progress else 0
    return f"{attempt} {'ends' if planned else 'is given up'} after step {step}"


def is_merged_with_last(context: Context, status: Status) -> bool:
    """Return whether a further failure belongs to the last recovery.

    It does if the attempt of that recovery is not launched yet and the batch window is open.
    """
    if not status.recoveries or status.launched:
        return False
    last = status.recoveries[-1]
    if last.cause == goodput.SUSPENDED:
        return False  # the time spent suspended has a record of its own
    window = context.spec.recovery.batch_window_seconds
    return last.launch_time is None and context.now - (last.detect_time or 0.0) <= window


def charge_budget(budget: RestartBudget, context: Context, now: float | None) -> RestartBudget:
    """Count one unplanned restart at `now`, or only drop those outside of the window if `now` is None."""
    rules = context.spec.recovery.restart_budget
    times = [moment for moment in budget.times if context.now - moment < rules.window_seconds]
    if now is not None:
        times.append(Time(now))
    # One more than the limit is enough to know that it is exceeded.
    times = times[-(rules.limit + 1) :]
    return RestartBudget(limit=rules.limit, used=len(times), window_seconds=rules.window_seconds, times=tuple(times))


def fail_as_not_owner(context: Context, status: Status, refusal: str) -> Status:
    """End a job whose checkpoint folder belongs to another job; a new attempt could not change that."""
    message = f"{sentence(refusal, _MESSAGE_BYTES)}; to try again: kubectl etj retry {context.job.name}"
    context.emit("CheckpointNotOwned", message, warning=True)
    return dataclasses.replace(
        set_checkpoint_owned(context, status, is_owned=False, message=message),
        phase=Phase.FAILED,
        reason="CheckpointNotOwned",
        message=message,
        current=None,
        drain=None,
        growth=None,
    )


def set_checkpoint_owned(context: Context, status: Status, *, is_owned: bool, message: str) -> Status:
    """Set condition CheckpointOwned: whether the checkpoint folder belongs to this job."""
    conditions = set_condition(
        status.conditions,
        Type.CHECKPOINT_OWNED,
        is_owned,
        reason="Claimed" if is_owned else "OwnedByAnotherJob",
        message=message,
        now=context.now,
        generation=context.job.generation,
    )
    return dataclasses.replace(status, conditions=conditions)


def refuse_commit(context: Context, status: Status, uri: str, reason: str) -> Status:
    """Mark a commit invalid, and report which commit the job falls back to."""
    checkpoint = commit_history.invalidate(status.checkpoint, uri, reason)
    fallback = commit_history.find_newest(checkpoint, below=status.attempt + 1)
    start = "spec.checkpoint.startFrom" if context.spec.checkpoint.start_from else "nothing"
    consequence = (
        f"falling back to {fallback.uri}" if fallback else f"no other commit is left: training starts from {start}"
    )
    context.emit("CommitInvalid", f"{uri} cannot be used ({reason}); {consequence}", warning=True)
    return dataclasses.replace(status, checkpoint=checkpoint)


def refresh_exclusions(context: Context, status: Status) -> Status:
    """Exclude nodes with stuck pods, and readmit excluded nodes.

    A lost node is readmitted once it has been Ready for a while, a node with a stuck pod a while after the pod has
    gone, a repeated offender after its term.
    """
    stuck = select_stuck_pods(context, status)
    status = _exclude_stuck(context, status, stuck)
    holding = {pod.node for pod in stuck}
    kept: list[ExcludedNode] = []
    for item in status.excluded_nodes:
        node = context.world.nodes.get(item.name)
        if node is None:
            continue  # A node that does not exist needs no exclusion; one created under its name later is another node.
        # A node with a stale Lease has not returned, even if its Ready condition is still True.
        is_healthy = not signals.detect_node_signals(node, item.name, context.limits, context.now)
        may_end = is_healthy and item.name not in holding
        until = _exclusion_end(context, item, node.ready_since) if may_end else None
        if until is None or until > context.now:
            kept.append(dataclasses.replace(item, until=until))
        else:
            context.emit("NodeReadmitted", f"node {item.name} may be used again: {item.reason} is over")
    return dataclasses.replace(status, excluded_nodes=tuple(kept))


def _exclude_stuck(context: Context, status: Status, stuck: Collection[PodView]) -> Status:
    """Exclude the nodes on which pods of stopped attempts do not end, and report each node once."""
    excluded = {item.name: item for item in status.excluded_nodes}
    for pod in sorted(stuck, key=lambda pod: pod.name):
        node = pod.node or ""
        known = excluded.get(node)
        if known is not None and known.reason == POD_STUCK_TERMINATING and known.until is None:
            continue
        overdue = context.now - (pod.deleted_at or context.now)
        context.emit(
            POD_STUCK_TERMINATING,
            f"pod {pod.name} of attempt {pod.attempt} is still there {overdue:.0f} s after it had to end, and its node "
            f"{node} is Ready: the job does not wait for it, and avoids the node until the pod is gone",
            warning=True,
        )
        excluded[node] = ExcludedNode(
            name=node, reason=POD_STUCK_TERMINATING, since=Time(context.now), hurts=known.hurts if known else 1
        )
    return dataclasses.replace(status, excluded_nodes=tuple(excluded.values()))


def _exclusion_end(context: Context, item: ExcludedNode, ready_since: float | None) -> Time:
    """Return the end of the exclusion of a node that is healthy now."""
    if item.hurts >= OFFENCES_UNTIL_EXCLUDED:
        return Time(item.since + context.spec.recovery.exclude_node_seconds)
    is_freed = item.reason == POD_STUCK_TERMINATING and item.until is None
    since = context.now if is_freed else max(ready_since or item.since, item.since)
    return item.until or Time(since + context.limits.node_stable_seconds)


def _exclude_nodes(context: Context, status: Status, lost: Collection[str], cause: str) -> tuple[ExcludedNode, ...]:
    others = [item for item in status.excluded_nodes if item.name not in lost]
    new = [
        ExcludedNode(
            name=name,
            reason=cause,
            since=Time(context.now),
            # The current recovery is in the list already.
            hurts=max(1, sum(name in recovery.lost for recovery in status.recoveries)),
        )
        for name in sorted(lost)
    ]
    for item in new:
        if item.hurts >= OFFENCES_UNTIL_EXCLUDED:
            seconds = context.spec.recovery.exclude_node_seconds
            context.emit(
                "NodeExcluded", f"node {item.name} ended {item.hurts} attempts: avoided for {seconds} s", warning=True
            )
    return (*others, *new)


def _build_record(
    context: Context, status: Status, *, cause: str, message: str, since: float, lost: Collection[str], planned: bool
) -> Recovery:
    current, progress = status.current, status.progress
    return Recovery(
        cause=cause,
        message=sentence(message, _MESSAGE_BYTES),
        lost=tuple(sorted(lost)),
        planned=planned,
        from_=short(current.topology) if current else "",
        from_attempt=status.attempt,
        signal_time=Time(min(since, context.now)),
        detect_time=Time(context.now),
        last_step=progress.step if progress else 0,
    )
