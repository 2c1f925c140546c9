"""Prometheus metrics of the operator. Names and meanings are listed in docs/operations.md."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from elastic_operator.status import Status

_JOB = ("namespace", "name")

RECONCILE_SECONDS = Histogram("etj_reconcile_seconds", "Wall time of one pass over a job")
ERRORS = Counter("etj_reconcile_errors_total", "Passes that failed and are repeated")
STATUS_WRITES = Counter("etj_status_writes_total", "Status updates sent to the API server")
EVENTS = Counter("etj_events_total", "Events, by reason", ["reason"])
RECOVERIES = Counter("etj_recoveries_total", "Attempts that ended before the job was complete", ["cause"])
PART_SECONDS = Histogram(
    "etj_recovery_seconds",
    "Duration of the parts of a recovery",
    ["part"],
    buckets=(0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600),
)
ATTEMPT = Gauge("etj_attempt", "Number of the newest attempt", _JOB)
STEP = Gauge("etj_step", "Optimizer steps done", _JOB)
GPUS = Gauge("etj_gpus", "Accelerators of the current attempt", _JOB)
COMMIT_STEP = Gauge("etj_commit_step", "Step of the newest valid commit", _JOB)
PHASE = Gauge("etj_phase", "1 for the phase that the job is in", [*_JOB, "phase"])

_shown: dict[tuple[str, str], tuple[str, int, int]] = {}
"""Phase, number of the attempt that the last recovery led to, and whether its parts were counted."""


def serve(port: int) -> None:
    """Serve /metrics; 0 means not at all."""
    if port:
        start_http_server(port)


def show(key: tuple[str, str], status: Status) -> None:
    """Set the gauges of one job, and count a recovery once, when its first step is known."""
    namespace, name = key
    ATTEMPT.labels(namespace, name).set(status.attempt)
    STEP.labels(namespace, name).set(status.progress.step if status.progress else 0)
    GPUS.labels(namespace, name).set(status.gpus)
    COMMIT_STEP.labels(namespace, name).set(status.checkpoint.step)
    last = status.recoveries[-1] if status.recoveries else None
    finished = last.to_attempt if last is not None and last.first_step_time is not None else 0
    old_phase, counted, known = _shown.get(key, ("", finished, 0))
    if last is not None and finished > counted and known:
        RECOVERIES.labels(cause=last.cause).inc()
        for part, seconds in last.seconds.items():
            PART_SECONDS.labels(part=part).observe(seconds)
    if old_phase != status.phase:
        if old_phase:
            PHASE.remove(namespace, name, old_phase)
        PHASE.labels(namespace, name, status.phase).set(1)
    # What was counted before this operator started is not counted again.
    _shown[key] = (status.phase, finished, 1)


def forget(key: tuple[str, str]) -> None:
    """The job does not exist any more."""
    namespace, name = key
    known = _shown.pop(key, None)
    if known is not None:
        for gauge in (ATTEMPT, STEP, GPUS, COMMIT_STEP):
            gauge.remove(namespace, name)
        PHASE.remove(namespace, name, known[0])
