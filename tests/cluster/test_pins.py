"""A pinned commit outlives newer ones on a real cluster, so that an evaluation can read it while training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.api import Conversion, RunOptions, convert
from reshard.commits.commit import check_files, read_commit
from reshard.topology import Topology
from tests.cluster.jobs import GPT, Run, committed

pytestmark = pytest.mark.cluster


@pytest.mark.soak_only  # the protocol search explores pins
def test_a_pinned_commit_is_read_while_training_goes_on_and_removed_when_the_pin_is(
    run: Run, checkpoints: Path, tmp_path: Path
) -> None:
    run.submit([*GPT, "--steps", "100000"], accelerator={"resource": "amd.com/gpu", "perNode": [1]})
    uri = str(run.until("a commit", committed, 240)["checkpoint"]["history"][-1]["uri"])
    pinned = checkpoints / uri.removeprefix("/checkpoint/")
    neighbour = pinned.with_name(f"step-{read_commit(pinned).step + 5:08d}")
    run.patch(checkpoint={"pinned": ["/".join(uri.split("/")[-2:])]})
    run.cluster.wait(lambda: run.condition("CommitsReleased").get("reason") == "Pinned", what="newer commits")
    run.cluster.wait(lambda: not neighbour.exists(), what="the removal of the commit after it")
    attempt = run.status()["attempt"]

    check_files(pinned, read_commit(pinned), crc=True)
    evaluated = Conversion(
        source=pinned, target=tmp_path / "weights", topology=Topology(), target_format="safetensors", states=("weight",)
    )
    assert convert(evaluated, RunOptions(reread=True)).verified

    run.patch(checkpoint={"pinned": []})
    run.cluster.wait(lambda: not pinned.exists(), what="the removal of the pinned commit")
    run.cluster.wait(lambda: run.condition("CommitsReleased").get("status") == "True", what="the end of the condition")
    assert run.status()["attempt"] == attempt, "a pin restarts nothing"
