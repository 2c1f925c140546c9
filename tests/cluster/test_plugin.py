"""`kubectl etj` against a real API server, a real operator and real pods."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator.client.resources import ResourceKind
from elastic_operator.plugin import cluster as edge
from elastic_operator.plugin.errors import Exit
from elastic_operator.plugin.main import main
from testbed.components import bin_dir
from tests.cluster.jobs import Run

pytestmark = pytest.mark.cluster

PLUGIN = Path(sys.executable).with_name("kubectl-etj")
TALKING = "echo attempt $ETJ_ATTEMPT begins; exec python tests/cluster/light_trainer.py {arguments}"

Etj = Callable[..., subprocess.CompletedProcess[str]]


def talking(arguments: str) -> list[str]:
    """A light training that says on stdout which attempt it is."""
    return ["sh", "-c", TALKING.format(arguments=arguments)]


@pytest.fixture
def run(run_by_process: Run) -> Run:
    return run_by_process


@pytest.fixture
def etj(testbed: Any, namespace: str) -> Etj:
    """The installed program, with the admin's credentials and the test's namespace unless told otherwise."""

    def call(*arguments: str, kubeconfig: Path | None = None, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        command = [str(PLUGIN), *arguments]
        if "-A" not in arguments and "-n" not in arguments:
            command += ["-n", namespace]
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig or testbed.kubeconfig)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
        assert code is None or done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return call


def parsed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def started(run: Run) -> None:
    run.submit(talking("100000 10 0"))
    run.until_phase("Running")
    run.until("a commit", lambda status: status.get("checkpoint", {}).get("step", 0) > 0)


def account(testbed: Any, namespace: str, path: Path, rules: list[dict[str, Any]], *, plugin: bool = False) -> Path:
    """Credentials of a user of the namespace who may do what `rules` say; with `plugin`, from a credential plugin."""
    meta = {"name": "reader", "namespace": namespace}
    testbed.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": meta, "rules": rules},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
            "subjects": [{"kind": "ServiceAccount", **meta}],
        },
    )
    token = testbed.kubectl("create", "token", "reader", "-n", namespace).strip()
    user: dict[str, Any] = {"token": token}
    if plugin:
        api = "client.authentication.k8s.io/v1"
        answer = {"apiVersion": api, "kind": "ExecCredential", "status": {"token": token}}
        user = {
            "exec": {"apiVersion": api, "command": "echo", "args": [json.dumps(answer)], "interactiveMode": "Never"}
        }
    config = yaml.safe_load(testbed.kubeconfig.read_text())
    config["users"] = [{"name": item["name"], "user": user} for item in config["users"]]
    path.write_text(json.dumps(config))
    return path


def test_a_job_is_listed_and_its_story_told(run: Run, etj: Etj) -> None:
    assert "No ElasticTrainingJobs found" in etj("list").stderr
    started(run)
    header, line = etj("list").stdout.splitlines()
    assert header.split()[:2] == ["NAME", "PHASE"]
    assert line.split()[:3] == ["gpt", "Running", "1"]
    everywhere = parsed(etj("list", "-A", "-o", "json"))["items"]
    assert (run.namespace, "gpt") in [(item["namespace"], item["name"]) for item in everywhere]
    page = etj("status", "etj/gpt").stdout
    assert f"{run.namespace}/gpt" in page
    assert "training: step " in page
    assert "Recoveries: none" in page
    assert "StartsFromNothing" in page
    status = parsed(etj("status", "gpt", "-o", "json"))
    assert (status["phase"], status["attempt"], status["gpus"]) == ("Running", 1, 2)
    assert {"Planned", "Launched", "Running"} <= {item["reason"] for item in status["events"]}


def test_drain_commits_starts_again_and_is_told_as_such(run: Run, etj: Etj) -> None:
    started(run)
    done = parsed(etj("drain", "gpt", "--wait", "-o", "json"))
    assert (done["changed"], done["phase"]) == (True, "Running")
    status = run.status()
    assert (status["attempt"], status["drainRequest"]) == (2, done["request"])
    (change,) = status["recoveries"]
    assert (change["cause"], change["planned"], change["lostSteps"]) == ("ManualDrain", True, 0)
    assert change["commitStep"] == change["lastStep"] > 0
    assert status["restartBudget"]["used"] == 0
    time.sleep(3)
    assert run.status()["attempt"] == 2, "one request is answered once"
    page = etj("status", "gpt").stdout
    assert "ManualDrain (planned): training again after" in page
    assert "nothing lost" in page


@pytest.mark.soak_only
def test_suspend_and_resume_wait_until_it_is_so(run: Run, etj: Etj) -> None:
    started(run)
    text = etj("suspend", "gpt", "--wait").stdout
    assert "gpt is suspended: nothing runs, the newest commit is of step" in text
    assert run.workers() == []
    assert parsed(etj("suspend", "gpt", "-o", "json"))["changed"] is False
    assert "only what is Running can commit" in etj("drain", "gpt", code=1).stderr
    assert "its pods are gone" in etj("logs", "gpt", code=1).stderr
    plan = parsed(etj("plan", "gpt", "-o", "json"))
    assert (plan["outcome"], plan["toNodes"]) == ("Starts", 1)
    assert "in attempt 2" in etj("resume", "gpt", "--wait").stdout
    status = run.status()
    assert (status["attempt"], status["phase"]) == (2, "Running")


@pytest.mark.soak_only
def test_what_is_not_done_in_time_has_a_code_of_its_own(run: Run, etj: Etj) -> None:
    started(run)
    run.submit(talking("100000 10 0"), pod_spec={"nodeSelector": {"kubernetes.io/hostname": "nowhere"}})
    run.until_phase("Waiting")
    etj("suspend", "gpt", "--wait")
    assert "resume is not done yet: gpt is Waiting" in etj("resume", "gpt", "--wait", "--timeout", "3", code=5).stderr
    assert "Nothing can run" in etj("status", "gpt").stdout


def test_plan_foresees_what_a_loss_does_on_the_live_cluster(run: Run, etj: Etj) -> None:
    started(run)
    (pod,) = run.workers()
    host = pod["spec"]["nodeName"]
    others = sorted(
        node["metadata"]["name"]
        for node in run.cluster.get("nodes")["items"]
        if node["status"]["allocatable"].get("amd.com/gpu") == "2" and node["metadata"]["name"] != host
    )
    assert len(others) == 2
    plan = parsed(etj("plan", "gpt", "--lose", host, *others, "-o", "json"))
    assert (plan["outcome"], plan["hit"]) == ("Waits", [host])
    assert "0 free accelerators on 0 nodes" in plan["reason"]
    replaced = parsed(etj("plan", "gpt", "--lose", host, *others, "--add", "1", "-o", "json"))
    assert (replaced["outcome"], replaced["useNodes"]) == ("Restarts", ["new-1"])
    assert replaced["reshard"]["mode"] == "None"
    assert parsed(etj("plan", "gpt", "--lose", *others, "-o", "json"))["outcome"] == "Unaffected"
    assert "gpt would wait: no topology fits." in etj("plan", "gpt", "--gpus", "1").stdout
    assert "no node nowhere with amd.com/gpu" in etj("plan", "gpt", "--lose", "nowhere", code=1).stderr
    assert run.status()["attempt"] == 1, "asking changes nothing"


def test_logs_are_those_of_the_attempt_that_matters(run: Run, etj: Etj) -> None:
    started(run)
    done = etj("logs", "gpt")
    assert done.stdout == "attempt 1 begins\n"
    assert "attempt 1, on gpu-" in done.stderr
    etj("drain", "gpt", "--wait")
    assert etj("logs", "gpt", "--rank", "1", "--tail", "1").stdout == "attempt 2 begins\n"
    found = parsed(etj("logs", "gpt", "-o", "json"))
    assert (found["attempt"], found["index"], found["lines"]) == (2, 0, ["attempt 2 begins"])
    assert "has no pod 4; it has 0" in etj("logs", "gpt", "--index", "4", code=1).stderr
    assert "there is no attempt 9" in etj("logs", "gpt", "--attempt", "9", code=1).stderr
    assert "no reshard pods" in etj("logs", "gpt", "--reshard", code=1).stderr


@pytest.mark.soak_only
def test_a_followed_log_ends_with_the_pod(run: Run, etj: Etj) -> None:
    run.submit(["sh", "-c", "echo first; python tests/cluster/light_trainer.py 30 0 0; echo last"])
    run.until_phase("Running")
    assert etj("logs", "gpt", "-f").stdout.splitlines() == ["first", "last"]


@pytest.mark.soak_only
def test_of_a_failed_job_the_pod_that_failed_is_shown(run: Run, etj: Etj) -> None:
    budget = {"restartBudget": {"limit": 0, "windowSeconds": 3600}}
    run.submit(talking("1000 0 7"), recovery=budget)
    run.until_phase("Failed")
    done = etj("logs", "gpt")
    assert done.stdout == "attempt 1 begins\n"
    assert "Failed, exit code 7" in done.stderr
    page = etj("status", "gpt").stdout
    assert "exit code 7" in page
    assert "hint: `kubectl etj logs gpt`" in page
    assert "it is Failed" in etj("drain", "gpt", code=1).stderr
    assert "gpt has ended" in etj("plan", "gpt", "--gpus", "2").stdout


def test_a_job_that_is_not_there_is_refused_with_near_names(run: Run, etj: Etj) -> None:
    run.submit(talking("100000 10 0"))
    assert "did you mean gpt?" in etj("status", "gtp", code=1).stderr
    assert "there are gpt" in etj("suspend", "whatever", code=1).stderr
    elsewhere = etj("status", "gpt", "-n", "default", code=1).stderr
    assert "there is one in " in elsewhere
    assert run.namespace in elsewhere


def test_a_cluster_without_the_crd_is_told_so(
    testbed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The API server's real answer about a group that it does not have.
    absent = ResourceKind("absent.example", "v1", "ElasticTrainingJob", "elastictrainingjobs")
    monkeypatch.setattr(edge, "TRAINING_JOB", absent)
    monkeypatch.setattr(edge, "GROUP", "absent.example")
    for arguments in (["list"], ["list", "-A"], ["status", "gpt"], ["suspend", "gpt"]):
        assert main([*arguments, "--kubeconfig", str(testbed.kubeconfig)], {}) == Exit.NOT_INSTALLED
        error = capsys.readouterr().err
        assert "does not know elastictrainingjobs.absent.example: install the CRD" in error
        assert error.count("\n") == 1


READ = [
    {"apiGroups": ["elastictraining.dev"], "resources": ["elastictrainingjobs"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["events", "pods"], "verbs": ["list"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
]


@pytest.mark.parametrize(
    "plugin",
    [pytest.param(False, id="token"), pytest.param(True, marks=pytest.mark.soak_only, id="credential-plugin")],
)
def test_a_reader_reads_and_is_told_what_it_may_not(
    run: Run, etj: Etj, testbed: Any, tmp_path: Path, plugin: bool
) -> None:
    started(run)
    reader = account(testbed, run.namespace, tmp_path / "reader.conf", READ, plugin=plugin)
    assert "Running" in etj("list", kubeconfig=reader).stdout
    assert "training: step" in etj("status", "gpt", kubeconfig=reader).stdout
    assert etj("logs", "gpt", kubeconfig=reader).stdout == "attempt 1 begins\n"
    for arguments, what in (
        (("list", "-A"), "you may not list jobs: "),
        (("plan", "gpt"), "you may not list nodes of the whole cluster: "),
        (("suspend", "gpt"), "you may not change job gpt: "),
        (("drain", "gpt"), "you may not change job gpt: "),
    ):
        error = etj(*arguments, kubeconfig=reader, code=1).stderr
        assert error.startswith(f"error: {what}"), error
        assert "system:serviceaccount" in error
        assert error.count("\n") == 1
    assert run.status()["phase"] == "Running"


def test_without_events_the_story_is_told_all_the_same(run: Run, etj: Etj, testbed: Any, tmp_path: Path) -> None:
    started(run)
    reader = account(testbed, run.namespace, tmp_path / "reader.conf", READ[:1])
    done = etj("status", "gpt", kubeconfig=reader)
    assert "training: step" in done.stdout
    assert "without events: you may not list events" in done.stderr


def test_credentials_that_the_cluster_does_not_accept_are_told_so(testbed: Any, etj: Etj, tmp_path: Path) -> None:
    config = yaml.safe_load(testbed.kubeconfig.read_text())
    config["users"] = [{"name": item["name"], "user": {"token": "nonsense"}} for item in config["users"]]
    path = tmp_path / "config"
    path.write_text(json.dumps(config))
    error = etj("list", kubeconfig=path, code=3).stderr
    assert error.startswith("error: the cluster does not accept the credentials of context ")
    assert error.count("\n") == 1


def test_a_reader_that_stops_reading_is_no_error(run: Run, testbed: Any) -> None:
    run.submit(["sh", "-c", "seq 200000; exec python tests/cluster/light_trainer.py 100000 10 0"])
    run.until_phase("Running")
    command = f"{PLUGIN} logs gpt -n {run.namespace} 2>/dev/null | head -n 2 | tail -n 1; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "KUBECONFIG": str(testbed.kubeconfig)}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    assert done.stdout.splitlines() == ["2", "0"]


def test_kubectl_finds_the_plugin(run: Run, testbed: Any) -> None:
    run.submit(talking("100000 10 0"))
    kubectl = shutil.which("kubectl") or str(bin_dir() / "kubectl")
    path = f"{PLUGIN.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "KUBECONFIG": str(testbed.kubeconfig)}
    command = [kubectl, "etj", "list", "-n", run.namespace]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    assert done.stdout.splitlines()[1].startswith("gpt ")
