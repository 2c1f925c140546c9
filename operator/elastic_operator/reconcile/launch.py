"""An attempt that is planned but not launched: convert its checkpoint, wait until older attempts have stopped, launch.

Both waits run at the same time. Until the launch every change of plan takes a new attempt number. A reshard pod on a
lost node may still write, but only into a folder that no attempt will read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from elastic_operator.api.conditions import Type
from elastic_operator.api.serialization import Time
from elastic_operator.api.spec import reshard_hash, spec_hash
from elastic_operator.api.spec_model import AUTO, LOAD
from elastic_operator.api.status import (
    Commit,
    Conversion,
    Current,
    Phase,
    ReshardStatus,
    Resume,
    StartMode,
    Status,
    edit_last_change,
    short,
)
from elastic_operator.manifests.attempt import reshard_name
from elastic_operator.observed import commit_history, reshard_pods
from elastic_operator.observed.capacity import Capacity
from elastic_operator.observed.observation import RESHARD, JobView, PodView
from elastic_operator.observed.signal_kinds import KINDS, Kind
from elastic_operator.planning import planner
from elastic_operator.reconcile import progress, recovery, reshard_mode, start_from
from elastic_operator.reconcile.actions import ReshardOutcome
from elastic_operator.reconcile.context import (
    Context,
    describe_stuck_pods,
    find_capacity,
    find_lost_nodes,
    find_suspect_nodes,
    list_avoided_nodes,
    select_running_pods,
    select_stuck_pods,
)
from elastic_operator.reconcile.effective_spec import describe_edit
from elastic_operator.reconcile.failures.budgets import LAST_BACKOFF_SECONDS, double_pause
from elastic_operator.reconcile.failures.pinned_topology import pin_topology
from elastic_operator.reconcile.failures.refused_commits import is_choice_open
from elastic_operator.reconcile.next_attempt import restrict_to_topology
from reshard.contract import ExitCode, ReshardReport

FINAL_EXIT_CODES = (ExitCode.USAGE, ExitCode.UNSUPPORTED, ExitCode.PLAN_INVALID)
"""Exit codes after which a retry would fail in the same way."""

INVALID_SOURCE_EXIT_CODES = (ExitCode.SOURCE_INVALID, ExitCode.SOURCE_CHANGED)
"""Exit codes after which the commit is invalid: it is damaged, or it was changed after it was committed."""

_EDITED = "spec.reshard or spec.checkpoint.allowedGlobals was edited"

KILLED_EXIT_CODES = (ExitCode.INTERNAL, ExitCode.INTERRUPTED)
"""Exit codes of a conversion that may have been killed because of its memory."""


def prepare(context: Context, status: Status, current: Current) -> Status:
    """Take one step towards the launch of the current attempt."""
    replanned = _replan(context, status, current)
    if replanned is not None:
        return replanned
    if not current.resume.ready:
        status = _follow_reshard(context, status, current)
        if status.current is None or status.terminal:
            return status
        current = status.current
    running = select_running_pods(context, status)
    open_recovery = bool(status.changes) and status.changes[-1].to_attempt == status.attempt
    status = recovery.record_stop(context, status, running)
    # A pod without a node is only deleted; its Job, while it exists, could create another one.
    # A Job that somebody deletes in the foreground creates none any more, but stays as long as its stuck pod.
    dying = {pod.attempt for pod in select_stuck_pods(context, status)}
    jobs = [
        job
        for job in context.world.jobs
        if job.role == "worker" and not (job.complete or job.failed or (job.deleting and job.attempt in dying))
    ]
    if running or jobs or not current.resume.ready:
        return status
    return _launch(context, status, current, open_recovery)


def _launch(context: Context, status: Status, current: Current, open_recovery: bool) -> Status:
    now = Time(context.now)
    avoid = list_avoided_nodes(context, status, current.gpus_per_node, also=current.avoid)
    status = dataclasses.replace(status, current=dataclasses.replace(current, launch_time=now, avoid=avoid.names))
    if open_recovery:
        status = edit_last_change(status, launch_time=now)
    num_accelerators = current.num_nodes * current.gpus_per_node
    description = f"{short(current.topology)} on {current.num_nodes} nodes, {num_accelerators} accelerators"
    text = f"attempt {status.attempt}: {description}, from {current.resume.uri or 'nothing'}"
    if avoid.num_left_out:
        text = f"{text}; {avoid.num_left_out} further nodes with signs of a failure could not be ruled out"
    context.emit("Launched", text)
    return status


def _replan(context: Context, status: Status, current: Current) -> Status | None:
    """Drop the plan if it has become impossible; return None if it is still valid."""
    if current.spec_hash != spec_hash(context.spec):
        context.emit("SpecChanged", f"attempt {status.attempt} gets a new plan: {describe_edit(current, context.spec)}")
        return _forget_plan(status)
    if start_from.is_outdated(context.spec, status, current):
        context.emit("SpecChanged", f"attempt {status.attempt} gets a new plan: spec.checkpoint.takeOver was edited")
        return _forget_plan(status)
    if is_choice_open(status):
        context.emit("SpecChanged", f"attempt {status.attempt} gets a new plan: spec.checkpoint.resumeFrom was set")
        return _forget_plan(status)
    pods = [pod for pod in context.world.pods if pod.role == RESHARD and pod.attempt == status.attempt]
    lost = find_lost_nodes(context, status)
    lost_reshard_nodes = sorted({pod.node for pod in pods if pod.node in lost and not pod.terminal and pod.node})
    capacity = find_capacity(context, status)
    if not lost_reshard_nodes and (current.awaits_nodes or has_capacity(capacity, current)):
        return None
    if lost_reshard_nodes:
        message = f"the reshard pod of attempt {status.attempt} was on lost node {', '.join(lost_reshard_nodes)}"
    else:
        needed = f"{current.num_nodes} nodes with {current.gpus_per_node} accelerators each"
        message = f"attempt {status.attempt} needs {needed}, but only {capacity} are left"
    stuck = select_stuck_pods(context, status)
    if stuck and not lost_reshard_nodes:
        # Nothing has failed besides what the last recovery is about, so that recovery goes on with another plan.
        context.emit("PlanOutdated", f"{message}: {describe_stuck_pods(stuck)} does not end", warning=True)
        if status.changes and status.changes[-1].to_attempt == status.attempt:
            status = edit_last_change(status, reshard_start_time=None, reshard_end_time=None)
        return _forget_plan(status)
    if not status.changes or status.changes[-1].to_attempt != status.attempt:
        # No attempt has run yet, so there is nothing to recover and no restart to count.
        context.emit("PlanOutdated", message, warning=True)
        return _forget_plan(status)
    return recovery.recover(
        context,
        status,
        cause=Kind.NODE_NOT_READY if lost_reshard_nodes or find_suspect_nodes(context) else "CapacityLost",
        message=message,
        since=context.now,
        lost=lost,
        suspected=find_suspect_nodes(context),
    )


def has_capacity(free: Capacity, current: Current) -> bool:
    """Return whether the planned attempt still fits into the free capacity."""
    return free.num_usable(current.gpus_per_node) >= current.num_nodes


def _forget_plan(status: Status) -> Status:
    status = dataclasses.replace(status, current=None)
    if status.changes and status.changes[-1].to_attempt == status.attempt:
        status = edit_last_change(status, to="", to_attempt=0, start_mode="")
    return status


def _follow_reshard(context: Context, status: Status, current: Current) -> Status:
    """Record the start and the report of the reshard Job."""
    reshard = status.reshard
    if reshard is None or reshard.attempt != status.attempt:
        reshard = ReshardStatus(
            job_name=reshard_name(context.job.name, status.attempt),
            attempt=status.attempt,
            mode_reason=reshard_mode.conversion_request(context.spec, status, current).reason,
            oom_kills=reshard.oom_kills if reshard is not None else 0,
        )
        status = dataclasses.replace(status, reshard=reshard)
        if status.changes and status.changes[-1].to_attempt == status.attempt:
            status = edit_last_change(status, reshard_start_time=Time(context.now))
        context.emit("Resharding", f"attempt {status.attempt}: {current.resume.reason}")
    if context.spec.reshard.mode == LOAD:
        loaded = _load_instead(context, status, current, "spec.reshard.mode was edited to Load")
        if loaded is not None:
            return loaded
    if reshard.interruptions > context.spec.reshard.backoff_limit:
        without_conversion = _avoid_conversion(context, status, current, reshard.message)
        if without_conversion is not None:
            return without_conversion
    job = context.world.job(status.attempt, RESHARD)
    if job is None:
        return dataclasses.replace(status, reshard=_begin_try(context, reshard))
    if job.uid == reshard.failed_uid:
        return status
    pods = reshard_pods.select_reshard_pods(context.world, job)
    job = reshard_pods.judge_job(job, pods)
    report = reshard_pods.report_of(pods)
    if report is not None and progress.find_misplaced_folders(current, report):
        report = None  # reported as a condition; a report about another target or source is ignored
    if job.complete and report is None and is_report_pending(pods):
        return status
    if job.complete and current.resume.external and report is None:
        failure = _Failure(name="NoReport", message=start_from.NO_REPORT)
        return _handle_reshard_failure(context, status, reshard, job, failure)
    if job.complete:
        return _finish_reshard(context, status, current, reshard, report)
    if job.failed:
        return _handle_reshard_failure(context, status, reshard, job, _describe_failure(context, job, pods, report))
    return _follow_start(context, status, current, reshard, job)


def _begin_try(context: Context, reshard: ReshardStatus) -> ReshardStatus:
    """Return the reshard status for a Job that is about to be created, from the spec as it is now."""
    wanted = reshard_hash(context.spec)
    if reshard.spec_hash in ("", wanted):  # empty: no Job yet, or an older operator kept no hash
        return dataclasses.replace(reshard, spec_hash=wanted)
    context.emit("SpecChanged", f"{_EDITED}: {reshard.job_name} begins anew, with all its retries")
    return dataclasses.replace(reshard, spec_hash=wanted, failures=0, interruptions=0, retry_time=None)


def _follow_start(context: Context, status: Status, current: Current, reshard: ReshardStatus, job: JobView) -> Status:
    """Bound the time in which no pod of a reshard Job starts.

    A pod that cannot start counts as a failed try after its grace period. A pod that finds no node waits, because a new
    one would not find any either. If the commit's topology fits meanwhile, the job returns to it.
    """
    pods = reshard_pods.select_reshard_pods(context.world, job)
    trouble = reshard_pods.detect_start_trouble(pods, job, context.now)
    if trouble is None:
        return status
    wanted = reshard_hash(context.spec)
    if reshard.spec_hash != wanted:
        is_edited = bool(reshard.spec_hash)  # an older operator kept no hash
        reshard = dataclasses.replace(reshard, spec_hash=wanted, failed_uid=job.uid if is_edited else "")
        if is_edited:
            context.emit("SpecChanged", f"{_EDITED}: {job.name}, which has not started, is created again")
        return dataclasses.replace(status, reshard=reshard)
    waited = context.now - trouble.since
    if reshard_pods.is_waiting_for_room(trouble, pods) and waited >= context.limits.unschedulable_seconds:
        without_conversion = _avoid_conversion(context, status, current, trouble.message)
        if without_conversion is not None:
            return without_conversion
    if trouble.kind is Kind.UNSCHEDULABLE:
        if waited < min(reshard_pods.UNPLACED_SECONDS, context.spec.reshard.timeout_seconds / 2):
            return status
        return dataclasses.replace(status, reshard=dataclasses.replace(reshard, failed_uid=job.uid))
    if waited < context.graces[KINDS[trouble.kind].grace]:
        return status
    is_interruption = reshard_pods.is_pull_failure(trouble, pods)
    failure = _Failure(name=str(trouble.kind), message=trouble.message, is_interruption=is_interruption)
    return _handle_reshard_failure(context, status, reshard, job, failure)


def _avoid_conversion(context: Context, status: Status, current: Current, trouble: str) -> Status | None:
    """Let the attempt load its commit unconverted, or plan the topology of the commit; None if neither is possible."""
    return _load_instead(context, status, current, trouble) or _return_to_commit(context, status, current, trouble)


def _load_instead(context: Context, status: Status, current: Current, why: str) -> Status | None:
    """Let the attempt load its commit unconverted, and drop the conversion; None if that is not possible, or unwanted.

    With mode Materialize the user has asked for the conversion.
    """
    commit = reshard_mode.find_loadable(context.spec, status, current.resume)
    if commit is None or context.spec.reshard.mode not in (AUTO, LOAD):
        return None
    context.emit("LoadsCommit", f"attempt {status.attempt} loads {commit.uri} without a conversion: {why}")
    if status.changes and status.changes[-1].to_attempt == status.attempt:
        status = edit_last_change(status, start_mode=StartMode.LOAD, reshard_end_time=Time(context.now))
    job = context.world.job(status.attempt, RESHARD)
    reshard = status.reshard
    if reshard is not None and job is not None:
        reshard = dataclasses.replace(reshard, failed_uid=job.uid)  # so that the Job is deleted
    resume = reshard_mode.load_commit(current.resume, commit, current.topology)
    return dataclasses.replace(status, reshard=reshard, current=dataclasses.replace(current, resume=resume))


def _return_to_commit(context: Context, status: Status, current: Current, trouble: str) -> Status | None:
    """Plan the topology of the newest commit, which needs no conversion; None if it does not fit."""
    commit = commit_history.find_newest(status.checkpoint, below=status.attempt)
    if commit is None or current.resume.external or commit.topology == current.topology:
        return None
    spec = restrict_to_topology(context.spec, commit.topology)
    if planner.best(spec, find_capacity(context, status), commit.topology) is None:
        return None
    text = f"{trouble}; {short(commit.topology)}, the topology of the commit, fits and needs no conversion"
    context.emit("PlanOutdated", text, warning=True)
    return pin_topology(context, _forget_plan(status), commit.topology)


def is_report_pending(pods: Collection[PodView]) -> bool:
    """Return whether a pod has not ended yet: Jobs and pods are read side by side, so the Job may be the newer one."""
    return any(not pod.outcome for pod in pods)


def _finish_reshard(
    context: Context, status: Status, current: Current, reshard: ReshardStatus, report: ReshardReport | None
) -> Status:
    _record_outcome(context, report, "Succeeded")
    if current.resume.external and report is not None:
        if start_from.is_nothing(context.spec, report):
            return start_from.begin_from_nothing(context, status, current, report)
        status, current = start_from.record_source(context.spec, status, current, report)
    resume = current.resume
    if report is not None:
        reshard = dataclasses.replace(
            reshard,
            mode=report.mode,
            mode_reason=report.mode_reason or reshard.mode_reason,
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
        num_bytes=reshard.bytes_written,
        writer="reshard",
        format=_find_format(context, status, resume),
        verified=reshard.verified,
    )
    status = dataclasses.replace(
        status,
        reshard=reshard,
        checkpoint=commit_history.add(status.checkpoint, commit),
        current=dataclasses.replace(current, resume=dataclasses.replace(resume, ready=True)),
        pin=None,
        conditions=context.add_condition(status, Type.RESHARD_FAILED, False, reason="Resharded", message=resume.reason),
    )
    if status.changes and status.changes[-1].to_attempt == status.attempt:
        conversion = Conversion(
            mode=reshard.mode,
            bytes_read=reshard.bytes_read,
            bytes_written=reshard.bytes_written,
            seconds=reshard.seconds,
            verified=reshard.verified,
        )
        status = edit_last_change(status, reshard_end_time=Time(context.now), conversion=conversion)
    figures = _describe_conversion(reshard)
    context.emit("Resharded", f"attempt {status.attempt}: {resume.uri} is committed ({figures})")
    return status


def _find_format(context: Context, status: Status, resume: Resume) -> str:
    """Return the format of a converted commit, which is that of its source unless the source is foreign."""
    if resume.external:
        return context.spec.checkpoint.format.lower()
    return next((item.format for item in status.checkpoint.history if item.uri == resume.source), "")


def _describe_conversion(reshard: ReshardStatus) -> str:
    if reshard.mode == "virtual":
        return f"virtual, in {reshard.seconds:.1f} s: the training reads the source itself"
    proof = "verified against its source" if reshard.verified else "not verified"
    return f"{reshard.bytes_written / 1e6:.1f} MB written in {reshard.seconds:.1f} s, {proof}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A failed try of a conversion.

    Attributes:
        name: reason of the condition ReshardFailed.
        report: what the pod reported, if it did.
        is_out_of_memory: the next try needs more memory.
        is_interruption: the infrastructure ended the try, so it uses no retry.
    """

    name: str
    message: str
    report: ReshardReport | None = None
    is_out_of_memory: bool = False
    is_interruption: bool = False


