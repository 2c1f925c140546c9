"""The metrics page of a real operator, compared with the statuses that it wrote."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.jobs import LIGHT, Operator, Run, find_process, free_port, resumed

pytestmark = pytest.mark.cluster

GOLDEN = "tests/golden/deepspeed-0.19.8/bf16-dp2/step-00000002"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Page:
    """/metrics of one process."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"

    def read(self) -> Series:
        """All series; none before the process serves."""
        try:
            with urllib.request.urlopen(self._url, timeout=10) as answer:
                text = answer.read().decode()
        except urllib.error.URLError:
            return {}
        families = text_string_to_metric_families(text)
        return {
            (item.name, frozenset(item.labels.items())): item.value for family in families for item in family.samples
        }

    def value(self, series: str, **labels: str) -> float | None:
        return self.read().get((series, frozenset(labels.items())))

    def total(self, series: str, **labels: str) -> float:
        """Sum over the series that have these labels."""
        wanted = set(labels.items())
        return sum(value for (name, found), value in self.read().items() if name == series and wanted <= found)

    def job_series(self) -> list[str]:
        return [name for name, _ in self.read() if name.startswith("etj_job_")]


@pytest.fixture
def run(run_by_process: Run) -> Run:
    return run_by_process


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def operator(testbed: Any, namespace: str, crd: None, log: Path, port: int) -> Iterator[Operator]:
    process = Operator(testbed.kubeconfig, namespace, log, "--no-leader-election", f"--metrics-port={port}")
    yield process
    with contextlib.suppress(ProcessLookupError):
        process.stop()
    print(log.read_text())


def seconds_of(recoveries: list[dict[str, Any]], part: str) -> float:
    return sum(recovery["seconds"].get(part, 0.0) for recovery in recoveries)


def fail_pod(run: Run) -> None:
    """End a training from within, not by a request to leave, which would be a planned change.

    A status that a test writes is no failure: the kubelet writes its own over it.
    """
    (pod,) = run.workers()
    os.kill(find_process(pod, "light_trainer"), signal.SIGKILL)


def counted(page: Page, run: Run, *, before: int = 0) -> dict[str, Any]:
    """The status once all recoveries after the first `before` are over and counted; a busy machine may add some."""
    found: dict[str, Any] = {}

    def agrees() -> bool:
        found.clear()
        found.update(run.status())
        recoveries = found["recoveries"][before:]
        over = bool(recoveries) and "firstStepTime" in recoveries[-1]
        return over and page.total("etj_recoveries_ended_total") == len(recoveries)

    run.cluster.wait(agrees, what="every recovery to be counted")
    return found


def check_counters(page: Page, status: dict[str, Any]) -> None:
    recoveries = status["recoveries"]
    resumed_ones = [item for item in recoveries if "firstStepTime" in item]
    assert page.total("etj_recoveries_started_total") == len(recoveries)
    for planned in ("true", "false"):
        durations = [item["seconds"]["total"] for item in resumed_ones if str(item["planned"]).lower() == planned]
        assert page.value("etj_recovery_seconds_count", planned=planned) == len(durations) > 0
        assert page.value("etj_recovery_seconds_sum", planned=planned) == pytest.approx(sum(durations))
    for cause in {item["cause"] for item in recoveries}:
        ended = [item for item in recoveries if item["cause"] == cause]
        done = sum("firstStepTime" in item for item in ended)
        assert page.value("etj_recoveries_ended_total", cause=cause, result="resumed") == done
        assert page.value("etj_recoveries_ended_total", cause=cause, result="superseded") == len(ended) - done
    assert page.value("etj_recoveries_started_total", cause="SpecChanged", planned="true") == 1
    for part in ("detect", "stop", "plan", "reshard", "launch", "schedule", "load"):
        found = page.value("etj_recovery_part_seconds_sum", part=part)
        assert found == pytest.approx(seconds_of(resumed_ones, part)), part
    assert page.value("etj_lost_steps_total") == sum(item["lostSteps"] for item in recoveries) > 0
    done = {"mode": "materialize", "result": "Succeeded"}
    assert page.value("etj_reshards_total", **done) == page.total("etj_reshards_total") == 1
    assert page.value("etj_reshard_read_bytes_total", **done) == status["reshard"]["bytesRead"] > 0
    assert page.value("etj_reshard_written_bytes_total", **done) == status["reshard"]["bytesWritten"] > 0
    assert page.value("etj_reshard_seconds_sum", **done) == pytest.approx(status["reshard"]["seconds"])
    assert 3 <= (page.value("etj_attempts_launched_total") or 0) <= status["attempt"]
    assert page.total("etj_queue_seconds_count") == status["attempt"]
    assert page.value("etj_queue_seconds_count", reason="start") == 1
    assert page.total("etj_jobs_finished_total") == 0
    assert page.value("etj_reconcile_seconds_count", result="error") == 0
    assert page.total("etj_reconcile_seconds_count", result="success") > 10
    assert page.value("etj_events_total", reason="Resharded") == 1


