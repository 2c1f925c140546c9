"""A source in an object store: read by ranges, beside a download that is converted afterwards."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import checkpoints
from benchmarks.checkpoints import ENVIRONMENT, OUTPUT
from benchmarks.converting import RESHARD, TARGET
from benchmarks.measure import measure, size_of, warm
from tests.engine.s3_server import Server, program, serve

DOWNLOAD = "import sys, fsspec; fsspec.filesystem('s3').get(sys.argv[1], sys.argv[2], recursive=True)"


def objects(repeat: int) -> str:
    """ZeRO-3 from a real S3-compatible server on this machine."""
    if program() is None:
        return "Not measured: building the S3 server needs Go.\n"
    source = checkpoints.zero3()
    copy = OUTPUT / "downloaded"
    with tempfile.TemporaryDirectory(dir=OUTPUT) as folder, serve(Path(folder)) as server:
        bucket = server.root / "bucket"
        bucket.mkdir()
        shutil.copytree(source, bucket / "step", copy_function=os.link)
        warm(source)
        environment = {**ENVIRONMENT, **server.environment}
        convert = [RESHARD, "run", "s3://bucket/step", str(TARGET), "--to", "dp=3,zero=3", "--no-sync"]
        download = [sys.executable, "-c", DOWNLOAD, "s3://bucket/step", str(copy)]
        local = [RESHARD, "run", str(copy), str(TARGET), "--to", "dp=3,zero=3", "--no-sync"]
        lines = ["| command | wall s, median (all) | requests for data |", "|---|---|---|"]
        lines.append(_row("`reshard run s3://...`", [convert], environment, server, repeat))
        lines.append(_row("download, then `reshard run`", [download, local], environment, server, repeat))
    shutil.rmtree(copy, ignore_errors=True)
    shutil.rmtree(TARGET, ignore_errors=True)
    note = f"Checkpoint of {size_of(source) / 1e9:.1f} GB, 8 files, server on the same machine."
    return "\n".join([*lines, "", note, ""])


def _row(name: str, commands: list[list[str]], environment: dict[str, str], server: Server, repeat: int) -> str:
    runs = []
    before = len(server.gets())
    for _ in range(repeat):
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.rmtree(OUTPUT / "downloaded", ignore_errors=True)
        parts = [measure(command, env=environment, log=OUTPUT / "commands.log") for command in commands]
        runs.append(sum(part.seconds for part in parts))
    requests = (len(server.gets()) - before) // repeat
    each = ", ".join(f"{value:.1f}" for value in runs)
    return f"| {name} | {statistics.median(runs):.1f} ({each}) | {requests} |"
