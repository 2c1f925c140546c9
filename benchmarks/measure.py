"""Run a command and account for it: time, bytes by the kernel's own count, memory of the whole process tree."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_SAMPLE_SECONDS = 0.02
_BLOCK_BYTES = 4 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of one command.

    Attributes:
        seconds: wall time, start of the interpreter included.
        bytes_read: by the process and its children, in calls (/proc/PID/io, rchar) or from the disk (read_bytes),
            whichever is more: of files that are mapped the kernel counts only the latter.
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
        bytes_read=max(int(counters["rchar"]), int(counters["read_bytes"])),
        bytes_written=int(counters["wchar"]),
        peak_rss_bytes=peak[0],
    )


def _watch(pid: int, peak: list[int]) -> None:
    """Sample until the process ends. Reads only what the kernel lists of this tree: whoever walks through all processes
    takes a good part of a processor from what is measured."""
    while (total := sum(_resident_bytes(member) for member in _tree(pid))) > 0:
        peak[0] = max(peak[0], total)
        time.sleep(_SAMPLE_SECONDS)


def _tree(pid: int) -> Iterator[int]:
    """A process and all its descendants (proc_pid_task_tid_children(5))."""
    yield pid
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text(encoding="ascii").split():
                yield from _tree(int(child))
    except OSError:  # it has just ended
        return


def _resident_bytes(pid: int) -> int:
    """0 of a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


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
