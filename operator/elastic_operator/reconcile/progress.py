"""Apply what the training pods report: commits, progress, the times of the last parts of a recovery."""

from __future__ import annotations

import dataclasses

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.pod_reports import find_commit_problem, find_path_problem, parse_or_none, parse_refused
from elastic_operator.api.serialization import Time
from elastic_operator.api.status import (
    MAX_LOSSES,
    MAX_WITHHELD,
    Commit,
    Current,
    Loader,
    LossPoint,
    Progress,
    Recovery,
    Status,
    edit_last_change,
)
from elastic_operator.api.validation import shorten
from elastic_operator.manifests.attempt import checkpoint_root
from elastic_operator.observed import commit_history
from elastic_operator.observed.observation import RESHARD, LeaseView
from elastic_operator.observed.pending_starts import MAX_AWAITED, Protection
from elastic_operator.observed.reshard_pods import report_of, report_problems
from elastic_operator.reconcile import goodput
from elastic_operator.reconcile.context import Context, find_protection
from elastic_operator.reconcile.failures import budgets
from elastic_operator.reconcile.failures.node_exclusions import refresh_exclusions
from elastic_operator.reconcile.failures.placement_limits import end_series
from elastic_operator.reconcile.notifications.recovery_summary import describe_recovery, summarize_recovery
from elastic_operator.reconcile.recovery import set_checkpoint_owned
from reshard.contract import LeaseKey, ReshardReport, sentence

_MAX_VERSIONS = 16
_MAX_PROBLEMS = 8
_PROBLEM_BYTES = 1024
_REFUSED_BYTES = 2048
_MAX_NAMES = 3
_LOSS_PARTS = 48


def apply_reports(context: Context, status: Status) -> Status:
    """Record reported facts in the status without any decision; idempotent."""
    status = _release_commits(context, refresh_exclusions(context, status))
    return budgets.refresh(context, _record_reports(context, _report_problems(context, status)))


def _record_reports(context: Context, status: Status) -> Status:
    if status.current is None or status.current.launch_time is None:
        return status
    lease = context.world.leases.get(status.attempt)
    status = _record_job(context, status, status.current)
    if lease is None:
        return status
    status = _report_refused(context, _record_loader(_record_commit(context, status, lease), lease), lease)
    return _record_progress(context, status, lease)


def _record_job(context: Context, status: Status, current: Current) -> Status:
    job = context.world.job(status.attempt)
    pods = context.world.workers(status.attempt)
    if job is not None and not current.job_uid:
        current = dataclasses.replace(current, job_uid=job.uid)
    started = [pod for pod in pods if pod.phase != "Pending"]
    if current.schedule_time is None and len(started) >= current.num_nodes:
        current = dataclasses.replace(current, schedule_time=Time(context.now))
        status = end_series(context, status, current)
        if _is_open(status):
            status = edit_last_change(status, schedule_time=Time(context.now))
    return dataclasses.replace(status, current=current)


def _release_commits(context: Context, status: Status) -> Status:
    before, protection = status.checkpoint, find_protection(context)
    checkpoint = commit_history.release(
        before,
        needed=commit_history.find_needed(status),
        read_by_others=protection.is_read,
        awaited=protection.folders,
        pinned=protection.pinned,
    )
    recorded = {*checkpoint.released, *checkpoint.withheld}
    forgotten = [name for name in (*before.released, *before.withheld) if name not in recorded]
    if forgotten:
        text = f"the status has no room for more than {MAX_WITHHELD} commits that wait for their removal"
        root = checkpoint_root(context.spec)
        context.emit("CommitsForgotten", f"{text}: remove by hand, below {root}: {', '.join(forgotten)}", warning=True)
    return _report_readers(context, dataclasses.replace(status, checkpoint=checkpoint), protection)


