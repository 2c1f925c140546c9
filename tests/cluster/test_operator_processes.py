"""The operator as processes of this machine: with the chart's rights only, two at a time, killed again and again."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import releases
from tests.cluster.jobs import GPT, LIGHT, Operator, Run, committed, elastic, resumed, victim

pytestmark = pytest.mark.cluster


@pytest.mark.usefixtures("crd", "checkpoints")
def test_the_roles_of_the_chart_are_enough_for_a_whole_life(
    testbed: Any, namespace: str, home: str, tmp_path: Path
) -> None:
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    kinds += ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    values = {"watchNamespaces": [namespace], "rbac": {"aggregateRoles": False}}
    granted = [item for item in releases.render(home, values) if item["kind"] in kinds]
    testbed.apply(*granted)
    account = f"system:serviceaccount:{home}:{releases.NAME}"
    config = yaml.safe_load(testbed.kubeconfig.read_text())
    token = testbed.kubectl("create", "token", releases.NAME, "-n", home).strip()
    config["users"] = [{"name": item["name"], "user": {"token": token}} for item in config["users"]]
    path = tmp_path / "account.conf"
    path.write_text(json.dumps(config))
    assert testbed.kubectl("auth", "can-i", "delete", "nodes", "--as", account, check=False).strip() == "no"
    process = Operator(path, namespace, tmp_path / "operator.log", "--lease-namespace", home)
    job = Run(testbed, namespace)
    try:
        job.submit([*LIGHT, "100000", "2", "0"])
        job.until("a commit", lambda status: status.get("checkpoint", {}).get("step", 0) > 0)
        job.patch(suspend=True)
        job.until_phase("Suspended")
        job.patch(suspend=False)
        job.until("attempt 2", lambda status: status["attempt"] == 2 and status["phase"] == "Running")
    finally:
        process.stop()
        testbed.kubectl("delete", "etj", "gpt", "-n", namespace)
        testbed.kubectl("delete", "-f", "-", stdin=yaml.safe_dump_all(granted))
    text = (tmp_path / "operator.log").read_text()
    assert "forbidden" not in text.lower(), text


@pytest.mark.soak_only
def test_a_standby_takes_over_when_the_leader_dies(
    testbed: Any, namespace: str, crd: None, checkpoints: Path, tmp_path: Path
) -> None:
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    options = ("--lease-namespace", namespace)
    first = Operator(testbed.kubeconfig, namespace, logs[0], *options)
    testbed.wait(lambda: "is the leader" in logs[0].read_text(), what="the first leader")
    second = Operator(testbed.kubeconfig, namespace, logs[1], *options)
    job = Run(testbed, namespace)
    try:
        testbed.wait(lambda: "waiting to become" in logs[1].read_text(), what="the standby")
        time.sleep(5)
        assert "is the leader" not in logs[1].read_text()
        first.stop(signal.SIGKILL)
        job.submit([*LIGHT, "5", "0", "0"])
        job.until_phase("Complete", 60)
        assert "is the leader" in logs[1].read_text()
    finally:
        second.stop()
        testbed.kubectl("delete", "etj", "gpt", "-n", namespace, "--ignore-not-found")


@pytest.mark.soak_only
def test_an_operator_killed_ten_times_during_recoveries_still_converges(
    run_by_process: Run, operator: Operator
) -> None:
    run = run_by_process
    run.submit([*GPT, "--steps", "100000"], **elastic())
    run.until("a commit on 3 nodes", lambda status: committed(status) and status["replicas"] == 3, 240)
    node = victim(run)
    seen: set[tuple[int, str]] = set()
    crashes = 0
    attempts: list[int] = []

    def crash_at_new_moments(goal: Any, limit: int, timeout_seconds: float) -> dict[str, Any]:
        """Kill the operator at every moment (attempt, phase, pods, age of that state) not seen before."""
        nonlocal crashes
        state, since = (0, ""), time.monotonic()
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            status = run.status()
            attempts.append(status["attempt"])
            live = {pod["metadata"]["labels"]["elastictraining.dev/attempt"] for pod in run.workers()
                    if pod["status"]["phase"] == "Running" and pod["spec"]["nodeName"] != node}  # fmt: skip
            assert len(live) <= 1, f"attempts {live} run at the same time"
            if goal(status):
                return status
            now = (status["attempt"], f"{status['phase']}/{len(live)}/{len(status.get('recoveries', []))}")
            state, since = (state, since) if now == state else (now, time.monotonic())
            moment = (now[0], f"{now[1]}/{int(time.monotonic() - since) // 3 * 3} s")
            if crashes < limit and moment not in seen:
                seen.add(moment)
                operator.crash()
                crashes += 1
        raise AssertionError(f"not reached after {crashes} crashes: {json.dumps(run.status(), indent=1)}")

    run.cluster.kill_node(node)
    small = crash_at_new_moments(
        lambda status: committed(status) and status["replicas"] == 2 and len(status["recoveries"]) == 1, 5, 240
    )
    run.cluster.heal_node(node)
    grown = crash_at_new_moments(lambda status: resumed(small["attempt"])(status) and status["replicas"] == 3, 10, 300)
    sys.stdout.write(f"{crashes} crashes at {sorted(seen)}\n")
    assert crashes == 10
    assert attempts == sorted(attempts), "attempts never go back"
    assert grown["checkpoint"]["step"] >= small["checkpoint"]["step"]
