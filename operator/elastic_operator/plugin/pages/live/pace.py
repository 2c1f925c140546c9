"""The pace of a training, and the likely end of a recovery. Pure.

Both follow from times that the operator wrote to the status. What has not been measured is unknown, and not guessed.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.status import Phase, Recovery, StartMode, Status
from elastic_operator.plugin.pages.recovery_estimate import estimate_recovery
from elastic_operator.reconcile import goodput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartProgress:
    """One part of a recovery.

    Attributes:
        name: as in `reconcile.goodput.PARTS`.
        state: `Done`, `Current` or `Ahead`.
        seconds: duration, so far if it is the current part.
        expected_seconds: duration in earlier recoveries of this job; None if it is unknown or over.
    """

    name: str
    state: str
    seconds: float = 0.0
    expected_seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryProgress:
    """The recovery in progress.

    Attributes:
        seconds: time since its first sign.
        left_seconds: expected time until the first step; None if it is unknown.
        basis: what the expectation rests on, or why there is none.
        parts: parts in their order; those that are not needed are left out.
    """

    cause: str
    seconds: float
    basis: str
    left_seconds: float | None = None
    parts: tuple[PartProgress, ...] = ()


def steps_per_second(status: Status) -> float | None:
    """Return the mean rate since the first step of the attempt; None if it does not train or has made fewer than two.

    Both times are of the operator's observation, at most ten seconds (with many jobs a minute) after the steps.
    """
    current, progress = status.current, status.progress
    if status.phase not in (Phase.RUNNING, Phase.DRAINING):
        return None
    if current is None or progress is None or current.resume.external:
        return None
    first, last = current.first_step_time, progress.step_time
    steps = progress.step - current.resume.step - 1
    if first is None or last is None or last <= first or steps < 1:
        return None
    return steps / (last - first)


def track_recovery(status: Status, now: float) -> RecoveryProgress | None:
    """Return the progress of the recovery that is not over; None if there is none, or if nothing may run."""
    if not status.changes or status.terminal:
        return None
    item = status.changes[-1]
    begin = item.signal_time if item.signal_time is not None else item.detect_time
    if item.first_step_time is not None or item.cause in goodput.PAUSES or begin is None:
        return None
    done = goodput.measure_parts(item)
    reshards = _is_converting(status, item)
    estimate = estimate_recovery(status, stops=True, reshards=reshards, num_bytes=_commit_bytes(status))
    ahead = [name for name in goodput.PARTS if name not in done and (name != "reshard" or reshards)]
    elapsed = max(0.0, now - begin - sum(done.values()))
    # Means of an unknown conversion have no key `reshard`.
    expected = {name: estimate.parts_seconds.get(name) for name in ahead}
    parts = [PartProgress(name=name, state="Done", seconds=seconds) for name, seconds in done.items()]
    for position, name in enumerate(ahead):
        state, seconds = ("Current", elapsed) if position == 0 else ("Ahead", 0.0)
        parts.append(PartProgress(name=name, state=state, seconds=seconds, expected_seconds=expected[name]))
    left, basis = _left(expected, elapsed), estimate.basis
    if not item.to_attempt:
        left, basis = None, "no attempt is planned yet"
    return RecoveryProgress(
        cause=item.cause, seconds=max(0.0, now - begin), left_seconds=left, basis=basis, parts=tuple(parts)
    )


def _left(expected: dict[str, float | None], elapsed: float) -> float | None:
    """Return the sum of the expected parts, less what has passed of the current one."""
    known = [seconds for seconds in expected.values() if seconds is not None]
    if not expected or len(known) < len(expected):
        return None
    return max(0.0, known[0] - elapsed) + sum(known[1:])


def _is_converting(status: Status, item: Recovery) -> bool:
    resume = status.current.resume if status.current is not None else None
    return item.start_mode == StartMode.RESHARD or (resume is not None and bool(resume.uri) and not resume.ready)


def _commit_bytes(status: Status) -> int | None:
    source = status.current.resume.source if status.current is not None else ""
    commit = next((item for item in status.checkpoint.history if item.uri == source), None)
    return commit.num_bytes if commit is not None and commit.num_bytes else None
