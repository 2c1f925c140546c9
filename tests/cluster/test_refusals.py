"""Pods that the cluster does not let be are told with its own words; a job that failed can be taken up again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.jobs import LIGHT, Run

pytestmark = pytest.mark.cluster

GPUS = "requests.amd.com/gpu"


def container(run: Run) -> dict[str, Any]:
    """The training container of the submitted job."""
    job = run.cluster.get("etj", "gpt", "-n", run.namespace)
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return dict(found)


def edit_template(run: Run, **changes: Any) -> None:
    """Change the training container of the submitted job."""
    run.patch(template={"spec": {"containers": [{**container(run), **changes}]}})


def refused(status: dict[str, Any]) -> str:
    """The message of SpecValid, where it is False and about the present spec."""
    for item in status.get("conditions", []):
        if item["type"] == "SpecValid" and item["status"] == "False":
            return str(item["message"])
    return ""


def test_a_pod_template_that_the_api_server_refuses_is_told_and_disturbs_nothing(run: Run) -> None:
    run.submit([*LIGHT, "100000", "5", "0"], pod={"comand": ["typo"]})
    status = run.until("the typo to be told", refused)
    assert 'unknown field "spec.template.spec.containers[0].comand"' in refused(status)
    assert (status["phase"], status["attempt"]) == ("Pending", 0)

    edit_template(run, comand=None)
    assert run.until_phase("Running")["attempt"] == 1
    (before,) = run.workers()
    mounts = container(run).get("volumeMounts")
    edit_template(run, volumeMounts=[{"name": "nowhere", "mountPath": "/x"}])
    status = run.until("the mount to be told", refused)
    assert "spec.template.spec.containers[0].volumeMounts[0].name" in refused(status)
    assert (status["phase"], status["attempt"]) == ("Running", 1)
    (after,) = run.workers()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]

    # What it loses meanwhile is recovered by the template that was accepted before.
    run.cluster.kubectl("delete", "pod", after["metadata"]["name"], "-n", run.namespace, "--wait=false")
    status = run.until("the next attempt", lambda found: (found["phase"], found["attempt"]) == ("Running", 2))
    assert "spec.template.spec.containers[0].volumeMounts[0].name" in refused(status)
    (worker,) = run.workers()
    assert "nowhere" not in json.dumps(worker["spec"]["containers"][0]["volumeMounts"])
    edit_template(run, volumeMounts=mounts)
    status = run.until("the correction to be accepted", lambda found: not refused(found))
    assert (status["phase"], status["attempt"]) == ("Running", 2)
    kept = run.cluster.get("controllerrevisions", "-n", run.namespace, "-l", "elastictraining.dev/job-name=gpt")
    assert [item["revision"] for item in kept["items"]] == [status["observedGeneration"]]


def test_pods_that_a_quota_refuses_are_told_and_come_once_it_lets_them(run: Run) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none", "namespace": run.namespace},
        "spec": {"hard": {GPUS: "0"}},
    }
    run.cluster.apply(quota)
    run.cluster.wait(
        lambda: run.cluster.get("resourcequota", "none", "-n", run.namespace).get("status", {}).get("used"),
        what="the quota to count",
    )
    run.submit([*LIGHT, "100000", "5", "0"])
    status = run.until("the refusal to be told", lambda found: found.get("reason") == "PodsRefused")
    condition = run.condition("Launched")
    assert (condition["status"], condition["reason"]) == ("False", "PodsRefused")
    assert "exceeded quota: none" in condition["message"]
    assert "PodsRefused" in run.events()
    patch = json.dumps({"spec": {"hard": {GPUS: "2"}}})
    run.cluster.kubectl("patch", "resourcequota", "none", "-n", run.namespace, "--type=merge", "-p", patch)
    status = run.until_phase("Running")
    assert (status["attempt"], status["restartBudget"]["used"]) == (1, 0)
    assert run.condition("Launched")["status"] == "True"


def test_a_failed_job_that_is_retried_goes_on_from_its_newest_commit(run: Run) -> None:
    run.submit([*LIGHT, "100000", "2", "7"], recovery={"restartBudget": {"limit": 0, "windowSeconds": 3600}})
    status = run.until_phase("Failed")
    step = status["checkpoint"]["step"]
    assert step > 0
    edit_template(run, command=[*LIGHT, str(step + 6), "2", "0"])
    run.cluster.kubectl("annotate", "etj", "gpt", "-n", run.namespace, "elastictraining.dev/retry-requested=1")
    status = run.until_phase("Complete")
    assert (status["attempt"], status["current"]["resume"]["step"]) == (2, step)
    assert "RetryRequested" in run.events()


def test_of_two_jobs_that_want_the_same_nodes_one_waits_without_pods_or_restarts(run: Run) -> None:
    run.submit([*LIGHT, "100000", "0", "0"], nodes={"min": 2, "max": 2}, batch={"globalSamples": 16})
    job = run.cluster.get("etj", "gpt", "-n", run.namespace)
    other = {**job, "metadata": {"name": "other", "namespace": run.namespace}, "status": None}
    run.cluster.apply(other)

    def phases() -> dict[str, str]:
        items = run.cluster.get("etj", "-n", run.namespace)["items"]
        return {item["metadata"]["name"]: item.get("status", {}).get("phase", "") for item in items}

    run.cluster.wait(lambda: sorted(phases().values()) == ["Running", "Waiting"], what="one to run and one to wait")
    (waiting,) = [name for name, phase in phases().items() if phase == "Waiting"]
    status = run.cluster.get("etj", waiting, "-n", run.namespace)["status"]
    assert status["attempt"] == 0
    assert len(run.workers()) == 2
    run.cluster.kubectl("delete", "etj", "other", "-n", run.namespace)
