"""Estimated time of one optimizer step, in seconds. Pure arithmetic; see docs/planner.md for the assumptions.

The estimates rank topologies; they are not predictions. Only ratios between compute, bandwidth and latency matter.
"""

from __future__ import annotations

import dataclasses

from elastic_operator.api.spec import Activations, Batch, Model, Performance
from elastic_operator.planning.memory import stage_fraction
from elastic_operator.planning.shape import Shape

_ACTIVATION_BYTES = 2
_GRADIENT_BYTES = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Parts of the time of a step, in seconds; without a model, in units of one sample on one accelerator.

    Attributes:
        compute: forward and backward passes of the slowest stage.
        bubble: waiting for the pipeline to fill and to drain.
        tensor: all-reduces of activations inside the node.
        pipeline: activations and their gradients between stages.
        data: all-reduce of gradients (and gathering of weights with ZeRO) over replicas.
        expert: all-to-alls of tokens to the experts and back.
        context: all-to-all of attention heads and sequence.
    """

    compute: float
    bubble: float
    tensor: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    expert: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all parts; no overlap is assumed."""
        return self.compute + self.bubble + self.tensor + self.pipeline + self.data + self.expert + self.context


def estimate(model: Model | None, performance: Performance, batch: Batch, shape: Shape, num_micro: int) -> Cost:
    """Estimate the time of one step of `num_micro` micro-batches per replica.

    Bubble: (p - 1)/m of the time that m micro-batches take (Narayanan et al. 2021, section 2.2.1). Ring all-reduce of
    n bytes over k ranks: 2(k - 1)/k * n / bandwidth + 2(k - 1) * latency (Thakur et al. 2005). Per layer and
    micro-batch tensor parallelism does 4 all-reduces of activations (Shoeybi et al. 2019, section 3), expert
    parallelism 4 all-to-alls, context parallelism 8 (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3.2).
    """
    if model is None:
        samples = batch.global_samples / shape.world_size
        return Cost(compute=samples, bubble=samples * (shape.pp - 1) / num_micro)
    stage = stage_fraction(model, shape)
    flops = step_flops(model, batch.global_samples) * stage / (shape.dp * shape.tp)
    compute = flops / (performance.teraflops * 1e12)
    intra, inter = performance.intra_node_gbps * 1e9, performance.inter_node_gbps * 1e9
    latency = performance.latency_microseconds * 1e-6
    recompute = 1.5 if model.activations is Activations.FULL else 1.0

    tokens = batch.micro_samples * model.sequence_length / shape.cp
    message = _ACTIVATION_BYTES * tokens * model.hidden_size
    layer_passes = num_micro * model.layers * stage
    tensor = 4 * recompute * layer_passes * _all_reduce(shape.tp, message, intra, latency)
    expert = 4 * layer_passes * _all_to_all(shape.ep, message * model.experts_per_token, inter, latency)
    context = 8 * layer_passes * _all_to_all(shape.cp, message / shape.tp, inter, latency)
    hop = latency + message / shape.tp / (inter if shape.num_nodes > 1 else intra)
    pipeline = 2 * (num_micro + shape.pp - 2) * hop if shape.pp > 1 else 0.0
    return Cost(
        compute=compute,
        bubble=(compute + tensor) * (shape.pp - 1) / num_micro,
        tensor=tensor,
        pipeline=pipeline,
        data=_data_parallel(
            model,
            shape,
            stage=stage,
            num_micro=num_micro,
            bandwidth=inter if shape.num_nodes > 1 else intra,
            latency=latency,
        ),
        expert=expert,
        context=context,
    )


def step_flops(model: Model, global_samples: int) -> float:
    """Count the floating point operations of one step.

    Per token: 6 for each active parameter, and 12*l*h*s for attention. Recomputing whole layers repeats the forward
    third of it. Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    active = model.parameters
    if model.experts:
        active -= model.expert_parameters * max(0.0, 1 - model.experts_per_token / model.experts)
    per_token = 6 * active + 12 * model.layers * model.hidden_size * model.sequence_length
    recompute = 4 / 3 if model.activations is Activations.FULL else 1.0
    return per_token * recompute * model.sequence_length * global_samples


def _data_parallel(
    model: Model, shape: Shape, *, stage: float, num_micro: int, bandwidth: float, latency: float
) -> float:
    """Estimate the time of data parallel communication.

    Gradients are reduced once per step; ZeRO-2 and 3 reduce them per micro-batch, and ZeRO-3 gathers weights twice as
    often.
    """
    dense = _GRADIENT_BYTES * (model.parameters - model.expert_parameters) * stage / shape.tp
    experts = _GRADIENT_BYTES * model.expert_parameters * stage / (shape.tp * shape.ep)
    rounds = num_micro if shape.zero >= 2 else 1
    volume = 1.0 if shape.zero < 3 else 1.5  # reduce-scatter + 2 gathers, in units of an all-reduce
    return (
        rounds
        * volume
        * (
            _all_reduce(shape.dp, dense, bandwidth, latency)
            + (_all_reduce(shape.dp // shape.ep, experts, bandwidth, latency) if experts else 0.0)
        )
    )


def _all_reduce(ranks: int, num_bytes: float, bandwidth: float, latency: float) -> float:
    return 2 * (ranks - 1) * (num_bytes / ranks / bandwidth + latency)


def _all_to_all(ranks: int, num_bytes: float, bandwidth: float, latency: float) -> float:
    return (ranks - 1) * (num_bytes / ranks / bandwidth + latency)
