"""End an attempt but not the job: record the recovery, exclude nodes, charge the budget of the failure's class."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from elastic_operator.api.conditions import Type
from elastic_operator.api.serialization import Time
from elastic_operator.api.status import (
    Phase,
    Recovery,
    Status,
    add_change,
    edit_last_change,
    short,
)
from elastic_operator.manifests.attempt import start_field
from elastic_operator.observed import commit_history
from elastic_operator.observed.observation import PodView
from elastic_operator.reconcile import goodput, reshard_mode
from elastic_operator.reconcile.context import Context
from elastic_operator.reconcile.failures import charges, node_exclusions, reassessment, refused_commits
from elastic_operator.reconcile.failures.faults import UNKNOWN, Fault
from elastic_operator.reconcile.failures.reassessment import MESSAGE_BYTES
from reshard.contract import sentence


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
    fault: Fault = UNKNOWN,
) -> Status:
    """End the current attempt. The next pass plans its successor; `actions_for_status` stops its pods.

    Args:
        context: inputs of the decision.
        status: status of the job.
        cause: reason of the recovery, for instance a `signal_kinds.Kind`.
        message: one sentence for people.
        since: when the first signal began, seconds since the epoch.
        lost: nodes that are confirmed lost; they are excluded.
        suspected: nodes that are probably lost, for the record only.
        planned: True for a planned change, which is charged to no budget.
        fault: what is known about the first sign of the failure.
    """
    named = {*lost, *suspected}
    record = _build_record(
        context, status, cause=cause, message=message, since=since, lost=named, planned=planned, fault=fault
    )
    is_merged = is_merged_with_last(context, status, named)
    context.emit(
        cause, f"{message.removesuffix('.')}; {_describe_ending(status, planned=planned)}", warning=not planned
    )
    if is_merged:
        previous = status.changes[-1]
        if named and not previous.lost and not previous.planned:
            text = f"{message.removesuffix('.')}; {previous.message}"
            status = reassessment.change_cause(context, status, cause=cause, message=text, lost=named)
        status = edit_last_change(
            status,
            cause=cause if named and not previous.lost else previous.cause,
            lost=tuple(sorted({*previous.lost, *named})),
            to="",
            to_attempt=0,
            start_mode="",
            plan_time=None,
            reshard_start_time=None,
            reshard_end_time=None,
        )
    else:
        status = add_change(status, record, is_pause=cause in goodput.PAUSES)
    current, lease = status.current, context.world.leases.get(status.attempt)
    refusal = (lease.resume_error if lease else "") or _find_out_of_memory(context, status)
    # Never resume again from a commit that rank 0 could not load, whatever else has ended the attempt.
    # A commit that the training refuses only for its topology is intact, and is converted next time.
    if (
        refusal
        and current is not None
        and current.resume.uri
        and not (lease and reshard_mode.is_topology_refused(current, lease.loader))
    ):
        status = refuse_commit(context, status, current.resume.uri, refusal)
    excluded = node_exclusions.exclude_nodes(context, status, lost, cause)
    status = dataclasses.replace(status, current=None, drain=None, growth=None, excluded_nodes=excluded)
    if planned or is_merged:
        return status
    return charges.charge_recovery(context, status, message=message, fault=fault)


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


def record_stop(context: Context, status: Status, running: Collection[PodView]) -> Status:
    """Record in an open recovery that no pod of the stopped attempt runs any more, for instance during a back-off.

    Args:
        context: inputs of the decision.
        status: status of the job.
        running: result of `select_running_pods`.
    """
    last = status.changes[-1] if status.changes else None
    if running or last is None or last.stop_time is not None or last.to_attempt not in (0, status.attempt):
        return status
    return edit_last_change(status, stop_time=Time(context.now))


def record_pause(context: Context, status: Status, cause: str, message: str) -> Status:
    """Record that an open recovery may not go on; the time that follows belongs to the pause.

    Args:
        context: inputs of the decision.
        status: status of the job.
        cause: one of `goodput.PAUSES`.
        message: one sentence for people.
    """
    last = status.changes[-1] if status.changes else None
    if last is None or last.first_step_time is not None:
        return status
    if last.cause in goodput.PAUSES:
        return (
            status
            if not last.to_attempt
            else edit_last_change(status, to="", to_attempt=0, start_mode="", plan_time=None)
        )
    now = Time(context.now)
    record = Recovery(
        cause=cause,
        message=sentence(message, MESSAGE_BYTES),
        planned=True,
        from_=last.from_,
        from_attempt=status.attempt,
        signal_time=now,
        detect_time=now,
        # The steps done so far; steps that a failure lost are counted in the record of that failure.
        last_step=status.progress.step if status.progress else 0,
    )
    return add_change(status, record, is_pause=True)


def _describe_ending(status: Status, *, planned: bool) -> str:
    """Return the words for an event that say what happens to the current attempt."""
    attempt = f"attempt {status.attempt}"
    if not status.launched:
        return f"{attempt}, which was not launched yet, gets a new plan"
    step = status.progress.step if status.progress else 0
    return f"{attempt} {'ends' if planned else 'is given up'} after step {step}"


def is_merged_with_last(context: Context, status: Status, named: Collection[str] = ()) -> bool:
    """Return whether a further failure belongs to the last recovery.

    It does if the attempt of that recovery is not launched yet, and if the batch window is open or the failure is that
    of nodes which the recovery names already.

    Args:
        context: inputs of the decision.
        status: status of the job.
        named: nodes that are lost, or about to be.
    """
    if not status.changes or status.launched:
        return False
    last = status.changes[-1]
    if last.cause in goodput.PAUSES:
        return False  # the time spent suspended has a record of its own
    window = context.spec.recovery.batch_window_seconds
    is_same = bool(named) and set(named) <= set(last.lost)
    return last.launch_time is None and (is_same or context.now - (last.detect_time or 0.0) <= window)


def fail_as_not_owner(context: Context, status: Status, refusal: str) -> Status:
    """End a job whose checkpoint folder belongs to another job; a new attempt could not change that."""
    message = f"{sentence(refusal, MESSAGE_BYTES)}; to try again: kubectl etj retry {context.job.name}"
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
    conditions = context.add_condition(
        status,
        Type.CHECKPOINT_OWNED,
        is_owned,
        reason="Claimed" if is_owned else "OwnedByAnotherJob",
        message=message,
    )
    return dataclasses.replace(status, conditions=conditions)


def refuse_commit(context: Context, status: Status, uri: str, reason: str) -> Status:
    """Mark a commit invalid, and report which commit the job falls back to."""
    checkpoint = commit_history.invalidate(status.checkpoint, uri, reason)
    status = dataclasses.replace(status, checkpoint=checkpoint)
    fallback = commit_history.find_newest(checkpoint, below=status.attempt + 1)
    consequence = f"falling back to {fallback.uri if fallback else start_field(context.spec)}"
    consequence = refused_commits.find_problem(status) or consequence
    context.emit("CommitInvalid", f"{uri} cannot be used ({reason}); {consequence}", warning=True)
    return status


def _build_record(
    context: Context,
    status: Status,
    *,
    cause: str,
    message: str,
    since: float,
    lost: Collection[str],
    planned: bool,
    fault: Fault,
) -> Recovery:
    current, progress = status.current, status.progress
    return Recovery(
        cause=cause,
        message=sentence(message, MESSAGE_BYTES),
        lost=tuple(sorted(lost)),
        planned=planned,
        blamed=fault.node,
        exit_code=fault.exit_code,
        failed_pods=fault.failed_pods,
        from_=short(current.topology) if current else "",
        from_attempt=status.attempt,
        signal_time=Time(min(since, context.now)),
        detect_time=Time(context.now),
        last_step=progress.step if progress else 0,
    )
