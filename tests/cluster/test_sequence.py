"""Sequence parallelism and ZeRO-3 on the cluster: two nodes share sequences, one alone does not, and losses go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.jobs import LAUNCH, Run, committed, elastic, resumed
from tests.engine import example_run
from tests.engine.example_run import losses

pytestmark = pytest.mark.cluster

FLAT = [*LAUNCH, "examples/gpt_deepspeed/train_flat.py", "--save-every", "5"]


@pytest.mark.soak_only
def test_a_job_leaves_sequence_parallelism_for_a_smaller_cluster_and_takes_it_up_again(
    run: Run, checkpoints: Path, tmp_path: Path
) -> None:
    # Four ranks cannot share 20 samples in micro batches of 2, but two pairs can.
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
    found = [losses(checkpoints / "gpt", attempt=now["attempt"]) for now in (before, alone, again)]
    last = max(found[2])
    example_run.run(tmp_path, "dp=1,zero=1", "--steps", str(last), script="train_flat.py")
    reference = losses(tmp_path)
    assert found[0] | found[1] | found[2] == pytest.approx(reference, rel=1e-5)
    assert reference[last] < reference[1] - 0.01  # what started anew would show
