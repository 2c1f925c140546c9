"""The number of workers that a run chooses by its measurements, beside fixed numbers, on storage of several kinds."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import checkpoints
from benchmarks.checkpoints import ENVIRONMENT, OUTPUT
from benchmarks.measure import size_of, warm
from reshard.system.limits import default_num_threads

TARGET = OUTPUT / "steered"
FIXED = sorted({1, 2, 4, default_num_threads()})
COMMAND = """
import multiprocessing, os, sys, time
from reshard.storage import files
latency, spindle_rate, seek = (float(word) for word in sys.argv[1:4])
lock, last = multiprocessing.Lock(), multiprocessing.Value("q", 0)
def serve(num_bytes):
    if latency:
        time.sleep(latency)
    if spindle_rate:
        with lock:
            moved = last.value != os.getpid()
            last.value = os.getpid()
            time.sleep(num_bytes / spindle_rate + seek * moved)
def slow(call, count):
    def served(*values):
        serve(count(values))
        return call(*values)
    return served
if latency or spindle_rate:
    os.pwrite = slow(os.pwrite, lambda values: len(values[1]))
    os.preadv = slow(os.preadv, lambda values: len(values[1][0]))
    files.LocalFile.is_cached = lambda *_: False
from reshard.cli.main import main
sys.exit(main(sys.argv[4:]))
"""
"""The command with a double of slow storage at its system calls: a time that each call takes, and a spindle that all
processes share, which needs a time to turn from one process to another."""


class Storage(NamedTuple):
    """A kind of storage: its name, seconds of each call, bytes per second of a spindle, seconds of a seek."""

    name: str
    latency: float = 0.0
    spindle_rate: float = 0.0
    seek: float = 0.0
    quota: float = 0.0


STORAGES = (
    Storage("page cache"),
    Storage("page cache, quota of 1 processor", quota=1.0),
    Storage("page cache, quota of half a processor", quota=0.5),
    Storage("8 ms for each call", latency=0.008),
    Storage("spindle: 400 MB/s, 2 ms to turn to another process", spindle_rate=400e6, seek=0.002),
)


def steering(repeat: int) -> str:
    """Fixed numbers of workers and the adaptive one, in turn on the same files."""
    source = checkpoints.zero1()
    warm(source)
    threads = " | ".join(f"`--threads {number}`" for number in FIXED)
    lines = [
        f"{size_of(source) / 1e9:.2f} GB, wall seconds, median (all):",
        "",
        f"| storage | {threads} | chosen | its numbers | default before / chosen | best fixed / chosen |",
        "|---|" + "---|" * (len(FIXED) + 4),
    ]
    for storage in STORAGES:
        seconds: dict[int, list[float]] = {number: [] for number in (*FIXED, 0)}
        workers: list[str] = []
        for _ in range(repeat):
            for number, own in seconds.items():
                value = _run(storage, source, number)
                own.append(value["seconds"])
                if not number:
                    workers.append(" ".join(str(item["workers"]) for item in value["profile"]["decisions"]))
        medians = {number: statistics.median(own) for number, own in seconds.items()}
        best = min(medians[number] for number in FIXED)
        before = medians[int(workers[0].split()[0])]
        cells = [f"{medians[number]:.2f} ({', '.join(f'{one:.2f}' for one in own)})" for number, own in seconds.items()]
        ratios = f"{before / medians[0]:.2f} | {best / medians[0]:.2f}"
        lines.append(f"| {storage.name} | {' | '.join(cells)} | {', '.join(workers)} | {ratios} |")
        sys.stdout.write(f"{lines[-1]}\n")
        sys.stdout.flush()
    shutil.rmtree(TARGET, ignore_errors=True)
    return "\n".join(lines) + "\n"


def _run(storage: Storage, source: Path, number: int) -> dict[str, Any]:
    """Convert once and return the JSON; `number` is 0 for the number that the run chooses."""
    shutil.rmtree(TARGET, ignore_errors=True)
    words = ["run", str(source), str(TARGET), "--to", "tp=2,dp=3", "--threads", str(number), "--no-sync", "--profile"]
    numbers = [str(item) for item in (storage.latency, storage.spindle_rate, storage.seek)]
    command = [sys.executable, "-c", COMMAND, *numbers, *words, "--quiet", "--json"]
    with _quota(storage.quota) as enter:
        process = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True, preexec_fn=enter)
    value: dict[str, Any] = json.loads(process.stdout)
    return value


@contextlib.contextmanager
def _quota(processors: float) -> Iterator[Any]:
    """Make a control group that may use so many processors; yields what puts a new process into it."""
    if not processors:
        yield None
        return
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup" if unified else "/sys/fs/cgroup/cpu") / f"reshard-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        period = 100_000
        if unified:
            (group / "cpu.max").write_text(f"{int(processors * period)} {period}", encoding="ascii")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period), encoding="ascii")
            (group / "cpu.cfs_quota_us").write_text(str(int(processors * period)), encoding="ascii")
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    finally:
        group.rmdir()
