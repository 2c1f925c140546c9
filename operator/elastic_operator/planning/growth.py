"""Decide whether a better topology is worth a restart."""

from __future__ import annotations

import dataclasses

from elastic_operator.planning.planner import Candidate

MIN_GAIN_FRACTION = 0.02
"""Minimum gain, as a fraction of the horizon; smaller gains are within the error of the estimates."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrowthVerdict:
    """Verdict on a restart for a better topology, with its reason.

    Attributes:
        is_worth: True if the restart gains training time.
        speedup: estimated ratio of steps per second, new over current.
        gain_seconds: training time gained within the horizon, after the restart; negative if lost.
    """

    is_worth: bool
    speedup: float
    gain_seconds: float
    reason: str


def evaluate_growth(
    current: Candidate, candidate: Candidate, *, restart_seconds: float, horizon_seconds: float
) -> GrowthVerdict:
    """Compare training on with `current` to a restart with `candidate`.

    In the next T seconds `current` does T seconds of training. A restart that takes R seconds and gives a speedup of g
    does the equivalent of (T - R) * g. The restart is worth it if that is more by at least MIN_GAIN_FRACTION of T.
    Without estimates in seconds the speedup is the ratio of the numbers of accelerators.

    Args:
        current: what runs.
        candidate: what would run after the restart.
        restart_seconds: R, the time without training.
        horizon_seconds: T, how long the new shape will probably last, for instance the mean time between failures.
    """
    if current.seconds is not None and candidate.seconds is not None:
        speedup = current.seconds / candidate.seconds
    else:
        speedup = candidate.shape.world_size / current.shape.world_size
    gain = max(0.0, horizon_seconds - restart_seconds) * speedup - horizon_seconds
    is_worth = gain > MIN_GAIN_FRACTION * horizon_seconds
    facts = (
        f"{candidate.topology} on {candidate.num_nodes} nodes would be {speedup:.2f} times as fast as "
        f"{current.topology} on {current.num_nodes}; with a restart of {restart_seconds:.0f} s it wins "
        f"{gain:.0f} s of training in {horizon_seconds:.0f} s"
    )
    verdict = "worth it" if is_worth else f"not worth it (less than {MIN_GAIN_FRACTION:.0%})"
    return GrowthVerdict(is_worth=is_worth, speedup=speedup, gain_seconds=gain, reason=f"{facts}: {verdict}.")
