"""The typed spec of an `ElasticTrainingJob`: frozen data, one class per section of the resource.

Names carry their units. docs/crd-reference.md describes every field. The defaults equal those of the schema in
crds/elastictrainingjobs.yaml; a test checks that.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

AUTO, VIRTUAL = "Auto", "Virtual"
"""Values of `spec.reshard.mode`.

Auto: the operator chooses the faster mode. Virtual: the reshard Job writes a manifest with the locations of the bytes,
and the training pods read the bytes from there.
"""


class Strategy(enum.StrEnum):
    """Rule by which the planner chooses among the topologies that can run."""

    AUTO = "Auto"
    FIXED = "Fixed"
    RANKED = "Ranked"


class Activations(enum.StrEnum):
    """Activations that the backward pass recomputes."""

    NONE = "None"
    SELECTIVE = "Selective"
    FULL = "Full"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """`spec.accelerator.performance`: speed of one accelerator in this training; see docs/planner.md."""

    teraflops: float = 400.0
    intra_node_gbps: float = 300.0
    inter_node_gbps: float = 50.0
    latency_microseconds: float = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """`spec.accelerator`.

    Attributes:
        per_node: accelerators per node, in order of preference.
        performance: None if the spec does not declare it.
    """

    resource: str
    per_node: tuple[int, ...]
    memory_bytes: int | None = None
    performance: Performance | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """`spec.nodes`.

    Attributes:
        allowed: permitted numbers of nodes; None for every number from `min` to `max`.
    """

    min: int
    max: int
    preferred: int | None = None
    allowed: tuple[int, ...] | None = None

    def permits(self, num_nodes: int) -> bool:
        """Return whether an attempt may run on `num_nodes` nodes."""
        return self.min <= num_nodes <= self.max and (self.allowed is None or num_nodes in self.allowed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopologyChoice:
    """One entry of `spec.parallelism.topologies`.

    Attributes:
        data: None if it follows from the number of GPUs.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int | None = None
    expert: int = 1
    context: int = 1
    zero_stage: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """`spec.parallelism`."""

    tensor: tuple[int, ...] = (1,)
    pipeline: tuple[int, ...] = (1,)
    expert: tuple[int, ...] = (1,)
    context: tuple[int, ...] = (1,)
    zero_stage: int = 1
    strategy: Strategy = Strategy.AUTO
    topologies: tuple[TopologyChoice, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`spec.batch`: samples per optimizer step, and per forward pass of one data-parallel replica."""

    global_samples: int
    micro_samples: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`spec.model`: what the planner needs to check divisibility and to estimate memory and speed."""

    parameters: float
    layers: int
    hidden_size: int
    attention_heads: int
    key_value_heads: int
    vocab_size: int
    sequence_length: int
    pad_vocabulary: bool = True
    experts: int = 0
    experts_per_token: int = 2
    expert_parameters: float = 0.0
    activations: Activations = Activations.SELECTIVE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """`spec.checkpoint.startOptions`: options of `reshard run`.

    Each is a path inside the claim; an empty string means that the option is not given.
    """

    patterns: str = ""
    names: str = ""
    like: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """`spec.checkpoint`.

    Attributes:
        start_from: folder inside the claim with the checkpoint to start from; empty for a training from step 0.
        take_over: the job may use a folder that another job owns.
    """

    claim_name: str
    path: str = ""
    start_from: str = ""
    start_options: StartOptions = StartOptions()
    take_over: bool = False
    format: str = "DeepSpeed"
    interval_seconds: int = 900


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardSpec:
    """`spec.reshard`.

    Attributes:
        template: a PodTemplateSpec; None to derive one from the training container.
    """

    mode: str = AUTO
    timeout_seconds: int = 3600
    parallelism: int = 1
    backoff_limit: int = 3
    on_failure: str = "RetainTopology"
    template: Mapping[str, Any] | None = None

    @property
    def may_be_virtual(self) -> bool:
        """True if a conversion may be virtual, so that training pods need a volume in memory."""
        return self.mode == VIRTUAL or (self.mode == AUTO and self.parallelism == 1 and self.template is None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartBudget:
    """`spec.recovery.restartBudget`."""

    limit: int = 10
    window_seconds: int = 3600


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySpec:
    """`spec.recovery`."""

    suspect_seconds: int = 20
    batch_window_seconds: int = 15
    force_delete_seconds: int = 60
    drain_seconds: int = 300
    scale_up_stable_seconds: int = 600
    exclude_node_seconds: int = 14400
    hang_seconds: int = 1800
    restart_budget: RestartBudget = RestartBudget()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The whole spec.

    Attributes:
        template: PodTemplateSpec of the training pods, unchanged.
    """

    accelerator: Accelerator
    nodes: Nodes
    batch: Batch
    checkpoint: CheckpointSpec
    template: Mapping[str, Any]
    parallelism: Parallelism = Parallelism()
    model: Model | None = None
    reshard: ReshardSpec = ReshardSpec()
    recovery: RecoverySpec = RecoverySpec()
    suspend: bool = False
