"""One conversion by several processes, on storage that gives each of them a limited rate, as object stores do."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

from benchmarks import checkpoints
from benchmarks.checkpoints import ENVIRONMENT
from benchmarks.converting import TARGET
from benchmarks.measure import size_of, warm

RATE = 100e6
WORKER = """
import sys
from pathlib import Path
from reshard import api
from reshard.commits.staging import Sharing
from reshard.topology import Topology
source, target, worker, count, rate = sys.argv[1:]
wanted = api.Conversion(source=Path(source), target=Path(target), topology=Topology.parse("dp=3,zero=3"))
share = (int(worker), int(count))
api.convert(wanted, api.RunOptions(sharing=Sharing.TOGETHER, worker=share, bytes_per_second=float(rate), sync=False))
"""


def workers(_repeat: int) -> str:
    """1, 2 and 4 workers of the same rate, then 4 of which one has a tenth of it."""
    source = checkpoints.zero3()
    warm(source)
    lines = ["| workers | wall s | speed-up |", "|---|---|---|"]
    first = 0.0
    for name, rates in (
        ("1", [RATE]),
        ("2", [RATE] * 2),
        ("4", [RATE] * 4),
        ("4, one of them ten times as slow", [RATE / 10, *[RATE] * 3]),
    ):
        shutil.rmtree(TARGET, ignore_errors=True)
        started = time.monotonic()
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(source), str(TARGET), str(number), str(len(rates)), str(rate)],
                env=ENVIRONMENT,
            )
            for number, rate in enumerate(rates)
        ]
        while not TARGET.exists():
            if all(process.poll() is not None for process in processes):
                raise RuntimeError("all workers have ended without a result")
            time.sleep(0.01)
        elapsed = time.monotonic() - started
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"workers ended with {codes}")
        first = first or elapsed
        lines.append(f"| {name} | {elapsed:.1f} | {first / elapsed:.2f} |")
    shutil.rmtree(TARGET, ignore_errors=True)
    size = f"ZeRO-3 checkpoint of {size_of(source) / 1e9:.1f} GB, {RATE / 1e6:.0f} MB/s for each worker."
    return "\n".join([*lines, "", size, ""])
