"""Decide from measurements how many processes are active and how large their tiles are. Pure, but for `Steering`.

A change is a trial: the next window is compared with the one before, and the change stays only if it made the run
faster. Each direction is given up after one trial that failed, so that the number cannot swing to and fro.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from reshard.profile.clock import UnitTimes
from reshard.profile.events import Decision
from reshard.system.limits import buffers_for, format_bytes, free_memory_bytes, throttled_seconds

WAIT_SHARE = 0.5
"""Share of the time in which workers wait for storage, from which on more or fewer of them may be faster."""

GAIN = 1.15
"""More workers stay if they made the run faster by this factor; rates of equal runs vary by some percent."""

GAIN_OF_FEWER = 1.05
"""Fewer workers stay if they made the run faster by this factor: they leave more of the storage to others."""

THROTTLED_SHARE = 0.05
"""Share of the time in which the control group stops processes, from which on no more than the quota are active."""

CROWDED_SHARE = 0.25
"""Share of the time in which workers wait for a processor, from which on none are active beyond the processors."""

WINDOW_SECONDS = 1.0
WINDOW_UNITS = 3
"""A window lasts until it has lasted so long, and each active worker has done so many units on average."""

FEWEST_UNITS = 32
"""Units of a conversion from which on it is worth while to measure and decide."""

SMALLEST_TILE_BYTES = 64 << 10
BUFFERS_PER_WORKER = 4
"""Buffers of a worker: the tile, a box that is being read, a slice that is being written, and the digest's memory."""

_UP, _DOWN = "more", "fewer"


