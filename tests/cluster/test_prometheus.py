"""The chart's alerts in a real Prometheus: each fires when it should and not before, and the operator is scraped."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from testbed import prometheus
from testbed.errors import TestbedError
from testbed.shell import until
from tests.cluster.jobs import Operator, free_port
from tests.cluster.own_api_server import own_api_server
from tests.cluster.test_plugin_pages import NAMESPACE, make_job
from tests.pages import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.own_api_server]

RULES = ROOT / "charts/elastic-training-operator/files/alerts.yaml"
JOB = 'namespace="team",name="gpt"'
RUNNING = {f'etj_job_phase{{{JOB},phase="Running"}}': "1x200"}


class Firing(NamedTuple):
    """An alert that fires at a minute and not the minute before; samples are a minute apart, from minute 0 on."""

    series: dict[str, str]
    minute: int
    labels: dict[str, str]
    summary: str


OF_JOB = {"namespace": "team", "name": "gpt"}
FIRING = {
    "ElasticTrainingJobFailed": Firing(
        {f'etj_job_phase{{{JOB},phase="Failed"}}': "0x9 1x20"},
        10,
        {**OF_JOB, "phase": "Failed"},
        "Training job team/gpt has failed and is not tried again.",
    ),
    "ElasticTrainingRecoverySlow": Firing(
        {f"etj_job_recovery_start_timestamp_seconds{{{JOB}}}": "600x60"},
        26,
        OF_JOB,
        "Training job team/gpt has been recovering for 16m 0s.",
    ),
    "ElasticTrainingNoProgress": Firing(
        {f"etj_job_last_step_timestamp_seconds{{{JOB}}}": "600x60", **RUNNING},
        41,
        OF_JOB,
        "Training job team/gpt has made no step for 31m 0s.",
    ),
    "ElasticTrainingGoodputLow": Firing(
        {f"etj_job_goodput_ratio{{{JOB}}}": "0.9x9 0.7x150", **RUNNING},
        70,
        OF_JOB,
        "Only 70% of the time of training job team/gpt counts.",
    ),
    "ElasticTrainingReshardFailing": Firing(
        {'etj_reshards_total{mode="Materialize", result="CorruptSource"}': "0x9 1x9 2x40"},
        20,
        {"mode": "Materialize", "result": "CorruptSource"},
        "Reshard Jobs fail with CorruptSource (2 in 30 minutes).",
    ),
    "ElasticTrainingNoLeader": Firing(
        {"etj_leader": "1x9 0x30"}, 12, {}, "No elastic-training-operator leads, so nothing recovers."
    ),
}
SILENT = {
    "a job that waits makes no steps": (
        "ElasticTrainingNoProgress",
        {
            f"etj_job_last_step_timestamp_seconds{{{JOB}}}": "600x120",
            f'etj_job_phase{{{JOB},phase="Waiting"}}': "1x120",
        },
    ),
    "a suspended job has no goodput": (
        "ElasticTrainingGoodputLow",
        {f"etj_job_goodput_ratio{{{JOB}}}": "0.1x120", f'etj_job_phase{{{JOB},phase="Suspended"}}': "1x120"},
    ),
    "a short drop of goodput": (
        "ElasticTrainingGoodputLow",
        {f"etj_job_goodput_ratio{{{JOB}}}": "0.9x30 0.5x30 0.9x60", **RUNNING},
    ),
    "one conversion that fails": (
        "ElasticTrainingReshardFailing",
        {'etj_reshards_total{mode="Materialize", result="CorruptSource"}': "0x9 1x120"},
    ),
    "conversions that succeed": (
        "ElasticTrainingReshardFailing",
        {'etj_reshards_total{mode="Materialize", result="Succeeded"}': "0+5x120"},
    ),
    "one of two replicas leads": (
        "ElasticTrainingNoLeader",
        {'etj_leader{instance="a"}': "0x120", 'etj_leader{instance="b"}': "1x120"},
    ),
}


@pytest.fixture(scope="module")
def programs() -> Path:
    try:
        return prometheus.ensure()
    except TestbedError as error:
        pytest.skip(str(error))


def alerts() -> dict[str, dict[str, Any]]:
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def firing_test(alert: str, case: Firing) -> dict[str, Any]:
    """Return what promtool checks: silence the minute before, then the alert with its labels and whole texts."""
    rule = alerts()[alert]
    description = rule["annotations"]["description"]
    for name, value in case.labels.items():
        description = description.replace(f"{{{{ $labels.{name} }}}}", value)
    assert "{{" not in description
    fired = {
        "exp_labels": {**rule["labels"], **case.labels},
        "exp_annotations": {"summary": case.summary, "description": description},
    }
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{case.minute - 1}m", "alertname": alert, "exp_alerts": []},
            {"eval_time": f"{case.minute}m", "alertname": alert, "exp_alerts": [fired]},
        ],
    }


def silence_test(alert: str, series: dict[str, str]) -> dict[str, Any]:
    """Return what promtool checks: silence at each sample and between samples, for 100 minutes."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{30 * number}s", "alertname": alert, "exp_alerts": []} for number in range(200)
        ],
    }


