"""The first conversion of a job that starts from a foreign checkpoint (`spec.checkpoint.startFrom`). Pure.

The operator opens no checkpoint. The resharder's report says which checkpoint of a folder was converted, and its step.
Without a report the Job is created again, and finds its work done.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.status import Current, Progress, StartedFrom, Status, short
from reshard.contract import ExitCode, ReshardReport

NO_REPORT = "the reshard pod succeeded, but its report is lost; the next reshard pod writes it again"


def record_source(status: Status, current: Current, report: ReshardReport) -> tuple[Status, Current]:
    """Record which checkpoint the job started from, and count steps from there."""
    description = f"step {report.step} of {report.source} (spec.checkpoint.startFrom)"
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


def format_advice(job: str) -> str:
    """Return what a person can do after the last try."""
    fields = "spec.checkpoint.startFrom, startOptions or allowedGlobals"
    return f"correct {fields}, or the checkpoint, then: kubectl etj retry {job}"
