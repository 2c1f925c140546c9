"""An attempt that is planned but not launched: convert its checkpoint, wait for the old one to be gone, launch.

Both waits run at the same time. Until the launch every change of plan takes a new attempt number, so that whatever a
reshard pod on a lost node still writes, it writes into a folder that nobody will read.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.conditions import Type, set_condition
from elastic_operator.api.serialization import Time
from elastic_operator.api.spec import spec_hash
from elastic_operator.api.status import (
    Commit,
    Condition,
    Conversion,
    Current,
    Phase,
    ReshardStatus,
    Status,
    edit_last_recovery,
    short,
)
from elastic_operator.manifests.attempt import reshard_name
from elastic_operator.observed import commit_history
from elastic_operator.observed.capacity import Capacity
from elastic_operator.observed.observation import RESHARD, JobView, report_of
from elastic_operator.observed.signals import Kind
from elastic_operator.reconcile import progress, recovery, reshard_mode, start_from
from elastic_operator.reconcile.actions import ReshardOutcome
from elastic_operator.reconcile.context import Context, capacity, lost_nodes, stopped_pods, suspect_nodes
from reshard.contract import ExitCode, ReshardReport

HOPELESS = (ExitCode.USAGE, ExitCode.UNSUPPORTED, ExitCode.PLAN_INVALID)
"""Trying again gives the same answer."""

UNUSABLE = (ExitCode.SOURCE_INVALID, ExitCode.SOURCE_CHANGED)
"""The commit is not to be used any more: it is damaged, or somebody has changed what must never change."""


def prepare(context: Context, status: Status, current: Current) -> Status:
    """One step towards the launch of the current attempt."""
    replanned = _replan(context, status, current)
    if replanned is not None:
        return replanned
    if not current.resume.ready:
        status = _follow_reshard(context, status, current)
        if status.current is None or status.terminal:
            return status
        current = status.current
    lost = lost_nodes(context, status)
    running = [pod for pod in stopped_pods(context, status) if not pod.terminal and pod.node not in lost]
    open_recovery = bool(status.recoveries) and status.recoveries[-1].to_attempt == status.attempt
    if not running and open_recovery and status.recoveries[-1].stop_time is None:
        status = edit_last_recovery(status, stop_time=Time(context.now))
    # A pod without a node is only deleted; a Job that still exists could make another.
    jobs = [job for job in context.world.jobs if job.role == "worker" and not (job.complete or job.failed)]
    if running or jobs or not current.resume.ready:
        return status
    return _launch(context, status, current, open_recovery)


def _launch(context: Context, status: Status, current: Current, open_recovery: bool) -> Status:
    now = Time(context.now)
    avoid = tuple(sorted({*current.avoid, *(item.name for item in status.excluded_nodes)}))
    status = dataclasses.replace(status, current=dataclasses.replace(current, launch_time=now, avoid=avoid))
    if open_recovery:
        status = edit_last_recovery(status, launch_time=now)
    world = current.num_nodes * current.gpus_per_node
    what = f"{short(current.topology)} on {current.num_nodes} nodes, {world} accelerators"
    context.emit("Launched", f"attempt {status.attempt}: {what}, from {current.resume.uri or 'nothing'}")
    return status


def _replan(context: Context, status: Status, current: Current) -> Status | None:
    """Give the plan up if it has become impossible; None if it stands."""
    if current.spec_hash != spec_hash(context.spec):
        context.emit("SpecChanged", f"attempt {status.attempt} is planned anew: the spec was edited")
        return _forget_plan(status)
    pods = [pod for pod in context.world.pods if pod.role == RESHARD and pod.attempt == status.attempt]
    lost = lost_nodes(context, status)
    stuck = sorted({pod.node for pod in pods if pod.node in lost and not pod.terminal and pod.node})
    free = capacity(context, status)
    if not stuck and fits(free, current):
        return None
    if stuck:
        message = f"the reshard pod of attempt {status.attempt} was on lost node {', '.join(stuck)}"
    else:
        wanted = f"{current.num_nodes} nodes with {current.gpus_per_node} accelerators each"
        message = f"attempt {status.attempt} needs {wanted}, but only {free} are left"
    if not status.recoveries or status.recoveries[-1].to_attempt != status.attempt:
        # A first start that lost its nodes before it began: nothing to recover, nothing to charge.
        context.emit("PlanOutdated", message, warning=True)
        return _forget_plan(status)
    return recovery.recover(
        context,
        status,
        cause=Kind.NODE_NOT_READY if stuck or suspect_nodes(context) else "CapacityLost",
        message=message,
        since=context.now,
        lost=lost,
        suspected=suspect_nodes(context),
    )


def fits(free: Capacity, current: Current) -> bool:
    """The planned attempt still finds room."""
    return free.num_usable(current.gpus_per_node) >= current.num_nodes


def _forget_plan(status: Status) -> Status:
    status = dataclasses.replace(status, current=None)
    if status.recoveries and status.recoveries[-1].to_attempt == status.attempt:
        status = edit_last_recovery(status, to="", to_attempt=0)
    return status


def _follow_reshard(context: Context, status: Status, current: Current) -> Status:
    """Record the start and the report of the reshard Job."""
    known = status.reshard
    if known is None or known.attempt != status.attempt:
        known = ReshardStatus(
            job_name=reshard_name(context.job.name, status.attempt),
            attempt=status.attempt,
            mode_reason=reshard_mode.conversion_request(context.spec, status, current).reason,
        )
        status = dataclasses.replace(status, reshard=known)
        if status.recoveries and status.recoveries[-1].to_attempt == status.attempt:
            status = edit_last_recovery(status, reshard_start_time=Time(context.now))
        context.emit("Resharding", f"attempt {status.attempt}: {current.resume.reason}")
    job = context.world.job(status.attempt, RESHARD)
    if job is None or job.uid == known.failed_uid:
        return status
    pods = [pod for pod in context.world.pods if pod.role == RESHARD and pod.attempt == status.attempt]
    report = report_of(pods)
    if report is not None and progress.misplaced(current, report):
        report = None  # told as a condition; what a report says of another target or source is not believed
    if job.complete and current.resume.external and report is None:
        return status if start_from.report_may_come(pods) else _reshard_failed(context, status, known, job, report)
    if job.complete:
        return _resharded(context, status, current, known, report)
    if job.failed:
        return _reshard_failed(context, status, known, job, report)
    return status


def _resharded(
    context: Context, status: Status, current: Current, known: ReshardStatus, report: ReshardReport | None
) -> Status:
    if current.resume.external and report is not None:
        status, current = start_from.learn(status, current, report)
    resume = current.resume
    _count(context, report, "Succeeded")
    if report is not None:
        known = dataclasses.replace(
            known,
            mode=report.mode,
            mode_reason=report.mode_reason or known.mode_reason,
            bytes_read=report.bytes_read,
            bytes_written=report.bytes_written,
            seconds=report.seconds,
            peak_rss_bytes=report.peak_rss_bytes,
            verified=report.verified,
            digest=report.digest,
            message=report.message,
        )
    commit = Commit(
        uri=resume.uri,
        step=resume.step,
        samples=resume.samples,
        attempt=status.attempt,
        topology=current.topology,
        num_bytes=known.bytes_written,
        writer="reshard",
        verified=known.verified,
    )
    status = dataclasses.replace(
        status,
        reshard=known,
        checkpoint=commit_history.add(status.checkpoint, commit),
        current=dataclasses.replace(current, resume=dataclasses.replace(resume, ready=True)),
        conditions=_reshard_condition(context, status, failed=False, reason="Resharded", message=resume.reason),
    )
    if status.recoveries and status.recoveries[-1].to_attempt == status.attempt:
        done = Conversion(
            mode=known.mode,
            bytes_read=known.bytes_read,
            bytes_written=known.bytes_written,
            seconds=known.seconds,
            verified=known.verified,
        )
        status = edit_last_recovery(status, reshard_end_time=Time(context.now), conversion=done)
    figures = _figures(known)
    context.emit("Resharded", f"attempt {status.attempt}: {resume.uri} is committed ({figures})")
    return status


def _figures(known: ReshardStatus) -> str:
    if known.mode == "virtual":
        return f"virtual, in {known.seconds:.1f} s: the training reads the source itself"
    proof = "verified against its source" if known.verified else "not verified"
    return f"{known.bytes_written / 1e6:.1f} MB written in {known.seconds:.1f} s, {proof}"


def _reshard_failed(
    context: Context, status: Status, known: ReshardStatus, job: JobView, report: ReshardReport | None
) -> Status:
    code = report.exit_code if report else None
    lost = start_from.NO_REPORT if job.complete else f"{job.failed_reason}: {job.failed_message}"
    message = report.message if report else lost
    source = status.current.resume.source if status.current else ""
    external = status.current is not None and status.current.resume.external
    name = _code_name(code)
    _count(context, report, name)
    if code == ExitCode.NOT_OWNER:
        return recovery.fail_as_not_owner(context, dataclasses.replace(status, reshard=known), message)
    if code in UNUSABLE and not external:
        status = recovery.refuse_commit(context, status, source, message)
        return dataclasses.replace(
            _forget_plan(status),
            conditions=_reshard_condition(context, status, failed=True, reason=name, message=message),
        )
    failures = known.failures + 1
    limit = context.spec.reshard.backoff_limit
    delay = context.limits.reshard_backoff_seconds * 2 ** (failures - 1)
    known = dataclasses.replace(
        known, failures=failures, failed_uid=job.uid, retry_time=Time(context.now + delay), message=message
    )
    final = failures > limit or code in HOPELESS or (external and start_from.is_final(code))
    then = "giving up on it" if final else f"retry {failures} of {limit} in {delay:.0f} s"
    context.emit("ReshardFailed", f"{job.name}: {name}: {message}; {then}", warning=True)
    then = f"{then}; {start_from.advice(context.job.name)}" if final and external else then
    text = f"{message}; the source {source} is untouched; {then}"
    status = dataclasses.replace(
        status,
        reshard=known,
        conditions=_reshard_condition(context, status, failed=True, reason=name, message=text),
    )
    if not final:
        return status
    if external or context.spec.reshard.on_failure == "Fail":
        return dataclasses.replace(status, phase=Phase.FAILED, reason="ReshardFailed", message=text, current=None)
    commit = commit_history.newest(status.checkpoint, below=status.attempt)
    return dataclasses.replace(_forget_plan(status), pinned=commit.topology if commit else {})


def _count(context: Context, report: ReshardReport | None, result: str) -> None:
    if report is None:
        outcome = ReshardOutcome(mode="", result=result)
    else:
        outcome = ReshardOutcome(
            mode=report.mode,
            result=result,
            bytes_read=report.bytes_read,
            bytes_written=report.bytes_written,
            seconds=report.seconds,
        )
    context.reshards.append(outcome)


def _code_name(code: int | None) -> str:
    if code is None or code not in ExitCode.__members__.values():
        return "NoReport"
    return "".join(part.capitalize() for part in ExitCode(code).name.split("_"))


def _reshard_condition(
    context: Context, status: Status, *, failed: bool, reason: str, message: str
) -> tuple[Condition, ...]:
    return set_condition(
        status.conditions,
        Type.RESHARD_FAILED,
        failed,
        reason=reason,
        message=message,
        now=context.now,
        generation=context.job.generation,
    )
