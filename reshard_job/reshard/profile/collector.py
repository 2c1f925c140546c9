"""Collect what a run measures: its steps, the times of its units, and the decisions about its processes.

`collecting` makes a collector that every function below it finds, so that no function has to pass it on.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from reshard.profile.clock import Phase, UnitTimes
from reshard.profile.events import Decision, FileNames, Step

if TYPE_CHECKING:
    from reshard.profile.records import Profile

P = ParamSpec("P")
R = TypeVar("R")


class Collector:
    """What one run has measured so far. Any number of its threads may add to it."""

    def __init__(self) -> None:
        self._started = time.time()
        self._steps: list[Step] = []
        self._decisions: list[Decision] = []
        self._units: Sequence[UnitTimes] = ()
        self._names = FileNames((), ())

    def add_step(self, name: str, started: float, seconds: float) -> None:
        """Add a step of the run; `started` is in seconds since 1970."""
        self._steps.append(Step(name, started, seconds))

    def add_decisions(self, decisions: Sequence[Decision]) -> None:
        """Add decisions about the number of processes."""
        self._decisions += decisions

    def set_units(self, units: Sequence[UnitTimes], names: FileNames) -> None:
        """Set the times of all units that are known, of this run and of other workers."""
        self._units, self._names = units, names

    def milliseconds(self) -> dict[str, int]:
        """Return the time of each step so far, and of each phase of all units together as `units.PHASE`."""
        seconds: dict[str, float] = defaultdict(float)
        for step in self._steps:
            seconds[step.name] += step.seconds
        for unit in self._units:
            for phase in Phase:
                seconds[f"units.{phase.name.lower()}"] += unit.seconds[phase]
            seconds["units.sync"] += unit.flush_seconds
        return {name: rounded for name, value in seconds.items() if (rounded := round(1000 * value))}

    def profile(self) -> Profile:
        """Return the profile of the run so far."""
        from reshard.profile.records import make_profile  # only who looks at a profile pays for this import

        span = (self._started, time.time())
        return make_profile(span, self._steps, self._units, self._decisions, self._names)


_current: contextvars.ContextVar[Collector | None] = contextvars.ContextVar("collector", default=None)


def current() -> Collector:
    """Return the collector of this run; one that nobody reads if there is none."""
    return _current.get() or Collector()


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Collect what is measured inside; a collector that is active already is used further.

    >>> with collecting() as collector:
    ...     report = reshard("ckpt/global_step2", "out/profiled", "dp=2")
    >>> [step.name for step in collector.profile().steps][:2]
    ['index', 'plan']
    """
    active = _current.get()
    if active is not None:
        yield active
        return
    collector = Collector()
    token = _current.set(collector)
    try:
        yield collector
    finally:
        _current.reset(token)


def collected(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function collect what is measured inside, see `collecting`."""

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        with collecting():
            return function(*arguments, **named)

    return call


def timed(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function be a step of the run that calls it, also if it fails."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            started, began = time.time(), time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                if (collector := _current.get()) is not None:
                    collector.add_step(name, started, time.perf_counter() - began)

        return call

    return decorate
