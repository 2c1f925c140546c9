"""The real operator, as the chart installs it, on a real cluster: starts, suspends, loses nodes, reshards, resumes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed import storage
from tests.cluster import releases
from tests.cluster.jobs import GPT, LIGHT, Run, committed, elastic, resumed, victim

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


def test_a_job_runs_to_completion_and_nothing_restarts(run: Run) -> None:
    run.submit([*LIGHT, "10", "3", "0"])
    status = run.until_phase("Complete")
    assert (status["attempt"], status["checkpoint"]["step"]) == (1, 10)
    time.sleep(3)
    assert run.status()["attempt"] == 1
    assert {"Planned", "StartsFromNothing", "Launched", "Running", "Complete"} <= set(run.events())


def test_suspend_drains_and_resume_continues_from_that_commit(run: Run) -> None:
    run.submit([*LIGHT, "100000", "0", "0"])
    run.until_phase("Running")
    run.patch(suspend=True)
    status = run.until_phase("Suspended")
    step = status["checkpoint"]["step"]
    assert step > 0
    assert run.workers() == []
    run.patch(suspend=False)
    status = run.until_phase("Running")
    assert status["attempt"] == 2
    assert status["current"]["resume"]["step"] == step
    assert status["current"]["resume"]["uri"].endswith(f"/a1/step-{step:08d}")


def test_a_pod_that_fails_restarts_in_the_same_shape_until_the_budget_is_spent(run: Run) -> None:
    run.submit([*LIGHT, "1000", "0", "7"], recovery={"restartBudget": {"limit": 1, "windowSeconds": 3600}})
    status = run.until_phase("Failed")
    assert status["reason"] == "RestartBudgetExceeded"
    assert "exit code 7" in status["message"]
    assert status["attempt"] == 2
    assert run.condition("Resumed")["reason"] == "NoCommit"
    time.sleep(3)
    assert run.status()["attempt"] == 2


def test_a_failed_attempt_resumes_from_the_newest_commit(run: Run) -> None:
    run.submit([*LIGHT, "6", "2", "7"])
    status = run.until_phase("Complete")
    assert status["attempt"] == 3
    assert [item["commitStep"] for item in status["recoveries"]] == [2, 4]
    assert all("total" in item["seconds"] for item in status["recoveries"])


def test_an_image_that_does_not_exist_fails_the_job_within_its_budget(run: Run) -> None:
    recovery = {"restartBudget": {"limit": 1, "windowSeconds": 3600}}
    run.submit(LIGHT, pod={"image": "localhost/nowhere:1", "imagePullPolicy": "Never"}, recovery=recovery)
    status = run.until_phase("Failed")
    assert "ErrImageNeverPull" in status["message"]
    assert status["attempt"] == 2


def test_a_job_that_no_topology_fits_waits_and_names_every_factor(run: Run) -> None:
    # What no cluster could run is refused at admission; this one would need five nodes.
    run.submit([*LIGHT, "10", "0", "0"], nodes={"min": 1, "max": 5}, parallelism={"tensor": [2], "pipeline": [5]})
    status = run.until_phase("Waiting")
    assert status["reason"] == "NoFeasibleTopology"
    condition = run.condition("Planned")
    assert (condition["status"], condition["reason"]) == ("False", "NoFeasibleTopology")
    assert "5" in condition["message"]
    assert run.workers() == []
    # Editing the spec is all it takes.
    run.patch(parallelism={"tensor": [2], "pipeline": [1]})
    run.until("an attempt", lambda status: status.get("attempt") == 1)


def test_a_pod_deleted_by_hand_commits_first_and_the_job_goes_on(run: Run) -> None:
    run.submit([*LIGHT, "100000", "2", "0"])
    run.until("a commit", lambda status: status.get("checkpoint", {}).get("step", 0) > 0)
    (pod,) = run.workers()
    run.cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", run.namespace, "--wait=false")
    status = run.until("attempt 2", lambda status: status["attempt"] == 2 and status["phase"] == "Running")
    assert status["current"]["resume"]["step"] > 0
    assert status["recoveries"][0]["cause"] == "PodTerminating"
    assert (status["recoveries"][0]["planned"], status["recoveries"][0]["lostSteps"]) == (True, 0)


def test_a_cordoned_node_is_drained_first_and_left(run: Run) -> None:
    run.submit([*LIGHT, "100000", "0", "0"])
    run.until_phase("Running")
    (pod,) = run.workers()
    node = pod["spec"]["nodeName"]
    run.cluster.kubectl("cordon", node)
    try:
        status = run.until("attempt 2", lambda status: status["attempt"] == 2 and status["phase"] == "Running")
        assert status["recoveries"][0]["planned"] is True
        assert status["recoveries"][0]["lostSteps"] == 0
        assert status["current"]["resume"]["step"] > 0
        (pod,) = run.workers()
        assert pod["spec"]["nodeName"] != node
    finally:
        run.cluster.kubectl("uncordon", node)


def test_an_unhealthy_gpu_moves_the_attempt_away(run: Run) -> None:
    run.submit([*LIGHT, "100000", "2", "0"])
    run.until("a commit", lambda status: status.get("checkpoint", {}).get("step", 0) > 0)
    (pod,) = run.workers()
    node = pod["spec"]["nodeName"]
    subprocess.run([sys.executable, "-m", "testbed", "gpu-fail", node, "gpu0"], check=True)
    status = run.until("attempt 2", lambda status: status["attempt"] == 2 and status["phase"] == "Running")
    # The node offers one device less, too: that is DeviceMissing after 10 s, and the kubelet tells of the pod at once.
    assert status["recoveries"][0]["cause"] == "DeviceUnhealthy"
    (pod,) = run.workers()
    assert pod["spec"]["nodeName"] != node


@pytest.mark.soak_only
def test_losing_a_node_reshards_and_resumes_and_growing_back_reshards_again(run: Run) -> None:
    run.submit([*GPT, "--steps", "100000"], **elastic(), reshard={"parallelism": 2})
    before = run.until("a commit on 3 nodes", lambda status: committed(status) and status["replicas"] == 3, 240)
    node = victim(run)
    killed = time.time()
    run.cluster.kill_node(node)
    status = run.until("the next attempt", resumed(before["attempt"]), 240)
    sys.stdout.write(
        f"node killed to Running: {time.time() - killed:.1f} s\n{json.dumps(status['recoveries'][-1], indent=1)}\n"
    )
    assert status["replicas"] == 2
    recovery = status["recoveries"][-1]
    assert len(status["recoveries"]) == 1, "one loss is one recovery"
    assert recovery["lost"] == [node]
    assert status["reshard"]["verified"] is True
    assert (status["topology"]["tp"], status["topology"]["pp"]) != (before["topology"]["tp"], before["topology"]["pp"])
    small = run.until("a commit on 2 nodes", lambda status: committed(status) and status["replicas"] == 2, 120)
    run.cluster.heal_node(node)
    grown = run.until("growth", lambda status: resumed(small["attempt"])(status) and status["replicas"] == 3, 240)
    assert grown["recoveries"][-1]["cause"] == "CapacityReturned"
    assert grown["recoveries"][-1]["lostSteps"] == 0
    assert grown["topology"] == before["topology"]


@pytest.mark.soak_only
def test_a_truncated_newest_commit_falls_back_to_the_one_before(run: Run, checkpoints: Path) -> None:
    run.submit([*GPT, "--steps", "100000"], **elastic())
    run.until("two commits", lambda status: len(status.get("checkpoint", {}).get("history", [])) >= 2, 240)
    # Suspended, so that no newer commit appears between the damage and the loss.
    run.patch(suspend=True)
    status = run.until_phase("Suspended", 120)
    newest, second = status["checkpoint"]["history"][:2]
    folder = checkpoints / newest["uri"].removeprefix("/checkpoint/")
    for path in folder.glob("*.pt"):
        os.truncate(path, path.stat().st_size // 2)
    run.patch(suspend=False, nodes={"min": 1, "max": 2})
    status = run.until("an attempt that makes steps", resumed(status["attempt"]), 240)
    history = {item["uri"]: item for item in status["checkpoint"]["history"]}
    assert history[newest["uri"]]["invalid"] is True
    assert status["current"]["resume"]["source"] == second["uri"]
    assert "CommitInvalid" in run.events()


@pytest.mark.soak_only
def test_a_loss_before_the_first_commit_restarts_from_nothing_and_says_so(run: Run) -> None:
    run.submit(["python", "-m", "elastic_trainer.launch", "examples/gpt_deepspeed/train.py"], **elastic())
    before = run.until("steps on 3 nodes", lambda status: status.get("progress", {}).get("step", 0) >= 1, 240)
    run.cluster.kill_node(victim(run))
    status = run.until("the next attempt", resumed(before["attempt"]), 240)
    assert "source" not in status["current"]["resume"] or not status["current"]["resume"]["source"]
    assert "no commit" in status["current"]["resume"]["reason"]
    assert "StartsFromNothing" in run.events()


@pytest.fixture
def full_volume(testbed: Any, namespace: str) -> Iterator[Path]:
    """The claim `ckpt` on a volume of limited size."""
    folder = storage.make_volume(storage.LIMITED)
    testbed.apply(*storage.claim(namespace, "ckpt", folder))
    yield folder
    testbed.kubectl("delete", "pv", f"{namespace}-ckpt", "--wait=false", check=False)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def confined(testbed: Any, namespace: str, full_volume: Path, installed: releases.Release) -> Iterator[Run]:
    """A job that is not submitted yet, with its checkpoints on that volume."""
    job = Run(testbed, namespace)
    yield job
    job.remove()


@pytest.mark.soak_only
def test_a_full_volume_fails_the_reshard_publishes_nothing_and_loses_nothing(confined: Run, full_volume: Path) -> None:
    run = confined
    run.submit([*GPT, "--steps", "100000"], **elastic(), reshard={"backoffLimit": 10})
    run.until("a commit", committed, 240)
    run.patch(suspend=True)
    status = run.until_phase("Suspended", 120)
    newest = status["checkpoint"]["uri"]
    free = shutil.disk_usage(full_volume).free
    (full_volume / "filler").write_bytes(bytes(free - (4 << 20)))
    run.patch(suspend=False, nodes={"min": 1, "max": 2})
    status = run.until("the failure", lambda found: found.get("reshard", {}).get("failures", 0) >= 1, 120)
    assert "are free" in status["reshard"]["message"]
    assert status["checkpoint"]["uri"] == newest
    assert not list(full_volume.glob(f"gpt/a{status['attempt']}/*"))
    (full_volume / "filler").unlink()
    status = run.until("an attempt that makes steps", resumed(status["attempt"] - 1), 240)
    assert status["current"]["resume"]["source"] == newest
