"""Install, upgrade, uninstall and install again with a training running; leaders that die and leaders that are paused.

The operator is a pod of the image that is really built, in a namespace that admits only restricted pods, with exactly
the rights that the chart gives it. The training runs in another namespace.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import LIGHT, Run, committed, find_process
from tests.cluster.releases import FAST, Release

pytestmark = pytest.mark.cluster

FAILOVER_SECONDS = 20
WIDE = (
    "clusterroles,clusterrolebindings,roles,rolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings"
)
WITHOUT_KIND = {"crds": {"enabled": False}}
"""The tests' CRD is there already and is nobody's release."""


@pytest.fixture
def release(testbed: Any, crd: None, home: str, namespace: str) -> Iterator[Release]:
    """Not installed yet."""
    found = Release(testbed, home, serves=(namespace,))
    yield found
    with contextlib.suppress(Exception):
        found.uninstall()


@pytest.fixture
def job(testbed: Any, namespace: str, checkpoints: Path, release: Release) -> Iterator[Run]:
    """A job that is not submitted yet."""
    found = Run(testbed, namespace)
    yield found
    found.remove()


def start(job: Run) -> dict[str, Any]:
    """A training that goes on for hours, committing every second step."""
    job.submit([*LIGHT, "100000", "2", "0"])
    return job.until("a commit", committed)


def objects(cluster: Any, *namespaces: str) -> set[str]:
    """All objects in some namespaces but Events, and those of the cluster that are named like one of them."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    kinds = [kind for kind in kinds if not kind.startswith("events")]
    found = {
        f"{space}/{name}"
        for space in namespaces
        for name in cluster.kubectl("get", ",".join(kinds), "-n", space, "-o", "name", "--ignore-not-found").split()
    }
    wide = cluster.kubectl("get", WIDE, "--all-namespaces", "-o", "name").split()
    return found | {name for name in wide if any(space in name for space in namespaces)}


def step(job: Run) -> int:
    """Of the training, as it writes it into its Lease."""
    lease = job.cluster.get("lease", f"gpt-a{job.status()['attempt']}", "-n", job.namespace)
    return int(lease["metadata"]["annotations"]["elastictraining.dev/step"])


def workers(job: Run) -> set[tuple[str, int]]:
    """Identity of the training's pods, and how often their containers were restarted."""
    return {
        (pod["metadata"]["uid"], sum(item["restartCount"] for item in pod["status"]["containerStatuses"]))
        for pod in job.workers()
    }


def jobs(job: Run) -> list[str]:
    """Names of all batch Jobs of the training, oldest attempt first."""
    return sorted(
        item["metadata"]["name"] for item in job.cluster.get("jobs", "-n", job.namespace).get("items", [])
    )  # fmt: skip


def test_install_upgrade_uninstall_and_install_again_leave_a_running_training_alone(
    testbed: Any, release: Release, job: Run
) -> None:
    before = objects(testbed, release.namespace, job.namespace)
    notes = release.install(**WITHOUT_KIND)
    assert "kubectl get etj" in notes
    assert len(release.pods()) == 2
    start(job)
    pods = workers(job)

    old = {pod["metadata"]["uid"] for pod in release.pods()}
    release.upgrade(**WITHOUT_KIND, settings={**FAST, "resyncSeconds": 5}, podAnnotations={"example.com/new": "yes"})
    assert not old & {pod["metadata"]["uid"] for pod in release.pods()}
    testbed.wait(lambda: release.leader() in {pod["metadata"]["name"] for pod in release.pods()}, what="a new leader")
    reached = step(job)
    job.until("progress under the new operator", lambda status: status["progress"]["step"] > reached)
    assert (job.status()["attempt"], workers(job)) == (1, pods)
    assert "forbidden" not in release.logs().lower()

    assert not testbed.get("etj", "gpt", "-n", job.namespace)["metadata"].get("finalizers")
    release.uninstall()
    attempt = {f"{job.namespace}/{name}" for name in _names_of_the_training(job)}
    testbed.wait(
        lambda: objects(testbed, release.namespace, job.namespace) == before | attempt,
        what="nothing to be left but the job", timeout_seconds=60,
    )  # fmt: skip
    reached = step(job)
    testbed.wait(lambda: step(job) > reached + 5, what="the training to go on without an operator")
    assert workers(job) == pods

    release.install(**WITHOUT_KIND)
    job.until("progress under the operator again", lambda status: status["progress"]["step"] > reached)
    assert (job.status()["attempt"], workers(job)) == (1, pods)
    job.patch(suspend=True)
    job.until_phase("Suspended")


