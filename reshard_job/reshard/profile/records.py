"""The profile of a run as data, and its merge from the times of units. Pure."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.profile.clock import FileTime, Phase, UnitTimes
from reshard.profile.events import Decision, Device, FileNames, Step

MOST_FILES = 10
"""Slowest files of each side that a profile lists."""

MOST_SPANS = 240
"""Parts of one worker's time that a profile keeps for a picture; neighbours are merged."""

_SOURCE, _TARGET = "source", "target"
_FLUSH = "sync"
_DIGITS = 6  # of seconds in JSON


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Seconds and bytes of a phase, of a device or of a file; workers' seconds are added up.

    Attributes:
        name: of the phase, `side device kind`, or `side path`.
        seconds: of all workers together.
        num_bytes: 0 where none are counted.
    """

    name: str
    seconds: float
    num_bytes: int


class Span(NamedTuple):
    """A part of a worker's time: start after the begin of the profile, and seconds by phase, in `Phase`'s order."""

    started: float
    seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One process or thread.

    Attributes:
        name: host and number of the process.
        units: that it did.
        seconds: by phase.
        cpu_seconds: on a processor.
        cpu_wait_seconds: waiting for a processor.
        spans: its time in order, at most `MOST_SPANS` parts.
    """

    name: str
    units: int
    seconds: Mapping[str, float]
    cpu_seconds: float
    cpu_wait_seconds: float
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Where the time of a run went.

    Attributes:
        started: in seconds since 1970.
        seconds: wall time.
        steps: of the run, in the order in which they ended; `started` counts from the profile's start.
        phases: of all workers' units.
        workers: processes or threads, of all machines that shared the conversion.
        devices: that the files lie on, by side.
        files: the slowest ones of each side.
        decisions: about the number of processes; `at` counts from the profile's start.
        flushes: (start, seconds) of each unit's flush to storage, from the profile's start, at most `MOST_SPANS`.
    """

    started: float
    seconds: float
    steps: tuple[Step, ...] = ()
    phases: tuple[Total, ...] = ()
    workers: tuple[Worker, ...] = ()
    devices: tuple[Total, ...] = ()
    files: tuple[Total, ...] = ()
    decisions: tuple[Decision, ...] = ()
    flushes: tuple[tuple[float, float], ...] = ()

    @property
    def unnamed_seconds(self) -> float:
        """Return the wall time in which no step ran; steps may run at the same time."""
        end = covered = 0.0
        for step in sorted(self.steps, key=lambda item: item.started):
            covered += max(0.0, step.started + step.seconds - max(end, step.started))
            end = max(end, step.started + step.seconds)
        return max(0.0, self.seconds - covered)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON value; spans are lists of a start and the seconds of each phase."""
        return {
            "started": round(self.started, _DIGITS),
            "seconds": round(self.seconds, _DIGITS),
            "steps": [_rounded(step._asdict()) for step in self.steps],
            "phases": [_rounded(dataclasses.asdict(total)) for total in self.phases],
            "workers": [
                {
                    **_rounded(dataclasses.asdict(worker)),
                    "spans": [[round(value, _DIGITS) for value in (at, *own)] for at, own in worker.spans],
                }
                for worker in self.workers
            ],
            "devices": [_rounded(dataclasses.asdict(total)) for total in self.devices],
            "files": [_rounded(dataclasses.asdict(total)) for total in self.files],
            "decisions": [_rounded(decision._asdict()) for decision in self.decisions],
            "flushes": [[round(value, _DIGITS) for value in flush] for flush in self.flushes],
        }


def _rounded(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _rounded(item) if isinstance(item, Mapping) else round(item, _DIGITS) if isinstance(item, float) else item
        for key, item in value.items()
    }


def make_profile(
    span: tuple[float, float],
    steps: Sequence[Step],
    units: Sequence[UnitTimes],
    decisions: Sequence[Decision],
    names: FileNames,
) -> Profile:
    """Merge the times of all units, from any number of workers and machines, into one profile.

    Args:
        span: begin and end of the run, in seconds since 1970. If other machines or earlier runs did units before, the
            profile begins with the first of them.
        steps: of the run.
        units: times of all units.
        decisions: about the number of processes.
        names: of the files that the times refer to by number.
    """
    first = min((span[0], *(unit.started for unit in units)))
    flushes = [(unit.flush_started - first, unit.flush_seconds) for unit in units if unit.flush_started]
    return Profile(
        started=first,
        seconds=span[1] - first,
        steps=tuple(Step(step.name, step.started - first, step.seconds) for step in steps),
        phases=_phases(units),
        workers=_workers(units, first),
        devices=_devices(units, names),
        files=_slowest_files(units, names),
        decisions=tuple(decision._replace(at=decision.at - first) for decision in decisions),
        flushes=tuple(_thin_out(sorted(flushes))),
    )


