"""Every metric of the operator, as data: name, type, labels, and the label values that exist. See docs/metrics.md.

Names follow Prometheus' conventions: prefix `etj_`, base units (seconds, bytes, ratio), `_total` on counters, and
`_timestamp_seconds` where people want an age: `time() - x` goes on growing when nobody looks any more.

Labels are bounded. Only what describes one job has its namespace and name; everything that is summed up has values from
the lists below, which are exported as 0 from the start, so that `increase()` sees the first one.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Mapping

from elastic_operator.api.status import Phase
from elastic_operator.observed.signals import KINDS, Weight
from elastic_operator.reconcile import user_requests
from elastic_operator.reconcile.goodput import PARTS, SUSPENDED
from reshard.contract import ExitCode

OTHER = "Other"
"""Stands for a label value that is on no list."""

CAUSES: Mapping[str, bool] = {
    **{str(kind): meaning.weight is Weight.PLANNED for kind, meaning in KINDS.items()},
    SUSPENDED: True,
    "SpecChanged": True,
    "CapacityReturned": True,
    user_requests.CAUSE: True,
    "CapacityLost": False,
    OTHER: False,
}
"""Causes of a recovery, and whether it is a planned change."""

MODES = ("materialize", "virtual", OTHER)
SUCCEEDED = "Succeeded"
RESHARD_RESULTS = (
    SUCCEEDED,
    *("".join(part.capitalize() for part in code.name.split("_")) for code in ExitCode if code != ExitCode.OK),
    "NoReport",
    OTHER,
)


class Result(enum.StrEnum):
    """How a recovery ended."""

    RESUMED = "resumed"
    """The next attempt made a step, or had nothing left to do."""
    SUPERSEDED = "superseded"
    """The next attempt was lost or given up before its first step; another recovery has taken over."""
    FAILED = "failed"
    """The job failed."""


class QueueReason(enum.StrEnum):
    """What the attempt is for that was waited for."""

    START = "start"
    FAILURE = "failure"
    CHANGE = "change"
    RESUME = "resume"


class Type(enum.StrEnum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricDefinition:
    """One metric.

    Attributes:
        name: as it is exposed; a histogram's without `_bucket`, `_sum`, `_count`.
        series: values of the labels of every series that exists from the start.
        is_bounded: nothing but the values in `series` is exported; others become `Other`.
        buckets: upper bounds of a histogram, in its unit.
    """

    name: str
    type: Type
    help: str
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ()
    is_bounded: bool = True
    buckets: tuple[float, ...] = ()


JOB = ("namespace", "name")
_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_PASS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_QUEUE_SECONDS = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


def _counter(
    name: str,
    text: str,
    labels: tuple[str, ...] = (),
    series: tuple[tuple[str, ...], ...] = (),
    *,
    is_bounded: bool = True,
) -> MetricDefinition:
    return MetricDefinition(
        name=name, type=Type.COUNTER, help=text, labels=labels, series=series, is_bounded=is_bounded
    )


def _histogram(
    name: str, text: str, labels: tuple[str, ...], series: tuple[tuple[str, ...], ...], buckets: tuple[float, ...]
) -> MetricDefinition:
    return MetricDefinition(name=name, type=Type.HISTOGRAM, help=text, labels=labels, series=series, buckets=buckets)


def _of_job(name: str, text: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(name=name, type=Type.GAUGE, help=text, labels=(*JOB, *labels))


def _product(*values: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(itertools.product(*values))


LEADER = MetricDefinition(
    name="etj_leader", type=Type.GAUGE, help="1 where this process is the leader, 0 where it stands by"
)
BUILD = MetricDefinition(
    name="etj_build_info", type=Type.GAUGE, help="1; the version is in the label", labels=("version",), is_bounded=False
)
RECONCILE_SECONDS = _histogram(
    "etj_reconcile_seconds",
    "Wall time of one pass over a job: read, decide, write, act",
    ("result",),
    (("success",), ("conflict",), ("error",)),
    _PASS_SECONDS,
)
STATUS_WRITES = _counter("etj_status_writes_total", "Status updates that the API server took")
EVENTS = _counter("etj_events_total", "Events of jobs, by reason", ("reason",), is_bounded=False)
UNREADABLE = _counter(
    "etj_unreadable_objects_total",
    "Objects of the cluster that could not be read and were set aside, by the plural of their kind",
    ("kind",),
    is_bounded=False,
)

ATTEMPTS = _counter("etj_attempts_launched_total", "Attempts launched, first ones included")
FINISHED = _counter(
    "etj_jobs_finished_total", "Jobs that came to their end", ("result",), ((Phase.COMPLETE,), (Phase.FAILED,))
)
QUEUE_SECONDS = _histogram(
    "etj_queue_seconds",
    "From wanting an attempt while having none to a plan for it: the wait for accelerators; one per planned attempt",
    ("reason",),
    _product(tuple(QueueReason)),
    _QUEUE_SECONDS,
)
RECOVERIES_STARTED = _counter(
    "etj_recoveries_started_total",
    "Recoveries begun: attempts ended, by failures and by planned changes, before the job was complete",
    ("cause", "planned"),
    tuple((cause, str(planned).lower()) for cause, planned in CAUSES.items()),
)
RECOVERIES_ENDED = _counter(
    "etj_recoveries_ended_total",
    "Recoveries that are over, by what came of them",
    ("cause", "result"),
    _product(tuple(CAUSES), tuple(Result)),
)
RECOVERY_SECONDS = _histogram(
    "etj_recovery_seconds",
    "From the first sign of a loss, or the request of a change, to the next attempt's first step; without suspensions",
    ("planned",),
    (("true",), ("false",)),
    _SECONDS,
)
PART_SECONDS = _histogram(
    "etj_recovery_part_seconds",
    "The same recoveries by what they waited for; the parts of one do not overlap and add up to it",
    ("part",),
    _product(PARTS),
    _SECONDS,
)
LOST_STEPS = _counter("etj_lost_steps_total", "Steps that were computed and thrown away, as their commit was older")
RESHARDS = _counter(
    "etj_reshards_total", "Reshard Jobs that ended", ("mode", "result"), _product(MODES, RESHARD_RESULTS)
)
RESHARD_SECONDS = _histogram(
    "etj_reshard_seconds",
    "Wall time of conversions, as the reshard pod measured it",
    ("mode", "result"),
    _product(MODES, (SUCCEEDED,)),
    _SECONDS,
)
RESHARD_READ = _counter(
    "etj_reshard_read_bytes_total",
    "Bytes that conversions read from storage",
    ("mode", "result"),
    _product(MODES, RESHARD_RESULTS),
)
RESHARD_WRITTEN = _counter(
    "etj_reshard_written_bytes_total",
    "Bytes that conversions wrote to storage",
    ("mode", "result"),
    _product(MODES, RESHARD_RESULTS),
)

JOB_PHASE = _of_job("etj_job_phase", "1 for the phase that the job is in; the others are absent", "phase")
JOB_ATTEMPT = _of_job("etj_job_attempt", "Number of the newest attempt")
JOB_STEP = _of_job("etj_job_step", "Optimizer steps done; falls when steps are lost")
JOB_COMMIT_STEP = _of_job("etj_job_commit_step", "Step of the newest valid commit")
JOB_GPUS_WANTED = _of_job("etj_job_gpus_wanted", "Accelerators that the job would run on if there were enough")
JOB_GPUS_USED = _of_job("etj_job_gpus_used", "Accelerators of the launched attempt")
JOB_GOODPUT = _of_job("etj_job_goodput_ratio", "ETTR, 0 to 1, since the first step or the oldest recovery kept")
JOB_LOST_STEPS = _of_job("etj_job_lost_steps", "Steps thrown away in the time that the ratio is about")
JOB_RESTARTS_LEFT = _of_job("etj_job_restarts_left", "Failures that the job survives now; with 0 the next one ends it")
JOB_LAST_STEP = _of_job("etj_job_last_step_timestamp_seconds", "When a new step was seen last, in Unix time")
JOB_HEARTBEAT = _of_job("etj_job_heartbeat_timestamp_seconds", "When rank 0's heartbeat was seen last, in Unix time")
JOB_QUEUED = _of_job("etj_job_queue_start_timestamp_seconds", "Since when the job waits for accelerators, in Unix time")
JOB_RECOVERING = _of_job("etj_job_recovery_start_timestamp_seconds", "When the recovery under way began, in Unix time")

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, MetricDefinition))
"""All of them, in the order of this file."""
