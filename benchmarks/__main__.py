"""`make bench`: reshard beside DeepSpeed's own converter, on the same real checkpoint of more than 1 GB."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Measurement, drop_from_cache, measure, size_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- table:begin -->\n", "<!-- table:end -->"
UNIVERSAL_WORKERS = ((1, 1), (2, 2), (4, 2))


def main() -> int:
    """Measure everything, print the table and put it into docs/benchmarks.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="leave the source in the page cache")
    options = parser.parse_args()
    output = ROOT / "benchmarks/output"
    output.mkdir(exist_ok=True)
    source = make_checkpoint(output)
    rows = [
        "| command | wall s, median (all) | read / checkpoint | written / checkpoint | peak memory |",
        "|---|---|---|---|---|",
    ]
    best: list[float] = []
    for name, command in commands(source, output):
        runs = [run(name, command, source, output, warm=options.warm) for _ in range(options.repeat)]
        best.append(statistics.median(item.seconds for item in runs))
        rows.append(row(name, runs, size_of(source)))
        sys.stdout.write(rows[-1] + "\n")
    fastest_universal = min(best[1:-1])
    rows.append("")
    rows.append(
        f"Wall time of `ds_to_universal` at its best setting / ours: **{fastest_universal / best[0]:.1f}**. "
        f"`cp -r` / ours: {best[-1] / best[0]:.2f}. "
        f"Checkpoint: {size_of(source) / 1e9:.2f} GB, {'warm' if options.warm else 'dropped from the page cache'}; "
        f"{os.cpu_count()} processors, {platform.platform()}."
    )
    text = "\n".join(rows) + "\n"
    sys.stdout.write("\n" + text)
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    PAGE.write_text(head + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")
    return 0


def make_checkpoint(output: Path) -> Path:
    """A real DeepSpeed ZeRO-1 checkpoint of more than 1 GB, made once: 71 million parameters, dp=2."""
    folder = output / "source"
    found = sorted(folder.glob("a1/step-*/COMMIT.json"))
    if found:
        return found[0].parent
    sys.stdout.write("training one step of the large example, for a checkpoint of more than 1 GB\n")
    environment = {
        **os.environ,
        "ETJ_TOPOLOGY": "tp=1,pp=1,dp=2,zero=1",
        "ETJ_CHECKPOINT_ROOT": str(folder),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = str(ROOT / "examples/gpt_deepspeed/train.py")
    command = [sys.executable, "-m", "elastic_trainer.launch", "--nproc", "2", script, "--big", "--steps", "1"]
    with open(output / "train.log", "wb") as log:
        subprocess.run(
            [*command, "--global-batch", "4", "--micro-batch", "1"], env=environment, stdout=log, stderr=log, check=True
        )
    return next(folder.glob("a1/step-*"))


def commands(source: Path, output: Path) -> list[tuple[str, list[str]]]:
    """Ours first, then DeepSpeed's at several settings, then a plain copy as the floor."""
    target = str(output / "target")
    reshard = str(Path(sys.executable).with_name("reshard"))
    universal = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    universal += ["--input_folder", str(source), "--output_folder", target]
    return [
        ("`reshard run --to tp=2,dp=3`", [reshard, "run", str(source), target, "--to", "tp=2,pp=1,dp=3,zero=1"]),
        *(
            (
                f"`ds_to_universal`, {extract} extract / {merge} merge workers",
                [*universal, "--num_extract_workers", str(extract), "--num_merge_workers", str(merge)],
            )
            for extract, merge in UNIVERSAL_WORKERS
        ),
        ("`cp -r` (no conversion: the floor)", ["cp", "-r", str(source), target]),
    ]


def run(name: str, command: Sequence[str], source: Path, output: Path, *, warm: bool) -> Measurement:
    """One run into an empty target."""
    shutil.rmtree(output / "target", ignore_errors=True)
    if not warm:
        drop_from_cache(source)
    sys.stdout.write(f"  {name}\n")
    sys.stdout.flush()
    return measure(command, env={**os.environ, "DS_ACCELERATOR": "cpu"}, log=output / "commands.log")


def row(name: str, runs: Sequence[Measurement], checkpoint_bytes: int) -> str:
    """A line of the table."""
    seconds = [item.seconds for item in runs]
    last = runs[-1]
    return (
        f"| {name} | {statistics.median(seconds):.1f} ({', '.join(f'{value:.1f}' for value in seconds)}) "
        f"| {last.bytes_read / checkpoint_bytes:.2f} | {last.bytes_written / checkpoint_bytes:.2f} "
        f"| {max(item.peak_rss_bytes for item in runs) / 2**20:.0f} MiB |"
    )


if __name__ == "__main__":
    sys.exit(main())