def run_promtool(programs: Path, folder: Path, *tests: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    path = folder / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": list(tests)}))
    command = [programs / "promtool", "test", "rules", path]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def test_every_alert_of_the_chart_has_a_case() -> None:
    assert FIRING.keys() == alerts().keys()


def test_every_alert_fires_when_it_should_and_no_minute_before(programs: Path, tmp_path: Path) -> None:
    done = run_promtool(programs, tmp_path, *(firing_test(alert, case) for alert, case in FIRING.items()))
    assert done.returncode == 0, done.stdout


def test_no_alert_fires_for_what_is_no_trouble(programs: Path, tmp_path: Path) -> None:
    done = run_promtool(programs, tmp_path, *(silence_test(*case) for case in SILENT.values()))
    assert done.returncode == 0, done.stdout


def test_an_alert_that_never_fires_would_be_noticed(programs: Path, tmp_path: Path) -> None:
    late = FIRING["ElasticTrainingJobFailed"]._replace(minute=5)
    done = run_promtool(programs, tmp_path, firing_test("ElasticTrainingJobFailed", late))
    assert done.returncode != 0
    assert "ElasticTrainingJobFailed" in done.stdout


class Prometheus:
    """The API of a server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer; None before the server answers."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.URLError:
            return None

    def value(self, expression: str) -> float | None:
        """Return the value of the only series."""
        data = self.ask("query", query=expression)
        return float(data["result"][0]["value"][1]) if data and len(data["result"]) == 1 else None

    def state(self, alert: str) -> str | None:
        """Return `inactive`, `pending` or `firing`; None before the first evaluation."""
        groups = (self.ask("rules") or {"groups": []})["groups"]
        found = [rule for group in groups for rule in group["rules"] if rule["name"] == alert]
        return str(found[0]["state"]) if found and found[0]["health"] == "ok" else None


def test_prometheus_scrapes_the_operator_and_evaluates_every_rule(programs: Path, tmp_path: Path) -> None:
    with own_api_server() as kubectl:
        kubectl("create", "namespace", NAMESPACE)
        make_job(kubectl)
        port = free_port()
        options = (f"--metrics-port={port}", "--lease-namespace", NAMESPACE)
        operator = Operator(kubectl.kubeconfig, NAMESPACE, tmp_path / "operator.log", *options)
        target = f"127.0.0.1:{port}"
        with prometheus.run(tmp_path, port=free_port(), target=target, rules=RULES) as url:
            server = Prometheus(url)
            try:
                until(lambda: server.value("etj_leader") == 1, what="a leader")
                until(lambda: server.value(f'etj_job_phase{{namespace="{NAMESPACE}"}} == 1') == 1, what="the job")
                for alert in alerts():
                    until(lambda alert=alert: server.state(alert) == "inactive", what=f"the evaluation of {alert}")
            finally:
                operator.stop()
            until(lambda: server.state("ElasticTrainingNoLeader") == "pending", what="an alert that nobody leads")
