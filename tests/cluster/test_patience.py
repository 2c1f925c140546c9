"""A healthy training is never restarted: outages, rollouts, flapping signals and wrong clocks on a real cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_operator.observed.timeouts import Timeouts
from testbed import cluster as bed
from testbed import faults
from testbed.errors import TestbedError
from tests.cluster.jobs import LIGHT, Operator, Run, elastic, resumed, victim
from tests.randomness import examples

pytestmark = pytest.mark.cluster

HANG_SECONDS = 25
OUTAGE_SECONDS = examples(30, soak=300)
ROUNDS = examples(1, soak=2)


@pytest.fixture
def training(run_by_process: Run) -> Iterator[Run]:
    """A training on all three nodes that makes steps."""
    # The test bed evicts after 5 s; here pods stay on a silent node for as long as Kubernetes lets them by default.
    stay = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
        for key in ("not-ready", "unreachable")
    ]
    run_by_process.submit(
        [*LIGHT, "100000", "0", "0"], pod_spec={"tolerations": stay}, **elastic(hangSeconds=HANG_SECONDS)
    )
    run_by_process.until_phase("Running")
    yield run_by_process


@pytest.fixture
def calm_training(testbed: Any, namespace: str, checkpoints: Path, crd: None, log: Path) -> Iterator[Run]:
    """The same with the patience of a real cluster, because a kubelet needs some seconds to start again.

    The test bed has short Leases, and evicts pods after 5 s from a node that is not Ready.
    """
    keys = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    tolerations = [{"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300} for key in keys]
    operator = Operator(testbed.kubeconfig, namespace, log, "--no-leader-election", "--node-lease-floor-seconds=20")
    run = Run(testbed, namespace)
    try:
        run.submit(
            [*LIGHT, "100000", "0", "0"], pod_spec={"tolerations": tolerations}, **elastic(hangSeconds=HANG_SECONDS)
        )
        run.until_phase("Running")
        yield run
        run.remove()
    finally:
        operator.stop()


def is_served(run: Run) -> bool:
    """Return whether the API server answers."""
    with contextlib.suppress(TestbedError):
        return bool(run.status())
    return False


def assert_undisturbed(*runs: Run, seconds: float) -> None:
    """Check that the first attempt of each goes on for a while, with more steps than before."""
    steps = [run.status()["progress"]["step"] for run in runs]
    time.sleep(seconds)
    for run, step in zip(runs, steps, strict=True):
        status = run.until("more steps", lambda now, step=step: now["progress"]["step"] > step)
        assert (status["attempt"], status["phase"], status.get("recoveries", [])) == (1, "Running", [])
        assert status["restartBudget"]["used"] == 0


@pytest.mark.timeout(600 + OUTAGE_SECONDS)
@pytest.mark.soak_only  # test_fault_injection cuts every request of a recovery
def test_an_outage_of_the_api_server_and_etcd_restarts_nothing(training: Run) -> None:
    with faults.control_plane_stopped("kube-apiserver", "etcd"):
        time.sleep(OUTAGE_SECONDS)
    training.cluster.wait(lambda: is_served(training), what="the API server", timeout_seconds=60)
    assert_undisturbed(training, seconds=HANG_SECONDS + 10)
    lost = victim(training)
    training.cluster.kill_node(lost)
    status = training.until("attempt 2", resumed(1), timeout_seconds=180)
    assert lost in status["recoveries"][-1]["lost"]


def test_a_rollout_of_the_device_plugin_restarts_nothing(training: Run) -> None:
    for node in [node for node in bed.members() if node.num_gpus][: examples(1, soak=3)]:
        with faults.device_plugins_stopped(node.name):
            training.cluster.wait(lambda name=node.name: offered(training, name) == 0, what=f"no GPU on {node.name}")
            assert_undisturbed(training, seconds=15)
        training.cluster.wait(lambda name=node.name: offered(training, name) > 0, what=f"GPUs on {node.name}")
    assert_undisturbed(training, seconds=5)


def offered(run: Run, node: str) -> int:
    return int(run.cluster.get("node", node)["status"]["allocatable"].get("amd.com/gpu", 0))


@pytest.mark.soak_only
def test_a_cordon_undone_after_five_seconds_restarts_nothing(training: Run) -> None:
    node = victim(training)
    for _ in range(3):
        training.cluster.kubectl("cordon", node)
        time.sleep(5)
        training.cluster.kubectl("uncordon", node)
        time.sleep(2)
    assert_undisturbed(training, seconds=12)


def has_taint(run: Run, node: str, key: str) -> bool:
    return any(taint["key"] == key for taint in run.cluster.get("node", node)["spec"].get("taints", []))


@pytest.mark.soak_only
def test_memory_pressure_that_comes_and_goes_restarts_nothing(calm_training: Run) -> None:
    node, key = victim(calm_training), "node.kubernetes.io/memory-pressure"
    for _ in range(ROUNDS):
        with faults.memory_pressure(node):
            calm_training.cluster.wait(lambda: has_taint(calm_training, node, key), what=f"{key} of {node}")
            end = time.monotonic() + Timeouts().planned_seconds + 5
            while time.monotonic() < end:
                assert has_taint(calm_training, node, key), "the taint lasts for longer than planned-seconds"
                time.sleep(1)
            assert_undisturbed(calm_training, seconds=2)
        calm_training.cluster.wait(lambda: not has_taint(calm_training, node, key), what=f"{node} without {key}")
    assert_undisturbed(calm_training, seconds=15)


@pytest.mark.soak_only
def test_a_kubelet_that_is_started_again_restarts_nothing(calm_training: Run) -> None:
    node = victim(calm_training)
    for _ in range(ROUNDS):
        faults.restart_kubelet(node)
        assert_undisturbed(calm_training, seconds=20)
        calm_training.cluster.wait(lambda: calm_training.cluster.node_is_ready(node), what=f"{node} to be Ready")
        calm_training.cluster.wait(lambda: offered(calm_training, node) > 0, what=f"GPUs on {node}")


@pytest.mark.soak_only
def test_wrong_clocks_and_one_that_is_set_restart_nothing(run_by_process: Run, checkpoints: Path) -> None:
    def set_clock(offset_seconds: int) -> None:
        new = checkpoints / "clock.new"
        new.write_text(str(offset_seconds))
        new.rename(checkpoints / "clock")

    set_clock(0)
    wrong = 3 * HANG_SECONDS
    clocks = {
        "behind": f"CLOCK_OFFSET_SECONDS={-wrong}",
        "ahead": f"CLOCK_OFFSET_SECONDS={wrong}",
        "set": "CLOCK_OFFSET_FILE=/checkpoint/clock",
    }
    runs = [Run(run_by_process.cluster, run_by_process.namespace, name) for name in clocks]
    for run in runs:
        run.submit(["env", clocks[run.name], *LIGHT, "100000", "0", "0"], recovery={"hangSeconds": HANG_SECONDS})
    for run in runs:
        run.until_phase("Running")
    for offset_seconds in (wrong, 0, -wrong):
        set_clock(offset_seconds)
        assert_undisturbed(*runs, seconds=20)
