"""DCP checkpoints at another number of ranks: bytes that are read."""

from __future__ import annotations

import json
import shutil

from benchmarks import checkpoints
from benchmarks.checkpoints import ENVIRONMENT, OUTPUT, torchrun
from benchmarks.converting import RESHARD, TARGET
from benchmarks.measure import drop_from_cache, measure, size_of, warm


def dcp(_repeat: int) -> str:
    """DCP's own resharding as it loads, beside a conversion by us and DCP's load of the result."""
    lines = [
        "| ranks | read by `dcp.load`, as it is | read by `reshard run` | read by `dcp.load` of its result |",
        "|---|---|---|---|",
    ]
    for before, after in ((4, 3), (1, 4)):
        source = checkpoints.dcp(before)
        warm(source)
        direct = _load(source, after)
        shutil.rmtree(TARGET, ignore_errors=True)
        drop_from_cache(source)  # ours maps it: what comes from the disk is counted
        command = [RESHARD, "run", str(source), str(TARGET), "--to", f"dp={after}", "--no-sync"]
        ours = measure(command, env=ENVIRONMENT, log=OUTPUT / "commands.log").bytes_read
        converted = _load(TARGET, after)
        total = size_of(source)
        lines.append(
            f"| {before} -> {after} | {direct / total:.2f} x | {ours / total:.2f} x | {converted / total:.2f} x |"
        )
    shutil.rmtree(TARGET, ignore_errors=True)
    return "\n".join([*lines, "", "Multiples of the checkpoint's bytes (1.2 GB), all ranks together.", ""])


def _load(folder: object, ranks: int) -> int:
    """Bytes that the ranks read together."""
    report = OUTPUT / "loaded.json"
    command = torchrun(ranks, "dcp_load", checkpoints.ROOT / str(folder), "--report", str(report))
    measure(command, env=ENVIRONMENT, log=OUTPUT / "commands.log")
    return int(json.loads(report.read_text(encoding="utf-8"))["bytes_read"])
