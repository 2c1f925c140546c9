"""Planning for thousands of ranks: a GPT of up to a trillion parameters whose files have their metadata and no payload.

The files are laid out by our own writer from a tiny real checkpoint, with the shapes of a large model, and written
sparse: `reshard plan` reads them as it reads any others.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.checkpoints import ENVIRONMENT, OUTPUT
from benchmarks.scale_zero1 import HIDDEN, SHAPES, VOCABULARY, layout_zero1
from benchmarks.scale_zero3 import layout_zero3
from reshard.tensors.layout import TargetLayout
from reshard.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model and the conversion of its checkpoint."""

    layers: int
    before: str
    after: str


ZERO1 = (
    Case(8, "tp=8,pp=4,dp=32", "tp=8,pp=2,dp=64"),
    Case(32, "tp=8,pp=16,dp=32", "tp=8,pp=8,dp=64"),
    Case(128, "tp=8,pp=64,dp=32", "tp=8,pp=32,dp=64"),
)
ZERO3 = (
    Case(8, "dp=1024,zero=3", "dp=768,zero=3"),
    Case(32, "dp=4096,zero=3", "dp=3072,zero=3"),
    Case(128, "dp=16384,zero=3", "dp=12288,zero=3"),
)
MEASURE = """
import json, sys, time
from pathlib import Path
from reshard import api
from reshard.planning.check import check_plan
from reshard.formats import format_of
from reshard.formats.base import Request
from reshard.planning.plan import make_plan
from reshard.topology import Topology
marks = [time.monotonic()]
index = api.index_of(Path(sys.argv[1])); marks.append(time.monotonic())
request = Request(topology=Topology.parse(sys.argv[2]))
layout = format_of(index.format).layout(index, request); marks.append(time.monotonic())
plan = make_plan(index, layout, agreement=True); marks.append(time.monotonic())
check_plan(plan); marks.append(time.monotonic())
processor = time.process_time()
status = Path("/proc/self/status").read_text()
peak = int(status.partition("VmHWM:")[2].split()[0])
boxes = [int(index.shards.num_boxes.sum()), int(layout.shards.num_boxes.sum())]
seconds = [b - a for a, b in zip(marks, marks[1:])]
print(json.dumps({"seconds": seconds, "processor": processor, "peak_kib": peak, "boxes": boxes}))
"""


def scale(_repeat: int) -> str:
    """1,024, 4,096 and 16,384 ranks of ZeRO-1 and of ZeRO-3, the model growing alike."""
    columns = ("ZeRO", "ranks", "parameters", "files", "boxes read + written", "index s", "layout s", "plan s", "all s")
    lines = [f"| {' | '.join((*columns, 'processor s', 'memory'))} |", "|---" * 11 + "|"]
    for stage, lay_out, cases in ((1, layout_zero1, ZERO1), (3, layout_zero3, ZERO3)):
        for case in cases:
            lines.append(_measure(stage, lay_out, case))
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()
    largest = [cases[-1] for cases in (ZERO1, ZERO3)]
    told = (
        f"ZeRO-1: half the pipeline and twice the data parallelism; last: {largest[0].before} to {largest[0].after}."
        f" ZeRO-3: three quarters of the ranks; last: {largest[1].before} to {largest[1].after}."
    )
    return "\n".join([*lines, "", told, ""])


def _measure(stage: int, lay_out: Callable[[int, Topology], TargetLayout], case: Case) -> str:
    """A line of the table."""
    folder = OUTPUT / "scale"
    shutil.rmtree(folder, ignore_errors=True)
    topology = Topology.parse(case.before)
    num_files = write_sparse(folder, lay_out(case.layers, topology))
    command = [sys.executable, "-c", MEASURE, str(folder), case.after]
    found = json.loads(subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True).stdout)
    shutil.rmtree(folder)
    index, lay_out_, *rest = found["seconds"]
    seconds = " | ".join(f"{value:.1f}" for value in (index, lay_out_, sum(rest), sum(found["seconds"])))
    parameters = sum(math.prod(shape) for shape in SHAPES.values()) * case.layers + VOCABULARY * HIDDEN
    return (
        f"| {stage} | {topology.world_size} | {parameters / 1e9:.0f} billion | {num_files} | {found['boxes'][0]:,} +"
        f" {found['boxes'][1]:,} | {seconds}"
        f" | {found['processor']:.1f} | {found['peak_kib'] / 2**20:.2f} GiB |"
    )


def write_sparse(folder: Path, layout: TargetLayout) -> int:
    """Write files with all metadata and holes for payloads; returns how many."""
    folder.mkdir(parents=True)
    for file in layout.files:
        descriptor = os.open(folder / file.path, os.O_CREAT | os.O_WRONLY)
        os.ftruncate(descriptor, file.num_bytes)
        for position, content in file.fixed:
            os.pwrite(descriptor, content, position)
        os.close(descriptor)
    return len(layout.files)
