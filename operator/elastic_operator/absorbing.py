"""Take up what the training pods report: commits, progress, the times of the recovery's last parts."""

from __future__ import annotations

import dataclasses

from elastic_operator import commits, ledger
from elastic_operator.context import Context
from elastic_operator.observation import LeaseView
from elastic_operator.recovering import charge, refresh_exclusions
from elastic_operator.status import Commit, Current, Loader, Progress, Recovery, Status, edit_last_recovery
from elastic_operator.wire import Time
from reshard.contract import LeaseKey

_MOST_VERSIONS = 16


def absorb(context: Context, status: Status) -> Status:
    """Facts only; decides nothing. Doing it twice changes nothing more."""
    status = refresh_exclusions(context, status)
    status = dataclasses.replace(status, restart_budget=charge(status.restart_budget, context, None))
    if status.current is None or status.current.launch_time is None:
        return status
    lease = context.world.leases.get(status.attempt)
    status = _job_seen(context, status, status.current)
    if lease is None:
        return status
    status = _loader(_commit(status, lease), lease)
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


def _commit(status: Status, lease: LeaseView) -> Status:
    ref = lease.commit
    # A Lease of attempt N that names another attempt's commit is a trainer's mistake; fencing forbids to believe it.
    if ref is None or ref.attempt != status.attempt:
        return status
    checkpoint = commits.add(status.checkpoint, Commit.from_ref(ref))
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
    if first is None and lease.step is not None and lease.step > current.resume.step:
        first = context.now
    if first is not None and current.first_step_time is None:
        current = dataclasses.replace(current, first_step_time=Time(first))
        status = dataclasses.replace(status, current=current, first_step_time=status.first_step_time or Time(first))
        if _is_open(status):
            status = edit_last_recovery(status, first_step_time=Time(first))
            status = edit_last_recovery(status, seconds=durations(status.recoveries[-1]))
        context.emit("Running", _running(status, current))
    old = status.progress
    new = Progress(
        phase=lease.phase,
        step=lease.step if lease.step is not None else current.resume.step,
        samples=_whole(lease.get(LeaseKey.SAMPLES)) or current.resume.samples,
        loss=_real(lease.get(LeaseKey.LOSS)),
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
    parts = ledger.parts(recovery)
    return {**{name: round(seconds, 3) for name, seconds in parts.items()}, "total": round(sum(parts.values()), 3)}


def accounted(status: Status, now: float) -> Status:
    """`status` with its goodput as of `now`."""
    if status.first_step_time is None:
        return status
    step = status.progress.step if status.progress else 0
    first = status.started_from.step if status.started_from else 0
    found = ledger.account(status.recoveries, start=status.first_step_time, now=now, first_step=first, step=step)
    return dataclasses.replace(status, goodput=ledger.to_status(found))


def _is_open(status: Status) -> bool:
    return bool(status.recoveries) and status.recoveries[-1].to_attempt == status.attempt


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _real(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    # JSON has no NaN and no infinity.
    return value if value - value == 0 else None
