"""Take up what the training pods report: commits, progress, the times of the recovery's last parts."""

from __future__ import annotations

import dataclasses

from elastic_operator.api.conditions import Type, find, set_condition
from elastic_operator.api.pod_reports import brief, commit_problem, path_problem
from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Commit, Current, Loader, Progress, Recovery, Status, edit_last_recovery
from elastic_operator.manifests.attempt import checkpoint_root
from elastic_operator.observed import commit_history
from elastic_operator.observed.observation import RESHARD, LeaseView, report_of, report_problems
from elastic_operator.reconcile import goodput
from elastic_operator.reconcile.context import Context, is_read
from elastic_operator.reconcile.recovery import charge, refresh_exclusions, set_checkpoint_owned
from reshard.contract import LeaseKey, ReshardReport, sentence

_MOST_VERSIONS = 16
_MOST_PROBLEMS = 8
_PROBLEM_BYTES = 1024


def apply_reports(context: Context, status: Status) -> Status:
    """Facts only; decides nothing. Doing it twice changes nothing more."""
    status = _release(context, refresh_exclusions(context, status))
    status = dataclasses.replace(status, restart_budget=charge(status.restart_budget, context, None))
    status = _tell_problems(context, status)
    if status.current is None or status.current.launch_time is None:
        return status
    lease = context.world.leases.get(status.attempt)
    status = _job_seen(context, status, status.current)
    if lease is None:
        return status
    status = _loader(_commit(context, status, lease), lease)
    return _progress(context, status, lease)


def _job_seen(context: Context, status: Status, current: Current) -> Status:
    job = context.world.job(status.attempt)
    pods = context.world.workers(status.attempt)
    if job is not None and not current.job_uid:
        current = dataclasses.replace(current, job_uid=job.uid)
    ran = [pod for pod in pods if pod.phase != "Pending"]
    if current.schedule_time is None and len(ran) >= current.num_nodes:
        current = dataclasses.replace(current, schedule_time=Time(context.now))
        if _is_open(status):
            status = edit_last_recovery(status, schedule_time=Time(context.now))
    return dataclasses.replace(status, current=current)


def _release(context: Context, status: Status) -> Status:
    needed = commit_history.needed(status)
    checkpoint = commit_history.release(status.checkpoint, needed=needed, read_by_others=is_read(context))
    return dataclasses.replace(status, checkpoint=checkpoint)


def _tell_problems(context: Context, status: Status) -> Status:
    """Say what the pods of the current attempt have written that does not fit. It is not believed, and goes nowhere."""
    found = _problems(context, status)[:_MOST_PROBLEMS]
    old = find(status.conditions, Type.REPORTS_VALID)
    # The paths come first, so that they are there whatever is cut off. They alone decide whether it was told already:
    # a pod that writes something else every second is not told every second.
    paths = sentence(f"not believed: {', '.join(path for path, _ in found)}", _PROBLEM_BYTES)
    if old is not None and (old.status == "False") == bool(found) and (not found or old.message.startswith(paths)):
        return status
    if old is None and not found:
        return status
    texts = sentence("; ".join(said for _, said in found), _PROBLEM_BYTES)
    message = f"{paths}: {texts}" if found else "what the pods report is valid"
    if found:
        context.emit("ReportInvalid", message, warning=True)
    conditions = set_condition(
        status.conditions,
        Type.REPORTS_VALID,
        not found,
        reason="ReportInvalid" if found else "ReportsValid",
        message=message,
        now=context.now,
        generation=context.job.generation,
    )
    return dataclasses.replace(status, conditions=conditions)


def _problems(context: Context, status: Status) -> list[tuple[str, str]]:
    if status.current is None:
        return []
    if status.current.launch_time is None:
        return _reshard_problems(context, status, status.current)
    lease = context.world.leases.get(status.attempt)
    if lease is None:
        return []
    found = lease.problems()
    ref = lease.commit
    wrong = commit_problem(ref, root=checkpoint_root(context.spec), attempt=status.attempt) if ref is not None else ""
    return [*found, (f"Lease {lease.name}: annotation {LeaseKey.COMMIT}", wrong)] if wrong else found


def _reshard_problems(context: Context, status: Status, current: Current) -> list[tuple[str, str]]:
    pods = [pod for pod in context.world.pods if pod.role == RESHARD and pod.attempt == status.attempt]
    report = report_of(pods)
    wrong = misplaced(current, report) if report is not None else []
    where = f"Pods of attempt {status.attempt}: termination message"
    return [*report_problems(pods), *((f"{where}: {path}", text) for path, text in wrong)]