def _report_readers(context: Context, status: Status, protection: Protection) -> Status:
    """Report why superseded commits stay on storage: jobs are about to start from here, or the user has pinned them."""
    old = find(status.conditions, Type.COMMITS_RELEASED)
    reason, message = _find_hold(status, protection)
    if context.world.starts is None or (not reason and (old is None or old.status == "True")):
        return status
    if reason and (old is None or old.reason != reason):
        context.emit(reason, message, warning=reason in ("StartOverdue", "PinUnknown"))
    conditions = context.add_condition(
        status,
        Type.COMMITS_RELEASED,
        not reason,
        reason=reason or "Released",
        message=message or "nothing keeps superseded commits of this job on storage",
    )
    return dataclasses.replace(status, conditions=conditions)


def _find_hold(status: Status, protection: Protection) -> tuple[str, str]:
    """Return reason and message of a condition that is False; empty texts if nothing is held."""
    checkpoint = status.checkpoint
    held = commit_history.find_withheld(checkpoint, protection)
    if held and protection.jobs:
        is_full = len(held) >= MAX_AWAITED and not protection.is_read
        return "StartOverdue" if is_full else "StartPending", _describe_readers(protection, is_full=is_full)
    known = {commit_history.parse_commit_name(item.uri) for item in checkpoint.history} | held
    if unknown := sorted(protection.pinned - known):
        text = f"spec.checkpoint.pinned names commits that are not there: {', '.join(unknown)}"
        return "PinUnknown", f"{text}; expected names from status.checkpoint.history, remove the others"
    if pinned := sorted(protection.pinned & held):
        text = f"pinned by spec.checkpoint.pinned: {', '.join(pinned)}"
        return "Pinned", f"{text}; they stay on the volume until they are removed from the list"
    return "", ""


def _describe_readers(protection: Protection, *, is_full: bool) -> str:
    first = ", ".join(protection.jobs[:_MAX_NAMES])
    more = len(protection.jobs) - _MAX_NAMES
    jobs = f"{first} and {more} more" if more > 0 else first
    text = f"jobs that are about to start from the commits of this job (spec.checkpoint.startFrom): {jobs}; "
    if not is_full:
        return f"{text}old commits stay on the volume until then"
    advice = "let these jobs start, or delete them, or copy the commit into a folder of its own and name that one"
    return f"{text}no more than {MAX_AWAITED} old commits stay for jobs that wait, the others are removed: {advice}"


def _report_problems(context: Context, status: Status) -> Status:
    """Report malformed values that the current attempt's pods wrote; the operator ignores these values."""
    problems = _find_problems(context, status)[:_MAX_PROBLEMS]
    old = find(status.conditions, Type.REPORTS_VALID)
    # The paths come first, so that truncation keeps them. They alone decide whether the problem was reported already;
    # otherwise a pod that writes a new value every second would cause an event every second.
    paths = sentence(f"ignored: {', '.join(path for path, _ in problems)}", _PROBLEM_BYTES)
    if (
        old is not None
        and (old.status == "False") == bool(problems)
        and (not problems or old.message.startswith(paths))
    ):
        return status
    if old is None and not problems:
        return status
    texts = sentence("; ".join(text for _, text in problems), _PROBLEM_BYTES)
    message = f"{paths}: {texts}" if problems else "what the pods report is valid"
    if problems:
        context.emit("ReportInvalid", message, warning=True)
    conditions = context.add_condition(
        status,
        Type.REPORTS_VALID,
        not problems,
        reason="ReportInvalid" if problems else "ReportsValid",
        message=message,
    )
    return dataclasses.replace(status, conditions=conditions)


def _find_problems(context: Context, status: Status) -> list[tuple[str, str]]:
    if status.current is None:
        return []
    if status.current.launch_time is None:
        return _find_reshard_problems(context, status, status.current)
    lease = context.world.leases.get(status.attempt)
    if lease is None:
        return []
    problems = lease.problems()
    ref = lease.commit
    commit_error = (
        find_commit_problem(ref, root=checkpoint_root(context.spec), attempt=status.attempt) if ref is not None else ""
    )
    return (
        [*problems, (f"Lease {lease.name}: annotation {LeaseKey.COMMIT}", commit_error)] if commit_error else problems
    )


