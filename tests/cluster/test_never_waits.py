"""What would be waited for without an end is told within seconds and left: pods that cannot start, or do not end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed import faults
from tests.cluster.jobs import LIGHT, Run, resumed

pytestmark = pytest.mark.cluster

TOLD_SECONDS = 15
STUCK_SECONDS = 120
SETTLED_SECONDS = 8
TO_CONVERT = {"checkpoint": {"claimName": "ckpt", "path": "gpt", "intervalSeconds": 1000, "startFrom": "nowhere"}}
"""The first attempt needs a conversion; its source does not exist, which only a reshard pod that runs can tell."""
CONVERTED = "there is no such folder"


def told(run: Run, reason: str) -> dict[str, Any]:
    """Wait until condition Resharding has this reason, and check that it took seconds."""
    status = run.until(reason, lambda found: found.get("reason") == reason, TOLD_SECONDS)
    condition = run.condition("Resharding")
    assert (status["phase"], condition["status"], condition["reason"]) == ("Resharding", "True", reason)
    run.cluster.wait(lambda: reason in run.events(), what=f"an event {reason}", timeout_seconds=5)
    return condition


def until_converted(run: Run, *, what: str) -> dict[str, Any]:
    """Wait until a reshard pod has said that its source does not exist."""
    return run.until(what, lambda found: CONVERTED in found.get("message", ""), 60)


def test_a_reshard_pod_whose_image_does_not_exist_is_told_and_its_tries_end(run: Run) -> None:
    container = {"name": "convert", "image": "localhost/nowhere:1", "imagePullPolicy": "Never"}
    template = {"spec": {"containers": [container]}}
    run.submit([*LIGHT, "10", "0", "0"], **TO_CONVERT, reshard={"template": template, "backoffLimit": 1})
    condition = told(run, "ContainerCannotStart")
    assert "ErrImageNeverPull" in condition["message"]
    status = run.until_phase("Failed", 60)
    assert status["reason"] == "ReshardFailed"
    assert "ErrImageNeverPull" in status["message"]
    assert status["reshard"]["failures"] == 2


def test_an_edit_reaches_a_reshard_pod_that_finds_no_node(run: Run) -> None:
    huge = {"requests": {"memory": "500Ti"}}
    run.submit([*LIGHT, "10", "0", "0"], **TO_CONVERT, reshard={"resources": huge})
    condition = told(run, "Unschedulable")
    assert "Insufficient memory" in condition["message"]
    assert run.status()["reshard"].get("failures", 0) == 0
    run.patch(reshard={"resources": None})
    until_converted(run, what="the conversion to begin anew")


def test_reshard_pods_that_a_quota_refuses_are_told_and_come_once_it_lets_them(run: Run) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none", "namespace": run.namespace},
        "spec": {"hard": {"limits.memory": "1Mi"}},
    }
    run.cluster.apply(quota)
    run.cluster.wait(
        lambda: run.cluster.get("resourcequota", "none", "-n", run.namespace).get("status", {}).get("used"),
        what="the quota to count",
    )
    run.submit([*LIGHT, "10", "0", "0"], **TO_CONVERT)
    condition = told(run, "PodsRefused")
    assert "exceeded quota: none" in condition["message"]
    patch = json.dumps({"spec": {"hard": {"limits.memory": "8Gi"}}})
    run.cluster.kubectl("patch", "resourcequota", "none", "-n", run.namespace, "--type=merge", "-p", patch)
    until_converted(run, what="the conversion")


def test_a_conversion_that_runs_out_of_memory_gets_more_until_it_is_enough(run: Run) -> None:
    resources = {"requests": {"cpu": "100m"}, "limits": {"memory": "16Mi"}}
    run.submit([*LIGHT, "10", "0", "0"], **TO_CONVERT, reshard={"resources": resources, "backoffLimit": 6})
    run.until("OutOfMemory", lambda found: "OOMKilled" in json.dumps(found.get("conditions", [])), 60)
    condition = run.condition("ReshardFailed")
    assert (condition["status"], condition["reason"]) == ("True", "OutOfMemory")
    status = until_converted(run, what="enough memory")
    assert status["reshard"]["oomKills"] >= 1


@pytest.fixture
def stuck(run: Run) -> Iterator[dict[str, Any]]:
    """The pod of a running job, whose processes nobody can stop."""
    run.submit([*LIGHT, "100000", "2", "0"])
    run.until("a commit", lambda status: status.get("checkpoint", {}).get("step", 0) > 0)
    (pod,) = run.workers()
    place = (pod["spec"]["nodeName"], pod["metadata"]["uid"])
    faults.hang_pod(*place)
    yield pod
    faults.resume_pod(*place)


@pytest.mark.soak_only
def test_a_pod_that_does_not_end_on_a_ready_node_is_left_and_the_job_goes_on_elsewhere(
    run: Run, stuck: dict[str, Any], checkpoints: Path
) -> None:
    name, node = stuck["metadata"]["name"], stuck["spec"]["nodeName"]
    begin = time.monotonic()
    run.cluster.kubectl("delete", "pod", name, "-n", run.namespace, "--wait=false")
    status = run.until("attempt 2", resumed(1), STUCK_SECONDS)
    print(f"deleted to Running elsewhere: {time.monotonic() - begin:.1f} s")
    assert status["current"]["resume"]["step"] > 0
    # The second, if the training commits before it is stuck.
    assert status["recoveries"][0]["cause"] in ("PodDeleted", "PodTerminating")
    assert [(item["name"], item["reason"]) for item in status["excludedNodes"]] == [(node, "PodStuckTerminating")]
    (worker,) = run.workers()
    assert worker["spec"]["nodeName"] != node
    assert run.cluster.node_is_ready(node)
    old = run.cluster.get("pod", name, "-n", run.namespace)
    assert old["status"]["phase"] == "Running", "nobody has removed it by force"
    events = run.cluster.get("events", "-n", run.namespace)["items"]
    (event,) = [item for item in events if item["reason"] == "PodStuckTerminating"]
    assert name in event["message"]
    assert node in event["message"]

    def commits() -> list[str]:
        return sorted(path.parent.name for path in checkpoints.glob("gpt/a1/*/COMMIT.json"))

    written = commits()
    time.sleep(SETTLED_SECONDS)
    assert commits() == written, "attempt 1 goes on writing beside attempt 2"
    faults.resume_pod(node, stuck["metadata"]["uid"])
    status = run.until("the node to be used again", lambda found: not found.get("excludedNodes"), 60)
    assert not run.cluster.get("pod", name, "-n", run.namespace)
    assert (status["attempt"], status["phase"], status["restartBudget"]["used"]) == (2, "Running", 0)