def _names_of_the_training(job: Run) -> set[str]:
    """Everything that the job and its one attempt consist of, and the one spec that was accepted."""
    kinds = "jobs,pods,services,endpointslices,serviceaccounts,roles,rolebindings,leases,endpoints,poddisruptionbudgets"
    names = job.cluster.kubectl("get", kinds, "-n", job.namespace, "-o", "name").split()
    (spec,) = job.cluster.kubectl("get", "controllerrevisions", "-n", job.namespace, "-o", "name").split()
    return {"elastictrainingjob.elastictraining.dev/gpt", spec, *(name for name in names if "/gpt-a1" in name)}


def test_a_job_can_be_deleted_while_no_operator_is_there(testbed: Any, release: Release, job: Run) -> None:
    release.install(**WITHOUT_KIND)
    start(job)
    release.uninstall()
    testbed.kubectl("delete", "etj", "gpt", "-n", job.namespace, "--timeout=30s")
    testbed.wait(lambda: not job.workers() and not jobs(job), what="the training to be gone with its resource")


@pytest.mark.soak_only
def test_a_leader_that_dies_is_replaced_and_nothing_is_done_twice(testbed: Any, release: Release, job: Run) -> None:
    release.install(**WITHOUT_KIND)
    start(job)
    leader = release.leader()
    (pod,) = [item for item in release.pods() if item["metadata"]["name"] == leader]
    pid = find_process(pod, "elastic-operator")
    testbed.kubectl("delete", "pod", leader, "-n", release.namespace, "--grace-period=0", "--force", check=False)
    os.kill(pid, signal.SIGKILL)
    died = time.monotonic()
    # Work that the next leader finds: the attempt has lost its pod.
    (worker,) = job.workers()
    testbed.kubectl("delete", "pod", worker["metadata"]["name"], "-n", job.namespace, "--wait=false")
    testbed.wait(lambda: release.leader() not in ("", leader), what="another leader", timeout_seconds=60)
    seconds = time.monotonic() - died
    print(f"another leader after {seconds:.1f} s")
    assert seconds < FAILOVER_SECONDS
    job.until("attempt 2", lambda status: status["attempt"] == 2 and status["phase"] == "Running")
    time.sleep(5)
    assert job.status()["attempt"] == 2
    assert jobs(job)[-1] == "gpt-a2"


@pytest.mark.soak_only
def test_a_paused_leader_is_replaced_and_ends_without_writing_when_it_goes_on(
    testbed: Any, release: Release, job: Run
) -> None:
    release.install(**WITHOUT_KIND)
    start(job)
    leader = release.leader()
    (pod,) = [item for item in release.pods() if item["metadata"]["name"] == leader]
    pid = find_process(pod, "elastic-operator")
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        (worker,) = job.workers()
        testbed.kubectl("delete", "pod", worker["metadata"]["name"], "-n", job.namespace, "--wait=false")
        testbed.wait(lambda: release.leader() not in ("", leader), what="another leader", timeout_seconds=60)
        seconds = time.monotonic() - stopped
        job.until("attempt 2", lambda status: status["attempt"] == 2, timeout_seconds=30)
        testbed.wait(lambda: not _ready(_pod(release, leader)), what="the probes to notice", timeout_seconds=10)
        known = release.lease()["metadata"]["resourceVersion"], release.leader()
    finally:
        os.kill(pid, signal.SIGCONT)
    print(f"another leader after {seconds:.1f} s, resumed after {time.monotonic() - stopped:.1f} s")
    assert seconds < FAILOVER_SECONDS
    assert known[1] != leader

    testbed.wait(lambda: _last_exit(_pod(release, leader)), what="the paused process to end", timeout_seconds=30)
    assert _last_exit(_pod(release, leader)) == 70
    said = testbed.kubectl("logs", leader, "-n", release.namespace, "--previous").splitlines()
    assert "not the leader any more" in said[-1]
    job.until("attempt 2 to run", lambda status: status["phase"] == "Running")
    time.sleep(5)
    assert job.status()["attempt"] == 2
    assert jobs(job)[-1] == "gpt-a2"
    assert release.leader() == known[1]


def _pod(release: Release, name: str) -> dict[str, Any]:
    return dict(release.cluster.get("pod", name, "-n", release.namespace))


def _ready(pod: dict[str, Any]) -> bool:
    return {item["type"]: item["status"] for item in pod["status"]["conditions"]}["Ready"] == "True"


def _last_exit(pod: dict[str, Any]) -> int:
    (status,) = pod["status"]["containerStatuses"]
    return int(status.get("lastState", {}).get("terminated", {}).get("exitCode", 0))
