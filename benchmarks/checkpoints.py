"""Real checkpoints of more than 1 GB to measure with, made once and kept in benchmarks/output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "benchmarks/output"
TRAIN = str(ROOT / "benchmarks/train.py")
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"},
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPYCACHEPREFIX": str(OUTPUT / "bytecode"),  # everybody's modules are compiled, as after an installation
}


def zero1(layers: int = 6) -> Path:
    """DeepSpeed ZeRO-1 of the example GPT: 71 million parameters in 6 layers, dp=2, layer files of a PipelineModule."""
    folder = OUTPUT / ("zero1" if layers == 6 else f"zero1-{layers}-layers")
    found = sorted(folder.glob("a1/step-*/COMMIT.json"))
    if found:
        return found[0].parent
    environment = {**ENVIRONMENT, "ETJ_TOPOLOGY": "tp=1,pp=1,dp=2,zero=1", "ETJ_CHECKPOINT_ROOT": str(folder)}
    script = str(ROOT / "examples/gpt_deepspeed/train.py")
    command = [sys.executable, "-m", "elastic_trainer.launch", "--nproc", "2", script, "--big", "--steps", "1"]
    _run([*command, "--layers", str(layers), "--global-batch", "4", "--micro-batch", "1"], environment, folder)
    return next(folder.glob("a1/step-*"))


def zero3() -> Path:
    """DeepSpeed ZeRO-3, 100 million parameters, dp=4."""
    return _saved("zero3", "deepspeed_save", ranks=4, options=["--stage", "3"])


def dcp(ranks: int) -> Path:
    """DCP of FSDP2, 100 million parameters."""
    return _saved(f"dcp-{ranks}", "dcp_save", ranks=ranks, options=[])


def large_dcp() -> Path:
    """DCP of 8.4 GB, of one rank."""
    return _saved("dcp-large", "dcp_save", ranks=1, options=["--parameters", "700e6"])


def torchrun(ranks: int, action: str, folder: Path, *options: str) -> list[str]:
    """Command that runs `benchmarks/train.py` in several processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, TRAIN, action, str(folder), *options]


def _saved(name: str, action: str, *, ranks: int, options: list[str]) -> Path:
    folder = OUTPUT / name
    step, done = folder / "step-00000001", folder / "done"
    if not done.exists():
        _run(torchrun(ranks, action, folder, *options), ENVIRONMENT, folder)
        done.touch()
    return step


def _run(command: list[str], environment: dict[str, str], folder: Path) -> None:
    sys.stdout.write(f"training one step, for a checkpoint of more than 1 GB in {folder.relative_to(ROOT)}\n")
    sys.stdout.flush()
    folder.mkdir(parents=True, exist_ok=True)
    with open(OUTPUT / "train.log", "ab") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
