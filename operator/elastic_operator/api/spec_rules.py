"""Rules that compare several fields of a spec. Each field is already valid alone.

`admission_rules` has them for the API server, and others besides: those that compare with the old resource or look at
its metadata, and those about accelerators and environment of the training container, which the operator overwrites.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_operator.api.claim_path import StartOptions
from elastic_operator.api.spec_model import (
    DCP,
    LOAD,
    VIRTUAL,
    Batch,
    CheckpointSpec,
    Model,
    Nodes,
    Parallelism,
    Spec,
    Strategy,
    TopologyChoice,
)
from reshard.contract import TakeOver

_ATTEMPT = re.compile(r"a\d+(/|$)", re.ASCII)


def find_conflicts(spec: Spec) -> list[str]:
    """Return one sentence per violated rule; each begins with the path of the field."""
    return [
        *_nodes(spec.nodes),
        *_strategy(spec.parallelism, is_dcp=spec.checkpoint.format == DCP),
        *_batch(spec.batch),
        *(_auto(spec) if spec.parallelism.strategy is Strategy.AUTO else _topologies(spec)),
        *_model(spec.model),
        *_checkpoint(spec.checkpoint),
        *_mode(spec),
        *_budgets(spec),
        *_template(spec),
        *_reshard_template(spec),
    ]


def _checkpoint(checkpoint: CheckpointSpec) -> Iterator[str]:
    start, path = checkpoint.start_from, checkpoint.path
    inside = f"{path}/" if path else ""
    if start and (start == path or (start.startswith(inside) and _ATTEMPT.match(start.removeprefix(inside)))):
        # Attempt numbers of the new job begin at 1, so the job would overwrite and prune those commits.
        yield (
            f"spec.checkpoint.startFrom is {start!r}: lies where this job writes its own attempts; choose another "
            "spec.checkpoint.path"
        )
    if start and checkpoint.take_over is TakeOver.RESUME:
        yield "spec.checkpoint: takeOver Resume goes on from the newest commit in path, so startFrom must be empty"
    if checkpoint.start_options != StartOptions() and not start:
        yield "spec.checkpoint.startOptions says how to read startFrom, which is empty"


def _nodes(nodes: Nodes) -> Iterator[str]:
    if nodes.min > nodes.max:
        yield f"spec.nodes: min is {nodes.min}, above max {nodes.max}"
    elif nodes.preferred is not None and not nodes.min <= nodes.preferred <= nodes.max:
        yield f"spec.nodes.preferred: {nodes.preferred} is not between min {nodes.min} and max {nodes.max}"
    elif nodes.allowed is not None and not any(map(nodes.permits, nodes.allowed)):
        yield f"spec.nodes.allowed: none of {list(nodes.allowed)} is between min {nodes.min} and max {nodes.max}"
    elif nodes.preferred is not None and not nodes.permits(nodes.preferred):
        yield f"spec.nodes.preferred: {nodes.preferred} is not one of allowed {list(nodes.allowed or ())}"


def _strategy(parallelism: Parallelism, *, is_dcp: bool) -> Iterator[str]:
    strategy, zero, choices = parallelism.strategy, parallelism.zero_stage, parallelism.topologies
    if strategy is Strategy.AUTO and choices:
        yield "spec.parallelism.topologies: strategy Auto does not use it; choose Fixed or Ranked, or remove it"
    if strategy is not Strategy.AUTO and not choices:
        yield f"spec.parallelism.topologies: is missing; strategy {strategy} needs it"
    if strategy is Strategy.FIXED and len(choices) > 1:
        yield f"spec.parallelism.topologies: strategy Fixed takes one entry, found {len(choices)}; choose Ranked"
    if strategy is Strategy.AUTO and zero > 1 and not is_dcp and 1 not in parallelism.pipeline:
        yield (
            f"spec.parallelism: zeroStage {zero} excludes pipelines, but pipeline has only "
            f"{list(parallelism.pipeline)}; add 1 to it, or choose zeroStage 0 or 1"
        )


def _batch(batch: Batch) -> Iterator[str]:
    if batch.global_samples % batch.micro_samples:
        yield (
            f"spec.batch: globalSamples {batch.global_samples} is not a multiple of microSamples {batch.micro_samples}"
        )


def _auto(spec: Spec) -> Iterator[str]:
    """Yield problems of lists of degrees of which no combination can run on any number of nodes."""
    lists, nodes, per_node = spec.parallelism, spec.nodes, spec.accelerator.per_node
    if not any(n % t == 0 for t in lists.tensor for n in per_node):
        yield f"spec.parallelism.tensor: none of {list(lists.tensor)} divides a number of perNode {list(per_node)}"
    smallest, most = min(lists.tensor) * min(lists.pipeline), nodes.max * max(per_node)
    if smallest > most:
        yield f"spec.parallelism: tensor * pipeline is at least {smallest}, but there are at most {most} accelerators"
    passes = spec.batch.global_samples // spec.batch.micro_samples
    if nodes.min * min(per_node) > max(lists.tensor) * max(lists.pipeline) * max(lists.context) * passes:
        yield (
            f"spec.batch.globalSamples: {passes} micro-batches are fewer than the replicas on {nodes.min} nodes; lower "
            "nodes.min or microSamples"
        )
    if spec.model is not None:
        yield from _auto_model(spec.model, lists)


def _auto_model(model: Model, lists: Parallelism) -> Iterator[str]:
    sizes = {"attentionHeads": model.attention_heads, "keyValueHeads": model.key_value_heads}
    sizes["hiddenSize"] = model.hidden_size
    if not model.pad_vocabulary:
        sizes["vocabSize"] = model.vocab_size
    named = ", ".join(f"{name} {value}" for name, value in sizes.items())
    if not any(all(value % t == 0 for value in sizes.values()) for t in lists.tensor):
        yield f"spec.parallelism.tensor: none of {list(lists.tensor)} divides {named}"
    if min(lists.pipeline) > model.layers:
        yield f"spec.parallelism.pipeline: every one of {list(lists.pipeline)} is above layers {model.layers}"
    if not any(e == 1 or (model.experts and model.experts % e == 0) for e in lists.expert):
        yield f"spec.parallelism.expert: none of {list(lists.expert)} divides experts {model.experts}"
    if not any(model.sequence_length % c == 0 for c in lists.context):
        yield f"spec.parallelism.context: none of {list(lists.context)} divides sequenceLength {model.sequence_length}"


def _topologies(spec: Spec) -> Iterator[str]:
    choices = spec.parallelism.topologies
    for i, choice in enumerate(choices):
        where = f"spec.parallelism.topologies[{i}]"
        if choice.zero_stage > 1 and choice.pipeline > 1 and spec.checkpoint.format != DCP:
            yield (
                f"{where}: zeroStage {choice.zero_stage} excludes pipelines, but pipeline is {choice.pipeline}; "
                "choose zeroStage 0 or 1"
            )
        if choice.data is not None and choice.data % (choice.expert * choice.context):
            yield f"{where}: data {choice.data} is not a multiple of expert {choice.expert} * context {choice.context}"
    if choices and not any(_has_room(choice, spec) for choice in choices):
        yield (
            f"spec.parallelism.topologies: none can run on {spec.nodes.min} to {spec.nodes.max} nodes with "
            f"{list(spec.accelerator.per_node)} accelerators each"
        )
    elif choices and not any(_fits_batch(choice, spec.batch) for choice in choices):
        yield "spec.batch.globalSamples: is not a multiple of microSamples * data / context of any topology"


def _has_room(choice: TopologyChoice, spec: Spec) -> bool:
    model_size, nodes = choice.tensor * choice.pipeline, spec.nodes
    for per_node in spec.accelerator.per_node:
        if per_node % choice.tensor:
            continue
        if choice.data is None and model_size <= per_node * nodes.max:
            return True
        if choice.data is not None:
            count, rest = divmod(model_size * choice.data, per_node)
            if not rest and nodes.min <= count <= nodes.max:
                return True
    return False


def _fits_batch(choice: TopologyChoice, batch: Batch) -> bool:
    if choice.data is None:
        return True
    return batch.global_samples % (max(1, choice.data // choice.context) * batch.micro_samples) == 0


def _model(model: Model | None) -> Iterator[str]:
    if model is None:
        return
    heads, kv_heads = model.attention_heads, model.key_value_heads
    if heads % kv_heads:
        yield f"spec.model: keyValueHeads {kv_heads} does not divide attentionHeads {heads}"
    if model.expert_parameters > model.parameters:
        yield f"spec.model.expertParameters: {model.expert_parameters:g} is above parameters {model.parameters:g}"
    if model.expert_parameters and not model.experts:
        yield "spec.model.expertParameters: is given, but experts is 0"
    if model.experts and model.experts_per_token > model.experts:
        yield f"spec.model.expertsPerToken: {model.experts_per_token} is above experts {model.experts}"


def _mode(spec: Spec) -> Iterator[str]:
    mode, format_ = spec.reshard.mode, spec.checkpoint.format
    if mode == LOAD and format_ != DCP:
        yield (
            f"spec.reshard.mode: is Load, but spec.checkpoint.format is {format_}, which cannot be loaded in another "
            "topology; choose Auto, Materialize or Virtual"
        )
    if mode == VIRTUAL and format_ == DCP:
        yield (
            "spec.reshard.mode: is Virtual, but spec.checkpoint.format is DCP, of which a rank may open any file; "
            "choose Auto, Load or Materialize"
        )
    if spec.reshard.mode == VIRTUAL and spec.reshard.parallelism > 1:
        yield (
            f"spec.reshard.parallelism: is {spec.reshard.parallelism}, but mode Virtual moves no bytes that pods could "
            "share; leave it out"
        )


def _budgets(spec: Spec) -> Iterator[str]:
    names = [item.failure_class for item in spec.recovery.budgets]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"spec.recovery.budgets: has {names.count(name)} entries for failureClass {name}; expected one"


def _template(spec: Spec) -> Iterator[str]:
    pod = spec.template.get("spec") or {}
    where = "spec.template.spec"
    if pod.get("restartPolicy", "Never") != "Never":
        yield f"{where}.restartPolicy: is {pod['restartPolicy']!r}: expected Never; the operator restarts all ranks"
    if "activeDeadlineSeconds" in pod:
        yield f"{where}.activeDeadlineSeconds: would kill every attempt after that time; set spec.activeDeadlineSeconds"
    if pod.get("hostNetwork") and pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield f"{where}.hostNetwork: needs dnsPolicy ClusterFirstWithHostNet, or the ranks cannot find rank 0"
    for name, instead in (
        ("nodeName", "use nodeSelector or affinity"),
        ("hostname", "the operator sets it"),
        ("subdomain", "the operator sets it"),
    ):
        if name in pod:
            yield f"{where}.{name}: is given; leave it out: {instead}"
    if any(_asks(item, spec) for item in (*pod["containers"][1:], *(pod.get("initContainers") or ()))):
        yield f"{where}: only the first container may ask for {spec.accelerator.resource}"


def _reshard_template(spec: Spec) -> Iterator[str]:
    resources = spec.reshard.resources
    if resources is not None and spec.accelerator.resource in (resources.limits or {}):
        yield f"spec.reshard.resources: asks for {spec.accelerator.resource}, but resharding runs on CPUs"
    if spec.reshard.template is None:
        return
    if resources is not None:
        yield "spec.reshard.resources: is not for a template: set the resources in spec.reshard.template"
    pod = spec.reshard.template.get("spec") or {}
    where = "spec.reshard.template.spec"
    if not pod.get("containers"):
        yield f"{where}.containers: is empty: the first container converts, so there must be one"
    if pod.get("restartPolicy", "Never") != "Never":
        yield f"{where}.restartPolicy: is {pod['restartPolicy']!r}: expected Never; the operator retries"
    if any(_asks(item, spec) for item in pod.get("containers") or ()):
        yield f"{where}: asks for {spec.accelerator.resource}, but resharding runs on CPUs"


def _asks(container: Mapping[str, Any], spec: Spec) -> bool:
    return spec.accelerator.resource in ((container.get("resources") or {}).get("limits") or {})
