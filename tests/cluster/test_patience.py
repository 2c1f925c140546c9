"""A healthy training is never restarted: outages, rollouts, flapping signals and wrong clocks on a real cluster."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest

from testbed import cluster as bed
from testbed import faults
from testbed.errors import TestbedError
from tests.cluster.jobs import LIGHT, Run, elastic, resumed, victim

pytestmark = pytest.mark.cluster

OUTAGE_SECONDS = 300 if os.environ.get("ETJ_SOAK") else 60


@pytest.fixture
def training(run_by_process: Run) -> Iterator[Run]:
    """A training on all three nodes that makes steps."""
    run_by_process.submit([*LIGHT, "100000", "0", "0"], **elastic(hangSeconds=60))
    run_by_process.until_phase("Running")
    yield run_by_process


def is_served(run: Run) -> bool:
    """Return whether the API server answers."""
    with contextlib.suppress(TestbedError):
        return bool(run.status())
    return False


def assert_undisturbed(run: Run, seconds: float) -> None:
    """Check that the first attempt goes on for a while, with more steps than before."""
    before = run.status()
    time.sleep(seconds)
    status = run.until("more steps", lambda now: now["progress"]["step"] > before["progress"]["step"])
    assert (status["attempt"], status["phase"], status.get("recoveries", [])) == (1, "Running", [])
    assert status["restartBudget"]["used"] == 0


def test_an_outage_of_the_api_server_and_etcd_restarts_nothing(training: Run) -> None:
    with faults.control_plane_stopped("kube-apiserver", "etcd"):
        time.sleep(OUTAGE_SECONDS)
    training.cluster.wait(lambda: is_served(training), what="the API server", timeout_seconds=60)
    assert_undisturbed(training, seconds=70)
    lost = victim(training)
    training.cluster.kill_node(lost)
    status = training.until("attempt 2", resumed(1), timeout_seconds=180)
    assert lost in status["recoveries"][-1]["lost"]


def test_a_rollout_of_the_device_plugin_over_all_nodes_restarts_nothing(training: Run) -> None:
    for node in (node for node in bed.members() if node.num_gpus):
        with faults.device_plugins_stopped(node.name):
            training.cluster.wait(lambda name=node.name: offered(training, name) == 0, what=f"no GPU on {node.name}")
            assert_undisturbed(training, seconds=15)
        training.cluster.wait(lambda name=node.name: offered(training, name) > 0, what=f"GPUs on {node.name}")
    assert_undisturbed(training, seconds=5)


def offered(run: Run, node: str) -> int:
    return int(run.cluster.get("node", node)["status"]["allocatable"].get("amd.com/gpu", 0))


def test_a_cordon_undone_after_five_seconds_restarts_nothing(training: Run) -> None:
    node = victim(training)
    for _ in range(3):
        training.cluster.kubectl("cordon", node)
        time.sleep(5)
        training.cluster.kubectl("uncordon", node)
        time.sleep(2)
    assert_undisturbed(training, seconds=12)


def test_memory_pressure_that_comes_and_goes_restarts_nothing(training: Run) -> None:
    taint = "node.kubernetes.io/memory-pressure:NoSchedule"
    for _ in range(2):
        training.cluster.kubectl("taint", "node", victim(training), taint, check=False)
        assert_undisturbed(training, seconds=12)
        training.cluster.kubectl("taint", "node", victim(training), f"{taint}-", check=False)


@pytest.mark.parametrize("offset_seconds", [-130, 130])
def test_a_trainer_whose_clock_is_wrong_is_not_hung(run_by_process: Run, offset_seconds: int) -> None:
    command = ["env", f"CLOCK_OFFSET_SECONDS={offset_seconds}", *LIGHT, "100000", "0", "0"]
    run_by_process.submit(command, recovery={"hangSeconds": 60})
    run_by_process.until_phase("Running")
    assert_undisturbed(run_by_process, seconds=20)
