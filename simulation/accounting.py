"""Where the time of a job went: steps that count, steps that were repeated, saves, and time without training."""

from __future__ import annotations

import collections
import dataclasses

from simulation.trace import Effect


@dataclasses.dataclass(slots=True, kw_only=True)
class Account:
    """Adds up the wall time of one simulated job.

    Attributes:
        start: when the job was created.
        productive_seconds: time of steps that no later attempt repeated.
        lost_seconds: time of steps after the last commit of an attempt that failed.
        saving_seconds: pauses of the training for saves.
        waiting_seconds: time without training in which the operator waited for nodes.
        down_seconds: all other time without training: start, detection, stop, conversion, restart.
        steps: steps that count.
        attempts: attempts that made steps.
        hits: failures that hit the job, by effect; `misses` hit nodes that it did not use.
    """

    start: float
    productive_seconds: float = 0.0
    lost_seconds: float = 0.0
    saving_seconds: float = 0.0
    waiting_seconds: float = 0.0
    down_seconds: float = 0.0
    steps: int = 0
    attempts: int = 0
    hits: collections.Counter[Effect] = dataclasses.field(default_factory=collections.Counter)
    misses: collections.Counter[Effect] = dataclasses.field(default_factory=collections.Counter)
    _idle_since: float | None = None
    _waiting_since: float | None = None
    _training: tuple[float, int, float] | None = None

    def __post_init__(self) -> None:
        self._idle_since = self.start

    def count(self, effect: Effect, *, is_hit: bool) -> None:
        """Count a failure."""
        (self.hits if is_hit else self.misses)[effect] += 1

    def wait(self, now: float, *, is_waiting: bool) -> None:
        """Record whether the operator waits for nodes."""
        if self._waiting_since is not None:
            self.waiting_seconds += now - self._waiting_since
            self.down_seconds -= now - self._waiting_since
        self._waiting_since = now if is_waiting else None

    def begin(self, now: float, first: int, step_seconds: float) -> None:
        """Begin the steps of an attempt that resumes after `first` steps.

        Raises:
            ValueError: the attempt repeats steps that were counted, or skips some.
        """
        if first != self.steps:
            raise ValueError(f"expected an attempt that resumes after step {self.steps}, found {first}")
        self._stop_idling(now)
        self.attempts += 1
        self._training = (now, first, step_seconds)

    def end(self, now: float, committed: int, saving_seconds: float) -> None:
        """End the steps of an attempt; the next one resumes after `committed` steps."""
        if self._training is None:
            return
        begin, first, step_seconds = self._training
        productive = (committed - first) * step_seconds
        self.productive_seconds += productive
        self.saving_seconds += saving_seconds
        self.lost_seconds += now - begin - productive - saving_seconds
        self.steps = committed
        self._training = None
        self._idle_since = now

    def close(self, now: float) -> None:
        """End the account."""
        self.wait(now, is_waiting=False)
        self._stop_idling(now)

    def _stop_idling(self, now: float) -> None:
        if self._idle_since is not None:
            self.down_seconds += now - self._idle_since
            self._idle_since = None
