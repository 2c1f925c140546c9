"""Whole conversions: ours, DeepSpeed's own converter at several settings, and a plain copy as the floor."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import checkpoints
from benchmarks.checkpoints import ENVIRONMENT, OUTPUT
from benchmarks.measure import Measurement, drop_from_cache, measure, size_of, warm
from benchmarks.table import HEAD, median, row

RESHARD = str(Path(sys.executable).with_name("reshard"))
TARGET = OUTPUT / "target"
UNIVERSAL_WORKERS = ((1, 1), (2, 2), (4, 2))


def zero1(repeat: int) -> str:
    """ZeRO-1: cut for tensor parallelism and another dp."""
    return _converting(checkpoints.zero1(), "tp=2,dp=3", [], repeat)


def zero1_large(repeat: int) -> str:
    """ZeRO-1 at four times the size, where the start of a program weighs less."""
    return _converting(checkpoints.zero1(layers=28), "tp=2,dp=3", [], repeat)


def zero3(repeat: int) -> str:
    """ZeRO-3: another dp."""
    return _converting(checkpoints.zero3(), "dp=3,zero=3", ["--inject_missing_state"], repeat)


def memory(repeat: int) -> str:
    """Memory and the size of the checkpoint: 1 GB beside 8 GB."""
    lines = [HEAD]
    for source in (checkpoints.dcp(4), checkpoints.large_dcp()):
        command = [RESHARD, "run", str(source), str(TARGET), "--to", "dp=3"]
        runs = [_run(command, source, cold=True) for _ in range(repeat)]
        lines.append(row(f"`reshard run`, DCP of {size_of(source) / 1e9:.1f} GB", runs, size_of(source)))
        copies = [_run(["cp", "-r", str(source), str(TARGET)], source, cold=True) for _ in range(repeat)]
        lines.append(row("`cp -r`", copies, size_of(source)))
    shutil.rmtree(TARGET, ignore_errors=True)
    return "\n".join(lines) + "\n"


def _converting(source: Path, to: str, universal_options: list[str], repeat: int) -> str:
    lines = []
    for cold in (False, True):
        name = "source dropped from the page cache" if cold else "source in the page cache"
        lines += [f"{size_of(source) / 1e9:.2f} GB, {name}:", "", HEAD]
        found: dict[str, float] = {}
        for label, command in _commands(source, to, universal_options):
            runs = [_run(command, source, cold=cold) for _ in range(repeat)]
            found[label] = median(runs)
            lines.append(row(label, runs, size_of(source)))
            sys.stdout.write(f"{lines[-1]}\n")
            sys.stdout.flush()
        universal = min(value for label, value in found.items() if label.startswith("`ds_to_universal`"))
        ours, unsynced, *_, copy, synced = found.values()
        ratios = (
            f"`ds_to_universal` at its best / ours without fsync, as it does: **{universal / unsynced:.1f}**; "
            f"/ ours with fsync: {universal / ours:.1f}. "
            f"`cp -r` / ours without fsync: {copy / unsynced:.2f}; `cp -r` with fsync / ours: {synced / ours:.2f}."
        )
        lines += ["", ratios, ""]
    shutil.rmtree(TARGET, ignore_errors=True)
    return "\n".join(lines)


def _commands(source: Path, to: str, universal_options: list[str]) -> list[tuple[str, list[str]]]:
    universal = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *universal_options]
    universal += ["--input_folder", str(source), "--output_folder", str(TARGET)]
    ours = [RESHARD, "run", str(source), str(TARGET), "--to", to]
    copy = ["cp", "-r", str(source), str(TARGET)]
    return [
        (f"`reshard run --to {to}`", ours),
        (f"`reshard run --to {to} --no-sync`", [*ours, "--no-sync"]),
        *(
            (
                f"`ds_to_universal`, {extract} extract / {merge} merge workers",
                [*universal, "--num_extract_workers", str(extract), "--num_merge_workers", str(merge)],
            )
            for extract, merge in UNIVERSAL_WORKERS
        ),
        ("`cp -r` (no conversion: the floor)", copy),
        ("`cp -r` and `sync`", ["sh", "-c", f"cp -r {source} {TARGET} && sync -f {TARGET}"]),
    ]


def _run(command: Sequence[str], source: Path, *, cold: bool) -> Measurement:
    """One run into an empty target, with nothing of an earlier run left to be written."""
    shutil.rmtree(TARGET, ignore_errors=True)
    subprocess.run(["sync"], check=True)
    if cold:
        drop_from_cache(source)
    else:
        warm(source)
    return measure(command, env=ENVIRONMENT, log=OUTPUT / "commands.log")