def misplaced(current: Current, report: ReshardReport) -> list[tuple[str, str]]:
    """Folders in the report of a conversion that are not those it was asked for: of each the path, and why."""
    if not report.ok:
        return []
    found: list[tuple[str, str]] = []
    if report.target and report.target != current.resume.uri:
        found.append(("target", f"expected {current.resume.uri}, found {brief(report.target)}"))
    if current.resume.external and (problem := path_problem(report.source, current.resume.source)):
        found.append(("source", problem))
    return found


def _commit(context: Context, status: Status, lease: LeaseView) -> Status:
    status = dataclasses.replace(status, checkpoint=commit_history.forget_removed(status.checkpoint, lease.removed))
    ref = lease.commit
    # A Lease of attempt N that names another attempt's commit is a trainer's mistake; fencing forbids to believe it.
    if ref is None or commit_problem(ref, root=checkpoint_root(context.spec), attempt=status.attempt):
        return status
    checkpoint = commit_history.add(status.checkpoint, Commit.from_ref(ref))
    if checkpoint == status.checkpoint:
        return status
    return dataclasses.replace(status, checkpoint=checkpoint, pinned={})


def _loader(status: Status, lease: LeaseView) -> Status:
    """What the training says that it can load; one that has another spec and says nothing yet leaves what is known."""
    found = lease.loader
    if found is None or status.current is None:
        return status
    loader = Loader(
        manifests=found.manifests[:_MOST_VERSIONS],
        memory_bytes=max(0, found.memory_bytes),
        spec_hash=status.current.spec_hash,
    )
    return dataclasses.replace(status, loader=loader)


def _progress(context: Context, status: Status, lease: LeaseView) -> Status:
    current = status.current
    if current is None:
        return status
    first = lease.first_step_at
    if first is not None:
        # By another clock: no earlier than the launch, and not in the future.
        first = min(max(first, current.launch_time or first), context.now)
    if first is None and lease.step is not None and lease.step > current.resume.step:
        first = context.now
    if first is not None and current.first_step_time is None:
        current = dataclasses.replace(current, first_step_time=Time(first))
        status = dataclasses.replace(status, current=current, first_step_time=status.first_step_time or Time(first))
        if _is_open(status):
            status = edit_last_recovery(status, first_step_time=Time(first))
            status = edit_last_recovery(status, seconds=durations(status.recoveries[-1]))
        context.emit("Running", _running(status, current))
        if find(status.conditions, Type.CHECKPOINT_OWNED) is not None:  # it was refused before: withdraw that
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
    due = old is None or old.phase != new.phase or context.now - (old.time or 0.0) >= context.limits.progress_seconds
    moved = old is None or (old.phase, old.step, old.samples, old.loss) != (new.phase, new.step, new.samples, new.loss)
    return accounted(dataclasses.replace(status, progress=new), context.now) if due and moved else status


def _step_time(context: Context, old: Progress | None, lease: LeaseView) -> Time | None:
    """When a step was seen last: now, if this one is new. What the attempt resumed from is none."""
    known = old or Progress()
    return known.step_time if lease.step is None or lease.step == known.step else Time(context.now)


def _running(status: Status, current: Current) -> str:
    text = f"attempt {status.attempt} makes steps, from step {current.resume.step} on"
    if not _is_open(status):
        return text
    last = status.recoveries[-1]
    lost = "1 step is" if last.lost_steps == 1 else f"{last.lost_steps} steps are"
    again = f"{lost} done again" if last.lost_steps else "no step was lost"
    return f"{text}; {last.cause} has cost {last.seconds.get('total', 0.0):.0f} s, and {again}"


def latest_step(context: Context, status: Status) -> int:
    """The newest step that anyone has heard of, for counting what is lost."""
    lease = context.world.leases.get(status.attempt)
    known = status.progress.step if status.progress else 0
    return max(known, (lease.step or 0) if lease else 0)


def durations(recovery: Recovery) -> dict[str, float]:
    """Seconds of a finished recovery by what it waited for, and of all of it."""
    parts = goodput.parts(recovery)
    return {**{name: round(seconds, 3) for name, seconds in parts.items()}, "total": round(sum(parts.values()), 3)}


def accounted(status: Status, now: float) -> Status:
    """`status` with its goodput as of `now`."""
    if status.first_step_time is None:
        return status
    step = status.progress.step if status.progress else 0
    first = status.started_from.step if status.started_from else 0
    found = goodput.account(status.recoveries, start=status.first_step_time, now=now, first_step=first, step=step)
    return dataclasses.replace(status, goodput=goodput.to_status(found))


def _is_open(status: Status) -> bool:
    return bool(status.recoveries) and status.recoveries[-1].to_attempt == status.attempt
