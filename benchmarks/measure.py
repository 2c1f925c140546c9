"""Run a command and account for it: time, bytes by the kernel's own count, memory of the whole process tree."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

_SAMPLE_SECONDS = 0.02
_BLOCK_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of one command.

    Attributes:
        seconds: wall time, start of the interpreter included.
        bytes_read: by read calls of the process and its children (/proc/PID/io, rchar).
        bytes_written: likewise (wchar).
        peak_rss_bytes: largest sum of resident sets of the process tree, sampled.
    """

    seconds: float
    bytes_read: int
    bytes_written: int
    peak_rss_bytes: int


def measure(command: Sequence[str], *, env: dict[str, str], log: Path) -> Measurement:
    """Run `command`.

    Raises:
        RuntimeError: it failed; its output is in `log`.
    """
    started = time.monotonic()
    with open(log, "ab") as stream:
        process = subprocess.Popen(list(command), stdout=stream, stderr=stream, env=env)
        peak = [0]
        watcher = threading.Thread(target=_watch, args=(process.pid, peak))
        watcher.start()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        seconds = time.monotonic() - started
        # Still a zombie: the kernel keeps its counters, those of its reaped children included.
        counters = dict(
            line.split(": ") for line in Path(f"/proc/{process.pid}/io").read_text(encoding="ascii").splitlines()
        )
        code = process.wait()
        watcher.join()
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with {code}: see {log}")
    return Measurement(
        seconds=seconds,
        bytes_read=int(counters["rchar"]),
        bytes_written=int(counters["wchar"]),
        peak_rss_bytes=peak[0],
    )


def _watch(pid: int, peak: list[int]) -> None:
    try:
        root = psutil.Process(pid)
        while root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
            total = 0
            for process in [root, *root.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.Error:
                    continue
            peak[0] = max(peak[0], total)
            time.sleep(_SAMPLE_SECONDS)
    except psutil.Error:
        return


def drop_from_cache(folder: Path) -> None:
    """Make the next reader of `folder` go to the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def warm(folder: Path) -> None:
    """Let the page cache hold all files of `folder`."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as stream:
                while stream.read(_BLOCK_BYTES):
                    pass


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
