"""Virtual mode on the cluster: the reshard Job moves no bytes, and real DeepSpeed goes on from where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.jobs import GPT, Run, committed, elastic, resumed

pytestmark = pytest.mark.cluster


def test_a_job_shrinks_without_its_checkpoint_being_copied(run: Run, checkpoints: Path) -> None:
    spec = elastic() | {"nodes": {"min": 2, "max": 2}, "reshard": {"mode": "Virtual"}}
    run.submit([*GPT, "--steps", "100000"], **spec)
    before = run.until("a commit on 2 nodes", committed, 240)
    # An edit drains first, so nothing is lost, and nothing else on the cluster is disturbed.
    run.patch(nodes={"min": 1, "max": 1})
    after = run.until("the next attempt", resumed(before["attempt"]), 240)
    assert after["topologyText"] != before["topologyText"]
    assert after["reshard"]["mode"] == "virtual"
    resume = after["current"]["resume"]
    folder = checkpoints / resume["uri"].removeprefix("/checkpoint/")
    assert json.loads((folder / "COMMIT.json").read_text())["format"] == "virtual"
    source = checkpoints / resume["source"].removeprefix("/checkpoint/")
    assert size(folder) < size(source) / 10
    assert after["progress"]["step"] >= resume["step"] > 0
    # What it commits now is whole again, and goes back to two nodes, where no node has all files.
    final = run.until(
        "a commit of its own", lambda status: committed(status) and status["checkpoint"]["step"] > resume["step"], 120
    )
    run.patch(nodes={"min": 2, "max": 2})
    grown = run.until("the attempt after it", resumed(final["attempt"]), 240)
    assert (grown["replicas"], grown["reshard"]["mode"]) == (2, "virtual")


def size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.iterdir())
