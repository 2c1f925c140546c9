"""What the change of a job's status counts for. Pure: an old status and a new one in, samples out.

A status is written by compare-and-swap, so every transition is written once, by one operator. What is counted is what
was written: a restarted operator begins with the stored status and counts nothing twice, and a pass that loses the
race counts nothing. An operator that dies between the write and the count leaves the transition out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from elastic_operator.api.status import Phase, Recovery, Status
from elastic_operator.metrics import definitions
from elastic_operator.metrics.definitions import MetricDefinition, QueueReason, Result
from elastic_operator.reconcile.actions import ReshardOutcome
from elastic_operator.reconcile.goodput import SUSPENDED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Add `value` to a counter, or observe it in a histogram. `labels` are in the family's order."""

    family: MetricDefinition
    labels: tuple[str, ...] = ()
    value: float = 1.0


def increments(old: Status, new: Status) -> tuple[Sample, ...]:
    """What to add up when `old` has been replaced by `new`."""
    return (*_attempts(old, new), *_recoveries(old, new))


def reshard_samples(outcome: ReshardOutcome) -> tuple[Sample, ...]:
    """What the end of one reshard Job counts for."""
    labels = (outcome.mode or definitions.OTHER, outcome.result)
    samples = (
        Sample(family=definitions.RESHARDS, labels=labels),
        Sample(family=definitions.RESHARD_READ, labels=labels, value=outcome.bytes_read),
        Sample(family=definitions.RESHARD_WRITTEN, labels=labels, value=outcome.bytes_written),
    )
    if outcome.seconds is None:
        return samples
    return (*samples, Sample(family=definitions.RESHARD_SECONDS, labels=labels, value=outcome.seconds))


def _attempts(old: Status, new: Status) -> Iterator[Sample]:
    current = new.current
    if current is not None and new.attempt > old.attempt and current.plan_time is not None:
        since = old.queue_time if old.queue_time is not None else current.plan_time
        waited = max(0.0, current.plan_time - since)
        yield Sample(family=definitions.QUEUE_SECONDS, labels=(_queue_reason(new),), value=waited)
    if new.launched and not (old.launched and old.attempt == new.attempt):
        yield Sample(family=definitions.ATTEMPTS)
    if new.terminal and not old.terminal:
        yield Sample(family=definitions.FINISHED, labels=(str(new.phase),))


def _queue_reason(status: Status) -> QueueReason:
    last = status.recoveries[-1] if status.recoveries else None
    if last is None or last.to_attempt != status.attempt:
        return QueueReason.START
    if last.cause == SUSPENDED:
        return QueueReason.RESUME
    return QueueReason.CHANGE if last.planned else QueueReason.FAILURE


def _recoveries(old: Status, new: Status) -> Iterator[Sample]:
    known = {_key(item): (item, _result(old, index)) for index, item in enumerate(old.recoveries)}
    lost_steps = 0
    for index, recovery in enumerate(new.recoveries):
        before, result_before = known.get(_key(recovery), (None, None))
        if before is None:
            labels = (recovery.cause, str(recovery.planned).lower())
            yield Sample(family=definitions.RECOVERIES_STARTED, labels=labels)
        # A further loss before the launch may cost more steps, where it costs a commit; it never brings any back.
        lost_steps += max(0, recovery.lost_steps - (before.lost_steps if before else 0))
        result = _result(new, index)
        if result is not None and result_before is None:
            yield Sample(family=definitions.RECOVERIES_ENDED, labels=(recovery.cause, result))
            yield from _durations(recovery)
    if lost_steps:
        yield Sample(family=definitions.LOST_STEPS, value=lost_steps)


def _durations(recovery: Recovery) -> Iterator[Sample]:
    # How long somebody kept a job suspended says nothing about recoveries.
    if recovery.cause == SUSPENDED:
        return
    for part, seconds in recovery.seconds.items():
        if part == "total":
            planned = str(recovery.planned).lower()
            yield Sample(family=definitions.RECOVERY_SECONDS, labels=(planned,), value=seconds)
        else:
            yield Sample(family=definitions.PART_SECONDS, labels=(part,), value=seconds)


def _key(recovery: Recovery) -> tuple[int, bool]:
    """Who it is, whatever is learned about it later: an attempt ends once, and may be suspended after that."""
    return recovery.from_attempt, recovery.cause == SUSPENDED


def _result(status: Status, index: int) -> Result | None:
    """How a recovery has ended; None while it is under way."""
    if status.recoveries[index].first_step_time is not None:
        return Result.RESUMED
    if index < len(status.recoveries) - 1:
        return Result.SUPERSEDED
    return _AT_THE_END.get(status.phase)


_AT_THE_END: Mapping[str, Result] = {Phase.COMPLETE: Result.RESUMED, Phase.FAILED: Result.FAILED}
