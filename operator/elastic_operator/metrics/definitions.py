"""Every metric of the operator, as data: name, type, labels, and the permitted label values. See docs/metrics.md.

Names follow Prometheus' conventions: prefix `etj_`, base units (seconds, bytes, ratio), `_total` on counters, and
`_timestamp_seconds` for ages: `time() - x` grows even if the operator has stopped.

Labels are bounded. Only metrics of one job have its namespace and name. All other metrics take label values from the
lists below, which are exported as 0 from the start, so that `increase()` includes the first event.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Mapping

from elastic_operator.api.status import Phase, StartMode
from elastic_operator.observed.reshard_pods import OUT_OF_MEMORY
from elastic_operator.observed.signal_kinds import KINDS, Kind, Weight
from elastic_operator.reconcile import user_requests
from elastic_operator.reconcile.goodput import PARTS
from reshard.contract import ExitCode

OTHER = "Other"
"""Replaces a label value that is on no list."""

CAUSES: Mapping[str, bool] = {
    **{str(kind): meaning.weight is Weight.PLANNED for kind, meaning in KINDS.items()},
    "SpecChanged": True,
    "DeadlineExceeded": True,
    "CapacityReturned": True,
    user_requests.CAUSE: True,
    "CapacityLost": False,
    OTHER: False,
}
"""Causes of a recovery, and whether each is a planned change."""

MODES = ("materialize", "virtual", OTHER)
SUCCEEDED = "Succeeded"
RESHARD_RESULTS = (
    SUCCEEDED,
    *("".join(part.capitalize() for part in code.name.split("_")) for code in ExitCode if code != ExitCode.OK),
    "NoReport",
    OUT_OF_MEMORY,
    str(Kind.IMAGE),
    str(Kind.STARTUP_TIMEOUT),
    str(Kind.POD_DISRUPTED),
    OTHER,
)


STARTS = ("Nothing", *(str(mode) for mode in StartMode))
"""Ways in which launched attempts start: from nothing, or from a commit in one of the start modes."""


class Result(enum.StrEnum):
    """Outcome of a recovery."""

    RESUMED = "resumed"
    """The next attempt made a step, or the job was complete."""
    SUPERSEDED = "superseded"
    """The next attempt ended before its first step; another recovery follows."""
    FAILED = "failed"
    """The job failed."""


class QueueReason(enum.StrEnum):
    """Reason for which the job waited for an attempt."""

    START = "start"
    FAILURE = "failure"
    CHANGE = "change"
    RESUME = "resume"


class NotificationResult(enum.StrEnum):
    """Results of a notification for the webhook."""

    SENT = "sent"
    """The receiver answered with a status of success."""
    REFUSED = "refused"
    """The receiver answered with a status that another try would not change."""
    GAVE_UP = "gave_up"
    """Every try failed."""
    RATE_LIMITED = "rate_limited"
    """The job had too many notifications."""
    QUEUE_FULL = "queue_full"
    """Too many notifications waited to be sent."""


class Type(enum.StrEnum):
    """Metric types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricDefinition:
    """One metric.

    Attributes:
        name: as exposed; for a histogram without `_bucket`, `_sum`, `_count`.
        series: label values of every series that exists from the start.
        is_bounded: True if only the values in `series` are exported; others become `Other`.
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
    name="etj_leader", type=Type.GAUGE, help="1 if this process is the leader, 0 if it is a standby"
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
STATUS_WRITES = _counter("etj_status_writes_total", "Status updates that the API server accepted")
EVENTS = _counter("etj_events_total", "Events of jobs, by reason", ("reason",), is_bounded=False)
UNREADABLE = _counter(
    "etj_unreadable_objects_total",
    "Objects of the cluster that could not be parsed and are ignored, by the plural of their kind",
    ("kind",),
    is_bounded=False,
)
NOTIFICATIONS = _counter(
    "etj_notifications_total",
    "Notifications for the webhook, by what became of them; only those with the result sent have arrived for certain",
    ("result",),
    _product(tuple(NotificationResult)),
)

ATTEMPTS = _counter("etj_attempts_launched_total", "Attempts launched, first ones included")
STARTS_BY_MODE = _counter(
    "etj_attempt_starts_total",
    "The same attempts by how they start: from nothing, or from a commit in one of the start modes",
    ("mode",),
    _product(STARTS),
)
FINISHED = _counter("etj_jobs_finished_total", "Jobs that ended", ("result",), ((Phase.COMPLETE,), (Phase.FAILED,)))
QUEUE_SECONDS = _histogram(
    "etj_queue_seconds",
    "Time that a job without an attempt waited for accelerators, until the plan; one value per planned attempt",
    ("reason",),
    _product(tuple(QueueReason)),
    _QUEUE_SECONDS,
)
RECOVERIES_STARTED = _counter(
    "etj_recoveries_started_total",
    "Recoveries begun: attempts that a failure or a planned change ended before the job was complete",
    ("cause", "planned"),
    tuple((cause, str(planned).lower()) for cause, planned in CAUSES.items()),
)
RECOVERIES_ENDED = _counter(
    "etj_recoveries_ended_total",
    "Recoveries that ended, by result",
    ("cause", "result"),
    _product(tuple(CAUSES), tuple(Result)),
)
RECOVERY_SECONDS = _histogram(
    "etj_recovery_seconds",
    "From the first signal of a failure, or the request of a change, to the next first step",
    ("planned",),
    (("true",), ("false",)),
    _SECONDS,
)
PART_SECONDS = _histogram(
    "etj_recovery_part_seconds",
    "Time of these recoveries by part; the parts of one recovery do not overlap and add up to its time",
    ("part",),
    _product(PARTS),
    _SECONDS,
)
LOST_STEPS = _counter(
    "etj_lost_steps_total", "Steps that were computed and lost, because the commit to resume from was older"
)
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

JOB_PHASE = _of_job("etj_job_phase", "1 for the current phase of the job; other phases have no series", "phase")
JOB_ATTEMPT = _of_job("etj_job_attempt", "Number of the newest attempt")
JOB_STEP = _of_job("etj_job_step", "Optimizer steps done; falls when steps are lost")
JOB_COMMIT_STEP = _of_job("etj_job_commit_step", "Step of the newest valid commit")
JOB_GPUS_WANTED = _of_job("etj_job_gpus_wanted", "Accelerators that the job would run on if there were enough")
JOB_GPUS_USED = _of_job("etj_job_gpus_used", "Accelerators of the launched attempt")
JOB_GOODPUT = _of_job("etj_job_goodput_ratio", "ETTR, 0 to 1, since the first step or the oldest recovery kept")
JOB_LOST_STEPS = _of_job("etj_job_lost_steps", "Steps lost in the window of the goodput ratio")
JOB_RESTARTS_LEFT = _of_job(
    "etj_job_restarts_left", "Restarts left in the budget; with 0 the next crash or hang ends the job"
)
JOB_LAST_STEP = _of_job("etj_job_last_step_timestamp_seconds", "When a new step was last seen, in Unix time")
JOB_HEARTBEAT = _of_job("etj_job_heartbeat_timestamp_seconds", "When rank 0's heartbeat was last seen, in Unix time")
JOB_QUEUED = _of_job(
    "etj_job_queue_start_timestamp_seconds", "When the job began to wait for accelerators, in Unix time"
)
JOB_RECOVERING = _of_job("etj_job_recovery_start_timestamp_seconds", "When the current recovery began, in Unix time")

DEFINITIONS = tuple(value for value in list(globals().values()) if isinstance(value, MetricDefinition))
"""All metrics, in the order of this file."""
