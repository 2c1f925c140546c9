"""How long a job and its objects stay, on a real cluster: deletion after the end, and another controller's jobs."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import TestbedError
from tests.cluster.conftest import Cluster
from tests.cluster.jobs import LIGHT, Run, resumed

pytestmark = pytest.mark.cluster

FIRST = "elastictraining.dev/attempt=1"
"""Selects what belongs to the first attempt."""


def there(run: Run, kinds: str, *labels: str) -> list[dict[str, Any]]:
    """The objects of these kinds in the test's namespace."""
    found: list[dict[str, Any]] = run.cluster.get(kinds, "-n", run.namespace, *labels).get("items", [])
    return found


def test_a_finished_job_is_deleted_after_its_time_and_its_checkpoints_stay(run: Run, checkpoints: Path) -> None:
    run.submit([*LIGHT, "3", "0", "0"], ttlSecondsAfterFinished=3)
    run.until_phase("Complete")
    run.cluster.wait(lambda: not run.cluster.get("etj", "gpt", "-n", run.namespace), what="the end of the time")
    assert there(run, "jobs,pods,leases,controllerrevisions") == []
    assert "TTLExpired" in run.events()
    assert (checkpoints / "gpt/a1/step-00000003/COMMIT.json").exists()


def test_a_job_that_another_controller_manages_is_left_alone(run: Run) -> None:
    run.submit([*LIGHT, "3", "0", "0"], managedBy="kueue.x-k8s.io/multikueue")
    time.sleep(5)
    assert (run.status(), run.events()) == ({}, [])
    assert there(run, "jobs,leases") == []
    with pytest.raises(TestbedError, match=r"spec\.managedBy cannot change"):
        run.patch(managedBy=None)


def test_a_job_whose_time_is_over_commits_and_fails(run: Run) -> None:
    run.submit([*LIGHT, "1000000", "0", "0"], activeDeadlineSeconds=8)
    status = run.until_phase("Failed", timeout_seconds=60)
    assert status["reason"] == "DeadlineExceeded"
    assert status["checkpoint"]["step"] == status["recoveries"][0]["lastStep"] > 0
    assert status["activeSeconds"] >= 8
    run.cluster.wait(lambda: not run.workers() or _are_terminal(run), what="the pods to end")


def test_a_batch_ramp_is_a_planned_change_that_loses_no_step(run: Run) -> None:
    run.submit([*LIGHT, "1000000", "0", "0"])
    run.until("steps", lambda found: found.get("progress", {}).get("step", 0) > 0)
    run.patch(batch={"globalSamples": 40})
    status = run.until("attempt 2", resumed(1))
    (change,) = status["recoveries"]
    assert (change["cause"], change["planned"], change["lostSteps"]) == ("SpecChanged", True, 0)
    assert "spec.batch.globalSamples changed from 20 to 40" in change["message"]
    (pod,) = [item for item in run.workers() if item["metadata"]["name"].startswith("gpt-a2")]
    environment = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
    assert environment["ETJ_GLOBAL_BATCH"] == "40"


def test_the_log_of_a_failed_attempt_can_be_read_while_the_next_one_trains(run: Run) -> None:
    script = '[ "$ETJ_ATTEMPT" != 1 ] || { echo "the cause is here"; exit 7; }; exec ' + shlex.join(
        [*LIGHT, "1000000", "0", "0"]
    )
    run.submit(["sh", "-c", script])
    run.until("attempt 2", resumed(1))
    (job, pod) = (there(run, kind, "-l", FIRST) for kind in ("jobs", "pods"))
    assert [item["metadata"]["name"] for item in job] == ["gpt-a1"]
    assert [item["status"]["phase"] for item in pod] == ["Failed"]
    assert there(run, "leases,services,roles,serviceaccounts", "-l", FIRST) == []
    plugin = [Path(sys.executable).with_name("kubectl-etj"), "--kubeconfig", run.cluster.kubeconfig]
    command = [*plugin, "-n", run.namespace, "logs", "gpt", "--attempt", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "the cause is here\n"
    run.patch(failedAttemptsHistoryLimit=0)
    run.cluster.wait(lambda: not there(run, "jobs,pods", "-l", FIRST), what="the pods to go")
    assert run.status()["attempt"] == 2


@pytest.fixture
def priority(testbed: Cluster, namespace: str) -> Iterator[str]:
    """The name of a PriorityClass above that of other pods, which preempts nothing."""
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": namespace}}
    testbed.apply({**body, "value": 1000, "preemptionPolicy": "Never"})
    yield namespace
    testbed.kubectl("delete", "priorityclass", namespace)


@pytest.mark.soak_only
def test_of_two_waiting_jobs_the_one_of_higher_priority_takes_the_node_first(run: Run, priority: str) -> None:
    run.submit([*LIGHT, "1000000", "0", "0"], nodes={"min": 3, "max": 3}, batch={"globalSamples": 24})
    run.until_phase("Running")
    spec = run.cluster.get("etj", "gpt", "-n", run.namespace)["spec"]
    for name, pod in (("low", {}), ("high", {"priorityClassName": priority})):
        job = {"apiVersion": "elastictraining.dev/v1beta1", "kind": "ElasticTrainingJob"}
        template = {"spec": {**spec["template"]["spec"], **pod}}
        own = {"template": template, "checkpoint": {**spec["checkpoint"], "path": name}}
        run.cluster.apply({**job, "metadata": {"name": name, "namespace": run.namespace}, "spec": {**spec, **own}})
        run.cluster.wait(lambda name=name: phase(run, name) == "Waiting", what=f"{name} to wait")
    try:
        run.cluster.kubectl("delete", "etj", "gpt", "-n", run.namespace)
        run.cluster.wait(lambda: phase(run, "high") == "Running", what="the job of higher priority")
        assert phase(run, "low") == "Waiting"
        assert run.cluster.get("etj", "low", "-n", run.namespace)["status"]["attempt"] == 0
    finally:
        run.cluster.kubectl("delete", "etj", "low", "high", "-n", run.namespace)


def phase(run: Run, name: str) -> str:
    return str(run.cluster.get("etj", name, "-n", run.namespace).get("status", {}).get("phase", ""))


def _are_terminal(run: Run) -> bool:
    return all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in run.workers())
