"""Measure the phases of a worker's units: one read of the clock where one phase ends and the next one begins.

The phases of a unit add up to the time between the end of the unit before and its own end. A clock is read for each
slice of a tile (1 MiB) or small box, never for each element.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import time
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

_NANO = 1e-9
_CPU_SECONDS = 0.05  # between two reads of the processor's counters, which cost 50 microseconds


class Phase(enum.IntEnum):
    """Phase of a worker's time; the value is the position in `UnitTimes.seconds`.

    WAIT is the time without a unit: nothing to claim, or the parent is busy. PREPARE opens files, asks for cached
    pages and tells the kernel what will be read. READ copies from a file or fetches from a store, POPULATE waits for
    the pages of a mapped file. OTHER is the rest, mostly the search for boxes.
    """

    WAIT = 0
    PREPARE = 1
    READ = 2
    POPULATE = 3
    CHECKSUM = 4
    COPY = 5
    WRITE = 6
    OTHER = 7


PHASES = tuple(Phase)
CHECKSUM, COPY, OTHER, POPULATE, READ, WRITE = (
    int(phase) for phase in (Phase.CHECKSUM, Phase.COPY, Phase.OTHER, Phase.POPULATE, Phase.READ, Phase.WRITE)
)
"""Phases as plain numbers, for the innermost loops: a member of an enum costs a lookup and a cache line."""


class FileTime(NamedTuple):
    """Seconds and bytes of one phase on one file of the source (READ, POPULATE) or of the target (WRITE)."""

    phase: int
    file: int
    seconds: float
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """Measurements of one unit.

    Attributes:
        worker: name of the process or thread that did it.
        started: when its worker became free for it, by the machine's clock, in seconds since 1970.
        seconds: by `Phase`.
        num_bytes: by `Phase`.
        files: by phase and file.
        cpu_seconds: that the worker ran on a processor since this was last read, in this unit or in units before.
        cpu_wait_seconds: that the worker waited for a processor, throttled by its control group or behind others.
        flush_started: when its bytes began to be brought to storage, as `started`; 0 if they were not.
        flush_seconds: that this took, in a thread of the run; without a journal only the begin of it.
    """

    worker: str
    started: float
    seconds: tuple[float, ...]
    num_bytes: tuple[int, ...]
    files: tuple[FileTime, ...] = ()
    cpu_seconds: float = 0.0
    cpu_wait_seconds: float = 0.0
    flush_started: float = 0.0
    flush_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """Return the time without that in which the worker had no unit."""
        return sum(self.seconds) - self.seconds[Phase.WAIT]


class PhaseClock:
    """Clock of one worker. `lap` gives the time since the last one to a phase."""

    __slots__ = ("_cpu", "_cpu_read", "_held", "_last", "_name", "_started")

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._last = perf_counter()
        self._started = time.time()
        self._cpu: tuple[float, float] | None = None
        self._cpu_read = 0.0
        self._reset()

    def _reset(self) -> None:
        self._held: dict[tuple[int, int], list[float]] = {}

    def begin(self) -> None:
        """Begin a unit: the time since the last one was spent without one."""
        if self._cpu is None:  # of the thread or process that works: a clock may be made before a fork
            self._cpu, self._cpu_read = _cpu_times(), self._last
        self.lap(Phase.WAIT)

    def lap(self, phase: int, num_bytes: int = 0, file: int = -1) -> None:
        """Give the time since the last call to a phase, and to a file unless that is negative."""
        now = perf_counter()
        held = self._held.get((phase, file))
        if held is None:
            held = self._held[phase, file] = [0.0, 0]
        held[0] += now - self._last
        held[1] += num_bytes
        self._last = now

    def share(self, phase: int, files: Sequence[tuple[int, int]]) -> None:
        """Give the time since the last call to a phase of several files that were read together, by their bytes.

        Args:
            phase: the phase.
            files: number and bytes of each file.
        """
        now, total = perf_counter(), sum(num_bytes for _, num_bytes in files)
        if not total:
            return
        for file, num_bytes in files:
            held = self._held.setdefault((phase, file), [0.0, 0])
            held[0] += (now - self._last) * num_bytes / total
            held[1] += num_bytes
        self._last = now

    def end(self) -> UnitTimes:
        """End a unit and return its measurements."""
        self.lap(Phase.OTHER)
        now = before = self._cpu or (0.0, 0.0)
        if self._last - self._cpu_read >= _CPU_SECONDS:
            now, self._cpu_read = _cpu_times(), self._last
        seconds, num_bytes = [0.0] * len(PHASES), [0] * len(PHASES)
        for (phase, _), held in self._held.items():
            seconds[phase] += held[0]
            num_bytes[phase] += int(held[1])
        self._cpu = now
        times = UnitTimes(
            worker=self._name or name_process(),
            started=self._started,
            seconds=tuple(seconds),
            num_bytes=tuple(num_bytes),
            files=tuple(FileTime(*key, held[0], int(held[1])) for key, held in self._held.items() if key[1] >= 0),
            cpu_seconds=now[0] - before[0],
            cpu_wait_seconds=now[1] - before[1],
        )
        self._started = time.time()
        self._reset()
        return times


class _Untimed(PhaseClock):
    def lap(self, phase: int, num_bytes: int = 0, file: int = -1) -> None:
        """Do nothing."""

    def share(self, phase: int, files: Sequence[tuple[int, int]]) -> None:
        """Do nothing."""


UNTIMED: PhaseClock = _Untimed()
"""Clock for callers that measure nothing."""


def name_process() -> str:
    """Return a name for this process that those of other machines do not have."""
    return f"{os.uname().nodename}:{os.getpid()}"


def _cpu_times() -> tuple[float, float]:
    """Return the seconds that this thread has run, and has waited for a processor; the latter 0 if not known."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            ran, waited, _ = os.read(descriptor, 100).split()
        finally:
            os.close(descriptor)
        return int(ran) * _NANO, int(waited) * _NANO
    return time.thread_time(), 0.0
