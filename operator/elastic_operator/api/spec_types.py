"""The typed spec of an `ElasticTrainingJob`: frozen data, one class per section of the resource.

Units are in the names; field by field descriptions are in docs/crd-reference.md. Defaults are those of the schema in
crds/elastictrainingjobs.yaml; a test keeps them equal.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

AUTO, VIRTUAL = "Auto", "Virtual"
"""`spec.reshard.mode`: as it pays; or the reshard Job writes where the bytes are, and the training reads them there."""


class Strategy(enum.StrEnum):
    """How the planner orders what can run."""

    AUTO = "Auto"
    FIXED = "Fixed"
    RANKED = "Ranked"


class Activations(enum.StrEnum):
    """What the backward pass recomputes."""

    NONE = "None"
    SELECTIVE = "Selective"
    FULL = "Full"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """What one accelerator does in this training; see docs/planner.md for what to enter."""

    teraflops: float = 400.0
    intra_node_gbps: float = 300.0
    inter_node_gbps: float = 50.0
    latency_microseconds: float = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """`spec.accelerator`. `per_node` is in order of preference; `performance` is None where it was not declared."""

    resource: str
    per_node: tuple[int, ...]
    memory_bytes: int | None = None
    performance: Performance | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """`spec.nodes`. `allowed` is None where every number between `min` and `max` may be used."""

    min: int
    max: int
    preferred: int | None = None
    allowed: tuple[int, ...] | None = None

    def permits(self, num_nodes: int) -> bool:
        """Whether an attempt may run on `num_nodes` nodes."""
        return self.min <= num_nodes <= self.max and (self.allowed is None or num_nodes in self.allowed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopologyChoice:
    """One entry of `spec.parallelism.topologies`. `data` None: follows from the number of GPUs."""

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
    """`spec.model`: what the planner needs for divisibility, memory and speed."""

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
    """`spec.checkpoint.startOptions`: options of `reshard run`, each a path inside the claim; empty for none."""

    patterns: str = ""
    names: str = ""
    like: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """`spec.checkpoint`.

    Attributes:
        start_from: folder inside the claim, empty for a training that begins from nothing.
        take_over: the job may use a folder that belongs to another job.
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
    """`spec.reshard`. `template` is a PodTemplateSpec, or None to derive one from the training container."""

    mode: str = AUTO
    timeout_seconds: int = 3600
    parallelism: int = 1
    backoff_limit: int = 3
    on_failure: str = "RetainTopology"
    template: Mapping[str, Any] | None = None

    @property
    def may_be_virtual(self) -> bool:
        """Some conversion may be: the training needs a place in memory."""
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
    """The whole spec. `template` is the PodTemplateSpec of the training pods, as written."""

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
