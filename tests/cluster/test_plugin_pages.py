"""The reading verbs of `kubectl etj` on a real API server, with the rights that its page lists and no others."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator.plugin.errors import Exit
from elastic_operator.plugin.main import main
from testbed.kubectl import Kubectl
from tests.cluster.own_api_server import own_api_server

pytestmark = [pytest.mark.cluster, pytest.mark.own_api_server]

NAMESPACE = "readers"
RECORDING = Path(__file__).parents[1] / "unit/elastic_operator/plugin/data/recorded_recovery.json"
READS = [
    {"apiGroups": ["elastictraining.dev"], "resources": ["elastictrainingjobs"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["events", "pods"], "verbs": ["list"]},
]


def make_reader(kubectl: Kubectl, folder: Path) -> Path:
    """Make an account that may read jobs, Events and pods of the namespace; return its kubeconfig."""
    meta = {"name": "reader", "namespace": NAMESPACE}
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", **meta}
    role = {"apiGroup": rbac, "kind": "Role", "name": "reader"}
    kubectl.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": READS},
        {"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": meta, "roleRef": role, "subjects": [subject]},
    )
    config = yaml.safe_load(kubectl.kubeconfig.read_text())
    token = kubectl("create", "token", "reader", "-n", NAMESPACE).strip()
    config["users"] = [{"name": item["name"], "user": {"token": token}} for item in config["users"]]
    path = folder / "reader.conf"
    path.write_text(json.dumps(config))
    return path


def make_job(kubectl: Kubectl) -> None:
    """Make the recorded job, with its status and one Event."""
    entry = json.loads(RECORDING.read_text())["drained"]
    status = copy.deepcopy(entry["job"]["status"]) | {"phase": "Complete", "message": "the training is over"}
    job = {
        "apiVersion": "elastictraining.dev/v1beta1",
        "kind": "ElasticTrainingJob",
        "metadata": {"name": "gpt", "namespace": NAMESPACE},
        "spec": entry["job"]["spec"],
    }
    kubectl.apply(job)
    patch = json.dumps({"status": status})
    kubectl("patch", "etj", "gpt", "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", patch)
    uid = kubectl.get("etj", "gpt", "-n", NAMESPACE)["metadata"]["uid"]
    about = {"kind": "ElasticTrainingJob", "name": "gpt", "namespace": NAMESPACE, "uid": uid}
    event = {"reason": "Complete", "message": "it is <over>", "type": "Normal", "involvedObject": about}
    meta = {"name": "gpt.1", "namespace": NAMESPACE}
    times = {"firstTimestamp": "2026-11-21T13:31:00Z", "lastTimestamp": "2026-11-21T13:31:00Z"}
    kubectl.apply({"apiVersion": "v1", "kind": "Event", "metadata": meta, **event, **times})


def test_a_reader_sees_a_job_with_the_rights_that_the_page_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with own_api_server() as kubectl:
        kubectl("create", "namespace", NAMESPACE)
        reader = make_reader(kubectl, tmp_path)
        make_job(kubectl)

        def etj(*arguments: str) -> Any:
            code = main([*arguments, "-n", NAMESPACE, "--kubeconfig", str(reader)], {})
            return code, *capsys.readouterr()

        for verb, expected in (
            ("list", "Complete"),
            ("top", "Total: 1 job (1 Complete)"),
            ("status", "1. 2026-11-21 13:28:21Z  NodeNotReady (unplanned), lost gpu-3"),
            ("why", "gpt: the job is Complete"),
            ("report", "`it is <over>`"),
        ):
            code, out, err = etj(verb, *(() if verb in ("list", "top") else ("gpt",)))
            assert (code, err) == (Exit.OK, ""), verb
            assert expected in out
        code, out, err = etj("watch", "gpt", "--interval", "0.2")
        assert (code, err) == (Exit.OK, "")
        assert "Complete  attempt 4" in out
        code, out, _ = etj("watch", "gpt", "-o", "json")
        assert json.loads(out)["recoveries"][0]["cause"] == "NodeNotReady"
        assert etj("report", "gpt", "-o", "html")[1].startswith("<!DOCTYPE html>")
        code, _, err = etj("plan", "gpt")
        assert (code, "you may not list nodes" in err) == (Exit.REFUSED, True)
        assert main(["__complete", "-n", NAMESPACE, "--kubeconfig", str(reader), "status", ""], {}) == Exit.OK
        assert capsys.readouterr().out == "gpt\n"