class Limits(NamedTuple):
    """Bounds of a decision.

    Attributes:
        processors: that this process may use, by affinity and quota.
        start: number of workers at the start.
        most: largest number of workers.
        memory_bytes: for the buffers of all workers together.
        largest_tile_bytes: largest tile of a worker.
    """

    processors: int
    start: int
    most: int
    memory_bytes: int
    largest_tile_bytes: int

    def tile_bytes(self, workers: int, memory_bytes: int) -> int:
        """Return the tile of each of so many workers that have so much memory for buffers."""
        return max(SMALLEST_TILE_BYTES, min(self.largest_tile_bytes, memory_bytes // (workers * BUFFERS_PER_WORKER)))


class Window(NamedTuple):
    """Measurements of the last moments, with one number of active workers.

    Attributes:
        seconds: duration.
        workers: that were active.
        num_bytes: source bytes of the units that were done.
        busy_seconds: of all workers, without the time in which they had no unit.
        cpu_seconds: of `busy_seconds` on a processor.
        cpu_wait_seconds: of `busy_seconds` waiting for a processor.
        throttled_seconds: in which the control group had no processor time left.
        free_bytes: memory that may still be allocated, or None if it is not known.
    """

    seconds: float
    workers: int
    num_bytes: int
    busy_seconds: float
    cpu_seconds: float = 0.0
    cpu_wait_seconds: float = 0.0
    throttled_seconds: float = 0.0
    free_bytes: int | None = None

    @property
    def rate(self) -> float:
        """Return the source bytes per second of all workers.

        It is computed from the time that the units took, because a window ends in the middle of units.
        """
        return self.workers * self.num_bytes / max(self.busy_seconds, 1e-9)

    @property
    def wait_share(self) -> float:
        """Return the share of the workers' time in which they waited for storage."""
        return max(0.0, 1 - (self.cpu_seconds + self.cpu_wait_seconds) / max(self.busy_seconds, 1e-9))

    @property
    def crowded_share(self) -> float:
        """Return the share of the workers' time in which they waited for a processor."""
        return self.cpu_wait_seconds / max(self.busy_seconds, 1e-9)


class State(NamedTuple):
    """What the next decision must know of the ones before.

    Attributes:
        active: number of active workers.
        tile_bytes: largest tile of each; it never grows, because idle workers keep their buffers.
        trial: (number of workers, rate) before the last change, until that is judged.
        closed: directions that are not tried any more.
    """

    active: int
    tile_bytes: int
    trial: tuple[int, float] | None = None
    closed: frozenset[str] = frozenset()


def start_state(limits: Limits) -> State:
    """Return the state before anything was measured."""
    return State(active=limits.start, tile_bytes=limits.tile_bytes(limits.start, limits.memory_bytes))


def decide(state: State, window: Window, limits: Limits) -> tuple[State, str]:
    """Return the next state and the reason for it; the reason is empty where nothing is decided.

    Args:
        state: the present state.
        window: measurements since the last decision.
        limits: what may be chosen.
    """
    active, closed, reason = _workers(state, window, limits)
    is_undone = closed != state.closed  # back to a number that was measured before
    trial = None if active == state.active or is_undone else (state.active, window.rate)
    memory_bytes = min(limits.memory_bytes, buffers_for(window.free_bytes))
    tile_bytes = min(state.tile_bytes, limits.tile_bytes(active, limits.memory_bytes))
    if (smaller := limits.tile_bytes(active, memory_bytes)) < tile_bytes:
        tile_bytes = smaller
        few = f"{format_bytes(window.free_bytes or 0)} of memory are free: tiles of {format_bytes(tile_bytes)}"
        reason = f"{reason}; {few}" if reason else few
    return State(active=active, tile_bytes=tile_bytes, trial=trial, closed=closed), reason


def _workers(state: State, window: Window, limits: Limits) -> tuple[int, frozenset[str], str]:
    """Return the number of active workers, the directions given up, and the reason."""
    active, closed = state.active, state.closed
    if window.throttled_seconds > THROTTLED_SHARE * window.seconds and active > limits.processors:
        share = window.throttled_seconds / window.seconds
        return limits.processors, closed | {_UP}, f"the control group throttled the processors {share:.0%} of the time"
    if active > limits.processors and window.crowded_share > CROWDED_SHARE:
        share = window.crowded_share
        return limits.processors, closed | {_UP}, f"workers waited for a processor {share:.0%} of the time"
    if state.trial is None:
        return _next_trial(active, closed, window, limits)
    before, rate = state.trial
    if window.rate >= (GAIN if active > before else GAIN_OF_FEWER) * rate:
        gain = window.rate / rate if rate else 1.0
        number, closed, reason = _next_trial(active, closed, window, limits)
        kept = f"{active} instead of {before} were {gain:.2f} times as fast"
        return number, closed, f"{kept}: {reason}" if reason else kept
    direction = _UP if active > before else _DOWN
    ratio = window.rate / rate if rate else 1.0
    return before, closed | {direction}, f"{active} instead of {before} were only {ratio:.2f} times as fast"


def _next_trial(active: int, closed: frozenset[str], window: Window, limits: Limits) -> tuple[int, frozenset[str], str]:
    """Choose a number of workers to try next: more at first, and fewer once more have not been faster."""
    if window.wait_share < WAIT_SHARE:
        return active, closed, ""
    waited = f"workers waited for storage {window.wait_share:.0%} of the time"
    more = min(limits.most, active + math.ceil(active / 2))
    if _UP not in closed and more > active:
        return more, closed, f"{waited}: try {more}"
    fewer = active // 2
    if _UP in closed and _DOWN not in closed and fewer >= 1:
        return fewer, closed, f"{waited}: try {fewer}"
    return active, closed, ""


class Steering:
    """Follows the workers of a run and decides; `active` and `tile_bytes` hold the latest decision.

    It is called from one thread at a time. The result of a conversion does not depend on it.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        adapts: bool = True,
        clock: Callable[[], float] = time.monotonic,
        free_bytes: Callable[[], int | None] = free_memory_bytes,
        throttled: Callable[[], float] = throttled_seconds,
    ) -> None:
        self.limits = limits
        self.decisions: list[Decision] = []
        self._is_fixed = limits.most == limits.start
        self._clock, self._free_bytes, self._throttled = clock, free_bytes, throttled
        self._state = start_state(limits)
        self._tell(0.0, "the default of this machine" if adapts else "as asked for")
        self._skip = 0
        self._begin()

    @property
    def active(self) -> int:
        """Return the number of workers that shall be active now."""
        return self._state.active

    @property
    def tile_bytes(self) -> int:
        """Return the largest tile that a worker shall use now."""
        return self._state.tile_bytes

    def add(self, times: UnitTimes | None, num_bytes: int) -> None:
        """Count a unit that was done, and decide if the window is complete."""
        if self._is_fixed or times is None:
            return
        if self._skip:  # units that began under another number
            self._skip -= 1
            if not self._skip:
                self._begin()
            return
        self._units += 1
        self._num_bytes += num_bytes
        self._busy += times.busy_seconds
        self._cpu += times.cpu_seconds
        self._cpu_wait += times.cpu_wait_seconds
        seconds = self._clock() - self._since
        if seconds >= WINDOW_SECONDS and self._units >= WINDOW_UNITS * self.active:
            self._decide(seconds)

    def _begin(self) -> None:
        self._since, self._throttled_before = self._clock(), self._throttled()
        self._units = self._num_bytes = 0
        self._busy = self._cpu = self._cpu_wait = 0.0

    def _decide(self, seconds: float) -> None:
        window = Window(
            seconds=seconds,
            workers=self.active,
            num_bytes=self._num_bytes,
            busy_seconds=self._busy,
            cpu_seconds=self._cpu,
            cpu_wait_seconds=self._cpu_wait,
            throttled_seconds=self._throttled() - self._throttled_before,
            free_bytes=self._free_bytes(),
        )
        before = self._state
        self._state, reason = decide(before, window, self.limits)
        if reason:
            self._tell(window.rate, reason)
        if self._state.active != before.active:
            self._skip = max(self._state.active, before.active)
        self._begin()

    def _tell(self, rate: float, reason: str) -> None:
        self.decisions.append(
            Decision(at=time.time(), workers=self.active, tile_bytes=self.tile_bytes, rate=rate, reason=reason)
        )
