"""The resource on a real API server: defaults, refusals with their message, explain, scale and columns."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator.api.spec import SpecError, parse_spec
from testbed.components import bin_dir
from tests.cluster.refused_jobs import (
    JOB,
    MODEL,
    REFUSED_AT_ADMISSION_ONLY,
    REFUSED_AT_CREATION,
    REFUSED_BY_SCHEMA,
    REFUSED_CHANGES,
    REFUSED_ONCE_STARTED,
    REFUSED_WITHDRAWALS,
    SIDECAR,
    container,
    parallelism,
    pod,
    started_with,
    with_field,
)

pytestmark = pytest.mark.cluster

CRD = Path(__file__).parents[2] / "crds/elastictrainingjobs.yaml"
VERSION = yaml.safe_load(CRD.read_text(encoding="utf-8"))["spec"]["versions"][0]
Kubectl = Callable[..., subprocess.CompletedProcess[str]]


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


def numbers(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number in the schema, by its path; for the first element of a list `.0`."""
    if schema.get("type") in ("integer", "number"):
        yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from numbers(field, f"{path}.{name}")
    if "items" in schema:
        yield from numbers(schema["items"], f"{path}.0")


def out_of_bounds() -> list[tuple[str, dict[str, Any]]]:
    """Path as the API server writes it, and the job with a value just outside of what the schema allows there."""
    full = copy.deepcopy(JOB)
    full["spec"] |= {"model": MODEL, "recovery": {"restartBudget": {}}, "reshard": {}}
    full["spec"]["accelerator"]["performance"] = {}
    cases = []
    for path, field in numbers(VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"], "spec"):
        if ".template." in path:
            continue
        for value in (field["minimum"] - 1, field["maximum"] + 1):
            job = copy.deepcopy(full)
            *folders, name = path.split(".")
            here: Any = job
            for folder, after in zip(folders, [*folders[1:], name], strict=True):
                new: Any = [] if after == "0" else {}
                if folder == "0":
                    here.append(new)
                    here = here[0]
                else:
                    if not isinstance(here.get(folder), type(new)) or isinstance(new, list):
                        here[folder] = new
                    here = here[folder]
            if name == "0":
                here.append(value)
            else:
                here[name] = value
            cases.append((path.replace(".0", "[0]"), job))
    return cases


def rules(schema: dict[str, Any]) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield rule["message"]
    for field in schema.get("properties", {}).values():
        yield from rules(field)
    if "items" in schema:
        yield from rules(schema["items"])


def test_every_rule_has_a_case_here():
    cases = [message for message, _ in (*REFUSED_AT_CREATION, *REFUSED_AT_ADMISSION_ONLY, *REFUSED_CHANGES)]
    cases += [message for message, _ in REFUSED_ONCE_STARTED]
    cases += [message for message, _, _ in REFUSED_WITHDRAWALS]
    for message in rules(VERSION["schema"]["openAPIV3Schema"]):
        assert any(message.startswith(case) for case in cases), message


def refusals(kubectl: Kubectl, namespace: str, jobs: list[dict[str, Any]]) -> list[str]:
    """Return the API server's refusal of each of many jobs, from one request; empty where it accepts one."""
    docs = [{**job, "metadata": {"name": f"case-{i}", "labels": {"case": "yes"}}} for i, job in enumerate(jobs)]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": docs})
    done = kubectl("create", "-n", namespace, "--dry-run=server", "--validate=ignore", "-f", "-", stdin=text)
    found = re.split(r'ElasticTrainingJob\S* "case-(\d+)" is invalid:', done.stderr)
    said = dict(zip(map(int, found[1::2]), found[2::2], strict=True))
    return [said.get(i, "") for i in range(len(jobs))]


@pytest.mark.parametrize(
    ("message", "job"), [case for case in REFUSED_AT_CREATION if case[0].startswith("metadata.name")]
)
def test_a_bad_name_is_refused_with_a_message_for_people(kubectl, namespace, message, job):
    done = apply(kubectl, namespace, job)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_mistake_is_refused_with_a_message_for_people(kubectl, namespace):
    cases = [case for case in REFUSED_AT_CREATION if not case[0].startswith("metadata.name")]
    cases += REFUSED_AT_ADMISSION_ONLY + REFUSED_BY_SCHEMA
    said = refusals(kubectl, namespace, [job for _, job in cases])
    wrong = [(message, text) for (message, _), text in zip(cases, said, strict=True) if message not in text]
    assert not wrong


def test_one_mistake_gets_one_message(kubectl, namespace):
    """Several rules that complain of the same thing in other words would hide what is to be done."""
    cases = [case for case in REFUSED_AT_CREATION if not case[0].startswith("metadata.name")]
    said = refusals(kubectl, namespace, [job for _, job in cases])
    several = [text for text in said if text.count("Invalid value") > 1]
    assert not several


def test_the_operator_refuses_the_same_in_resources_that_are_older_than_the_rules():
    for message, job in REFUSED_AT_CREATION:
        if not message.startswith(("metadata.name", "spec.accelerator.resource: the domain", "spec.checkpoint.claim")):
            with pytest.raises(SpecError):
                parse_spec(job["spec"])
                pytest.fail(f"taken: {message}")


def test_numbers_out_of_bounds_are_refused_by_their_path(kubectl, namespace):
    cases = out_of_bounds()
    assert len(cases) > 80
    said = refusals(kubectl, namespace, [job for _, job in cases])
    wrong = [(path, text) for (path, _), text in zip(cases, said, strict=True) if f"{path}: Invalid value" not in text]
    assert not wrong


def test_a_job_that_asks_for_what_it_gets_anyway_is_taken(kubectl, namespace):
    taken = [
        container(resources={"limits": {"amd.com/gpu": 2}, "requests": {"amd.com/gpu": "2", "cpu": 4}}),
        pod(restartPolicy="Never", hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet", initContainers=[SIDECAR]),
        pod(containers=[{**SIDECAR, "env": [{"name": "ETJ_SCRATCH", "value": "/scratch"}]}, {**SIDECAR, "name": "b"}]),
        parallelism(tensor=[1, 3, 4], pipeline=[1, 7]),
        parallelism(strategy="Ranked", topologies=[{"tensor": 64}, {"tensor": 2, "data": 1}]),
        with_field("spec.checkpoint.path", "team-a/run_1/v1.0+x=1,y@z"),
        with_field("spec.checkpoint.path", ""),
        with_field("spec.checkpoint.startFrom", "gpt-old/global_step1000"),
        with_field("spec.checkpoint.startFrom", "gpt/before/global_step1000"),
        with_field("spec.checkpoint", {"claimName": "ckpt", "startFrom": "global_step1000"}),
        started_with(patterns="old/patterns.yaml", names="names.yaml", like="other/global_step1"),
    ]
    assert refusals(kubectl, namespace, taken) == [""] * len(taken)
    assert all(parse_spec(job["spec"]) for job in taken)


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


@pytest.mark.parametrize(("message", "before", "after"), REFUSED_WITHDRAWALS)
def test_a_consent_cannot_be_withdrawn(kubectl, namespace, message, before, after):
    assert apply(kubectl, namespace, before).returncode == 0
    done = apply(kubectl, namespace, after)
    assert done.returncode != 0
    assert message in done.stderr
    assert get(kubectl, namespace)["metadata"]["generation"] == 1


def test_what_may_change_can_be_changed(kubectl, namespace):
    assert apply(kubectl, namespace, JOB).returncode == 0
    for path, value in (
        ("spec.model", MODEL),
        ("spec.batch.microSamples", 1),
        ("spec.batch.globalSamples", 40),
        ("spec.model", {**MODEL, "sequenceLength": 4096, "parameters": 8.0e9, "activationCheckpointing": "Full"}),
        ("spec.nodes.max", 2),
        ("spec.parallelism", {"tensor": [1, 2], "zeroStage": 0}),
        ("spec.checkpoint.intervalSeconds", 60),
        ("spec.checkpoint.takeOver", "Resume"),
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
        "strategy": "Auto", "tensor": [1], "pipeline": [1], "expert": [1], "context": [1],
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
        "nodesText": "2/3",
        "ettrText": "97.3%",
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
    assert table[0].split() == ["NAME", "PHASE", "TOPOLOGY", "NODES", "GPUS", "STEP", "ATTEMPT", "ETTR", "AGE"]
    assert table[1].split()[:8] == ["gpt", "Running", "tp=2,pp=1,dp=2,zero=1", "2/3", "4", "120", "3", "97.3%"]
    wide = kubectl("get", "etj", "-n", namespace, "-o", "wide").stdout.splitlines()
    assert wide[0].split()[8:10] == ["REASON", "COMMIT"]


def sections(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the schema that `kubectl explain` can be asked for."""
    schema = schema.get("items", schema)
    if "properties" in schema:
        yield path, schema
        for name, field in schema["properties"].items():
            if name != "metadata":
                yield from sections(field, f"{path}.{name}")


SECTIONS = dict(sections(VERSION["schema"]["openAPIV3Schema"], "etj"))


def test_explain_describes_every_field_at_every_level(kubectl):
    for path, schema in SECTIONS.items():
        done = kubectl("explain", path)
        assert done.returncode == 0, done.stderr
        description, _, fields = done.stdout.partition("FIELDS:")
        assert "<empty>" not in description, path
        for name in schema["properties"]:
            entry = re.search(rf"(?ms)^  {name}\t(.*?)(?=^  \w+\t|\Z)", fields)
            assert entry is not None, f"{path}.{name}"
            assert "<no description>" not in entry.group(1), f"{path}.{name}"


def test_explain_tells_unit_and_default(kubectl):
    text = " ".join(kubectl("explain", "etj.spec.recovery").stdout.split())
    assert "drainSeconds <integer> Longest time in seconds that a planned change waits" in text
    assert "Default 300." in text


def test_the_category_finds_the_job(kubectl, namespace):
    assert apply(kubectl, namespace, JOB).returncode == 0
    assert (
        "elastictrainingjob.elastictraining.dev/gpt" in kubectl("get", "training", "-n", namespace, "-o", "name").stdout
    )


@pytest.mark.parametrize("written", [{"startedFrom": {"source": "/c/old"}}, {"firstStepTime": "2026-01-01T00:00:00Z"}])
def test_what_a_job_starts_from_can_be_corrected_until_it_has_started(kubectl, namespace, written):
    job = with_field("spec.checkpoint.startFrom", "old/global_step10")
    apply(kubectl, namespace, with_field("spec.checkpoint.startFrom", "old/global_stp10"))
    assert apply(kubectl, namespace, job).returncode == 0
    patch = ("patch", "etj", "gpt", "-n", namespace, "--type=merge", "-p")
    done = kubectl(*patch, json.dumps({"status": written}), "--subresource=status")
    assert done.returncode == 0, done.stderr
    for message, other in REFUSED_ONCE_STARTED:
        done = apply(kubectl, namespace, other)
        assert message in done.stderr
    assert apply(kubectl, namespace, with_field("spec.nodes", {"min": 1, "max": 2}, base=job)).returncode == 0