def _describe_failure(
    context: Context, job: JobView, pods: Collection[PodView], report: ReshardReport | None
) -> _Failure:
    """Return why a reshard Job failed, in the words of its pods if they say more than the Job."""
    by_pods = reshard_pods.describe_failed_pods(pods, context.now)
    killed = reshard_pods.find_killed_pod(pods)
    # The kernel may kill only a child of `reshard`; its parent then reports an internal error.
    if killed is not None and by_pods is not None and (report is None or report.exit_code in KILLED_EXIT_CODES):
        advice = "the next try gets twice the memory"
        if context.spec.reshard.template is not None:
            advice = "give it more in spec.reshard.template"
        return _Failure(name=by_pods[0], message=f"{by_pods[1]}: {advice}", report=report, is_out_of_memory=True)
    interruption = reshard_pods.find_interruption(pods, job, context.now)
    if interruption is not None and (report is None or report.exit_code in KILLED_EXIT_CODES):
        return _Failure(name=str(interruption.kind), message=interruption.message, report=report, is_interruption=True)
    if report is not None:
        return _Failure(name=_name_exit_code(report.exit_code), message=report.message, report=report)
    name, message = by_pods or ("NoReport", f"{job.failed_reason}: {job.failed_message}")
    return _Failure(name=name, message=message)