def check_gauges(page: Page, run: Run, status: dict[str, Any]) -> None:
    job = {"namespace": run.namespace, "name": "gpt"}
    assert page.value("etj_leader") == 1
    assert page.value("etj_job_phase", **job, phase="Running") == 1
    assert page.total("etj_job_phase") == 1
    assert page.value("etj_job_attempt", **job) == status["attempt"]
    assert page.value("etj_job_gpus_used", **job) == page.value("etj_job_gpus_wanted", **job) == 1
    assert page.value("etj_job_commit_step", **job) == status["checkpoint"]["step"]
    assert page.value("etj_job_lost_steps", **job) == sum(item["lostSteps"] for item in status["recoveries"])
    assert 0 < (page.value("etj_job_goodput_ratio", **job) or 0) < 1
    assert (
        page.value("etj_job_restarts_left", **job) == status["restartBudget"]["limit"] - status["restartBudget"]["used"]
    )
    assert time.time() - (page.value("etj_job_heartbeat_timestamp_seconds", **job) or 0) < 40
    assert time.time() - (page.value("etj_job_last_step_timestamp_seconds", **job) or 0) < 60
    assert page.value("etj_job_queue_start_timestamp_seconds", **job) is None
    assert page.value("etj_job_recovery_start_timestamp_seconds", **job) is None


@pytest.mark.soak_only
def test_what_is_exported_agrees_with_what_happened_and_a_restart_counts_nothing_again(
    run: Run, operator: Operator, port: int
) -> None:
    page = Page(port)
    # Progress is written every 10 s, which are 50 steps: with a commit every 10 it could always fall on one.
    run.submit([*LIGHT, "100000", "7", "0", GOLDEN], accelerator={"resource": "amd.com/gpu", "perNode": [2, 1]})
    run.until("a commit, and a step after it", lambda status: (
        status.get("phase") == "Running" and 0 < status["checkpoint"].get("step", 0) < status["progress"]["step"]
    ))  # fmt: skip
    fail_pod(run)
    run.until("attempt 2", resumed(1))
    run.patch(accelerator={"perNode": [1]})
    run.until("attempt 3 on one GPU", lambda status: resumed(2)(status) and status["gpus"] == 1)
    status = counted(page, run)
    check_counters(page, status)
    check_gauges(page, run, status)

    before = len(status["recoveries"])
    operator.crash()
    run.cluster.wait(page.job_series, what="the new process to have looked at the job")
    fail_pod(run)
    run.until("the next attempt", resumed(status["attempt"]))
    status = counted(page, run, before=before)
    assert page.total("etj_recoveries_started_total") == len(status["recoveries"]) - before
    assert page.value("etj_lost_steps_total") == sum(item["lostSteps"] for item in status["recoveries"][before:])
    assert page.total("etj_reshards_total") == 0

    run.cluster.kubectl("delete", "etj", "gpt", "-n", run.namespace)
    run.cluster.wait(lambda: not page.job_series(), what="the series of the job to go")
    assert page.total("etj_recoveries_ended_total") == len(status["recoveries"]) - before, "counters stay"


def test_a_failed_job_is_counted_with_the_attempts_that_led_to_it(run: Run, port: int) -> None:
    page = Page(port)
    budget = {"restartBudget": {"limit": 1, "windowSeconds": 3600}}
    run.submit([*LIGHT, "1000", "0", "7"], accelerator={"resource": "amd.com/gpu", "perNode": [1]}, recovery=budget)
    status = run.until_phase("Failed")
    run.cluster.wait(lambda: page.total("etj_jobs_finished_total"), what="the failure to be counted")
    assert page.value("etj_jobs_finished_total", result="Failed") == 1
    assert page.value("etj_attempts_launched_total") == status["attempt"] == 2
    assert page.value("etj_recoveries_ended_total", cause="PodFailed", result="resumed") == 1
    assert page.value("etj_recoveries_ended_total", cause="PodFailed", result="failed") == 1
    job = {"namespace": run.namespace, "name": "gpt"}
    assert page.value("etj_job_phase", **job, phase="Failed") == 1
    assert page.value("etj_job_gpus_used", **job) == page.value("etj_job_gpus_wanted", **job) == 0
    ratio = page.value("etj_job_goodput_ratio", **job)
    time.sleep(3)
    assert page.value("etj_job_goodput_ratio", **job) == ratio, "the clock has stopped"


@pytest.mark.soak_only
def test_a_standby_serves_its_page_without_jobs_until_it_leads(
    testbed: Any, namespace: str, crd: None, checkpoints: Path, tmp_path: Path
) -> None:
    ports = (free_port(), free_port())
    pages = [Page(port) for port in ports]
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    options = ("--lease-namespace", namespace)
    operators = [Operator(testbed.kubeconfig, namespace, logs[0], *options, f"--metrics-port={ports[0]}")]
    job = Run(testbed, namespace)
    try:
        testbed.wait(lambda: pages[0].value("etj_leader") == 1, what="the first to lead")
        operators.append(Operator(testbed.kubeconfig, namespace, logs[1], *options, f"--metrics-port={ports[1]}"))
        job.submit([*LIGHT, "100000", "5", "0"], accelerator={"resource": "amd.com/gpu", "perNode": [1]})
        job.until_phase("Running")
        testbed.wait(pages[0].job_series, what="the leader to tell of the job")
        testbed.wait(lambda: pages[1].value("etj_leader") == 0, what="the standby to serve")
        assert pages[1].job_series() == []
        assert pages[1].value("etj_attempts_launched_total") == 0
        operators.pop(0).stop(signal.SIGKILL)
        testbed.wait(lambda: pages[1].value("etj_leader") == 1, what="the standby to lead")
        testbed.wait(pages[1].job_series, what="the new leader to tell of the job")
        assert pages[1].value("etj_attempts_launched_total") == 0, "the attempt was launched and counted by the first"
    finally:
        for operator in operators:
            operator.stop()
        testbed.kubectl("delete", "etj", "gpt", "-n", namespace, "--ignore-not-found")
        print(*(log.read_text() for log in logs if log.exists()))