def _find_reshard_problems(context: Context, status: Status, current: Current) -> list[tuple[str, str]]:
    pods = [pod for pod in context.world.pods if pod.role == RESHARD and pod.attempt == status.attempt]
    report = report_of(pods)
    mismatches = find_misplaced_folders(current, report) if report is not None else []
    where = f"Pods of attempt {status.attempt}: termination message"
    return [*report_problems(pods), *((f"{where}: {path}", text) for path, text in mismatches)]


def find_misplaced_folders(current: Current, report: ReshardReport) -> list[tuple[str, str]]:
    """Return the folders in a conversion's report that differ from the requested ones: path and message."""
    if not report.ok:
        return []
    mismatches: list[tuple[str, str]] = []
    if report.target and report.target != current.resume.uri:
        mismatches.append(("target", f"expected {current.resume.uri}, found {shorten(report.target)}"))
    if current.resume.external and (problem := find_path_problem(report.source, current.resume.source)):
        mismatches.append(("source", problem))
    return mismatches


def _record_commit(context: Context, status: Status, lease: LeaseView) -> Status:
    status = dataclasses.replace(status, checkpoint=commit_history.forget_removed(status.checkpoint, lease.removed))
    ref = lease.commit
    # Fencing: a Lease of attempt N that names another attempt's commit is a defect of the trainer and is ignored.
    if ref is None or find_commit_problem(ref, root=checkpoint_root(context.spec), attempt=status.attempt):
        return status
    checkpoint = commit_history.add(status.checkpoint, Commit.from_ref(ref))
    if checkpoint == status.checkpoint:
        return status
    return dataclasses.replace(status, checkpoint=checkpoint, pinned=None, pin=None)


def _record_loader(status: Status, lease: LeaseView) -> Status:
    """Record what the training can load.

    If an attempt with an edited spec has not reported yet, the recorded value stays.
    """
    reported = lease.loader
    if reported is None or status.current is None:
        return status
    loader = Loader(
        manifests=reported.manifests[:_MAX_VERSIONS],
        memory_bytes=max(0, reported.memory_bytes),
        formats=reported.formats,
        spec_hash=status.current.spec_hash,
    )
    return dataclasses.replace(status, loader=loader)


def _report_refused(context: Context, status: Status, lease: LeaseView) -> Status:
    """Report that the resharder would refuse the commits of the training, as rank 0 has found out."""
    refused = parse_or_none(parse_refused, lease.get(LeaseKey.REFUSED))
    old = find(status.conditions, Type.COMMITS_CONVERTIBLE)
    if refused is None or (not refused.message and old is None):
        return status
    allowed = context.spec.checkpoint.allowed_globals
    is_allowed = bool(refused.to_allow) and set(refused.to_allow) <= set(allowed)
    is_convertible = not refused.message or is_allowed
    if is_convertible and old is None:
        return status
    message = "the resharder refuses nothing of the commits" + " with spec.checkpoint.allowedGlobals" * is_allowed
    if not is_convertible:
        names = ", ".join(dict.fromkeys((*allowed, *refused.to_allow)))
        advice = f"set spec.checkpoint.allowedGlobals: [{names}], or " * bool(refused.to_allow)
        message = (
            f"the resharder would refuse the commits of attempt {status.attempt}: {refused.message}; {advice}save plain"
            " data; until then the job cannot go on in another topology that needs a conversion"
        )
        message = sentence(message, _REFUSED_BYTES)
        if old is None or old.message != message:
            context.emit("NotConvertible", message, warning=True)
    conditions = context.add_condition(
        status,
        Type.COMMITS_CONVERTIBLE,
        is_convertible,
        reason="Convertible" if is_convertible else "NotConvertible",
        message=message,
    )
    return dataclasses.replace(status, conditions=conditions)


