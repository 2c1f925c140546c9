"""Counter increments that follow from the change of a job's status. Pure: an old status and a new one in, samples out.

A status is written by compare-and-swap, so every transition is written once, by one operator. The operator counts what
was written: a restarted operator begins with the stored status and counts nothing twice, and a pass that loses the
race counts nothing. If an operator dies between the write and the count, that transition is not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from elastic_operator.api.status import Phase, Recovery, Resume, StartMode, Status
from elastic_operator.metrics import definitions
from elastic_operator.metrics.definitions import MetricDefinition, QueueReason, Result
from elastic_operator.reconcile.actions import ReshardOutcome
from elastic_operator.reconcile.goodput import PAUSES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A value to add to a counter or to observe in a histogram; `labels` are in the order of the definition."""

    definition: MetricDefinition
    labels: tuple[str, ...] = ()
    value: float = 1.0


def increments(old: Status, new: Status) -> tuple[Sample, ...]:
    """Return the samples for the replacement of `old` by `new`."""
    return (*_count_attempts(old, new), *_count_recoveries(old, new))


def reshard_samples(outcome: ReshardOutcome) -> tuple[Sample, ...]:
    """Return the samples for the end of one reshard Job."""
    labels = (outcome.mode or definitions.OTHER, outcome.result)
    samples = (
        Sample(definition=definitions.RESHARDS, labels=labels),
        Sample(definition=definitions.RESHARD_READ, labels=labels, value=outcome.bytes_read),
        Sample(definition=definitions.RESHARD_WRITTEN, labels=labels, value=outcome.bytes_written),
    )
    if outcome.seconds is None:
        return samples
    return (*samples, Sample(definition=definitions.RESHARD_SECONDS, labels=labels, value=outcome.seconds))


def _count_attempts(old: Status, new: Status) -> Iterator[Sample]:
    current = new.current
    if current is not None and new.attempt > old.attempt and current.plan_time is not None:
        since = old.queue_time if old.queue_time is not None else current.plan_time
        waited = max(0.0, current.plan_time - since)
        yield Sample(definition=definitions.QUEUE_SECONDS, labels=(_queue_reason(new),), value=waited)
    if new.launched and not (old.launched and old.attempt == new.attempt):
        yield Sample(definition=definitions.ATTEMPTS)
        yield Sample(definition=definitions.STARTS_BY_MODE, labels=(_start_mode(new),))
    if new.terminal and not old.terminal:
        yield Sample(definition=definitions.FINISHED, labels=(str(new.phase),))


def _start_mode(status: Status) -> str:
    resume = status.current.resume if status.current is not None else Resume()
    if resume.mode in definitions.STARTS:
        return resume.mode
    # An older operator planned the attempt, and wrote no mode.
    return "Nothing" if not resume.uri else StartMode.AS_IS if resume.uri == resume.source else StartMode.RESHARD


def _queue_reason(status: Status) -> QueueReason:
    last = status.changes[-1] if status.changes else None
    if last is None or last.to_attempt != status.attempt:
        return QueueReason.START
    if last.cause in PAUSES:
        return QueueReason.RESUME
    return QueueReason.CHANGE if last.planned else QueueReason.FAILURE


def _count_recoveries(old: Status, new: Status) -> Iterator[Sample]:
    recorded = {_key(item): (item, _result(old, index)) for index, item in enumerate(old.changes)}
    lost_steps = 0
    for index, recovery in enumerate(new.changes):
        before, result_before = recorded.get(_key(recovery), (None, None))
        is_pause = recovery.cause in PAUSES
        if before is None and not is_pause:
            labels = (recovery.cause, str(recovery.planned).lower())
            yield Sample(definition=definitions.RECOVERIES_STARTED, labels=labels)
        # A further failure before the launch may lose more steps, if it makes a commit invalid; it never recovers any.
        lost_steps += max(0, recovery.lost_steps - (before.lost_steps if before else 0))
        result = _result(new, index)
        if result is not None and result_before is None and not is_pause:
            yield Sample(definition=definitions.RECOVERIES_ENDED, labels=(recovery.cause, result))
            yield from _measure_recovery(recovery)
    if lost_steps:
        yield Sample(definition=definitions.LOST_STEPS, value=lost_steps)


def _measure_recovery(recovery: Recovery) -> Iterator[Sample]:
    for part, seconds in recovery.seconds.items():
        if part == "total":
            planned = str(recovery.planned).lower()
            yield Sample(definition=definitions.RECOVERY_SECONDS, labels=(planned,), value=seconds)
        else:
            yield Sample(definition=definitions.PART_SECONDS, labels=(part,), value=seconds)


def _key(recovery: Recovery) -> tuple[int, bool]:
    """Return what identifies a recovery while its record is updated: its attempt, and whether it is a pause."""
    return recovery.from_attempt, recovery.cause in PAUSES


def _result(status: Status, index: int) -> Result | None:
    """Return how a recovery has ended; None if it is open."""
    if status.changes[index].first_step_time is not None:
        return Result.RESUMED
    if index < len(status.changes) - 1:
        return Result.SUPERSEDED
    return _RESULT_BY_PHASE.get(status.phase)


_RESULT_BY_PHASE: Mapping[str, Result] = {Phase.COMPLETE: Result.RESUMED, Phase.FAILED: Result.FAILED}
