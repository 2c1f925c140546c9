"""Sequence parallelism and ZeRO-3 on the cluster: two nodes share sequences, one alone does not, and losses go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.jobs import Run, committed, elastic, resumed

pytestmark = pytest.mark.cluster

FLAT = ["python", "-m", "elastic_trainer.launch", "examples/gpt_deepspeed/train_flat.py", "--save-every", "5"]


def test_a_job_leaves_sequence_parallelism_for_a_smaller_cluster_and_takes_it_up_again(
    run: Run, checkpoints: Path
) -> None:
    # Four ranks would have a fifth of 20 samples each in micro batches of 2, but for pairs that share a sample.
    spec = elastic() | {"nodes": {"min": 2, "max": 2}, "parallelism": {"context": [1, 2], "zeroStage": 3}}
    run.submit([*FLAT, "--steps", "100000"], **spec)
    before = run.until("a commit on 2 nodes", committed, 240)
    assert (before["topology"]["dp"], before["topology"]["cp"], before["topology"]["zero"]) == (4, 2, 3)
    run.patch(nodes={"min": 1, "max": 1})
    alone = run.until("the next attempt", resumed(before["attempt"]), 240)
    assert (alone["topology"]["dp"], alone["topology"]["cp"], alone["topology"]["zero"]) == (2, 1, 3)
    step = alone["current"]["resume"]["step"]
    assert step > 0
    final = run.until("a commit of its own", lambda now: committed(now) and now["checkpoint"]["step"] > step, 120)
    run.patch(nodes={"min": 2, "max": 2})
    again = run.until("the attempt after it", resumed(final["attempt"]), 240)
    assert (again["topology"]["dp"], again["topology"]["cp"]) == (4, 2)
    assert went_on(checkpoints, before["attempt"], alone["attempt"])
    assert went_on(checkpoints, alone["attempt"], again["attempt"])


def losses(checkpoints: Path, attempt: int) -> list[float]:
    lines = (checkpoints / "gpt" / f"loss-a{attempt}.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def went_on(checkpoints: Path, earlier: int, later: int) -> bool:
    """The first loss of an attempt is nearer to the last ones before it than to that of untrained weights, ln 257."""
    before = losses(checkpoints, earlier)[-5:]
    return losses(checkpoints, later)[0] < sum(before) / len(before) + 0.5 < 5.549