def _handle_reshard_failure(
    context: Context, status: Status, reshard: ReshardStatus, job: JobView, failure: _Failure
) -> Status:
    name, message, report = failure.name, failure.message, failure.report
    code = report.exit_code if report else None
    source = status.current.resume.source if status.current else ""
    external = status.current is not None and status.current.resume.external
    _record_outcome(context, report, name)
    if code == ExitCode.NOT_OWNER:
        return recovery.fail_as_not_owner(context, dataclasses.replace(status, reshard=reshard), message)
    if code in INVALID_SOURCE_EXIT_CODES and not external:
        status = recovery.refuse_commit(context, status, source, message)
        return dataclasses.replace(
            _forget_plan(status),
            conditions=context.add_condition(status, Type.RESHARD_FAILED, True, reason=name, message=message),
        )
    reshard, next_step = _count_try(context, reshard, job, failure)
    cannot_help = code in FINAL_EXIT_CODES or (external and start_from.is_final(code))
    is_final = not failure.is_interruption and (reshard.failures > context.spec.reshard.backoff_limit or cannot_help)
    next_step = "giving up on it" if is_final else next_step
    context.emit("ReshardFailed", f"{job.name}: {name}: {message}; {next_step}", warning=True)
    next_step = (
        f"{next_step}; {start_from.format_advice(context.spec, context.job.name)}"
        if is_final and external
        else next_step
    )
    text = f"{message}; the source {source} is untouched; {next_step}"
    status = dataclasses.replace(
        status,
        reshard=reshard,
        conditions=context.add_condition(status, Type.RESHARD_FAILED, True, reason=name, message=text),
    )
    if not is_final:
        return status
    if status.current is not None:
        loaded = _load_instead(context, status, status.current, f"its conversion failed ({message})")
        if loaded is not None:
            return loaded
    if external or context.spec.reshard.on_failure == "Fail":
        return dataclasses.replace(status, phase=Phase.FAILED, reason="ReshardFailed", message=text, current=None)
    commit = commit_history.find_newest(status.checkpoint, below=status.attempt)
    topology = commit.topology if commit else None
    return pin_topology(context, _forget_plan(status), topology, is_final=cannot_help)


