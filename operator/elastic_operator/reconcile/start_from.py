"""The first conversion of a job that starts from a checkpoint of others (`startFrom`, `takeOver: Resume`). Pure.

The operator opens no checkpoint. The resharder's report says which checkpoint of a folder was converted, and its step.
Without a report the Job is created again, and finds its work done.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Current, Progress, StartedFrom, Status, short
from elastic_operator.manifests.attempt import start_field, start_source
from elastic_operator.observed import commit_history
from elastic_operator.reconcile.context import Context
from reshard.contract import ExitCode, ReshardReport, TakeOver

NO_REPORT = "the reshard pod succeeded, but its report is lost; the next reshard pod writes it again"


def is_outdated(spec: Spec, status: Status, current: Current) -> bool:
    """Return whether `spec.checkpoint.takeOver` was edited since the plan of an attempt without a commit of the job."""
    if commit_history.find_newest(status.checkpoint, below=status.attempt) is not None:
        return False
    return (current.resume.source if current.resume.external else "") != start_source(spec)


def is_nothing(spec: Spec, report: ReshardReport) -> bool:
    """Return whether a conversion has found no commit in the folder that it was to take over."""
    return spec.checkpoint.take_over is TakeOver.RESUME and not report.target


def begin_from_nothing(context: Context, status: Status, current: Current, report: ReshardReport) -> Status:
    """Let the attempt begin from nothing, because the folder that was taken over holds no commit."""
    reason = f"{report.source} holds no commit: training starts from nothing"
    context.emit("StartsFromNothing", f"attempt {status.attempt}: {reason}")
    resume = dataclasses.replace(current.resume, uri="", ready=True, mode="", reason=reason)
    return dataclasses.replace(status, current=dataclasses.replace(current, resume=resume))


def record_source(spec: Spec, status: Status, current: Current, report: ReshardReport) -> tuple[Status, Current]:
    """Record which checkpoint the job started from, and count steps from there."""
    description = f"step {report.step} of {report.source} ({start_field(spec)})"
    resume = dataclasses.replace(
        current.resume,
        step=report.step,
        samples=report.samples,
        reason=f"{description}, resharded to {short(current.topology)}",
    )
    status = dataclasses.replace(
        status,
        started_from=StartedFrom(source=report.source, step=report.step, samples=report.samples),
        progress=dataclasses.replace(status.progress or Progress(), step=report.step, samples=report.samples),
    )
    return status, dataclasses.replace(current, resume=resume)


def is_final(code: int | None) -> bool:
    """Return whether a retry would fail in the same way; there is no earlier commit to fall back to."""
    return code == ExitCode.SOURCE_INVALID


def format_advice(spec: Spec, job: str) -> str:
    """Return what a person can do after the last try."""
    if spec.checkpoint.take_over is TakeOver.RESUME:
        what = "mend the damaged commit in spec.checkpoint.path, or move its folder away so that the next older one is"
        what += " taken, or set takeOver: Begin to begin from nothing"
    else:
        what = "correct spec.checkpoint.startFrom, startOptions or allowedGlobals, or the checkpoint"
    return f"{what}, then: kubectl etj retry {job}"
