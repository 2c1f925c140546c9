"""Measure the time for which a save stops the training: synchronous or not, by the session or by torch DCP."""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import ENVIRONMENT, OUTPUT, ROOT

SIZES = (0.1, 1.0, 5.0)
RANKS = 2
WAYS = {
    "session": "`session.save`, synchronous (`torch.save`)",
    "session-async": "`session.save`, asynchronous (`torch.save`)",
    "dcp": "torch `dcp.save`",
    "dcp-async": "torch `dcp.async_save`",
    "session-dcp-async": "`session.save`, asynchronous (`dcp.async_save`, as the FSDP2 stack does)",
}
_MEMORY = Path("/dev/shm")
_COPIES = 3
"""The state, what DCP copies of it, and the files on the node; the largest number of these at once."""


def stall(_repeat: int) -> str:
    """All ways at all sizes, two ranks on one node."""
    lines = [
        "| size | save | stall, first save | stall, later saves | step while it is written / quiet | written after |",
        "|---|---|---|---|---|---|",
    ]
    _check_memory(max(SIZES))
    before, *_ = os.getloadavg()
    for gigabytes in SIZES:
        for way, name in WAYS.items():
            found = _run(way, gigabytes)
            later = ", ".join(f"{seconds:.2f}" for seconds in found["stalls"][1:])
            quiet = statistics.median(found["quiet"])
            during = f"{statistics.mean(found['steps']):.2f} / {quiet:.2f} s" if found["steps"] else "none"
            lines.append(
                f"| {gigabytes:g} GB | {name} | {found['stalls'][0]:.2f} s | {later} s | {during} "
                f"| {statistics.median(found['durable']):.1f} s |"
            )
    load = f"Programs that wanted a processor before the measurement, on average over a minute: {before:.1f}."
    return "\n".join([*lines, "", load, ""])


def _run(way: str, gigabytes: float) -> dict[str, Any]:
    """Run one training, and return what rank 0 has seen."""
    root, report, log = OUTPUT / "stall", OUTPUT / "stall.json", OUTPUT / "stall.log"
    shutil.rmtree(root, ignore_errors=True)
    report.unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {
        **ENVIRONMENT,
        "MASTER_PORT": port,
        "ETJ_CHECKPOINT_ROOT": str(root),
        "ETJ_STAGING": str(_MEMORY),
        "ETJ_STAGING_BYTES": str(int(1.2e9 * gigabytes)),
    }
    script = [str(ROOT / "benchmarks/stall_rank.py"), way, str(gigabytes), str(root), str(report)]
    command = [sys.executable, "-m", "elastic_trainer.launch", "--nproc", str(RANKS), *script]
    with open(log, "ab") as stream:
        code = subprocess.run(command, env=env, stdout=stream, stderr=stream, check=False).returncode
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with {code}: see {log}")
    shutil.rmtree(root, ignore_errors=True)
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def _check_memory(gigabytes: float) -> None:
    """Refuse to start what the machine has no memory for.

    Raises:
        RuntimeError: there is too little free memory.
    """
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    if available < _COPIES * gigabytes * 1e9:
        raise RuntimeError(f"{gigabytes} GB need {_COPIES * gigabytes} GB of memory, {available / 1e9:.1f} are free")
