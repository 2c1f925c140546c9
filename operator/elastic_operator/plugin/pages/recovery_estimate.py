"""Estimates the duration of the next recovery from the past recoveries of the same job only. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from elastic_operator.api.status import Conversion, Recovery, Status
from elastic_operator.plugin.pages.text import pluralize
from elastic_operator.reconcile import goodput

_STOPPING = ("detect", "plan", "stop")
_STARTING = ("launch", "schedule", "load")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimated time until the first step of the next attempt.

    Attributes:
        total_seconds: the whole time; None if it is unknown.
        parts_seconds: duration of each part.
        reshard_seconds: duration of the whole reshard Job; None if it is unknown, 0 if none is needed.
        bytes_per_second: rate at which the last conversion wrote; None if there was none.
        basis: the measurements behind the figures, or why there are none.
    """

    total_seconds: float | None
    reshard_seconds: float | None
    basis: str
    bytes_per_second: float | None = None
    parts_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


def estimate_recovery(status: Status, *, stops: bool, reshards: bool, num_bytes: int | None) -> Estimate:
    """Estimate a recovery from the mean of the finished ones and the rate of the last conversion.

    Args:
        status: status of the job with its recoveries.
        stops: a running attempt has to stop first.
        reshards: a reshard Job is needed.
        num_bytes: size of the commit that the reshard Job reads; None if it is unknown.
    """
    finished = [item for item in status.recoveries if item.first_step_time is not None]
    rate = _rate(status)
    reshard, reshard_basis = _reshard(finished, rate, num_bytes) if reshards else (0.0, "")
    if not finished:
        basis = "the job has had no recovery yet that could be measured"
        return Estimate(total_seconds=None, reshard_seconds=reshard, basis=basis, bytes_per_second=rate)
    unplanned = [item for item in finished if not item.planned]
    parts = _mean_parts(unplanned or finished, _STOPPING + _STARTING if stops else _STARTING)
    number = pluralize(len(unplanned or finished), "loss" if unplanned else "planned change")
    basis = f"as measured in {number} of this job"
    if reshard is None:
        return Estimate(
            total_seconds=None, reshard_seconds=None, parts_seconds=parts, basis=f"{basis}; {reshard_basis}",
            bytes_per_second=rate,
        )  # fmt: skip
    if reshards:
        parts["reshard"] = round(reshard, 1)
        basis += f"; {reshard_basis}"
    return Estimate(
        total_seconds=round(sum(parts.values()), 1),
        reshard_seconds=round(reshard, 1),
        parts_seconds=parts,
        basis=basis,
        bytes_per_second=rate,
    )


def _conversions(recoveries: Sequence[Recovery]) -> list[tuple[float, Conversion]]:
    """Return the duration in seconds and the result of each reshard Job."""
    return [
        (goodput.measure_parts(item)["reshard"], item.conversion)
        for item in recoveries
        if item.conversion is not None and "reshard" in goodput.measure_parts(item)
    ]


def _rate(status: Status) -> float | None:
    done = [item.conversion for item in status.changes if item.conversion is not None]
    last = done[-1] if done else None
    if last is not None and last.seconds > 0 and last.bytes_written:
        return last.bytes_written / last.seconds
    known = status.reshard
    if last is None and known is not None and known.seconds > 0 and known.bytes_written:
        return known.bytes_written / known.seconds
    return None


def _reshard(finished: Sequence[Recovery], rate: float | None, num_bytes: int | None) -> tuple[float | None, str]:
    """Estimate the seconds of the reshard Job: the measured start of its pods, plus the bytes at the last rate."""
    measured = _conversions(finished)
    if not measured:
        return None, "how long a conversion takes here is not known: there has been none yet"
    start = sum(max(0.0, seconds - item.seconds) for seconds, item in measured) / len(measured)
    if rate is None:
        # Virtual conversions write a manifest only, so their duration does not depend on the number of bytes.
        return sum(seconds for seconds, _ in measured) / len(measured), "conversions as long as the last ones"
    if num_bytes is None:
        return None, "the size of the commit is not known"
    return start + num_bytes / rate, f"conversion at {rate / 1e6:.3g} MB/s as the last time, {start:.1f} s for its pod"


def _mean_parts(recoveries: Sequence[Recovery], names: Sequence[str]) -> dict[str, float]:
    every = [goodput.measure_parts(item) for item in recoveries]
    return {name: round(sum(item.get(name, 0.0) for item in every) / len(every), 1) for name in names}