def _phases(units: Sequence[UnitTimes]) -> tuple[Total, ...]:
    totals = [
        Total(
            name=phase.name.lower(),
            seconds=sum(unit.seconds[phase] for unit in units),
            num_bytes=sum(unit.num_bytes[phase] for unit in units),
        )
        for phase in Phase
    ]
    flush = Total(name=_FLUSH, seconds=sum(unit.flush_seconds for unit in units), num_bytes=0)
    return tuple(total for total in (*totals, flush) if total.seconds)


def _workers(units: Iterable[UnitTimes], first: float) -> tuple[Worker, ...]:
    by_name: dict[str, list[UnitTimes]] = defaultdict(list)
    for unit in units:
        by_name[unit.worker].append(unit)
    return tuple(_worker(name, by_name[name], first) for name in sorted(by_name))


def _worker(name: str, units: Sequence[UnitTimes], first: float) -> Worker:
    ordered = sorted(units, key=lambda unit: unit.started)
    return Worker(
        name=name,
        units=len(units),
        seconds={phase.name.lower(): sum(unit.seconds[phase] for unit in units) for phase in Phase},
        cpu_seconds=sum(unit.cpu_seconds for unit in units),
        cpu_wait_seconds=sum(unit.cpu_wait_seconds for unit in units),
        spans=merge_spans([Span(unit.started - first, unit.seconds) for unit in ordered]),
    )


def merge_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Merge neighbours so that at most `MOST_SPANS` are left; the time between merged spans counts as WAIT."""
    step = -(-len(spans) // MOST_SPANS) if spans else 1
    merged = []
    for at in range(0, len(spans), step):
        group = spans[at : at + step]
        seconds = [sum(span.seconds[phase] for span in group) for phase in Phase]
        end = max(span.started + sum(span.seconds) for span in group)
        seconds[Phase.WAIT] += max(0.0, end - group[0].started - sum(seconds))
        merged.append(Span(group[0].started, tuple(seconds)))
    return tuple(merged)


def _thin_out(flushes: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge neighbouring flushes so that at most `MOST_SPANS` are left; the gaps between them are left out."""
    step = -(-len(flushes) // MOST_SPANS) if flushes else 1
    groups = [flushes[at : at + step] for at in range(0, len(flushes), step)]
    return [(group[0][0], sum(seconds for _, seconds in group)) for group in groups]


def _files(units: Iterable[UnitTimes]) -> dict[tuple[str, int], tuple[float, int]]:
    """Add up seconds and bytes by side and number of the file."""
    totals: dict[tuple[str, int], tuple[float, int]] = {}
    for unit in units:
        for item in map(FileTime._make, unit.files):
            key = (_TARGET if item.phase == Phase.WRITE else _SOURCE, item.file)
            seconds, num_bytes = totals.get(key, (0.0, 0))
            totals[key] = (seconds + item.seconds, num_bytes + item.num_bytes)
    return totals


def _devices(units: Iterable[UnitTimes], names: FileNames) -> tuple[Total, ...]:
    totals: dict[str, tuple[float, int]] = {}
    for (side, file), (seconds, num_bytes) in _files(units).items():
        _, device = _of_file(names, side, file)
        name = f"{side} {device.name} {device.kind}".strip()
        before = totals.get(name, (0.0, 0))
        totals[name] = (before[0] + seconds, before[1] + num_bytes)
    return tuple(Total(name=name, seconds=own[0], num_bytes=own[1]) for name, own in sorted(totals.items()))


def _of_file(names: FileNames, side: str, file: int) -> tuple[str, Device]:
    """Return path and device of a file; a journal of others may name files that there are not."""
    files = names.source if side == _SOURCE else names.target
    return files[file] if file < len(files) else (f"file {file}", Device("?", ""))


def _slowest_files(units: Iterable[UnitTimes], names: FileNames) -> tuple[Total, ...]:
    every = sorted(_files(units).items(), key=lambda item: -item[1][0])
    slowest = []
    for wanted in (_SOURCE, _TARGET):
        of_side = [(file, own) for (side, file), own in every if side == wanted][:MOST_FILES]
        slowest += [
            Total(name=f"{wanted} {_of_file(names, wanted, file)[0]}", seconds=own[0], num_bytes=own[1])
            for file, own in of_side
        ]
    return tuple(slowest)
