"""Runs one task per job. A task waits for an event or its deadline, and then runs one pass.

After a failed pass the controller may set the pause. Otherwise the queue doubles the pause, up to half a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable

from elastic_operator.cluster.shutdown import cancel_tasks
from elastic_operator.observed.observation import Key

DEBOUNCE_SECONDS = 0.05
"""Time that a pass waits after an event. Events come in bursts, and one pass handles all of them."""

CROWD_DEBOUNCE_SECONDS = 0.3

FEW_JOBS = 50
"""Up to this number of jobs, every change wakes all jobs. Above it, a change wakes the jobs it concerns first."""

SECONDS_PER_JOB = 0.005
"""Delay per job before a change wakes all jobs: about the time that one pass takes."""

TICK_SECONDS = 5.0
"""Above `FEW_JOBS`, timed passes start at multiples of this time, so that they share requests."""

_FIRST_BACKOFF_SECONDS = 0.5
_LAST_BACKOFF_SECONDS = 30.0


class WorkQueue:
    """Runs one task per key, never two for the same key.

    Args:
        work: runs one pass for a key; returns the seconds until the next one, or None to remove the key.
        on_error: is called with the error of a pass; returns the seconds until the next one, or None to wait longer
            after each further error.
        on_removed: is called with a key that was removed.
        count: returns a lower bound of the number of keys, for those that were not added yet.
    """

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        *,
        on_error: Callable[[Key, Exception], float | None],
        on_removed: Callable[[Key], None],
        count: Callable[[], int],
    ) -> None:
        self._work = work
        self._on_error = on_error
        self._on_removed = on_removed
        self._count = count
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._events: dict[Key, asyncio.Event] = {}
        self._adding_all: asyncio.TimerHandle | None = None
        self.start_time = time.monotonic()
        """Time at which the first key was added, on the monotonic clock."""

    def __len__(self) -> int:
        return max(len(self._tasks), self._count())

    @property
    def is_crowded(self) -> bool:
        """True if there are too many keys to run a pass of every key for every change."""
        return len(self) > FEW_JOBS

    def add(self, key: Key) -> None:
        """Start a pass for a key soon; the first call creates its task."""
        if not self._tasks:
            self.start_time = time.monotonic()
        if key not in self._tasks:
            self._events[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._run(key), name="/".join(key))
        self._events[key].set()

    def add_all(self) -> None:
        """Start a pass for every key: at once, or with many keys after a delay that collects further changes."""
        if not self.is_crowded:
            self._add_each(self._tasks)
        elif self._adding_all is None:
            seconds = SECONDS_PER_JOB * len(self)
            self._adding_all = asyncio.get_running_loop().call_later(seconds, self._add_each, self._tasks)

    async def stop(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        await cancel_tasks(list(self._tasks.values()))

    def _add_each(self, keys: Iterable[Key]) -> None:
        self._adding_all = None
        for key in list(keys):
            self.add(key)

    async def _run(self, key: Key) -> None:
        event, num_errors = self._events[key], 0
        while True:
            event.clear()
            try:
                seconds = await self._work(key)
                num_errors = 0
                if seconds is None:
                    self._remove(key)
                    return
            except Exception as error:
                # Any error of a pass ends here; the pass is repeated.
                seconds = self._on_error(key, error)
                if seconds is None:
                    num_errors += 1
                    seconds = backoff_seconds(num_errors)
            # Not `wait_for`: in Python 3.11 it can lose a cancellation that arrives together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(align_to_tick(seconds, time.monotonic()) if self.is_crowded else seconds):
                    await event.wait()
                await asyncio.sleep(CROWD_DEBOUNCE_SECONDS if self.is_crowded else DEBOUNCE_SECONDS)

    def _remove(self, key: Key) -> None:
        del self._tasks[key], self._events[key]
        self._on_removed(key)


def backoff_seconds(num_errors: int) -> float:
    """Return the pause after the last of `num_errors` failed passes: it doubles each time, up to half a minute."""
    return min(_FIRST_BACKOFF_SECONDS * 2.0 ** min(num_errors - 1, 16), _LAST_BACKOFF_SECONDS)


def align_to_tick(seconds: float, now: float) -> float:
    """Extend a pause that begins at `now`, so that it ends at a multiple of TICK_SECONDS; leave short ones."""
    return seconds if seconds < TICK_SECONDS else seconds + -(now + seconds) % TICK_SECONDS
