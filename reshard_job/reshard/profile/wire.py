"""Encode the times of a unit for the journal, and decode what a journal holds."""

from __future__ import annotations

import math
from typing import Any

from reshard.profile.clock import FileTime, Phase, UnitTimes

_MOST_NAME = 200
_DIGITS = 6
_NUMBERS = ("started", "cpu_seconds", "cpu_wait_seconds", "flush_started", "flush_seconds")


def encode(times: UnitTimes) -> dict[str, Any]:
    """Return the JSON value of a unit's times."""
    return {
        "worker": times.worker,
        **{name: round(getattr(times, name), _DIGITS) for name in _NUMBERS},
        "seconds": [round(value, _DIGITS) for value in times.seconds],
        "bytes": list(times.num_bytes),
        "files": [[int(phase), file, round(own, _DIGITS), count] for phase, file, own, count in times.files],
    }


def decode(value: Any) -> UnitTimes | None:
    """Return the times that a JSON value holds; None if it holds none, or is not of this version.

    Times prove nothing, so a record with unknown times is as good as any other.
    """
    try:
        seconds, num_bytes = [_number(item) for item in value["seconds"]], [_count(item) for item in value["bytes"]]
        if len(seconds) != len(Phase) or len(num_bytes) != len(Phase):
            return None
        return UnitTimes(
            worker=str(value["worker"])[:_MOST_NAME],
            seconds=tuple(seconds),
            num_bytes=tuple(num_bytes),
            files=tuple(
                FileTime(Phase(phase), _count(file), _number(own), _count(count))
                for phase, file, own, count in value["files"]
            ),
            **{name: _number(value[name]) for name in _NUMBERS},
        )
    except (ValueError, KeyError, TypeError):
        return None


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"expected seconds, found {value!r:.60}")
    return float(value)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"expected a number, found {value!r:.60}")
    return value
