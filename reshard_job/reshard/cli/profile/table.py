"""Render a profile as text. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from reshard.cli.render import format_count, format_table
from reshard.profile.records import Profile, Total
from reshard.system.limits import format_bytes

_MOST_WORKERS = 16
_MOST_FILES = 3  # of each side; a profile as JSON has more


def lines(profile: Profile) -> list[str]:
    """Return the lines of a profile: steps, phases, workers, devices, slowest files, decisions."""
    return [
        f"  where the time went ({_seconds(profile.seconds)} s):",
        *_steps(profile),
        *_phases(profile),
        *_workers(profile),
        *_totals("device", profile.devices),
        *_totals("slowest files", _first_of_each_side(profile.files)),
        *(
            f"    {decision.at:6.2f} s  {format_count(decision.workers, 'worker')}, tiles of"
            f" {format_bytes(decision.tile_bytes)}: {decision.reason}"
            for decision in profile.decisions
        ),
    ]


def _steps(profile: Profile) -> list[str]:
    seconds: dict[str, float] = defaultdict(float)
    for step in profile.steps:
        seconds[step.name] += step.seconds
    rows = [("step", "seconds", "share")]
    seconds["rest"] = profile.unnamed_seconds
    rows += [(name, _seconds(own), _share(own, profile.seconds)) for name, own in seconds.items()]
    return _indented(format_table(rows, right=(1, 2)))


def _phases(profile: Profile) -> list[str]:
    if not profile.phases:
        return []
    whole = sum(total.seconds for total in profile.phases)
    rows = [(f"phase of {format_count(len(profile.workers), 'worker')}", "seconds", "share", "bytes", "rate")]
    rows += [
        (total.name, _seconds(total.seconds), _share(total.seconds, whole), *_rate(total)) for total in profile.phases
    ]
    return ["", *_indented(format_table(rows, right=(1, 2, 3, 4)))]


def _workers(profile: Profile) -> list[str]:
    if not profile.workers:
        return []
    names = [total.name for total in profile.phases if any(total.name in item.seconds for item in profile.workers)]
    rows: list[tuple[str, ...]] = [("worker", "units", *names, "processor", "waits for it")]
    rows += [
        (
            worker.name,
            str(worker.units),
            *(_seconds(worker.seconds[name]) for name in names),
            _seconds(worker.cpu_seconds),
            _seconds(worker.cpu_wait_seconds),
        )
        for worker in profile.workers[:_MOST_WORKERS]
    ]
    left = len(profile.workers) - _MOST_WORKERS
    more = [f"    and {format_count(left, 'worker')} more with --json"] if left > 0 else []
    return ["", *_indented(format_table(rows, right=tuple(range(1, len(rows[0]))))), *more]


def _totals(what: str, totals: Sequence[Total]) -> list[str]:
    if not totals:
        return []
    rows = [(what, "seconds", "bytes", "rate")]
    rows += [(total.name, _seconds(total.seconds), *_rate(total)) for total in totals]
    return ["", *_indented(format_table(rows, right=(1, 2, 3))), *([""] if what == "slowest files" else [])]


def _first_of_each_side(files: Sequence[Total]) -> list[Total]:
    sides: dict[str, list[Total]] = defaultdict(list)
    for total in files:
        sides[total.name.partition(" ")[0]].append(total)
    return [total for own in sides.values() for total in own[:_MOST_FILES]]


def _rate(total: Total) -> tuple[str, str]:
    """Return the bytes of a total, and its bytes per second of one worker; empty where none are counted."""
    if not total.num_bytes:
        return "", ""
    return format_bytes(total.num_bytes), f"{format_bytes(total.num_bytes / max(total.seconds, 1e-9))}/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.1 or not seconds else f"{seconds:.3f}"


def _share(part: float, whole: float) -> str:
    return f"{part / max(whole, 1e-9):.0%}"


def _indented(rows: Iterable[str]) -> list[str]:
    return [f"    {row}" for row in rows]
