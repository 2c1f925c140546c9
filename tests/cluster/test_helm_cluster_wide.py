"""The chart as most people install it: for all namespaces, and with the kind, which it keeps or takes along."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed import helm
from tests.cluster.jobs import LIGHT, Run, committed
from tests.cluster.releases import NAME, Release

pytestmark = [pytest.mark.cluster, pytest.mark.soak_only]

ROOT = Path(__file__).parents[2]
KIND = "crd/elastictrainingjobs.elastictraining.dev"


@pytest.fixture
def release(testbed: Any, crd: None, home: str) -> Iterator[Release]:
    """Not installed yet. The plain CRD is back afterwards, for other tests."""
    found = Release(testbed, home, serves=())
    yield found
    with contextlib.suppress(helm.HelmError):
        found.uninstall()
    testbed.kubectl("delete", KIND, "--ignore-not-found")
    testbed.kubectl.apply_crd(ROOT / "crds/elastictrainingjobs.yaml")


def test_the_kind_is_taken_over_kept_found_again_and_taken_along(
    testbed: Any, release: Release, namespace: str, checkpoints: Path
) -> None:
    job = Run(testbed, namespace)

    # Somebody has applied the plain file before: Helm does not touch what is not its own, unless it is told to.
    with pytest.raises(helm.HelmError, match="exists and cannot be imported into the current release"):
        release.install()
    # Helm 4 applies on the server, where the fields belong to whoever applied them before.
    force = ["--force-conflicts"] if helm.version(helm.ensure()) >= (4, 0) else []
    release.install("--take-ownership", *force)
    account = f"system:serviceaccount:{release.namespace}:{NAME}"
    assert testbed.kubectl("auth", "can-i", "delete", "nodes", "--as", account, check=False).strip() == "no"
    job.submit([*LIGHT, "100000", "2", "0"])
    job.until("a commit", committed)
    job.patch(suspend=True)
    job.until_phase("Suspended")
    job.patch(suspend=False)
    job.until("attempt 2", lambda status: status["attempt"] == 2 and committed(status))
    (pod,) = job.workers()
    testbed.kubectl("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--wait=false")
    job.until("attempt 3", lambda status: status["attempt"] == 3 and committed(status))
    # A whole life with exactly these rights.
    assert "forbidden" not in release.logs().lower()

    # By default the kind stays, and with it the job, which goes on.
    (pod,) = job.workers()
    release.uninstall()
    assert testbed.get(KIND)["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    release.install()
    assert [item["metadata"]["uid"] for item in job.workers()] == [pod["metadata"]["uid"]]
    reached = job.status()["progress"]["step"]
    job.until("progress", lambda status: status["attempt"] == 3 and status["progress"]["step"] > reached)

    # If it is not to be kept, everything goes with it, although nobody is there to finalize anything.
    release.upgrade(crds={"keep": False})
    release.uninstall()
    testbed.wait(lambda: not testbed.get(KIND), what="the kind to be gone")
    testbed.wait(
        lambda: not testbed.kubectl("get", "jobs,pods,leases,services", "-n", namespace, "-o", "name").strip(),
        what="the training to be gone",
    )
    kinds = "all,leases,roles,rolebindings,poddisruptionbudgets,secrets"
    testbed.wait(
        lambda: not testbed.kubectl("get", kinds, "-n", release.namespace, "-o", "name").strip(),
        what="the operator's namespace to be empty",
    )
    kinds = "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings"
    names = testbed.kubectl("get", kinds, "-o", "name")
    assert release.namespace not in names
