"""Start the ranks of a real DeepSpeed run and collect their losses. Helper of the reshard tests."""

import itertools
import json
import re
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from reshard.api import reshard
from reshard.topology import Topology
from tests.engine.rank_client import run_script

_LIMIT_SECONDS = 500
_OF_THE_RUN_ALONE = {"name", "steps", "save_at", "save", "load", "spoil"}
_RANK = Path(__file__).with_name("reshard_rank.py")

Start = Callable[[Path, list[str], list[dict[str, str]], list[Path], float], None]
"""Runs a script in several processes, as `run_script` does."""


def launch(runs: list[dict], script: Path = _RANK, start: Start = run_script) -> dict[str, list[float]]:
    """Run `runs`, all of one world size, one after the other in one set of processes; losses by name."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.jsonl"
        task = {"runs": runs, "results": str(results)}
        (world,) = {Topology.parse(run["topology"]).world_size for run in runs}
        port = _free_port()
        own = [_environment(rank, world, port) for rank in range(world)]
        logs = [Path(scratch) / f"rank{rank}.log" for rank in range(world)]
        start(script, [json.dumps(task)], own, logs, _LIMIT_SECONDS)
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["name"]: line["losses"] for line in lines}


def launch_all(runs: list[dict], script: Path = _RANK) -> dict[str, list[float]]:
    """One set of processes per world size, kind of model and cp: a pipeline and an mpu leave global state behind.

    So do pipelines with experts, whose groups of ranks have names that do not depend on pp.

    Runs that differ only in what they load, save and are called follow each other: they share an engine.
    """

    def key(run: dict) -> tuple[str, int, int, int]:
        topology = Topology.parse(run["topology"])
        return run["model"], topology.world_size, topology.cp, topology.pp if run["model"] == "moe-pipeline" else 0

    def engine(run: dict) -> str:
        return json.dumps({name: value for name, value in run.items() if name not in _OF_THE_RUN_ALONE}, sort_keys=True)

    losses: dict[str, list[float]] = {}
    for _, group in itertools.groupby(sorted(runs, key=key), key=key):
        losses |= launch(sorted(group, key=engine), script)
    return losses


def folder_of(root: Path, name: str) -> Path:
    """Return the folder of a case's second step."""
    return root / re.sub("[^a-z0-9]+", "-", name) / "step-00000002"


def save_all(root: Path, cases: dict[str, dict], script: Path = _RANK) -> dict[str, list[float]]:
    """Five steps of every case, saved after the second into its `folder_of`."""
    fixed = {"steps": 5, "save_at": 2}
    runs = [{"name": name, **case, **fixed, "save": str(folder_of(root, name))} for name, case in cases.items()]
    return launch_all(runs, script)


def goes_on(root: Path, source: str, out: Path, run: dict) -> dict:
    """Three more steps of `run` from the case `source` of `save_all`, converted into the topology of `run`."""
    folder = folder_of(out, run["name"])
    reshard(folder_of(root, source), folder, Topology.parse(run["topology"]))
    return {**run, "steps": 3, "load": str(folder)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
