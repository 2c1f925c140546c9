"""Whether a better topology is worth a restart."""

from __future__ import annotations

import dataclasses

from elastic_operator.planning.planner import Candidate

MIN_GAIN_FRACTION = 0.02
"""Smaller gains are within the error of the estimates."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrowthVerdict:
    """Whether to restart, and the sentence that says why.

    Attributes:
        speedup: estimated ratio of steps per second, new over current.
        gain_seconds: training time won within the horizon, after the restart; negative if lost.
    """

    worth: bool
    speedup: float
    gain_seconds: float
    reason: str


def worth_growing(
    current: Candidate, candidate: Candidate, *, restart_seconds: float, horizon_seconds: float
) -> GrowthVerdict:
    """Compare going on as `current` with restarting as `candidate`.

    A restart that takes R seconds and gives a speedup of g does (T - R) * g seconds' worth of the current training in
    the next T seconds, where going on does T. It is worth it if that is more, by at least MIN_GAIN_FRACTION of T.
    `horizon_seconds` is how long the new shape will probably last (for instance the mean time between failures).

    Without estimates in seconds the speedup is taken to be that of the number of accelerators.
    """
    if current.seconds is not None and candidate.seconds is not None:
        speedup = current.seconds / candidate.seconds
    else:
        speedup = candidate.shape.world_size / current.shape.world_size
    gain = max(0.0, horizon_seconds - restart_seconds) * speedup - horizon_seconds
    worth = gain > MIN_GAIN_FRACTION * horizon_seconds
    facts = (
        f"{candidate.topology} on {candidate.num_nodes} nodes would be {speedup:.2f} times as fast as "
        f"{current.topology} on {current.num_nodes}; with a restart of {restart_seconds:.0f} s it wins "
        f"{gain:.0f} s of training in {horizon_seconds:.0f} s"
    )
    verdict = "worth it" if worth else f"not worth it (less than {MIN_GAIN_FRACTION:.0%})"
    return GrowthVerdict(worth=worth, speedup=speedup, gain_seconds=gain, reason=f"{facts}: {verdict}.")
