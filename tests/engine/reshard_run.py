"""Start the ranks of a real DeepSpeed run and collect their losses. Helper of the reshard tests."""

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reshard.topology import Topology

_LIMIT_SECONDS = 500
_RANK = Path(__file__).with_name("reshard_rank.py")


def launch(runs: list[dict], script: Path = _RANK) -> dict[str, list[float]]:
    """Run `runs`, all of one world size, one after the other in one set of processes; losses by name."""
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        results = Path(scratch) / "results.jsonl"
        task = {"runs": runs, "results": str(results)}
        (world,) = {Topology.parse(run["topology"]).world_size for run in runs}
        logs = [open(Path(scratch) / f"rank{rank}.log", "wb") for rank in range(world)]  # noqa: SIM115
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), json.dumps(task)],
                env=_environment(rank, world, port),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            codes = _wait(ranks)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            for log in logs:
                log.close()
        if any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            tail = (Path(scratch) / f"rank{failed}.log").read_text(errors="replace")[-6000:]
            raise AssertionError(f"rank {failed} of {world} ended with {codes[failed]}\n{tail}")
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["name"]: line["losses"] for line in lines}


def launch_all(runs: list[dict], script: Path = _RANK) -> dict[str, list[float]]:
    """One set of processes per world size and kind of model: a PipelineModule leaves global state behind."""

    def key(run: dict) -> tuple[str, int]:
        return run["model"], Topology.parse(run["topology"]).world_size

    losses: dict[str, list[float]] = {}
    for _, group in itertools.groupby(sorted(runs, key=key), key=key):
        losses |= launch(list(group), script)
    return losses


def folder_of(root: Path, name: str) -> Path:
    """Where a case keeps its second step."""
    return root / name.replace("/", "-") / "step-00000002"


def save_all(root: Path, cases: dict[str, dict], script: Path = _RANK) -> dict[str, list[float]]:
    """Five steps of every case, saved after the second into its `folder_of`."""
    fixed = {"steps": 5, "save_at": 2}
    runs = [{"name": name, **case, **fixed, "save": str(folder_of(root, name))} for name, case in cases.items()]
    return launch_all(runs, script)


def _wait(ranks: list[subprocess.Popen]) -> list[int | None]:
    """Exit codes, as soon as all ranks have ended or one has failed: the others would wait for it for ever."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if any(codes) or None not in codes:
            return codes
        time.sleep(0.05)
    raise TimeoutError(f"{len(ranks)} ranks have not ended in {_LIMIT_SECONDS} s")


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "TORCH_EXTENSIONS_DIR": os.environ.get(
            "TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "elastic-training-operator" / "torch_extensions")
        ),
    }
