"""Processors and memory that this process may use, by its control groups and the machine; sizes and times as text."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

from reshard.system.cgroups import (
    CPU_FILES,
    MEMORY_FILES,
    THROTTLE_FILES,
    parse_available,
    parse_cpu_quota,
    parse_free_memory,
    parse_groups,
    parse_throttled_seconds,
)

DEFAULT_MEMORY_BYTES = 96 << 20
"""Memory for buffers. The interpreter with numpy needs another 60 MiB or so: the process stays below 256 MiB."""

MAX_THREADS = 8
"""Largest default number of threads, because more streams do not make one file system faster."""

_SMALLEST_BUFFERS = 8 << 20
_SHARE = 4  # buffers may take a quarter of the free memory


def buffers_for(free_bytes: int | None) -> int:
    """Return the bytes of buffers for a process that may allocate `free_bytes` more (None: not known).

    A process with little memory gets a quarter of it. More than the default was not faster on any measured storage.
    """
    if free_bytes is None:
        return DEFAULT_MEMORY_BYTES
    return max(_SMALLEST_BUFFERS, min(DEFAULT_MEMORY_BYTES, free_bytes // _SHARE))


def threads_for(processors: int, quota: float | None) -> int:
    """Return the number of threads for a process that may use `processors`, `quota` of them fully (None: all)."""
    usable = processors if quota is None else min(processors, math.ceil(quota))
    return max(1, min(MAX_THREADS, usable))


def free_memory_bytes() -> int | None:
    """Return the bytes that this process may still allocate, by its control groups and the machine; None: not known."""
    free = [parse_free_memory(version, files) for version, files in _read_groups("memory", MEMORY_FILES)]
    free.append(parse_available(_text("/proc/meminfo")))
    return min((value for value in free if value is not None), default=None)


def buffer_bytes() -> int:
    """Return the default bytes of buffers for this process on this machine."""
    return buffers_for(free_memory_bytes())


def default_num_threads() -> int:
    """Return the default number of threads, by this process' processors and CPU quota; at most `MAX_THREADS`."""
    quotas = [parse_cpu_quota(version, files) for version, files in _read_groups("cpu", CPU_FILES)]
    quota = min((value for value in quotas if value is not None), default=None)
    return threads_for(len(os.sched_getaffinity(0)), quota)


def throttled_seconds() -> float:
    """Return how long this process' control groups have been stopped for want of processor time, since they exist."""
    return max((parse_throttled_seconds(files) for _, files in _read_groups("cpu", THROTTLE_FILES)), default=0.0)


def _read_groups(controller: str, names: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield version and files of every group that limits this process: its own groups and their parents."""
    for group in parse_groups(_text("/proc/self/cgroup"), _text("/proc/self/mountinfo")):
        if group.version == 2 or controller in group.controllers:
            for folder in group.folders:
                yield group.version, {name: _text(f"{folder}/{name}") for name in names if Path(folder, name).exists()}


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


_MOST_DIGITS = 18  # an exabyte


def parse_bytes(text: str) -> int:
    """Parse `256MiB`, `1GiB`, `64KiB`, `1TiB` or a number of bytes.

    Raises:
        ValueError: the text is something else.
    """
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "B": 1, "": 1}
    number = text.rstrip("KMGTiB")
    unit = text[len(number) :]
    if unit not in units or not number.isascii() or not number.isdigit() or len(number) > _MOST_DIGITS:
        raise ValueError(f"cannot read {text!r}: write a number of B, KiB, MiB, GiB or TiB, for instance 256MiB")
    return int(number) * units[unit]


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes, for instance as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            digits = {"B": 0, "GiB": 2}.get(unit, 1)
            return f"{num_bytes:.{digits}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Format a duration as `42 ms`, `0.4 s`, `12 s`, `3 min 5 s` or `2 h 7 min`."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
