"""Training losses: a few dozen that the status keeps, and all that `kubectl etj watch` has observed. Pure."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from elastic_operator.api.status import Status

MAX_SAMPLES = 200_000
"""Lines of a recording that are read; a watch of a day at two seconds writes 43,200."""

MAX_LINE = 4 << 20
"""Length of a line that is read: `watch -o json` prints all Events of the job with each step."""

_BLOCKS = "".join(map(chr, range(0x2581, 0x2589)))
"""Blocks of eight heights, the lowest first."""

_COLUMNS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Progress of a job at one moment: the line of a recording.

    Attributes:
        samples: global samples consumed.
        loss: training loss of the step; None if it is not known or not finite.
    """

    attempt: int
    step: int
    samples: int
    loss: float | None = None


def samples_of(status: Status) -> tuple[Sample, ...]:
    """Return the losses that the status of a job keeps, oldest first."""
    return tuple(
        Sample(attempt=item.attempt, step=item.step, samples=item.samples, loss=item.loss) for item in status.losses
    )


def read_recording(lines: Iterable[str]) -> tuple[tuple[Sample, ...], int]:
    """Read the samples of a recording, oldest first, without repetitions; return also the number of unusable lines.

    Args:
        lines: JSON objects, one a line, that `watch --record` or `watch -o json` wrote.
    """
    found: list[Sample] = []
    num_bad = 0
    for line in lines:
        if not line.strip():
            continue
        sample = _read_line(line)
        if sample is None or len(found) >= MAX_SAMPLES:
            num_bad += 1
        elif not found or found[-1] != sample:
            found.append(sample)
    return tuple(found), num_bad


def _read_line(line: str) -> Sample | None:
    if len(line) > MAX_LINE:
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    counts = [value.get(name) for name in ("attempt", "step", "samples")]
    attempt, step, samples = (item if _is_count(item) else None for item in counts)
    if attempt is None or step is None or samples is None:
        return None
    return Sample(attempt=attempt, step=step, samples=samples, loss=_finite(value.get("loss")))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 and math.isfinite(value) else None


def sparkline(values: Sequence[float]) -> str:
    """Draw the last values as blocks of eight heights; return an empty string for fewer than two."""
    shown = values[-_COLUMNS:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    span = high - low or 1.0
    return "".join(_BLOCKS[min(7, int((value - low) / span * 8))] for value in shown)
