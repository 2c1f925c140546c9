"""`python -m elastic_trainer.launch SCRIPT ARGUMENTS`: start this node's ranks.

The number of ranks is fixed, as in every attempt: there is no rendezvous, no restart and no membership change. The
launcher reads the variables that torchrun and Kubeflow use (PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK,
PET_MASTER_ADDR, PET_MASTER_PORT) and sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of each rank.
Unlike torchrun it does not import torch, ends all ranks as soon as one fails, and exits with the code of the first
failure.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from reshard.contract import TrainerExit

_OF_EVERY_RANK = (
    TrainerExit.DRAINED,
    TrainerExit.RESUME_INVALID,
    TrainerExit.NOT_OWNER,
    TrainerExit.UNPUBLISHED,
)
_INSIST_AFTER_SECONDS = 0.1
"""Time until a second SIGTERM, which no rank takes for a request to leave; sent at once, the two would be one."""

_KILL_AFTER_SECONDS = 5.0
_POLL_SECONDS = 0.05


def rank_environments(env: Mapping[str, str], *, num_local: int) -> list[dict[str, str]]:
    """Return the environment of each local rank."""
    num_nodes = int(env.get("PET_NNODES") or 1)
    node_rank = int(env.get("PET_NODE_RANK") or 0)
    common = {
        "WORLD_SIZE": str(num_nodes * num_local),
        "LOCAL_WORLD_SIZE": str(num_local),
        "MASTER_ADDR": env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR") or "127.0.0.1",
        "MASTER_PORT": env.get("PET_MASTER_PORT") or env.get("MASTER_PORT") or "29500",
    }
    return [
        {**env, **common, "RANK": str(node_rank * num_local + local), "LOCAL_RANK": str(local)}
        for local in range(num_local)
    ]


def supervise(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes, and end them after the first failure; return the first failure's exit code, else 0."""
    first_failure = 0
    insist_at = deadline = float("inf")
    while True:
        # Every process is polled every time, because only `poll` notices an exit and sets the exit code.
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), 0)
        if failed and not first_failure:
            now = time.monotonic()
            first_failure, deadline = failed, now + _KILL_AFTER_SECONDS
            # With these codes every rank exits by itself.
            if failed not in _OF_EVERY_RANK:
                _signal_all(processes, signal.SIGTERM)
                insist_at = now + _INSIST_AFTER_SECONDS
        if None not in codes:
            break
        if time.monotonic() > insist_at:
            _signal_all(processes, signal.SIGTERM)
            insist_at = float("inf")
        if time.monotonic() > deadline:
            _signal_all(processes, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return first_failure if first_failure >= 0 else 128 - first_failure


def _signal_all(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def main() -> int:
    """Start this node's ranks, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m elastic_trainer.launch", description=__doc__.splitlines()[0])
    default = int(os.environ.get("PET_NPROC_PER_NODE") or 1)
    parser.add_argument("--nproc", type=int, default=default, help="ranks on this node (default: PET_NPROC_PER_NODE)")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = [sys.executable, options.script, *options.arguments]
    processes: list[subprocess.Popen[bytes]] = []
    stopping = False

    def stop(_number: int, _frame: object) -> None:
        # The session of a rank decides: the first SIGTERM may ask for a commit, a second one ends the rank.
        nonlocal stopping
        stopping = True
        _signal_all(processes, signal.SIGTERM)

    # Set before anything else: the kernel ignores an unhandled SIGTERM for process 1 of a container.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    environments = rank_environments(os.environ, num_local=options.nproc)
    processes.extend(subprocess.Popen(command, env=environment) for environment in environments)
    if stopping:
        _signal_all(processes, signal.SIGTERM)
    return supervise(processes)


if __name__ == "__main__":
    sys.exit(main())
