"""The reader of the spec of an `ElasticTrainingJob`: it checks the mapping and returns frozen data.

The rest of the operator works on `Spec` and never on the resource's dict. The API server already refuses most mistakes
(crds/elastictrainingjobs.yaml). This reader repeats the checks, because a resource may be older than the schema.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from elastic_operator.api.field_reader import RESOURCE_NAME, Section, SpecError
from elastic_operator.api.spec_rules import find_conflicts, find_path_problem, find_start_problem, normalize_path
from elastic_operator.api.spec_types import (
    Accelerator,
    Activations,
    Batch,
    CheckpointSpec,
    Model,
    Nodes,
    Parallelism,
    Performance,
    RecoverySpec,
    ReshardSpec,
    RestartBudget,
    Spec,
    StartOptions,
    Strategy,
    TopologyChoice,
)

__all__ = [
    "Accelerator", "Activations", "Batch", "CheckpointSpec", "Model", "Nodes", "Parallelism", "Performance",
    "RecoverySpec", "ReshardSpec", "RestartBudget", "Spec", "SpecError", "StartOptions", "Strategy", "TopologyChoice",
    "parse_spec",
]  # fmt: skip

GIB = 2**30


def parse_spec(value: Mapping[str, Any]) -> Spec:
    """Read and check the `spec` of a resource.

    Raises:
        SpecError: with all problems; each begins with the path of its field.
    """
    problems: list[str] = []
    root = Section(value, "spec", problems)
    spec = Spec(
        suspend=root.flag("suspend", default=False),
        accelerator=_accelerator(root.section("accelerator", required=True)),
        nodes=_nodes(root.section("nodes", required=True)),
        parallelism=_parallelism(root.section("parallelism")),
        batch=_batch(root.section("batch", required=True)),
        model=_model(root.section("model")) if "model" in root else None,
        checkpoint=_checkpoint(root.section("checkpoint", required=True)),
        reshard=_reshard(root.section("reshard")),
        recovery=_recovery(root.section("recovery")),
        template=_template(root),
    )
    if not problems:
        problems += find_conflicts(spec)
    if problems:
        raise SpecError(problems)
    return spec


def _accelerator(section: Section) -> Accelerator:
    resource = section.text("resource", required=True)
    if resource and not RESOURCE_NAME.fullmatch(resource):
        section.add_problem("resource", f"is {resource!r}: expected an extended resource such as amd.com/gpu")
    memory_gib = section.number("memoryGiB", default=None, least=0.001)
    return Accelerator(
        resource=resource,
        per_node=section.integers("perNode", default=None),
        memory_bytes=None if memory_gib is None else int(memory_gib * GIB),
        performance=_performance(section.section("performance")) if "performance" in section else None,
    )


def _performance(section: Section) -> Performance:
    base = Performance()
    return Performance(
        teraflops=section.real("teraflops", default=base.teraflops, least=1e-6),
        intra_node_gbps=section.real("intraNodeGBps", default=base.intra_node_gbps, least=1e-6),
        inter_node_gbps=section.real("interNodeGBps", default=base.inter_node_gbps, least=1e-6),
        latency_microseconds=section.real("latencyMicroseconds", default=base.latency_microseconds, least=0),
    )


def _nodes(section: Section) -> Nodes:
    return Nodes(
        min=section.integer("min", default=None),
        max=section.integer("max", default=None),
        preferred=section.integer("preferred", default=None) if "preferred" in section else None,
        allowed=section.integers("allowed", default=None) if "allowed" in section else None,
    )


def _parallelism(section: Section) -> Parallelism:
    zero_stage = section.integer("zeroStage", default=1, least=0, most=3)
    return Parallelism(
        tensor=section.integers("tensor", default=(1,)),
        pipeline=section.integers("pipeline", default=(1,)),
        expert=section.integers("expert", default=(1,)),
        context=section.integers("context", default=(1,)),
        zero_stage=zero_stage,
        strategy=Strategy(section.choice("strategy", tuple(Strategy), default=Strategy.AUTO)),
        topologies=tuple(
            TopologyChoice(
                tensor=entry.integer("tensor", default=1),
                pipeline=entry.integer("pipeline", default=1),
                data=entry.integer("data", default=None) if "data" in entry else None,
                expert=entry.integer("expert", default=1),
                context=entry.integer("context", default=1),
                zero_stage=entry.integer("zeroStage", default=zero_stage, least=0, most=3),
            )
            for entry in section.sections("topologies")
        ),
    )


def _batch(section: Section) -> Batch:
    return Batch(
        global_samples=section.integer("globalSamples", default=None),
        micro_samples=section.integer("microSamples", default=1),
    )


def _model(section: Section) -> Model:
    heads = section.integer("attentionHeads", default=None)
    return Model(
        parameters=section.real("parameters", default=None, least=1),
        layers=section.integer("layers", default=None),
        hidden_size=section.integer("hiddenSize", default=None),
        attention_heads=heads,
        key_value_heads=section.integer("keyValueHeads", default=heads),
        vocab_size=section.integer("vocabSize", default=None),
        sequence_length=section.integer("sequenceLength", default=None),
        pad_vocabulary=section.flag("padVocabulary", default=True),
        experts=section.integer("experts", default=0, least=0),
        experts_per_token=section.integer("expertsPerToken", default=2),
        expert_parameters=section.real("expertParameters", default=0.0, least=0),
        activations=Activations(
            section.choice("activationCheckpointing", tuple(Activations), default=Activations.SELECTIVE)
        ),
    )


def _checkpoint(section: Section) -> CheckpointSpec:
    checkpoint = CheckpointSpec(
        claim_name=section.text("claimName", required=True),
        path=normalize_path(section.text("path")),
        start_from=normalize_path(section.text("startFrom")),
        start_options=_start_options(section.section("startOptions")) if "startOptions" in section else StartOptions(),
        take_over=section.flag("takeOver", default=False),
        format=section.choice("format", ("DeepSpeed",), default="DeepSpeed"),
        interval_seconds=section.integer("intervalSeconds", default=900),
    )
    if problem := find_path_problem(section.text("path")):
        section.add_problem("path", f"is {section.text('path')!r}: {problem}")
    if problem := find_path_problem(section.text("startFrom")):
        section.add_problem("startFrom", f"is {section.text('startFrom')!r}: {problem}")
    elif problem := find_start_problem(checkpoint):
        section.add_problem("startFrom", f"is {checkpoint.start_from!r}: {problem}")
    if checkpoint.start_options != StartOptions() and not checkpoint.start_from:
        section.add_problem("startOptions", "says how to read startFrom, which is empty")
    return checkpoint


def _start_options(section: Section) -> StartOptions:
    options = StartOptions(patterns=section.text("patterns"), names=section.text("names"), like=section.text("like"))
    for name, path in dataclasses.asdict(options).items():
        if problem := find_path_problem(path):
            section.add_problem(name, f"is {path!r}: {problem}")
    return options


def _reshard(section: Section) -> ReshardSpec:
    template = section.section("template").value if "template" in section else None
    return ReshardSpec(
        mode=section.choice("mode", ("Auto", "Materialize", "Virtual"), default="Auto"),
        timeout_seconds=section.integer("timeoutSeconds", default=3600),
        parallelism=section.integer("parallelism", default=1),
        backoff_limit=section.integer("backoffLimit", default=3, least=0),
        on_failure=section.choice("onFailure", ("RetainTopology", "Fail"), default="RetainTopology"),
        template=template,
    )


def _recovery(section: Section) -> RecoverySpec:
    base = RecoverySpec()
    budget = section.section("restartBudget")
    return RecoverySpec(
        suspect_seconds=section.integer("suspectSeconds", default=base.suspect_seconds),
        batch_window_seconds=section.integer("batchWindowSeconds", default=base.batch_window_seconds, least=0),
        force_delete_seconds=section.integer("forceDeleteSeconds", default=base.force_delete_seconds, least=0),
        drain_seconds=section.integer("drainSeconds", default=base.drain_seconds),
        scale_up_stable_seconds=section.integer("scaleUpStableSeconds", default=base.scale_up_stable_seconds, least=0),
        exclude_node_seconds=section.integer("excludeNodeSeconds", default=base.exclude_node_seconds, least=0),
        hang_seconds=section.integer("hangSeconds", default=base.hang_seconds),
        restart_budget=RestartBudget(
            limit=budget.integer("limit", default=base.restart_budget.limit, least=0),
            window_seconds=budget.integer("windowSeconds", default=base.restart_budget.window_seconds),
        ),
    )


def _template(root: Section) -> Mapping[str, Any]:
    template = root.section("template", required=True)
    containers = template.section("spec").value.get("containers")
    if "template" in root and (not isinstance(containers, list) or not containers):
        root.add_problem("template.spec.containers", "is empty: the first container trains, so there must be one")
    return template.value


def spec_hash(spec: Spec) -> str:
    """Return a hash of those parts of the spec that an attempt is made from."""
    parts: dict[str, Any] = {
        name: _plain(getattr(spec, name)) for name in ("accelerator", "parallelism", "batch", "model", "template")
    }
    if spec.checkpoint.start_from:
        # Without startFrom the hash must equal that of older operators, which did not know the field: otherwise an
        # upgrade would restart every running job.
        parts["start_from"] = spec.checkpoint.start_from
        parts |= {f"start_{name}": path for name, path in _plain(spec.checkpoint.start_options).items() if path}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
