"""The claims of many workers that share one conversion, without moving any byte: time and file operations."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

from benchmarks.checkpoints import ENVIRONMENT, OUTPUT

UNITS = 177_000
"""Units of a checkpoint of about 11 TB."""

WORKER = """
import json, os, sys, time
from pathlib import Path
from reshard.execution.journal import Journal
folder, units, worker, workers = Path(sys.argv[1]), *map(int, sys.argv[2:])
tries = 0
create = os.open
def counted(*arguments, **options):
    global tries
    tries += 1
    return create(*arguments, **options)
os.open = counted
journal = Journal(folder)
sys.stdin.readline()
claimed = 0
for unit in journal.share(units, worker, workers):
    if unit is None:
        break
    claimed += 1
print(json.dumps({"claimed": claimed, "tries": tries, "seconds": time.process_time()}))
"""


def claims(_repeat: int) -> str:
    """1 and 64 workers claim all units."""
    lines = [
        "| workers | wall s | processor s of all workers | tries to create a claim | a worker that tries all units |",
        "|---|---|---|---|---|",
    ]
    for num_workers in (1, 64):
        wall, reports = _run(num_workers)
        tries, seconds = sum(item["tries"] for item in reports), sum(item["seconds"] for item in reports)
        claimed = sum(item["claimed"] for item in reports)
        if claimed != UNITS:
            raise RuntimeError(f"{claimed} units were claimed, expected {UNITS}")
        lines.append(f"| {num_workers} | {wall:.1f} | {seconds:.1f} | {tries:,} | {UNITS * num_workers:,} |")
    return "\n".join([*lines, "", f"{UNITS:,} units, as of a checkpoint of 11 TB.", ""])


def _run(num_workers: int) -> tuple[float, list[dict[str, float]]]:
    folder = OUTPUT / "claims"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder), str(UNITS), str(worker), str(num_workers)],
            env=ENVIRONMENT,
            stdin=pipe,
            stdout=pipe,
            text=True,
        )
        for worker in range(num_workers)
    ]
    started = time.monotonic()
    reports = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.close()
    for process in processes:
        assert process.stdout is not None
        reports.append(json.loads(process.stdout.read()))
        process.wait()
    elapsed = time.monotonic() - started
    shutil.rmtree(folder)
    return elapsed, reports
