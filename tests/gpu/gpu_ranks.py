"""Run the ranks of the engine tier on a GPU, each in a process of its own: CUDA does not outlive a fork."""

import subprocess
import sys
from pathlib import Path

from tests.engine.rank_client import common_environment

GPU = {"DS_ACCELERATOR": "cuda"}


def run_on_gpu(script: Path, arguments: list[str], own: list[dict[str, str]], logs: list[Path], limit: float) -> None:
    """Run one process for each of `own`, which is added to the environment, all on the first GPU.

    One rank uses NCCL (RCCL). It refuses two ranks on one GPU, so several use gloo.

    Raises:
        AssertionError: a process has failed.
        subprocess.TimeoutExpired: after `limit` seconds.
    """
    backend = {"RANK_BACKEND": "nccl" if len(own) == 1 else "gloo", "LOCAL_RANK": "0"}
    processes = []
    try:
        for environment, log in zip(own, logs, strict=True):
            with open(log, "w") as stream:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(script), *arguments],
                        env=common_environment() | environment | GPU | backend,
                        stdout=stream,
                        stderr=stream,
                    )
                )
        codes = [process.wait(timeout=limit) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, code in enumerate(codes):
        assert code == 0, f"{script.name}: rank {rank} ended with {code}\n{logs[rank].read_text()[-6000:]}"
