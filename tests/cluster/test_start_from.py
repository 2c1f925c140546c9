"""A new job goes on from checkpoints that were there before it, with real DeepSpeed on a real cluster."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import GPT, Run, elastic
from tests.golden.files import edit, patterns

pytestmark = pytest.mark.cluster

ONE_NODE = {"nodes": {"min": 1, "max": 1}}
TWO_NODES = {"nodes": {"min": 2, "max": 2}}
TWO_WAYS = {"parallelism": {"tensor": [2], "pipeline": [1]}}
"""Tensors have to be cut, so it has to be known how."""


def checkpoint(**fields: str) -> dict[str, Any]:
    return {"checkpoint": {"claimName": "ckpt", "intervalSeconds": 1000, **fields}}


def retry(run: Run, number: int) -> None:
    retry = f"elastictraining.dev/retry-requested={number}"
    run.cluster.kubectl("annotate", "etj", "gpt", "-n", run.namespace, "--overwrite", retry)


def losses(folder: Path) -> dict[int, float]:
    """Loss by step, of every attempt of a job."""
    records = [json.loads(line) for path in folder.glob("loss-a*.jsonl") for line in path.read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records}


def message(status: Mapping[str, Any], type_: str) -> str:
    return next((str(item["message"]) for item in status["conditions"] if item["type"] == type_), "")


@pytest.mark.soak_only
def test_a_new_job_goes_on_from_a_folder_of_plain_deepspeed_in_another_layout(run: Run, checkpoints: Path) -> None:
    # A first job on two nodes makes real checkpoints of step 5 and 10.
    run.submit([*GPT, "--steps", "12"], **elastic() | TWO_NODES | checkpoint(path="before"))
    first = run.until_phase("Complete", 240)
    old = checkpoints / "before/a1"
    # As plain DeepSpeed leaves them: tags and `latest`, no COMMIT.json.
    plain = checkpoints / "plain"
    shutil.copytree(old / "step-00000010", plain / "global_step10", ignore=shutil.ignore_patterns("COMMIT.json"))
    shutil.copytree(old / "step-00000005", plain / "global_step5", ignore=shutil.ignore_patterns("COMMIT.json"))
    (plain / "latest").write_text("global_step10")
    for path in (plain / "global_step10").glob("mp_rank_*_model_states.pt"):  # nor how its tensors are cut
        edit(path.parent, path.name, lambda value: value.pop("universal_checkpoint_info"))
    run.remove()

    # The name of the folder is wrong at first: told, corrected, tried again.
    spec = elastic() | ONE_NODE | TWO_WAYS | checkpoint(path="after", startFrom="plane")
    run.submit([*GPT, "--steps", "14"], **spec)
    failed = run.until_phase("Failed", 120)
    assert "/checkpoint/plane: there is no such folder" in message(failed, "ReshardFailed")
    assert "kubectl etj retry gpt" in failed["message"]
    assert not (checkpoints / "after").exists()
    run.patch(checkpoint={"startFrom": "plain"})
    retry(run, 1)
    failed = run.until("a wish for --patterns", lambda status: "--patterns" in message(status, "ReshardFailed"), 120)
    assert failed["phase"] == "Failed"
    (plain / "patterns.yaml").write_text(patterns(rows=264, padded_rows=264, parts=(128, 64, 64)))
    run.patch(checkpoint={"startOptions": {"patterns": "plain/patterns.yaml"}})
    retry(run, 2)

    done = run.until_phase("Complete", 240)
    assert done["startedFrom"]["source"] == "/checkpoint/plain/global_step10"
    assert (done["startedFrom"]["step"], done["startedFrom"]["samples"]) == (10, 200)
    assert done["reshard"]["verified"] is True
    assert done["current"]["topology"] != first["current"]["topology"]
    assert done["current"]["resume"]["uri"] == "/checkpoint/after/a3/step-start"
    before, after = losses(checkpoints / "before"), losses(checkpoints / "after")
    assert sorted(after) == [11, 12, 13, 14]
    assert [after[step] for step in (11, 12)] == pytest.approx([before[step] for step in (11, 12)], rel=1e-5)


@pytest.mark.soak_only  # test_admission starts from a folder, too
def test_a_new_job_goes_on_from_the_newest_commit_of_an_older_one(run: Run, checkpoints: Path) -> None:
    run.submit([*GPT, "--steps", "6"], **elastic() | ONE_NODE | checkpoint(path="before"))
    run.until_phase("Complete", 240)
    run.remove()
    run.submit([*GPT, "--steps", "8"], **elastic() | ONE_NODE | checkpoint(path="after", startFrom="before"))
    done = run.until_phase("Complete", 240)
    assert done["attempt"] == 1
    assert done["startedFrom"]["source"] == "/checkpoint/before/a1/step-00000006"
    assert sorted(losses(checkpoints / "after")) == [7, 8]
    commit = json.loads((checkpoints / "after/a1/step-start/COMMIT.json").read_text())
    assert commit["data"] == {"seed": 7}
