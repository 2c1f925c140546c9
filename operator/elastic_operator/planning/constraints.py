"""Constraints that decide whether a shape can run. Each violation is one sentence with all its factors."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_operator.api.schema_types import GIB
from elastic_operator.api.spec import Batch, Model, Spec
from elastic_operator.api.spec_model import DCP
from elastic_operator.planning import memory
from elastic_operator.planning.shape import Shape


def refusals(spec: Spec, shape: Shape) -> tuple[str, ...]:
    """Return every reason why `shape` cannot run; empty if it can."""
    problems = [*_check_mesh(shape), *_check_batch(spec.batch, shape)]
    if shape.zero > 1 and shape.pp > 1 and spec.checkpoint.format != DCP:
        problems.append(f"ZeRO stage {shape.zero} excludes pipelines, and pp is {shape.pp}")
    if spec.model is not None:
        problems += _check_model(spec.model, shape)
        # A memory estimate for an impossible shape means nothing.
        if not problems and spec.accelerator.memory_bytes is not None:
            problems += _check_memory(spec, spec.model, spec.accelerator.memory_bytes, shape)
    return tuple(problems)


def accumulation_steps(batch: Batch, shape: Shape) -> int:
    """Return the number of micro-batches that one replica processes per optimizer step."""
    return batch.global_samples // (shape.num_replicas * batch.micro_samples)


def _check_mesh(shape: Shape) -> Iterator[str]:
    product = shape.tp * shape.pp * shape.dp
    if product != shape.world_size:
        yield (
            f"tp({shape.tp}) * pp({shape.pp}) * dp({shape.dp}) = {product} is not the {shape.world_size} accelerators "
            f"of {shape.num_nodes} nodes * {shape.per_node}"
        )
    if shape.per_node % shape.tp:
        yield (
            f"tp({shape.tp}) does not divide the {shape.per_node} accelerators of a node: a tensor parallel group "
            "would span nodes"
        )
    if shape.dp % (shape.ep * shape.cp):
        yield f"ep({shape.ep}) * cp({shape.cp}) does not divide dp({shape.dp})"


def _check_batch(batch: Batch, shape: Shape) -> Iterator[str]:
    if shape.dp % shape.cp:
        return  # reported by _check_mesh; there is no whole number of replicas
    per_pass = shape.num_replicas * batch.micro_samples
    if batch.global_samples % per_pass:
        replicas = f"dp({shape.dp})" + (f" / cp({shape.cp})" if shape.cp > 1 else "")
        yield (
            f"globalSamples({batch.global_samples}) is not a multiple of {replicas} * "
            f"microSamples({batch.micro_samples}) = {per_pass}"
        )


def _check_model(model: Model, shape: Shape) -> Iterator[str]:
    tp = shape.tp
    for name, value in (
        ("attentionHeads", model.attention_heads),
        ("keyValueHeads", model.key_value_heads),
        ("hiddenSize", model.hidden_size),
    ):
        if value % tp:
            yield f"tp({tp}) does not divide {name}({value})"
    if not model.pad_vocabulary and model.vocab_size % tp:
        yield f"tp({tp}) does not divide vocabSize({model.vocab_size}), and padVocabulary is false"
    if shape.pp > model.layers:
        yield f"pp({shape.pp}) is more than layers({model.layers})"
    if shape.ep > 1 and not model.experts:
        yield f"ep({shape.ep}) needs experts, and the model has none"
    elif model.experts % shape.ep:
        yield f"ep({shape.ep}) does not divide experts({model.experts})"
    if shape.cp > 1 and model.attention_heads % (tp * shape.cp):
        yield f"tp({tp}) * cp({shape.cp}) does not divide attentionHeads({model.attention_heads})"
    if model.sequence_length % shape.cp:
        yield f"cp({shape.cp}) does not divide sequenceLength({model.sequence_length})"


def _check_memory(spec: Spec, model: Model, limit_bytes: int, shape: Shape) -> Iterator[str]:
    need = memory.estimate(model, shape, spec.batch.micro_samples, accumulation_steps(spec.batch, shape))
    usable = limit_bytes * (1 - memory.RESERVED_FRACTION)
    if need.total_bytes > usable:
        yield (
            f"needs {need.total_bytes / GIB:.3g} GiB per accelerator (weights {need.weights_bytes / GIB:.3g}, "
            f"gradients {need.gradients_bytes / GIB:.3g}, optimizer {need.optimizer_bytes / GIB:.3g}, "
            f"activations {need.activations_bytes / GIB:.3g}), {usable / GIB:.3g} of {limit_bytes / GIB:.3g} GiB "
            "can be used"
        )
