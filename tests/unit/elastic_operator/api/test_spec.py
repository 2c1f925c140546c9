"""Reading the spec: defaults, every problem at once, and never a crash."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from elastic_operator.api.spec import Activations, Performance, SpecError, Strategy, parse_spec

MINIMAL: dict[str, Any] = {
    "accelerator": {"resource": "amd.com/gpu", "perNode": [8]},
    "nodes": {"min": 1, "max": 4},
    "batch": {"globalSamples": 64},
    "checkpoint": {"claimName": "ckpt"},
    "template": {"spec": {"containers": [{"name": "train", "image": "image"}]}},
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


def with_field(path: str, value: Any) -> dict[str, Any]:
    """MINIMAL with one field set; a value of None removes it."""
    spec = copy.deepcopy(MINIMAL)
    *folders, name = path.split(".")
    here = spec
    for folder in folders:
        here = here.setdefault(folder, {})
    here[name] = copy.deepcopy(value)
    if value is None:
        del here[name]
    return spec


def problems(spec: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        parse_spec(spec)
    return caught.value.problems


def test_a_minimal_spec_gets_defaults():
    spec = parse_spec(MINIMAL)
    assert spec.parallelism.strategy is Strategy.AUTO
    assert spec.parallelism.tensor == (1,)
    assert spec.parallelism.zero_stage == 1
    assert spec.batch.micro_samples == 1
    assert spec.model is None
    assert spec.accelerator.performance is None
    assert spec.recovery.restart_budget.limit == 10


def test_the_full_form_is_read():
    value = copy.deepcopy(MINIMAL) | {"model": {**MODEL, "activationCheckpointing": "Full"}, "suspend": True}
    value["accelerator"] |= {"perNode": [8, 4, 8], "memoryGiB": 192, "performance": {"teraflops": 500}}
    value["nodes"] |= {"preferred": 2, "allowed": [1, 2, 4]}
    spec = parse_spec(value)
    assert spec.suspend
    assert spec.accelerator.per_node == (8, 4)
    assert spec.accelerator.memory_bytes == 192 * 2**30
    assert spec.accelerator.performance == Performance(teraflops=500.0)
    assert [n for n in range(6) if spec.nodes.permits(n)] == [1, 2, 4]
    assert spec.model is not None
    assert spec.model.activations is Activations.FULL


def test_key_value_heads_default_to_attention_heads():
    spec = parse_spec(with_field("model", {key: value for key, value in MODEL.items() if key != "keyValueHeads"}))
    assert spec.model is not None
    assert spec.model.key_value_heads == 32


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("accelerator", None, "spec.accelerator is missing"),
        ("accelerator", [], "spec.accelerator is []: expected an object"),
        ("accelerator.resource", "gpu", "spec.accelerator.resource is 'gpu'"),
        ("accelerator.perNode", [], "spec.accelerator.perNode is []: expected a list"),
        ("accelerator.perNode", [0], "spec.accelerator.perNode[0] is 0"),
        ("accelerator.memoryGiB", float("nan"), "spec.accelerator.memoryGiB is nan"),
        ("nodes.min", 5, "spec.nodes: min is 5, above max 4"),
        ("nodes.min", True, "spec.nodes.min is True"),
        ("nodes.preferred", 9, "spec.nodes.preferred: 9 is not between min 1 and max 4"),
        ("nodes.allowed", [7], "spec.nodes.allowed: none of [7] is between min 1 and max 4"),
        ("batch.globalSamples", None, "spec.batch.globalSamples is missing"),
        ("batch.microSamples", 7, "spec.batch: globalSamples 64 is not a multiple of microSamples 7"),
        ("parallelism.strategy", "Best", "spec.parallelism.strategy is 'Best': expected one of Auto, Fixed, Ranked"),
        ("parallelism.strategy", "Fixed", "spec.parallelism.topologies: is missing; strategy Fixed needs it"),
        ("parallelism.topologies", [{}], "spec.parallelism.topologies: strategy Auto does not use it"),
        ("parallelism.topologies", [3], "spec.parallelism.topologies[0] is 3: expected an object"),
        ("parallelism", {"strategy": "Fixed", "topologies": [{}, {}]}, "strategy Fixed takes one entry, found 2"),
        ("parallelism", {"zeroStage": 3, "pipeline": [2]}, "zeroStage 3 excludes pipelines"),
        (
            "parallelism",
            {"strategy": "Ranked", "topologies": [{"zeroStage": 2, "pipeline": 2}]},
            "spec.parallelism.topologies[0]: zeroStage 2 excludes pipelines",
        ),
        ("template.spec.affinity", "x", "spec.template.spec.affinity is 'x': expected an object"),
        ("template.spec.tolerations", "x", "spec.template.spec.tolerations is 'x': expected a list"),
        ("template.spec.nodeSelector", [1], "spec.template.spec.nodeSelector is [1]: expected an object"),
        ("template.spec.volumes", [{}], "spec.template.spec.volumes[0].name is missing"),
        ("nodes.podsPerNode", "Two", "spec.nodes.podsPerNode is 'Two': expected one of One, Many"),
        ("model", {**MODEL, "keyValueHeads": 5}, "keyValueHeads 5 does not divide attentionHeads 32"),
        ("model", {**MODEL, "expertParameters": 1e9}, "expertParameters: is given, but experts is 0"),
        (
            "model",
            {**MODEL, "experts": 8, "expertParameters": 9e9},
            "expertParameters: 9e+09 is above parameters 7e+09",
        ),
        ("model", {**MODEL, "layers": "32"}, "spec.model.layers is '32': expected a whole number"),
        ("checkpoint.path", "/abs", "spec.checkpoint.path is '/abs'"),
        ("checkpoint.path", "a/../b", "without '..'"),
        ("checkpoint.claimName", "", "spec.checkpoint.claimName is empty"),
        ("recovery.hangSeconds", 0, "spec.recovery.hangSeconds is 0"),
        ("suspend", "yes", "spec.suspend is 'yes': expected true or false"),
        ("checkpoint.allowedGlobals", ["a.B", "a.*"], "spec.checkpoint.allowedGlobals[1] is 'a.*': expected the full"),
        ("checkpoint.allowedGlobals", ["B"], "spec.checkpoint.allowedGlobals[0] is 'B': expected the full name"),
        ("checkpoint.allowedGlobals", ["a.B\n"], "spec.checkpoint.allowedGlobals[0] is 'a.B"),
        ("checkpoint.allowedGlobals", ["a.B"] * 65, "spec.checkpoint.allowedGlobals"),
        ("checkpoint.format", "Other", "spec.checkpoint.format is 'Other': expected one of DeepSpeed"),
        ("template", {"spec": {"containers": []}}, "spec.template.spec.containers is empty"),
    ],
)
def test_a_mistake_is_named_with_its_path(path, value, expected):
    found = problems(with_field(path, value))
    assert len(found) == 1, found
    assert expected in found[0]


def test_all_mistakes_are_reported_at_once():
    found = problems({"nodes": {"min": 0, "max": "x"}, "accelerator": {"resource": "gpu", "perNode": []}})
    assert [sentence.split(" ")[0] for sentence in found] == [
        "spec.accelerator.resource",
        "spec.accelerator.perNode",
        "spec.nodes.min",
        "spec.nodes.max",
        "spec.batch",
        "spec.checkpoint",
        "spec.template",
    ]


def test_whole_numbers_written_as_floats_are_read():
    assert parse_spec(with_field("batch.globalSamples", 64.0)).batch.global_samples == 64


def test_a_fixed_topology_inherits_the_zero_stage():
    spec = parse_spec(with_field("parallelism", {"zeroStage": 0, "strategy": "Fixed", "topologies": [{"tensor": 2}]}))
    assert spec.parallelism.topologies[0].zero_stage == 0
    assert spec.parallelism.topologies[0].data is None


def test_a_dcp_job_is_fully_sharded_unless_it_says_otherwise():
    dcp = with_field("checkpoint.format", "DCP")
    assert parse_spec(with_field("checkpoint.format", "DeepSpeed")).parallelism.zero_stage == 1
    assert parse_spec(dcp).parallelism.zero_stage == 3
    listed = {**dcp, "parallelism": {"strategy": "Ranked", "topologies": [{"tensor": 2}, {"zeroStage": 0}]}}
    assert [item.zero_stage for item in parse_spec(listed).parallelism.topologies] == [3, 0]
    listed["parallelism"]["zeroStage"] = 2
    assert [item.zero_stage for item in parse_spec(listed).parallelism.topologies] == [2, 0]


def test_a_dcp_job_may_shard_the_stages_of_a_pipeline():
    dcp = with_field("checkpoint.format", "DCP")
    assert parse_spec({**dcp, "parallelism": {"pipeline": [2], "zeroStage": 2}}).parallelism.pipeline == (2,)
    listed = {"strategy": "Fixed", "topologies": [{"pipeline": 2}]}
    assert parse_spec({**dcp, "parallelism": listed}).parallelism.topologies[0].zero_stage == 3


@pytest.mark.parametrize(
    ("format_", "mode", "problem"),
    [
        ("DeepSpeed", "Load", "spec.reshard.mode: is Load, but spec.checkpoint.format is DeepSpeed"),
        ("DCP", "Virtual", "spec.reshard.mode: is Virtual, but spec.checkpoint.format is DCP"),
        ("Megatron", "Auto", "spec.checkpoint.format is 'Megatron': expected one of DeepSpeed, DCP"),
    ],
)
def test_a_mode_that_the_format_does_not_have_is_refused(format_, mode, problem):
    job = {**with_field("checkpoint.format", format_), "reshard": {"mode": mode}}
    with pytest.raises(SpecError) as caught:
        parse_spec(job)
    (found,) = caught.value.problems
    assert found.startswith(problem)


@pytest.mark.parametrize(("format_", "modes"), [("DeepSpeed", {"Auto", "Virtual"}), ("DCP", set())])
def test_memory_for_virtual_commits_is_reserved_only_where_there_may_be_one(format_, modes):
    job = with_field("checkpoint.format", format_)
    permitted = ["Auto", "Materialize", "Virtual" if format_ == "DeepSpeed" else "Load"]
    found = {mode for mode in permitted if parse_spec({**job, "reshard": {"mode": mode}}).may_be_virtual}
    assert found == modes
