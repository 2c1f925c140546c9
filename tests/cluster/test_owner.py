"""Ownership of checkpoints: a job that is created again, and an attempt that has lost only the API server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from reshard.commits.commit import read_commit
from testbed import faults
from tests.cluster.jobs import GPT, Run, elastic, resumed

pytestmark = pytest.mark.cluster

ONE_NODE = {"nodes": {"min": 1, "max": 1}}
ZOMBIE_SECONDS = 20


def annotate(run: Run, key: str, value: str) -> None:
    text = f"elastictraining.dev/{key}={value}"
    run.cluster.kubectl("annotate", "etj", "gpt", "-n", run.namespace, "--overwrite", text)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file below a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def commits(checkpoints: Path, attempt: int) -> list[str]:
    return sorted(path.parent.name for path in checkpoints.glob(f"gpt/a{attempt}/*/COMMIT.json"))


def message(status: dict[str, Any]) -> str:
    return str(next(item["message"] for item in status["conditions"] if item["type"] == "CheckpointOwned"))


@pytest.mark.soak_only
def test_a_job_that_is_deleted_and_applied_again_is_refused_and_with_one_word_resumes_with_no_step_lost(
    run: Run, checkpoints: Path
) -> None:
    spec = elastic() | ONE_NODE
    run.submit([*GPT, "--steps", "6"], **spec)
    run.until_phase("Complete", 240)
    old_uid = run.cluster.get("etj", "gpt", "-n", run.namespace)["metadata"]["uid"]
    old = checkpoints / "gpt/a1"
    before, newest = snapshot(old), read_commit(old / commits(checkpoints, 1)[-1]).step
    run.remove()

    # Created again at once: the finished Job of its predecessor may still be there, and says nothing about this one.
    run.submit([*GPT, "--steps", "9"], **spec)
    failed = run.until("an end", lambda status: status.get("phase") in ("Failed", "Complete"), 240)
    assert (failed["phase"], failed["reason"]) == ("Failed", "CheckpointNotOwned")
    assert old_uid in message(failed)
    assert "set spec.checkpoint.takeOver and retry: Resume goes on from the newest commit" in failed["message"]
    assert failed.get("restartBudget", {}).get("used", 0) == 0
    assert snapshot(old) == before

    run.patch(checkpoint={"takeOver": "Resume"})
    annotate(run, "retry-requested", "1")
    done = run.until_phase("Complete", 240)
    assert done["startedFrom"]["step"] == newest == 6, "no committed step is lost"
    assert done["checkpoint"]["step"] == 9
    assert {key: value for key, value in snapshot(old).items() if key in before} == before
    assert next(item["status"] for item in done["conditions"] if item["type"] == "CheckpointOwned") == "True"


@pytest.mark.soak_only
def test_an_attempt_that_is_cut_off_with_its_volume_keeps_the_commit_that_the_next_ones_start_from(
    run: Run, checkpoints: Path
) -> None:
    run.submit([*GPT, "--steps", "100000"], **elastic() | ONE_NODE)
    run.until("some commits", lambda status: status.get("checkpoint", {}).get("step", 0) >= 25, 240)
    (pod,) = run.workers()
    node = pod["spec"]["nodeName"]
    faults.unplug(node)
    status = run.until("attempt 2", resumed(1), 120)
    resume = Path(status["current"]["resume"]["uri"]).name
    time.sleep(ZOMBIE_SECONDS)
    unpublished = list(checkpoints.glob("gpt/a1/*/COMMIT.unconfirmed.json"))
    assert unpublished, "the cut attempt goes on saving"
    assert resume in commits(checkpoints, 1)
    known = commits(checkpoints, 1)
    annotate(run, "drain-requested", "1")
    status = run.until("attempt 3", resumed(2), 180)
    assert status["checkpoint"]["attempt"] >= 2
    assert commits(checkpoints, 1) == known or set(commits(checkpoints, 1)) < set(known), "published after it was cut"
    faults.plug(node)
    run.cluster.wait(lambda: run.cluster.node_is_ready(node), what=f"{node} to be Ready")
    time.sleep(5)
    assert set(commits(checkpoints, 1)) <= set(known)


@pytest.mark.soak_only
def test_old_commits_are_removed_once_the_operator_has_released_them(run: Run, checkpoints: Path) -> None:
    run.submit([*GPT, "--steps", "60"], **elastic() | ONE_NODE)
    done = run.until_phase("Complete", 240)
    left = commits(checkpoints, 1)
    assert left[-1] == "step-00000060"
    assert 3 <= len(left) < 12, "of twelve commits the newest few are left"
    known = {Path(item["uri"]).name for item in done["checkpoint"]["history"]}
    assert known <= set(left), "what the status names is there"
