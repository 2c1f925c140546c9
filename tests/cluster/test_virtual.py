"""Virtual mode on the cluster: the reshard Job moves no bytes, and real DeepSpeed goes on from where they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import GPT, GPT_AT_FULL_SPEED, Run, committed, elastic, resumed

pytestmark = pytest.mark.cluster


@pytest.mark.soak_only  # the engine tier resumes from virtual commits
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


@pytest.mark.soak_only
def test_auto_moves_no_bytes_where_that_saves_seconds(run: Run, checkpoints: Path) -> None:
    # 94 million parameters: checkpoints of 1.5 GB, which take seconds to write and to read again.
    spec = elastic() | {"nodes": {"min": 2, "max": 2}, "reshard": {"mode": "Auto"}}
    run.submit([*GPT_AT_FULL_SPEED, "--big", "--layers", "8", "--steps", "100000"], **spec)
    before = run.until("a step on 2 nodes", made_steps, 300)
    run.patch(nodes={"min": 1, "max": 1})
    after = run.until("the next attempt", resumed(before["attempt"]), 300)
    assert after["topologyText"] != before["topologyText"]
    assert after["reshard"]["mode"] == "virtual"
    assert "to load virtually" in after["reshard"]["modeReason"]
    resume = after["current"]["resume"]
    folder, source = (checkpoints / resume[key].removeprefix("/checkpoint/") for key in ("uri", "source"))
    assert size(source) > 1.4e9
    assert size(folder) < 1e6
    # The training goes on from there, where it was.
    later = run.until("a step of it", lambda status: went_on(status, after), 120)
    assert later["attempt"] == after["attempt"]


def went_on(status: dict[str, Any], since: dict[str, Any]) -> bool:
    """It has made a step after the one that it resumed from."""
    step = since["current"]["resume"]["step"]
    return step > 0 and status.get("phase") == "Running" and status.get("progress", {}).get("step", 0) > step


def made_steps(status: dict[str, Any]) -> bool:
    return status.get("phase") == "Running" and status.get("progress", {}).get("step", 0) > 0


def size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.iterdir())
