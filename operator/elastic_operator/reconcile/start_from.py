"""The first conversion of a job that goes on from a checkpoint of others (`spec.checkpoint.startFrom`). Pure.

The operator opens no checkpoint: which one of a folder it was, and its step, the resharder's report says. Without a
report the Job is made again, and finds its work done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from elastic_operator.api.status import Current, Progress, StartedFrom, Status, short
from elastic_operator.observed.observation import PodView
from reshard.contract import ExitCode, ReshardReport

NO_REPORT = "the reshard pod ended well, but what it had to say is lost; the next one says it again"


def learn(status: Status, current: Current, report: ReshardReport) -> tuple[Status, Current]:
    """Take up what was started from, and count steps from there on."""
    what = f"step {report.step} of {report.source} (spec.checkpoint.startFrom)"
    resume = dataclasses.replace(
        current.resume,
        step=report.step,
        samples=report.samples,
        reason=f"{what}, resharded to {short(current.topology)}",
    )
    status = dataclasses.replace(
        status,
        started_from=StartedFrom(source=report.source, step=report.step, samples=report.samples),
        progress=dataclasses.replace(status.progress or Progress(), step=report.step, samples=report.samples),
    )
    return status, dataclasses.replace(current, resume=resume)


def report_may_come(pods: Collection[PodView]) -> bool:
    """The Job has been seen complete before its pod was."""
    return any(not pod.terminal for pod in pods)


def is_final(code: int | None) -> bool:
    """There is no earlier commit to fall back to: another try at once would find the same."""
    return code == ExitCode.SOURCE_INVALID


def advice(job: str) -> str:
    """What a person can do after the last try."""
    return f"correct spec.checkpoint.startFrom or startOptions, or what is there, then: kubectl etj retry {job}"
