"""Values of the gauges of one job. Pure: spec, status, heartbeat and the present in, values out."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Status
from elastic_operator.metrics import definitions
from elastic_operator.metrics.definitions import MetricDefinition
from elastic_operator.reconcile import goodput


def job_gauges(
    spec: Spec | None, status: Status, *, heartbeat_time: float | None, now: float
) -> Mapping[MetricDefinition, float | None]:
    """Return the values of the metrics with one series per job, except the phase; None if there is no value to export.

    Args:
        spec: None if it is invalid.
        status: status of the job.
        heartbeat_time: when the current attempt's Lease was seen to change, seconds since the epoch.
        now: seconds since the epoch.
    """
    progress, budget = status.progress, status.restart_budget
    measured = _goodput(status, now)
    return {
        definitions.JOB_ATTEMPT: status.attempt,
        definitions.JOB_STEP: progress.step if progress else 0,
        definitions.JOB_COMMIT_STEP: status.checkpoint.step,
        definitions.JOB_GPUS_WANTED: _gpus_wanted(spec, status),
        definitions.JOB_GPUS_USED: _gpus_used(status),
        definitions.JOB_GOODPUT: measured.ettr if measured else None,
        definitions.JOB_LOST_STEPS: measured.lost_steps if measured else 0,
        definitions.JOB_RESTARTS_LEFT: None if status.terminal else max(0, budget.limit - budget.used),
        definitions.JOB_LAST_STEP: progress.step_time if progress else None,
        definitions.JOB_HEARTBEAT: None if status.terminal else heartbeat_time,
        definitions.JOB_QUEUED: status.queue_time,
        definitions.JOB_RECOVERING: _recovering_since(status),
    }


def _gpus_wanted(spec: Spec | None, status: Status) -> int | None:
    if spec is None:
        return None
    if spec.suspend or status.terminal:
        return 0
    return (spec.nodes.preferred or spec.nodes.max) * max(spec.accelerator.per_node)


def _gpus_used(status: Status) -> int:
    if status.current is None or not status.launched or status.terminal:
        return 0
    return status.current.num_nodes * status.current.gpus_per_node


def _goodput(status: Status, now: float) -> goodput.Goodput | None:
    """Compute the goodput as of `now`; for a job that has ended, as of its end."""
    if status.first_step_time is None:
        return None
    until = status.finish_time if status.finish_time is not None else now
    step = status.progress.step if status.progress else 0
    return goodput.account(status.changes, start=status.first_step_time, now=until, first_step=0, step=step)


def _recovering_since(status: Status) -> float | None:
    last = status.changes[-1] if status.changes else None
    if last is None or status.terminal or last.first_step_time is not None or last.cause in goodput.PAUSES:
        return None
    return last.signal_time if last.signal_time is not None else last.detect_time
