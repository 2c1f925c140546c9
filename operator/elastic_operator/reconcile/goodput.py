"""Goodput: the share of wall time in training that counted. Pure interval accounting over recorded recoveries.

Definitions (docs/goodput.md has them with an example):

- *down*: from the first signal of a failure, or the request of a planned change, to the first step of the attempt that
  follows. *paused*: from the end of an attempt that was suspended or evicted to the next plan; neither up nor down.
- *up*: the rest. *lost*: the share of it that went into steps that were repeated.
- ETTR (effective training time ratio) = (up - lost) / (up + down).
- MTBF = up / failures; planned changes are not failures.

The status keeps only the last few recoveries. Once older ones were dropped, the window begins with the oldest one kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from elastic_operator.api.status import MAX_RECOVERIES, Recovery

SUSPENDED = "Suspended"
"""Cause of a pause that answers `spec.suspend`."""

EVICTED = "QueueEviction"
"""Cause of a pause that answers an eviction by a queueing system, or that has to wait for its quota."""

PAUSES = (SUSPENDED, EVICTED)
"""Causes of changes in between which nothing runs because nothing may run: `status.pauses`."""

_CHAIN = (
    ("detect", "detect_time"),
    ("plan", "plan_time"),
    ("reshard", "reshard_end_time"),
    ("stop", "stop_time"),
    ("launch", "launch_time"),
    ("schedule", "schedule_time"),
    ("load", "first_step_time"),
)
"""Parts of a recovery, in order. A failed attempt stops during the conversion, so `stop` is the time after that."""

PARTS = tuple(name for name, _ in _CHAIN)
"""Keys of the result of `measure_parts`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Goodput of one window of time.

    Attributes:
        ettr: effective training time ratio, 0..1; None while nothing has been up.
        window_seconds: up + down.
        up_seconds: time in which an attempt made steps.
        down_seconds: time between attempts.
        paused_seconds: time suspended, in neither.
        lost_seconds: part of `up_seconds` that was spent on repeated steps.
        lost_steps: number of repeated steps.
        failures: unplanned recoveries.
        mtbf_seconds: mean time between failures; None without a failure.
        mttr_seconds: mean duration of the finished unplanned recoveries; None without one.
        parts_seconds: mean duration of each part of these recoveries; the values add up to `mttr_seconds`.
    """

    ettr: float | None
    window_seconds: float
    up_seconds: float
    down_seconds: float
    paused_seconds: float
    lost_seconds: float
    lost_steps: int
    failures: int
    mtbf_seconds: float | None
    mttr_seconds: float | None
    parts_seconds: dict[str, float]


def account(recoveries: Sequence[Recovery], *, start: float, now: float, first_step: int, step: int) -> Goodput:
    """Account for the time of a job.

    Args:
        recoveries: `status.changes`, with the pauses, oldest first; the last one may be open.
        start: when the first attempt made its first step, seconds since the epoch.
        now: the present, or when the job ended.
        first_step: step that the job began with.
        step: steps done now, or, between attempts, the step of the commit to resume from.
    """
    truncated = len(recoveries) >= MAX_RECOVERIES
    if truncated:
        start, first_step = _begin_time(recoveries[0], now), recoveries[0].commit_step
    # The steps that the oldest recovery lost were trained before the window.
    counted = recoveries[1:] if truncated else recoveries
    wall = max(0.0, now - start)
    paused = sum(_paused_seconds(item, now) for item in recoveries)
    down = min(wall, _down_seconds(recoveries, start, now)) - paused
    up = max(0.0, wall - paused - max(0.0, down))
    down = max(0.0, down)
    lost_steps = sum(item.lost_steps for item in counted)
    kept_steps = max(0, step - first_step)
    lost = up * lost_steps / (lost_steps + kept_steps) if lost_steps else 0.0
    failures = sum(not item.planned for item in counted)
    finished = [item for item in recoveries if not item.planned and item.first_step_time is not None]
    return Goodput(
        ettr=(up - lost) / (up + down) if up + down > 0 else None,
        window_seconds=up + down,
        up_seconds=up,
        down_seconds=down,
        paused_seconds=paused,
        lost_seconds=lost,
        lost_steps=lost_steps,
        failures=failures,
        mtbf_seconds=up / failures if failures else None,
        mttr_seconds=_mean([sum(measure_parts(item).values()) for item in finished]),
        parts_seconds=_mean_parts(finished),
    )


def to_status(goodput: Goodput, *, save_seconds: float | None = None) -> dict[str, Any]:
    """Return `status.goodput`; with `save_seconds`, the cost of one commit, include a suggested commit interval."""
    value: dict[str, Any] = {
        "ettr": _round(goodput.ettr, 4),
        "windowSeconds": _round(goodput.window_seconds, 1),
        "lostSteps": goodput.lost_steps,
        "lostSeconds": _round(goodput.lost_seconds, 1),
        "failures": goodput.failures,
        "mtbfSeconds": _round(goodput.mtbf_seconds, 1),
        "mttrSeconds": _round(goodput.mttr_seconds, 1),
        "partsSeconds": {name: _round(seconds, 1) for name, seconds in goodput.parts_seconds.items()},
    }
    if save_seconds is not None and goodput.mtbf_seconds:
        value["suggestedIntervalSeconds"] = _round(suggest_interval_seconds(save_seconds, goodput.mtbf_seconds), 0)
    return {key: item for key, item in value.items() if item is not None and item != {}}


def measure_parts(recovery: Recovery) -> dict[str, float]:
    """Split the time of a recovery into parts, in seconds; they do not overlap and add up to its length so far.

    A part that ended before the part ahead of it in the chain took no time. If the attempt stopped before the plan was
    made, as in a drain, `stop` comes first.
    """
    begin = recovery.signal_time if recovery.signal_time is not None else recovery.detect_time
    if begin is None:
        return {}
    stop, plan_time = recovery.stop_time, recovery.plan_time
    chain = list(_CHAIN)
    if stop is not None and (plan_time is None or stop <= plan_time):
        chain.remove(("stop", "stop_time"))
        chain.insert(1, ("stop", "stop_time"))
    seconds: dict[str, float] = {}
    reached: float = begin
    for name, field in chain:
        moment: float | None = getattr(recovery, field)
        if moment is not None:
            seconds[name] = max(0.0, moment - reached)
            reached = max(reached, moment)
    return seconds


def suggest_interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Return the checkpoint interval with the least expected loss of time.

    Args:
        save_seconds: cost of one save.
        mtbf_seconds: mean time between failures.

    Source: J. T. Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation
    37; its first term is Young's (1974), sqrt(2 * save * mtbf).
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def _begin_time(recovery: Recovery, now: float) -> float:
    for moment in (recovery.signal_time, recovery.detect_time):
        if moment is not None:
            return moment
    return now


def _down_seconds(recoveries: Sequence[Recovery], start: float, now: float) -> float:
    """Return the length of the union of all recoveries; a later one may begin before an earlier one ends."""
    total, reached = 0.0, start
    for item, after in itertools.zip_longest(recoveries, recoveries[1:]):
        begin, end = max(reached, _begin_time(item, now)), min(now, _end_time(item, after, now))
        total += max(0.0, end - begin)
        reached = max(reached, end)
    return total


def _end_time(recovery: Recovery, after: Recovery | None, now: float) -> float:
    if recovery.first_step_time is not None:
        return recovery.first_step_time
    # The attempt was lost before its first step, so the recovery that followed continues the same outage.
    return now if after is None else max(_begin_time(recovery, now), _begin_time(after, now))


def _paused_seconds(recovery: Recovery, now: float) -> float:
    if recovery.cause not in PAUSES or recovery.stop_time is None:
        return 0.0
    return max(0.0, (recovery.plan_time if recovery.plan_time is not None else now) - recovery.stop_time)


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean_parts(recoveries: Sequence[Recovery]) -> dict[str, float]:
    parts_of_each = [measure_parts(item) for item in recoveries]
    names = dict.fromkeys(name for name, _ in _CHAIN if any(name in item for item in parts_of_each))
    return {name: sum(item.get(name, 0.0) for item in parts_of_each) / len(parts_of_each) for name in names}
