"""What a real API server makes of the resource: defaults, refusals with their message, explain, scale and columns."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator.spec import parse_spec
from testbed.components import bin_dir

pytestmark = pytest.mark.cluster

CRD = Path(__file__).parents[2] / "crds/elastictrainingjobs.yaml"
VERSION = yaml.safe_load(CRD.read_text(encoding="utf-8"))["spec"]["versions"][0]
JOB: dict[str, Any] = {
    "apiVersion": "elastictraining.dev/v1alpha1",
    "kind": "ElasticTrainingJob",
    "metadata": {"name": "gpt"},
    "spec": {
        # Suspended: an operator that happens to run on this cluster starts nothing.
        "suspend": True,
        "accelerator": {"resource": "amd.com/gpu", "perNode": [2]},
        "nodes": {"min": 1, "max": 3},
        "batch": {"globalSamples": 20, "microSamples": 2},
        "checkpoint": {"claimName": "ckpt", "path": "gpt"},
        "template": {
            "spec": {"containers": [{"name": "train", "image": "image", "env": [{"name": "A", "value": "b"}]}]}
        },
    },
}
MODEL = {
    "parameters": 7.0e9,
    "layers": 32,
    "hiddenSize": 4096,
    "attentionHeads": 32,
    "keyValueHeads": 8,
    "vocabSize": 128256,
    "sequenceLength": 8192,
}

Kubectl = Callable[..., subprocess.CompletedProcess[str]]


def with_field(path: str, value: Any, *, base: dict[str, Any] = JOB) -> dict[str, Any]:
    job = copy.deepcopy(base)
    *folders, name = path.split(".")
    here = job
    for folder in folders:
        here = here.setdefault(folder, {})
    here[name] = value
    return job


@pytest.fixture(scope="module")
def kubectl(kubeconfig: Path) -> Kubectl:
    program = shutil.which("kubectl") or str(bin_dir() / "kubectl")

    def call(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [program, "--kubeconfig", str(kubeconfig), *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120)

    done = call("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    assert done.returncode == 0, done.stderr
    done = call("wait", "--for=condition=Established", "--timeout=60s", f"crd/{crd_name()}")
    assert done.returncode == 0, done.stderr
    return call


def crd_name() -> str:
    return str(yaml.safe_load(CRD.read_text(encoding="utf-8"))["metadata"]["name"])


def apply(kubectl: Kubectl, namespace: str, job: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    return kubectl("apply", "-n", namespace, *arguments, "-f", "-", stdin=json.dumps(job))


def get(kubectl: Kubectl, namespace: str, name: str = "gpt") -> dict[str, Any]:
    done = kubectl("get", "etj", name, "-n", namespace, "-o", "json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


# (message of the rule begins with, what breaks it)
REFUSED_AT_CREATION = [
    ("metadata.name may have at most 40", with_field("metadata.name", "a" * 41)),
    ("metadata.name must begin with a lower-case letter", with_field("metadata.name", "7b")),
    ("metadata.name must begin with a lower-case letter", with_field("metadata.name", "llama.7b")),
    ("spec.accelerator.resource must be an extended", with_field("spec.accelerator.resource", "gpu")),
    ("spec.nodes: min must not be above max", with_field("spec.nodes", {"min": 4, "max": 3})),
    ("spec.nodes.preferred must lie between", with_field("spec.nodes", {"min": 1, "max": 3, "preferred": 4})),
    ("spec.nodes.allowed: none", with_field("spec.nodes", {"min": 2, "max": 3, "allowed": [1, 4]})),
    ("spec.parallelism: strategy Fixed or Ranked needs", with_field("spec.parallelism", {"strategy": "Ranked"})),
    ("spec.parallelism: topologies is only for", with_field("spec.parallelism", {"topologies": [{"tensor": 2}]})),
    (
        "spec.parallelism: strategy Fixed takes exactly one",
        with_field("spec.parallelism", {"strategy": "Fixed", "topologies": [{"tensor": 2}, {"tensor": 1}]}),
    ),
    (
        "spec.parallelism.topologies: zeroStage 2 or 3",
        with_field("spec.parallelism", {"strategy": "Fixed", "topologies": [{"pipeline": 2, "zeroStage": 3}]}),
    ),
    (
        "spec.parallelism: zeroStage 2 or 3 cannot run with a pipeline",
        with_field("spec.parallelism", {"zeroStage": 2, "pipeline": [2, 4]}),
    ),
    ("spec.batch.globalSamples must be a multiple", with_field("spec.batch", {"globalSamples": 20, "microSamples": 3})),
    ("spec.model: keyValueHeads must divide", with_field("spec.model", {**MODEL, "keyValueHeads": 5})),
    (
        "spec.model: expertParameters is part of",
        with_field("spec.model", {**MODEL, "experts": 8, "expertParameters": 8.0e9}),
    ),
    ("spec.model: expertParameters needs experts", with_field("spec.model", {**MODEL, "expertParameters": 1.0e9})),
    ("spec.checkpoint.path must be relative", with_field("spec.checkpoint.path", "/gpt")),
    ("spec.checkpoint.path must be relative", with_field("spec.checkpoint.path", "a/../../b")),
    ("spec.template.spec.containers must have", with_field("spec.template", {"spec": {"containers": []}})),
    ("spec.template.spec.containers must have", with_field("spec.template", {})),
]
REFUSED_CHANGES = [
    ("spec.model cannot change", with_field("spec.model", {**MODEL, "layers": 31})),
    ("spec.batch.globalSamples cannot change", with_field("spec.batch.globalSamples", 40)),
    ("spec.accelerator.resource cannot change", with_field("spec.accelerator.resource", "nvidia.com/gpu")),
    ("spec.checkpoint: claimName, path and format", with_field("spec.checkpoint.claimName", "other")),
    ("spec.checkpoint: claimName, path and format", with_field("spec.checkpoint.path", "other")),
]


def rules(schema: dict[str, Any]) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield rule["message"]
    for field in schema.get("properties", {}).values():
        yield from rules(field)
    if "items" in schema:
        yield from rules(schema["items"])


def test_every_rule_has_a_case_here():
    cases = [message for message, _ in (*REFUSED_AT_CREATION, *REFUSED_CHANGES)]
    for message in rules(VERSION["schema"]["openAPIV3Schema"]):
        assert any(message.startswith(case) for case in cases), message


@pytest.mark.parametrize(("message", "job"), REFUSED_AT_CREATION)
def test_a_mistake_is_refused_with_a_message_for_people(kubectl, namespace, message, job):
    done = apply(kubectl, namespace, job)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(("message", "job"), REFUSED_CHANGES)
def test_a_change_that_would_lose_the_training_is_refused(kubectl, namespace, message, job):
    first = with_field("spec.model", MODEL)
    if "model" not in job["spec"]:
        job = with_field("spec.model", MODEL, base=job)
    assert apply(kubectl, namespace, first).returncode == 0
    done = apply(kubectl, namespace, job)
    assert done.returncode != 0
    assert message in done.stderr
    assert get(kubectl, namespace)["metadata"]["generation"] == 1


def test_what_may_change_can_be_changed(kubectl, namespace):
    assert apply(kubectl, namespace, JOB).returncode == 0
    for path, value in (
        ("spec.model", MODEL),
        ("spec.batch.microSamples", 1),
        ("spec.nodes.max", 2),
        ("spec.parallelism", {"tensor": [1, 2], "zeroStage": 0}),
        ("spec.checkpoint.intervalSeconds", 60),
    ):
        done = apply(kubectl, namespace, with_field(path, value, base=with_field("spec.model", MODEL)))
        assert done.returncode == 0, done.stderr


def test_an_unknown_field_is_refused_by_kubectl(kubectl, namespace):
    done = apply(kubectl, namespace, with_field("spec.paralelism", {}))
    assert done.returncode != 0
    assert 'unknown field "spec.paralelism"' in done.stderr


def test_defaults_are_stored_and_mean_what_the_reader_assumes(kubectl, namespace):
    assert apply(kubectl, namespace, JOB).returncode == 0
    stored = get(kubectl, namespace)["spec"]
    assert stored["parallelism"] == {
        "strategy": "Auto", "zeroStage": 1, "tensor": [1], "pipeline": [1], "expert": [1], "context": [1],
    }  # fmt: skip
    assert stored["recovery"]["restartBudget"] == {"limit": 10, "windowSeconds": 3600}
    assert parse_spec(stored) == parse_spec(JOB["spec"])
    assert stored["template"] == JOB["spec"]["template"]


def test_scale_sets_the_largest_number_of_nodes(kubectl, namespace):
    assert apply(kubectl, namespace, JOB).returncode == 0
    done = kubectl("scale", "etj/gpt", "-n", namespace, "--replicas=2")
    assert done.returncode == 0, done.stderr
    assert get(kubectl, namespace)["spec"]["nodes"]["max"] == 2
    refused = kubectl("scale", "etj/gpt", "-n", namespace, "--replicas=0")
    assert refused.returncode != 0


def test_status_is_a_subresource_and_fills_the_columns(kubectl, namespace):
    assert apply(kubectl, namespace, with_field("status", {"phase": "Running"})).returncode == 0
    assert "phase" not in get(kubectl, namespace).get("status", {})
    status = {
        "phase": "Running",
        "topologyText": "tp=2,pp=1,dp=2,zero=1",
        "replicas": 2,
        "gpus": 4,
        "attempt": 3,
        "reason": "Training",
        "progress": {"step": 120},
    }
    patch = json.dumps({"status": status})
    done = kubectl("patch", "etj", "gpt", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)
    assert done.returncode == 0, done.stderr
    table = kubectl("get", "etj", "-n", namespace).stdout.splitlines()
    assert table[0].split() == ["NAME", "PHASE", "TOPOLOGY", "NODES", "GPUS", "STEP", "ATTEMPT", "REASON", "AGE"]
    assert table[1].split()[:8] == ["gpt", "Running", "tp=2,pp=1,dp=2,zero=1", "2", "4", "120", "3", "Training"]


@pytest.mark.parametrize("path", ["etj", "etj.spec.parallelism", "etj.spec.accelerator.performance", "etj.status"])
def test_explain_describes_the_fields(kubectl, path):
    done = kubectl("explain", path)
    assert done.returncode == 0, done.stderr
    assert "<empty>" not in done.stdout.split("FIELDS:")[0]


def test_the_category_finds_the_job(kubectl, namespace):
    assert apply(kubectl, namespace, JOB).returncode == 0
    assert (
        "elastictrainingjob.elastictraining.dev/gpt" in kubectl("get", "training", "-n", namespace, "-o", "name").stdout
    )
