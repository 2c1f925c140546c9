"""How many workers are active: a table from measurement to decision, and properties of any sequence of measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.profile.clock import Phase, UnitTimes
from reshard.profile.steering import (
    BUFFERS_PER_WORKER,
    SMALLEST_TILE_BYTES,
    Limits,
    State,
    Steering,
    Window,
    decide,
    start_state,
)

MIB = 1 << 20
LIMITS = Limits(processors=4, start=4, most=8, memory_bytes=96 * MIB, largest_tile_bytes=8 * MIB)
START = start_state(LIMITS)


def window(
    rate: float,
    *,
    workers: int = 4,
    wait: float = 0.9,
    crowded: float = 0.0,
    throttled: float = 0.0,
    free: int = 1 << 40,
) -> Window:
    """One second: bytes per second, shares of the time that workers wait for storage and for a processor."""
    return Window(
        seconds=1.0,
        workers=workers,
        num_bytes=int(rate),
        busy_seconds=float(workers),
        cpu_seconds=workers * (1 - wait - crowded),
        cpu_wait_seconds=workers * crowded,
        throttled_seconds=throttled,
        free_bytes=free,
    )


def state(active: int, *, trial: tuple[int, float] | None = None, closed: str = "") -> State:
    tile_bytes = LIMITS.tile_bytes(max(active, LIMITS.start), LIMITS.memory_bytes)
    return State(active=active, tile_bytes=tile_bytes, trial=trial, closed=frozenset(closed.split()))


CASES = {
    "busy processors: nothing changes": (START, window(100, wait=0.2), 4, ""),
    "workers wait for storage: more are tried": (START, window(100), 6, "try 6"),
    "twice the processors at most": (state(6, trial=(4, 100)), window(150, workers=6), 8, "1.50 times as fast"),
    "as many as are allowed: it stays": (state(8, trial=(6, 100)), window(150, workers=8), 8, "1.50 times as fast"),
    "more were not faster: back": (state(6, trial=(4, 100)), window(105, workers=6), 4, "only 1.05 times as fast"),
    "then fewer are tried": (state(4, closed="more"), window(100), 2, "try 2"),
    "fewer were faster: still fewer": (state(2, trial=(4, 100), closed="more"), window(150, workers=2), 1, "try 1"),
    "fewer were not faster: back": (state(2, trial=(4, 100), closed="more"), window(101, workers=2), 4, "only 1.01"),
    "nothing is left to try": (state(4, closed="more fewer"), window(100), 4, ""),
    "a rate that falls later is no reason to try again": (state(4, closed="more fewer"), window(1), 4, ""),
    "one worker cannot become fewer": (state(1, closed="more"), window(100, workers=1), 1, ""),
    "throttled by the quota: no more than the processors": (
        state(6, trial=(4, 100)), window(500, workers=6, throttled=0.3), 4, "throttled the processors 30% of the time",
    ),
    "throttled within the processors: nothing changes": (START, window(100, wait=0.1, throttled=0.3), 4, ""),
    "workers wait for processors: no more than those": (
        state(8, trial=(6, 100)), window(500, workers=8, wait=0.5, crowded=0.3), 4, "waited for a processor 30%",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_decisions(name: str) -> None:
    before, measured, active, reason = CASES[name]
    after, said = decide(before, measured, LIMITS)
    assert after.active == active
    assert reason in said
    assert bool(reason) == bool(said)


def test_a_trial_is_judged_by_the_rate_before_it() -> None:
    after, _ = decide(START, window(100), LIMITS)
    assert after.trial == (4, 100)
    again, _ = decide(after, window(200, workers=6), LIMITS)
    assert (again.active, again.trial) == (8, (6, 200))
    last, _ = decide(again, window(190, workers=8), LIMITS)
    assert (last.active, last.trial, last.closed) == (6, None, {"more"})


def test_little_free_memory_makes_tiles_smaller_and_they_stay_so() -> None:
    after, said = decide(START, window(100, wait=0.1, free=64 * MIB), LIMITS)
    assert after.tile_bytes == 64 * MIB // 4 // 4 // BUFFERS_PER_WORKER
    assert "64.0 MiB of memory are free: tiles of 1.0 MiB" in said
    again, said = decide(after, window(100, wait=0.1), LIMITS)
    assert (again.tile_bytes, said) == (after.tile_bytes, "")


def test_tiles_never_become_smaller_than_what_is_worth_a_call() -> None:
    after, _ = decide(START, window(100, free=0), LIMITS)
    assert after.tile_bytes >= SMALLEST_TILE_BYTES


WINDOWS = st.lists(
    st.builds(
        window,
        st.floats(0, 1e9),
        wait=st.floats(0, 0.7),
        crowded=st.floats(0, 0.3),
        throttled=st.floats(0, 1),
        free=st.integers(0, 1 << 40),
    ),
    max_size=40,
)


@given(WINDOWS, st.integers(1, 9), st.integers(0, 9))
def test_whatever_is_measured_the_number_settles_and_memory_is_bounded(windows, start, spare) -> None:
    limits = LIMITS._replace(start=start, processors=start, most=start + spare)
    now, changes, most_active = start_state(limits), 0, start
    for measured in windows:
        after, reason = decide(now, measured._replace(workers=now.active), limits)
        assert 1 <= after.active <= limits.most
        assert after.tile_bytes <= now.tile_bytes
        assert after == now or reason or after.trial is None
        changes += after.active != now.active
        now, most_active = after, max(most_active, after.active)
        held = most_active * now.tile_bytes * BUFFERS_PER_WORKER
        assert held <= max(limits.memory_bytes, most_active * SMALLEST_TILE_BYTES * BUFFERS_PER_WORKER)
    assert changes <= 2 * (spare + start.bit_length() + 2)  # each direction is left after the first trial that fails


def times(busy: float, cpu: float) -> UnitTimes:
    seconds = [0.0] * len(Phase)
    seconds[Phase.READ] = busy
    return UnitTimes(worker="a", started=0.0, seconds=tuple(seconds), num_bytes=(0,) * len(Phase), cpu_seconds=cpu)


class Workers:
    """Workers of a storage that serves each one with the same rate, up to a number of them."""

    def __init__(self, steering: Steering, served: int) -> None:
        self.steering, self.served, self.now = steering, served, 0.0
        self.history = [steering.active]

    def run(self, num_units: int) -> list[int]:
        """Do units, and return the numbers of active workers in turn."""
        for _ in range(num_units):
            active = self.steering.active
            seconds = 0.5 * max(1.0, active / self.served)
            self.now += seconds / active
            self.steering.add(times(seconds, 0.01), 16 * MIB)
            if self.steering.active != self.history[-1]:
                self.history.append(self.steering.active)
        return self.history


@pytest.mark.parametrize(("served", "expected"), [(16, [4, 6, 8]), (6, [4, 6, 8, 6, 3, 6]), (4, [4, 6, 4, 2, 4])])
def test_a_run_finds_the_number_that_the_storage_serves_and_keeps_it(served: int, expected: list[int]) -> None:
    clock = Workers.__new__(Workers)
    clock.now = 0.0
    steering = Steering(LIMITS, clock=lambda: clock.now, free_bytes=lambda: None, throttled=lambda: 0.0)
    clock.__init__(steering, served)
    assert clock.run(500) == expected
    assert [decision.workers for decision in steering.decisions][-1] == expected[-1]


def test_a_number_that_was_asked_for_stays() -> None:
    limits = LIMITS._replace(most=4)
    steering = Steering(limits, adapts=False, free_bytes=lambda: 0, throttled=lambda: 0.0)
    for _ in range(100):
        steering.add(times(1.0, 0.0), MIB)
    assert (steering.active, steering.tile_bytes) == (4, START.tile_bytes)
    assert [decision.reason for decision in steering.decisions] == ["as asked for"]


def test_units_without_times_are_not_counted() -> None:
    steering = Steering(LIMITS, free_bytes=lambda: None, throttled=lambda: 0.0)
    steering.add(None, MIB)
    assert steering.active == 4
