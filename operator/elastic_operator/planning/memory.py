"""Memory of the rank that needs most: weights, gradients, optimizer state and activations, in bytes.

This is a model of what training needs, not of one framework's allocator; RESERVED_FRACTION covers the rest.
"""

from __future__ import annotations

import dataclasses
import math

from elastic_operator.api.spec import Activations, Model
from elastic_operator.planning.shape import Shape

RESERVED_FRACTION = 0.1
"""Assumed fraction of an accelerator's memory for the runtime, communication buffers and fragmentation."""

WEIGHT_BYTES = 2
GRADIENT_BYTES = 2
OPTIMIZER_BYTES = 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes


def estimate(model: Model, shape: Shape, micro_samples: int, accumulation_steps: int) -> Memory:
    """Estimate the memory of the rank that needs most.

    Mixed precision with Adam: 2 bytes of weight, 2 of gradient and 12 of optimizer state (fp32 weight and two moments)
    per parameter; ZeRO stages 1, 2 and 3 divide optimizer state, gradients and weights by dp (Rajbhandari et al. 2020,
    "ZeRO", section 3.1 and figure 1). Tensor and pipeline parallelism divide all three; expert parallelism divides
    the experts, which leaves dp/ep replicas of each for ZeRO. FSDP2, the default of a DCP job, counts as stage 3.

    Activations: see `activation_bytes_per_layer`; the first stage of a 1F1B pipeline keeps those of min(pp,
    micro-batches) micro-batches (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", section 2.2.1).
    """
    stage = stage_fraction(model, shape)
    dense = (model.parameters - model.expert_parameters) * stage / shape.tp
    experts = model.expert_parameters * stage / (shape.tp * shape.ep)
    expert_replicas = max(1, shape.dp // shape.ep)

    def state_bytes(bytes_per_parameter: int, partitioned_from_stage: int) -> float:
        if shape.zero < partitioned_from_stage:
            return bytes_per_parameter * (dense + experts)
        return bytes_per_parameter * (dense / shape.dp + experts / expert_replicas)

    in_flight = min(shape.pp, accumulation_steps)
    return Memory(
        weights_bytes=state_bytes(WEIGHT_BYTES, 3),
        gradients_bytes=state_bytes(GRADIENT_BYTES, 2),
        optimizer_bytes=state_bytes(OPTIMIZER_BYTES, 1),
        activations_bytes=in_flight
        * largest_stage(model, shape)
        * activation_bytes_per_layer(model, shape, micro_samples),
    )


def activation_bytes_per_layer(model: Model, shape: Shape, micro_samples: int) -> float:
    """Estimate the activations that one layer keeps for one micro-batch, on one rank.

    With s tokens, b samples, h width, a heads and t = tp (Korthikanti et al. 2022, "Reducing Activation Recomputation
    in Large Transformer Models", equation 2 and table 2): nothing recomputed sbh(10 + 24/t + 5as/(ht)); attention
    scores recomputed or fused sbh(10 + 24/t); whole layers recomputed 2sbh. Context parallelism divides s.
    """
    tokens = model.sequence_length / shape.cp * micro_samples
    if model.activations is Activations.FULL:
        return 2 * tokens * model.hidden_size
    bytes_per_element = 10 + 24 / shape.tp
    if model.activations is Activations.NONE:
        # With context parallelism each rank holds a/cp heads over the full sequence (Ulysses).
        bytes_per_element += 5 * model.attention_heads * model.sequence_length / (model.hidden_size * shape.tp)
    return tokens * model.hidden_size * bytes_per_element


def largest_stage(model: Model, shape: Shape) -> int:
    """Return the number of layers in the largest pipeline stage, if the layers are divided evenly."""
    return math.ceil(model.layers / shape.pp)


def stage_fraction(model: Model, shape: Shape) -> float:
    """Return the fraction of the model in the largest stage; 1/pp if pp divides the layers."""
    return largest_stage(model, shape) / model.layers
