"""The leader's Lease on a real API server: what a leader does when somebody meddles with it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.cluster.leader_election import EXIT_NOT_LEADER
from tests.cluster.jobs import free_port

pytestmark = pytest.mark.cluster

PROGRAM = str(Path(sys.executable).with_name("elastic-operator"))
LEASE = "meddled"


class Candidate:
    """One operator process that may become the leader, and its probes."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path) -> None:
        self.port = free_port()
        self.log = log
        command = [
            PROGRAM,
            "run",
            "--kubeconfig",
            str(kubeconfig),
            "--namespace",
            namespace,
            "--lease-namespace",
            namespace,
        ]
        command += ["--lease-name", LEASE, "--health-port", str(self.port)]
        with open(log, "wb") as stream:
            self.process = subprocess.Popen(command, stderr=stream)

    def ready(self) -> str:
        """Return the answer of /readyz; empty while nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5) as response:
                return str(response.read().decode().strip())
        except urllib.error.HTTPError as error:
            with error:
                return f"{error.code} {error.read().decode().strip()}"
        except OSError:
            return ""


@pytest.fixture
def candidates(cluster: Any, crd: None, namespace: str, tmp_path: Path) -> Iterator[list[Candidate]]:
    """A leader and a standby."""
    found = []
    try:
        for name in ("first", "second"):
            candidate = Candidate(cluster.kubeconfig, namespace, tmp_path / f"{name}.log")
            found.append(candidate)
            cluster.wait(candidate.ready, what=f"the {name} candidate to answer", timeout_seconds=30)
            wanted = "leader" if name == "first" else "standby; the leader is"
            cluster.wait(lambda: candidate.ready().startswith(wanted), what=wanted, timeout_seconds=30)  # noqa: B023
        yield found
    finally:
        for candidate in found:
            candidate.process.kill()
            candidate.process.wait()


def holder(cluster: Any, namespace: str) -> str:
    return str(cluster.get("lease", LEASE, "-n", namespace).get("spec", {}).get("holderIdentity", ""))


def test_a_leader_that_sees_another_holder_ends_at_once(
    cluster: Any, namespace: str, candidates: list[Candidate]
) -> None:
    patch = json.dumps({"spec": {"holderIdentity": "somebody-else"}})
    cluster.kubectl("patch", "lease", LEASE, "-n", namespace, "--type=merge", "-p", patch)
    assert candidates[0].process.wait(timeout=5) == EXIT_NOT_LEADER
    assert "somebody-else holds the Lease" in candidates[0].log.read_text()
    # The stranger never renews, so the standby takes over once that Lease is over.
    cluster.wait(lambda: candidates[1].ready() == "leader", what="the standby to lead", timeout_seconds=20)


def test_a_lease_that_was_deleted_is_made_again_and_only_one_leads(
    cluster: Any, namespace: str, candidates: list[Candidate]
) -> None:
    cluster.kubectl("delete", "lease", LEASE, "-n", namespace)
    cluster.wait(lambda: holder(cluster, namespace), what="a Lease again", timeout_seconds=10)
    time.sleep(5)
    leaders = [item for item in candidates if item.process.poll() is None and item.ready() == "leader"]
    assert len(leaders) == 1
    # Whoever lost the race to make it has ended, or never led.
    losers = [item.process.poll() for item in candidates if item not in leaders]
    assert losers[0] in (None, EXIT_NOT_LEADER)


def test_a_leader_that_is_told_to_stop_gives_the_lease_back(
    cluster: Any, namespace: str, candidates: list[Candidate]
) -> None:
    candidates[0].process.terminate()
    assert candidates[0].process.wait(timeout=15) == 0
    stopped = time.monotonic()
    cluster.wait(lambda: candidates[1].ready() == "leader", what="the standby to lead", timeout_seconds=20)
    assert time.monotonic() - stopped < 10, "it did not have to wait for the Lease to run out"


def test_a_standby_without_rights_is_not_ready_and_says_why(
    cluster: Any, crd: None, namespace: str, tmp_path: Path
) -> None:
    token = cluster.kubectl("create", "token", "default", "-n", namespace).strip()
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    config["users"] = [{"name": item["name"], "user": {"token": token}} for item in config["users"]]
    path = tmp_path / "nobody.conf"
    path.write_text(json.dumps(config))
    candidate = Candidate(path, namespace, tmp_path / "nobody.log")
    try:
        cluster.wait(lambda: "forbidden" in candidate.ready(), what="the reason", timeout_seconds=30)
        assert candidate.ready().startswith("503 the leader's Lease cannot be read or written: ApiError")
    finally:
        with contextlib.suppress(ProcessLookupError):
            candidate.process.kill()
        candidate.process.wait()