def _record_progress(context: Context, status: Status, lease: LeaseView) -> Status:
    current = status.current
    if current is None:
        return status
    first = lease.first_step_at
    if first is not None:
        # The trainer's clock may differ: accept no time before the launch or in the future.
        first = min(max(first, current.launch_time or first), context.now)
    if first is None and lease.step is not None and lease.step > current.resume.step:
        first = context.now
    if first is not None and current.first_step_time is None:
        current = dataclasses.replace(current, first_step_time=Time(first))
        status = dataclasses.replace(status, current=current, first_step_time=status.first_step_time or Time(first))
        if _is_open(status):
            status = edit_last_change(status, first_step_time=Time(first))
            status = edit_last_change(status, seconds=measure_durations(status.changes[-1]))
        context.emit("Running", _describe_start(status, current))
        if find(status.conditions, Type.CHECKPOINT_OWNED) is not None:  # set by an earlier refusal, which is over
            message = f"attempt {status.attempt} writes to {checkpoint_root(context.spec)}"
            status = set_checkpoint_owned(context, status, is_owned=True, message=message)
    old = status.progress
    new = Progress(
        phase=lease.phase,
        step=lease.step if lease.step is not None else current.resume.step,
        samples=lease.samples or current.resume.samples,
        loss=lease.loss,
        time=Time(context.now),
        step_time=_step_time(context, old, lease),
    )
    is_due = old is None or old.phase != new.phase or context.now - (old.time or 0.0) >= context.limits.progress_seconds
    has_changed = old is None or (old.phase, old.step, old.samples, old.loss) != (
        new.phase,
        new.step,
        new.samples,
        new.loss,
    )
    if not is_due or not has_changed:
        return status
    losses = status.losses
    if lease.step is not None and lease.loss is not None:
        point = LossPoint(attempt=status.attempt, step=new.step, samples=new.samples, loss=lease.loss)
        losses = add_loss(losses, point)
    return update_goodput(dataclasses.replace(status, progress=new, losses=losses), context.now)


def add_loss(points: tuple[LossPoint, ...], new: LossPoint) -> tuple[LossPoint, ...]:
    """Add a loss to the curve that the status keeps; at most MAX_LOSSES points, spread over the samples of the job.

    A point is left out if it is no step further than the last one of its attempt, or nearer to it than a 48th of the
    curve. When there are too many, every second one is dropped, but the first and the newest.
    """
    if points and points[-1].attempt == new.attempt:
        last = points[-1]
        span = max(item.samples for item in points) - min(item.samples for item in points)
        if new.step <= last.step or (new.samples - last.samples) * _LOSS_PARTS < span:
            return points
    grown = (*points, new)
    return grown if len(grown) <= MAX_LOSSES else (*grown[:-1:2], new)


def _step_time(context: Context, old: Progress | None, lease: LeaseView) -> Time | None:
    """Return when a new step was last seen: now, if the Lease shows a new one."""
    progress = old or Progress()
    return progress.step_time if lease.step is None or lease.step == progress.step else Time(context.now)


def _describe_start(status: Status, current: Current) -> str:
    text = f"attempt {status.attempt} makes steps, from step {current.resume.step} on"
    summary = summarize_recovery(status.changes, len(status.changes) - 1) if _is_open(status) else None
    return f"{text}; {describe_recovery(summary)}" if summary is not None else text


def find_latest_step(context: Context, status: Status) -> int:
    """Return the newest step that the Lease or the status shows, to count lost steps."""
    lease = context.world.leases.get(status.attempt)
    recorded = status.progress.step if status.progress else 0
    return max(recorded, (lease.step or 0) if lease else 0)


def measure_durations(recovery: Recovery) -> dict[str, float]:
    """Return the seconds of each part of a finished recovery, and their total."""
    parts = goodput.measure_parts(recovery)
    return {**{name: round(seconds, 3) for name, seconds in parts.items()}, "total": round(sum(parts.values()), 3)}


def update_goodput(status: Status, now: float) -> Status:
    """Return `status` with its goodput as of `now`."""
    if status.first_step_time is None:
        return status
    step = status.progress.step if status.progress else 0
    first = status.started_from.step if status.started_from else 0
    measured = goodput.account(status.changes, start=status.first_step_time, now=now, first_step=first, step=step)
    return dataclasses.replace(status, goodput=goodput.to_status(measured))


def _is_open(status: Status) -> bool:
    return bool(status.changes) and status.changes[-1].to_attempt == status.attempt
