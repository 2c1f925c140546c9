"""The schema of the resource: complete, bounded, in step with the reader and with every YAML that people copy."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from crds.generate import render_files
from elastic_operator.api.serialization import Time, to_wire
from elastic_operator.api.spec import parse_spec
from elastic_operator.api.status import (
    Checkpoint,
    Commit,
    Condition,
    Current,
    ExcludedNode,
    Phase,
    Plan,
    Progress,
    Recovery,
    Rejected,
    ReshardStatus,
    Status,
)
from elastic_operator.api.status_reader import read_status
from elastic_operator.client.resources import TRAINING_JOB
from elastic_operator.manifests.attempt import JobRef, build_owned_metadata
from reshard import contract
from reshard.topology import Topology

ROOT = Path(__file__).parents[4]
CRD = yaml.safe_load((ROOT / "crds/elastictrainingjobs.yaml").read_text(encoding="utf-8"))
VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
PRESERVE = "x-kubernetes-preserve-unknown-fields"
MINIMAL: dict[str, Any] = {
    "accelerator": {"resource": "amd.com/gpu", "perNode": [8]},
    "nodes": {"min": 1, "max": 4},
    "batch": {"globalSamples": 64},
    "checkpoint": {"claimName": "ckpt"},
    "template": {"spec": {"containers": [{"name": "train", "image": "image"}]}},
}


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from fields(field, f"{path}.{name}")
    if "items" in schema:
        yield f"{path}[]", schema["items"]
        yield from fields(schema["items"], f"{path}[]")


ALL_FIELDS = [*fields(SCHEMA["properties"]["spec"], "spec"), *fields(SCHEMA["properties"]["status"], "status")]


def with_defaults(schema: dict[str, Any], value: Any) -> Any:
    """What the API server stores: defaults are filled in, from the outside to the inside."""
    if isinstance(value, dict):
        value = dict(value)
        for name, field in schema.get("properties", {}).items():
            if name not in value and "default" in field:
                value[name] = copy.deepcopy(field["default"])
            if name in value:
                value[name] = with_defaults(field, value[name])
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], item) for item in value]
    return value


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """As a JSON schema that refuses unknown fields, which an API server would drop without a word."""
    result = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if "properties" in result:
        result["properties"] = {name: strict(field) for name, field in result["properties"].items()}
        result["additionalProperties"] = bool(schema.get(PRESERVE))
    if "items" in result:
        result["items"] = strict(result["items"])
    if result.pop("nullable", False):
        result["type"] = [result["type"], "null"]
    return result


STRICT = strict({**SCHEMA, "properties": {**SCHEMA["properties"], "metadata": {"type": "object"}}})


def documents() -> Iterator[Any]:
    """Every ElasticTrainingJob in the checkout that somebody may copy."""
    for folder in ("examples", "demo", "charts"):
        for path in sorted((ROOT / folder).rglob("*.yaml")):
            text = path.read_text(encoding="utf-8")
            if f"kind: {contract.KIND}\n" in text and "{{" not in text:
                for i, value in enumerate(yaml.safe_load_all(text)):
                    if value and value.get("kind") == contract.KIND:
                        yield pytest.param(value, id=f"{path.relative_to(ROOT)}-{i}")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for i, block in enumerate(re.findall(r"```ya?ml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)):
            if f"kind: {contract.KIND}\n" in block:
                for value in yaml.safe_load_all(block):
                    if value and value.get("kind") == contract.KIND:
                        yield pytest.param(value, id=f"{path.relative_to(ROOT)}-{i}")


def test_names_are_those_of_the_contract():
    assert CRD["metadata"]["name"] == f"{contract.PLURAL}.{contract.GROUP}"
    assert (CRD["spec"]["group"], VERSION["name"]) == (contract.GROUP, contract.VERSION)
    assert CRD["spec"]["names"]["kind"] == contract.KIND


def test_one_version_is_served_and_stored_and_used_everywhere():
    assert [(item["name"], item["served"], item["storage"]) for item in CRD["spec"]["versions"]] == [
        (contract.VERSION, True, True)
    ]
    assert TRAINING_JOB.version == contract.VERSION
    job = JobRef(name="gpt", namespace="team", uid="u", generation=1)
    (owner,) = build_owned_metadata(job, "gpt-a1")["ownerReferences"]
    assert owner["apiVersion"] == f"{contract.GROUP}/{contract.VERSION}"
    chart = yaml.safe_load((ROOT / "charts/elastic-training-operator/Chart.yaml").read_text(encoding="utf-8"))
    named = yaml.safe_load(chart["annotations"]["artifacthub.io/crds"])
    assert [item["version"] for item in named] == [contract.VERSION]


@pytest.mark.parametrize(("path", "field"), ALL_FIELDS, ids=[path for path, _ in ALL_FIELDS])
def test_a_field_is_described_and_bounded(path, field):
    if not path.endswith("[]"):
        assert field.get("description"), "kubectl explain would have nothing to say"
        assert field["description"].endswith(".")
    if field["type"] == "array":
        assert field.get("maxItems"), "an unbounded list makes the rules on it too costly for the API server"
    if path.startswith("spec") and field["type"] == "string" and "enum" not in field:
        assert field.get("maxLength")
    if path.startswith("spec") and field["type"] in ("integer", "number"):
        assert "minimum" in field
        assert "maximum" in field


def test_durations_and_sizes_name_their_unit():
    for path, field in ALL_FIELDS:
        name = path.rsplit(".", 1)[-1]
        if re.search(r"(?i)(timeout|interval|period|window|duration|grace|memory)", name) and field["type"] != "object":
            assert re.search(r"(Seconds|GiB|Bytes)$", name), path


def test_print_columns_and_subresources_point_at_fields():
    known = {f".{path}" for path, _ in ALL_FIELDS} | {".metadata.creationTimestamp"}
    for column in VERSION["additionalPrinterColumns"]:
        assert column["jsonPath"] in known
    for path in VERSION["subresources"]["scale"].values():
        assert path in known


def test_defaults_of_schema_and_reader_are_the_same():
    model = {"parameters": 1, "layers": 1, "hiddenSize": 8, "attentionHeads": 1, "vocabSize": 1, "sequenceLength": 1}
    value = copy.deepcopy(MINIMAL) | {"model": model}
    value["accelerator"]["performance"] = {}
    value["parallelism"] = {"strategy": "Fixed", "topologies": [{}]}
    stored = with_defaults(SCHEMA["properties"]["spec"], value)
    assert len(stored) > len(value)
    assert parse_spec(stored) == parse_spec(value)
    assert parse_spec(with_defaults(SCHEMA["properties"]["spec"], MINIMAL)) == parse_spec(MINIMAL)


def test_the_default_of_a_section_agrees_with_those_of_its_fields():
    for path, field in ALL_FIELDS:
        for name, value in field.get("default", {}).items() if field["type"] == "object" else ():
            assert field["properties"][name]["default"] == value, path


def test_a_misspelt_field_is_refused_by_the_strict_schema():
    job = {"apiVersion": "x", "kind": "y", "metadata": {}, "spec": {**MINIMAL, "paralelism": {}}}
    with pytest.raises(jsonschema.ValidationError, match="paralelism"):
        jsonschema.validate(job, STRICT)


@pytest.mark.parametrize("job", list(documents()))
def test_an_example_is_valid(job):
    assert job["apiVersion"] == f"{contract.GROUP}/{contract.VERSION}"
    jsonschema.validate(job, STRICT)
    parse_spec(job["spec"])


def test_the_crd_its_copy_and_the_reference_page_are_generated_from_the_models():
    files = render_files()
    assert {path.relative_to(ROOT).as_posix() for path in files} == {
        "crds/elastictrainingjobs.yaml",
        "charts/elastic-training-operator/files/elastictrainingjobs.yaml",
        "docs/crd-reference.md",
    }
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, "run: make generate"


def test_a_default_that_a_description_names_is_the_default():
    for path, field in ALL_FIELDS:
        if "default" in field and (named := re.search(r"Default ([^ ]+)\.$", field["description"])):
            value = field["default"][0] if field["type"] == "array" else field["default"]
            text = "empty" if value == "" else str(value).lower() if isinstance(value, bool) else str(value)
            assert named.group(1) == text, path


def test_what_the_operator_writes_is_a_valid_status():
    topology = Topology(tp=2, dp=2)
    moment = Time(1.8e9)
    commit = Commit(uri="/checkpoint/gpt/a2/step-00000040", step=40, samples=800, attempt=2, topology=topology)
    status = Status(
        phase=Phase.RUNNING,
        reason="Training",
        attempt=3,
        observed_generation=1,
        topology=topology,
        topology_text="tp=2,pp=1,dp=2,zero=1",
        replicas=2,
        gpus=4,
        selector="a=b",
        conditions=(
            Condition(type="Planned", status="True", reason="Chosen", message="m", last_transition_time=moment),
        ),
        current=Current(topology=topology, num_nodes=2, gpus_per_node=2, plan_time=moment),
        plan=Plan(target=topology, nodes=2, per_node=2, reason="r", rejected=(Rejected(topology="t", reason="r"),)),
        progress=Progress(phase="Training", step=41, samples=820, loss=2.5, time=moment),
        checkpoint=Checkpoint(uri=commit.uri, step=40, samples=800, attempt=2, topology=topology, history=(commit,)),
        reshard=ReshardStatus(
            job_name="gpt-a3-reshard", mode="materialize", bytes_read=1, bytes_written=1, seconds=1.5
        ),
        recoveries=(Recovery(cause="NodeLost", lost=("node-3",), from_="a", to="b", seconds={"total": 41.0}),),
        excluded_nodes=(ExcludedNode(name="node-3", reason="NodeLost", since=moment),),
        start_time=moment,
    )
    wire = to_wire(status)
    jsonschema.validate(wire, strict(SCHEMA["properties"]["status"]))
    for name in ("phase", "topologyText", "replicas", "gpus", "attempt", "reason"):
        assert name in wire, "a print column would be empty"
    assert wire["progress"]["step"] == 41
    assert read_status(wire).status == status