def _count_try(context: Context, reshard: ReshardStatus, job: JobView, failure: _Failure) -> tuple[ReshardStatus, str]:
    """Count a failed try and set the time of the next; return the words that announce it, too."""
    failures = reshard.failures + (not failure.is_interruption)
    interruptions = reshard.interruptions + failure.is_interruption
    in_a_row = interruptions if failure.is_interruption else failures
    delay = double_pause(context.limits.reshard_backoff_seconds, LAST_BACKOFF_SECONDS, in_a_row)
    limit = context.spec.reshard.backoff_limit
    retry = "the next try, which uses no retry," if failure.is_interruption else f"retry {failures} of {limit}"
    counted = dataclasses.replace(
        reshard,
        failures=failures,
        interruptions=interruptions,
        failed_uid=job.uid,
        retry_time=Time(context.now + delay),
        oom_kills=reshard.oom_kills + failure.is_out_of_memory,
        message=failure.message,
    )
    return counted, f"{retry} in {delay:.0f} s"


def _record_outcome(context: Context, report: ReshardReport | None, result: str) -> None:
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


def _name_exit_code(code: int | None) -> str:
    if code is None or code not in ExitCode.__members__.values():
        return "NoReport"
    return "".join(part.capitalize() for part in ExitCode(code).name.split("_"))
