"""The queue of jobs: one pass at a time per job, events that collect, pauses that grow after errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from elastic_operator.cluster.work_queue import (
    FEW_JOBS,
    SECONDS_PER_JOB,
    TICK_SECONDS,
    WorkQueue,
    align_to_tick,
    backoff_seconds,
)
from elastic_operator.observed.observation import Key

A, B = ("ns", "a"), ("ns", "b")
FOREVER = 1e6


class Passes:
    """Work that records its keys and then does what `outcomes` say; after them it waits for events."""

    def __init__(self, *outcomes: float | Exception | None, num_jobs: int = 0) -> None:
        self.keys: list[Key] = []
        self.removed: list[Key] = []
        self.errors: list[Exception] = []
        self.running = self.most_running = 0
        self.retry_seconds: float | None = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self._outcomes = list(outcomes)
        self.queue = WorkQueue(
            self._work, on_error=self._on_error, on_removed=self.removed.append, count=lambda: num_jobs
        )

    async def _work(self, key: Key) -> float | None:
        self.keys.append(key)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await self.gate.wait()
        self.running -= 1
        outcome = self._outcomes.pop(0) if self._outcomes else FOREVER
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _on_error(self, key: Key, error: Exception) -> float | None:
        del key
        self.errors.append(error)
        return self.retry_seconds

    async def until(self, is_met: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_met():
                await asyncio.sleep(0.001)


def run(story: Callable[[], Awaitable[Passes]]) -> Passes:
    async def told() -> Passes:
        passes = await story()
        await passes.queue.stop()
        return passes

    return asyncio.run(told())


def test_events_during_a_pass_lead_to_one_further_pass() -> None:
    async def story() -> Passes:
        passes = Passes()
        passes.gate.clear()
        passes.queue.add(A)
        await passes.until(lambda: passes.running == 1)
        for _ in range(5):
            passes.queue.add(A)
        passes.gate.set()
        await passes.until(lambda: len(passes.keys) == 2)
        return passes

    passes = run(story)
    assert passes.keys == [A, A]
    assert passes.most_running == 1


def test_a_deadline_starts_a_pass_without_an_event() -> None:
    async def story() -> Passes:
        passes = Passes(0.0, 0.0)
        passes.queue.add(A)
        await passes.until(lambda: len(passes.keys) == 3)
        return passes

    assert run(story).keys == [A, A, A]


def test_a_removed_job_can_come_back() -> None:
    async def story() -> Passes:
        passes = Passes(None)
        passes.queue.add(A)
        await passes.until(lambda: passes.removed == [A])
        passes.queue.add(A)
        await passes.until(lambda: len(passes.keys) == 2)
        return passes

    assert run(story).removed == [A]


def test_an_error_of_one_job_is_handled_and_its_pass_repeated() -> None:
    async def story() -> Passes:
        passes = Passes(RuntimeError("one"), RuntimeError("two"))
        passes.queue.add(A)
        await passes.until(lambda: len(passes.keys) == 3)
        return passes

    assert [str(error) for error in run(story).errors] == ["one", "two"]


@pytest.mark.parametrize(
    ("num_errors", "seconds"), [(1, 0.5), (2, 1.0), (3, 2.0), (6, 16.0), (7, 30.0), (10_000, 30.0)]
)
def test_the_pause_after_errors_doubles_up_to_half_a_minute(num_errors: int, seconds: float) -> None:
    assert backoff_seconds(num_errors) == seconds


@pytest.mark.parametrize("num_jobs", [2, FEW_JOBS + 1])
def test_a_change_for_all_reaches_every_job_and_in_a_crowd_later(num_jobs: int) -> None:
    async def story() -> Passes:
        passes = Passes(num_jobs=num_jobs)
        for key in (A, B):
            passes.queue.add(key)
        await passes.until(lambda: len(passes.keys) == 2)
        start = asyncio.get_running_loop().time()
        passes.queue.add_all()
        passes.queue.add_all()
        await passes.until(lambda: len(passes.keys) == 4)
        if num_jobs > FEW_JOBS:
            assert asyncio.get_running_loop().time() - start >= SECONDS_PER_JOB * num_jobs
        return passes

    assert sorted(run(story).keys) == [A, A, B, B], "two changes are one"


@pytest.mark.parametrize("seconds", [TICK_SECONDS, 7.3, 30.0])
def test_long_pauses_end_at_the_same_moments(seconds: float) -> None:
    pause = align_to_tick(seconds, 1.7)
    assert seconds <= pause < seconds + TICK_SECONDS
    assert (1.7 + pause) % TICK_SECONDS == pytest.approx(0, abs=1e-9) or (1.7 + pause) % TICK_SECONDS > 4.999
    assert align_to_tick(1.0, 1.7) == 1.0
