"""The spec of an `ElasticTrainingJob`: frozen data, one class per section of the resource.

crds/elastictrainingjobs.yaml and docs/crd-reference.md are generated from these classes (`make generate`): types,
bounds and defaults come from the fields, descriptions from the text below each field. `admission_rules` adds the
rules that the API server checks. Names carry their units.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, Strict

from elastic_operator.api.claim_path import BEGINNING, RelativePath, StartOptions
from elastic_operator.api.failure_policy import BY_CLASS, ClassBudget, PodFailurePolicy
from elastic_operator.api.pod_template import ReshardPodTemplate, Resources, TrainingPodTemplate
from elastic_operator.api.schema_types import (
    ABSENT,
    DERIVED,
    GIB,
    INT32,
    INT64,
    MAX_ALLOWED_GLOBALS,
    OPEN,
    SET,
    WHOLE,
    CheckedAs,
    Degree,
    Flag,
    GlobalName,
    ManagerName,
    NodeCount,
    ReadAs,
    Speed,
    ZeroStage,
    not_expected,
    to_camel_case,
)
from reshard.contract import COMMIT_NAME, GROUP, MAX_RELEASED, TakeOver

AUTO: Final = "Auto"
LOAD: Final = "Load"
VIRTUAL: Final = "Virtual"
"""Values of `spec.reshard.mode`.

Auto: the resharder chooses, within what the operator permits (`reconcile.reshard_mode`). Load: the training loads a
DCP commit of another topology by itself. Virtual: the reshard Job writes a manifest with the locations of the bytes,
and the training pods read the bytes from there.
"""

DCP: Final = "DCP"
"""Value of `spec.checkpoint.format`: checkpoints of torch.distributed.checkpoint."""


class Strategy(enum.StrEnum):
    """Rule by which the planner chooses among the topologies that can run."""

    AUTO = "Auto"
    FIXED = "Fixed"
    RANKED = "Ranked"


class Gang(enum.StrEnum):
    """Scheduler whose PodGroups let the pods of an attempt start together or not at all."""

    KUBERNETES = "Kubernetes"
    COSCHEDULING = "Coscheduling"
    VOLCANO = "Volcano"


class Activations(enum.StrEnum):
    """Activations that the backward pass recomputes."""

    NONE = "None"
    SELECTIVE = "Selective"
    FULL = "Full"


def _without_repeats(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Remove repeated items; the order expresses preference."""
    return tuple(dict.fromkeys(items))


def _to_bytes(gibibytes: float) -> int:
    return int(gibibytes * GIB)


def _check_resource_name(name: str) -> str:
    if not _RESOURCE_NAME.fullmatch(name):
        raise not_expected("an extended resource such as amd.com/gpu")
    return name


_RESOURCE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
"""An extended resource: DNS subdomain, slash, qualified name."""

OPERATOR_NAME: Final = f"{GROUP}/elastic-training-operator"
"""Value of `spec.managedBy` that names this operator; an absent field means the same."""

UNIQUE = AfterValidator(_without_repeats)
_Gibibytes = Annotated[float, Strict(), Field(ge=0.001, le=65_536, allow_inf_nan=False)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """`spec.accelerator.performance`."""

    teraflops: Speed = 400.0
    """Achieved (not peak) speed of one accelerator on this model in 10^12 floating point operations per second. Default
    400.
    """
    intra_node_gbps: Annotated[Speed, Field(alias="intraNodeGBps")] = 300.0
    """Bandwidth per accelerator to others in its node in 10^9 bytes per second, one direction. Default 300."""
    inter_node_gbps: Annotated[Speed, Field(alias="interNodeGBps")] = 50.0
    """Bandwidth per accelerator to other nodes in 10^9 bytes per second, one direction. Default 50."""
    latency_microseconds: Annotated[float, Strict(), Field(ge=0, le=1_000_000, allow_inf_nan=False)] = 10.0
    """Time of one message, however small, in microseconds. Default 10."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """`spec.accelerator`."""

    resource: Annotated[str, Strict(), Field(min_length=3, max_length=253), AfterValidator(_check_resource_name)]
    """Extended resource that the device plugin offers, for instance amd.com/gpu or nvidia.com/gpu. Cannot be changed.
    """
    per_node: Annotated[tuple[Degree, ...], Field(min_length=1, max_length=16), UNIQUE, SET]
    """Acceptable numbers of accelerators per pod, best first. All pods of an attempt have the same number."""
    memory_bytes: Annotated[Annotated[int, ReadAs(_Gibibytes, _to_bytes)] | None, Field(alias="memoryGiB")] = None
    """Memory of one accelerator in GiB (2^30 bytes). With it (and with spec.model) the planner refuses topologies that
    do not fit.
    """
    performance: Performance | None = None
    """Speed of one accelerator in this training, from which the planner estimates the step time. With it, the planner
    prefers fewer nodes where more would be slower. Without it, the planner uses as many GPUs as it can.
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """`spec.nodes`."""

    min: NodeCount
    """Smallest number of nodes. The job waits while fewer are usable. With podsPerNode Many, min, max, preferred and
    allowed count pods.
    """
    max: NodeCount
    """Largest number of nodes. `kubectl scale` sets it."""
    preferred: NodeCount | None = None
    """Number of nodes that the job uses whenever it can run there, even if the planner estimates that another number is
    faster.
    """
    allowed: Annotated[tuple[NodeCount, ...], Field(min_length=1, max_length=64), UNIQUE, SET] | None = None
    """Permitted numbers of nodes between min and max. If absent, all of them."""
    pods_per_node: Literal["One", "Many"] = "One"
    """One: no two pods of the job share a node, even if both would fit; the pods get a required anti-affinity. Many: a
    node runs as many of the job's pods as fit. A change counts from the next attempt on. Default One.
    """
    autoscaling: Flag = False
    """If true, something adds nodes for pods that find none, for instance Cluster Autoscaler or Karpenter. Then the job
    does not wait without pods while too few nodes are usable: it starts on the smallest permitted number of nodes, and
    its pods are Pending until the nodes are there. Default false.
    """

    def permits(self, num_nodes: int) -> bool:
        """Return whether an attempt may run on `num_nodes` nodes."""
        return self.min <= num_nodes <= self.max and (self.allowed is None or num_nodes in self.allowed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopologyChoice:
    """One entry of `spec.parallelism.topologies`."""

    tensor: Degree = 1
    """Degree of tensor parallelism. Default 1."""
    pipeline: Degree = 1
    """Number of pipeline stages. Default 1."""
    data: Annotated[int, Strict(), Field(ge=1, le=1_048_576), WHOLE, INT32] | None = None
    """Degree of data parallelism. If absent, it follows from the number of GPUs."""
    expert: Degree = 1
    """Degree of expert parallelism. Default 1."""
    context: Degree = 1
    """Degree of context parallelism. Default 1."""
    zero_stage: Annotated[ZeroStage, DERIVED] = 1
    """ZeRO stage. If absent, that of spec.parallelism."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """`spec.parallelism`."""

    tensor: Annotated[tuple[Degree, ...], Field(min_length=1, max_length=16), UNIQUE, SET] = (1,)
    """Allowed degrees of tensor parallelism. Default 1."""
    pipeline: Annotated[tuple[Degree, ...], Field(min_length=1, max_length=32), UNIQUE, SET] = (1,)
    """Allowed numbers of pipeline stages. Default 1."""
    expert: Annotated[tuple[Degree, ...], Field(min_length=1, max_length=16), UNIQUE, SET] = (1,)
    """Allowed degrees of expert parallelism. It divides data parallelism and adds no GPUs. Default 1."""
    context: Annotated[tuple[Degree, ...], Field(min_length=1, max_length=16), UNIQUE, SET] = (1,)
    """Allowed degrees of context (sequence) parallelism. It divides data parallelism and adds no GPUs. Default 1."""
    zero_stage: Annotated[ZeroStage, DERIVED] = 1
    """ZeRO stage: 1 partitions the optimizer state over data parallelism, 2 also the gradients, 3 also the weights. In
    a DeepSpeed job 2 and 3 exclude pipelines. In a DCP job the stage says what the training partitions: 3 is FSDP2
    (fully_shard), 2 is FSDP2 with reshard_after_forward=False, 0 is replicas. If absent, 1, in a DCP job 3.
    """
    strategy: Strategy = Strategy.AUTO
    """Auto chooses the topology with the shortest estimated step. Fixed runs the one entry of topologies, with another
    degree of data parallelism if the entry leaves it open. Ranked takes the first entry of topologies that can run.
    Default Auto.
    """
    topologies: Annotated[tuple[TopologyChoice, ...], Field(min_length=1, max_length=32), ABSENT] = ()
    """Topologies for Fixed and Ranked, best first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`spec.batch`."""

    global_samples: Annotated[int, Strict(), Field(ge=1, le=1_000_000_000), WHOLE, INT64]
    """Samples per optimizer step over all GPUs. An edit (a batch ramp) is a planned change: the training commits and
    goes on from there. The training script must count its samples (docs/trainer.md), not compute them from the step.
    """
    micro_samples: Annotated[int, Strict(), Field(ge=1, le=1_000_000), WHOLE, INT32] = 1
    """Samples per forward pass of one data-parallel replica. Default 1."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`spec.model`."""

    parameters: Annotated[float, Strict(), Field(ge=1, le=1e15, allow_inf_nan=False)]
    """Number of weights of the whole model."""
    layers: Annotated[int, Strict(), Field(ge=1, le=10_000), WHOLE, INT32]
    """Number of transformer layers."""
    hidden_size: Annotated[int, Strict(), Field(ge=1, le=1_000_000), WHOLE, INT32]
    """Width of the residual stream."""
    attention_heads: Annotated[int, Strict(), Field(ge=1, le=100_000), WHOLE, INT32]
    """Number of query heads."""
    key_value_heads: Annotated[int, Strict(), Field(ge=1, le=100_000), WHOLE, INT32, DERIVED]
    """Number of key and value heads (grouped-query attention). If absent, as many as attentionHeads."""
    vocab_size: Annotated[int, Strict(), Field(ge=1, le=100_000_000), WHOLE, INT32]
    """Number of rows of the embedding, before padding."""
    pad_vocabulary: Flag = True
    """The training script pads the embedding so that tensor parallelism divides it. If false, tensor parallelism must
    divide vocabSize. Default true.
    """
    sequence_length: Annotated[int, Strict(), Field(ge=1, le=100_000_000), WHOLE, INT32]
    """Tokens per sample. An edit is a planned change."""
    experts: Annotated[int, Strict(), Field(ge=0, le=100_000), WHOLE, INT32] = 0
    """Number of experts per mixture-of-experts layer; 0 for a dense model. Default 0."""
    experts_per_token: Annotated[int, Strict(), Field(ge=1, le=10_000), WHOLE, INT32] = 2
    """Number of experts that one token visits. Default 2."""
    expert_parameters: Annotated[float, Strict(), Field(ge=0, le=1e15, allow_inf_nan=False)] = 0.0
    """Number of weights in experts. They are part of parameters, and expert parallelism divides them. Default 0."""
    activations: Annotated[Activations, Field(alias="activationCheckpointing")] = Activations.SELECTIVE
    """Activations that the backward pass recomputes. None keeps all, Selective recomputes attention scores (or uses
    fused attention), Full recomputes whole layers. Default Selective.
    """


_NO_OPTIONS: Final = StartOptions()


def _check_resume_from(value: str) -> str:
    if value not in ("", BEGINNING) and not COMMIT_NAME.fullmatch(value):
        raise not_expected(f"{BEGINNING}, or a commit in status.checkpoint.history: a2/step-00000005")
    return value


CommitName = Annotated[str, Strict(), Field(max_length=80, pattern=f"^{COMMIT_NAME.pattern}$")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """`spec.checkpoint`."""

    claim_name: Annotated[str, Strict(), Field(min_length=1, max_length=253)]
    """PersistentVolumeClaim (ReadWriteMany) that every training and reshard pod mounts. The operator never creates or
    deletes it. Cannot be changed.
    """
    path: RelativePath = ""
    """Folder inside the claim; empty for its root. Cannot be changed."""
    start_from: RelativePath = ""
    """Folder inside the claim from which a job without commits of its own starts. It holds one checkpoint of plain
    DeepSpeed or of another job, in any layout that reshard converts, or several; of several, the job starts from the
    one that DeepSpeed's file latest names, or from the newest commit. A reshard Job copies it into path, in the
    topology of the first attempt; it is only read. If empty, training starts from nothing. Cannot be changed once the
    job has started. Default empty.
    """
    start_options: Annotated[StartOptions, ABSENT] = _NO_OPTIONS
    """Options that reshard needs to read startFrom, as paths inside the claim. Cannot be changed once the job has
    started.
    """
    resume_from: Annotated[str, Strict(), Field(max_length=80), AfterValidator(_check_resume_from)] = ""
    """Start of the next attempt, for a job that asks for it (reason CommitsRefused), or that is suspended. The name of
    a commit in status.checkpoint.history (a<N>/step-...): newer commits are not used again, and a refused commit is
    tried once more. Beginning: from startFrom or from nothing, without any commit. It acts once, and not if an attempt
    runs when it is set; status.resumeChoice says for which attempt. To repeat it, empty the field first. If empty, the
    newest commit that can be used. Default empty.
    """
    take_over: TakeOver = TakeOver.NEVER
    """Whether the job may use a path that belongs to another job, or to an earlier job of the same name. Resume goes on
    from the newest commit there, which a reshard Job copies; the training begins from nothing only if there is no
    commit, and the job fails if the commits cannot be read. Begin begins from nothing. In both cases the job owns path
    from then on, writes beside the other job's commits, and never changes or removes them. The other job stops at its
    next save, and cannot take the path back. With Never, such a job fails with the condition CheckpointOwned False and
    changes nothing. Cannot be set back to Never. Default Never.
    """
    format: Literal["DeepSpeed", "DCP"] = "DeepSpeed"
    """Format of the checkpoints that the training saves. A DeepSpeed checkpoint is converted by a reshard Job before it
    is loaded in another topology. A DCP checkpoint (torch.distributed.checkpoint) can be loaded in any topology, so the
    next attempt starts from it at once; see spec.reshard.mode. Cannot be changed. Default DeepSpeed.
    """
    interval_seconds: Annotated[int, Strict(), Field(ge=1, le=1_000_000), WHOLE, INT32] = 900
    """Time between commits in seconds. status.goodput.suggestedIntervalSeconds suggests a value. Default 900."""
    pinned: Annotated[tuple[CommitName, ...], Field(max_length=MAX_RELEASED), UNIQUE, SET] = ()
    """Names of commits (a<N>/step-..., the end of their uri in status.checkpoint.history) that stay on the volume while
    they are listed here, for instance while an evaluation reads them. Pin a commit while it is in the history.
    """
    allowed_globals: Annotated[tuple[GlobalName, ...], Field(max_length=MAX_ALLOWED_GLOBALS), UNIQUE, SET] = ()
    """Full names of classes and functions that pickles of the checkpoints may name besides those that frameworks write:
    reshard --allow-global. Who loads a checkpoint runs what it names. After an edit, a conversion that has failed
    begins anew; nothing else restarts.
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardSpec:
    """`spec.reshard`."""

    mode: Literal["Auto", "Load", "Materialize", "Virtual"] = AUTO
    """Load, for DCP only, starts from the commit as it is: no reshard Job runs, and the training loads the other
    topology by itself. Materialize writes the target's files. Virtual, not for DCP, writes only a manifest with the
    places of their bytes;
    elastic_trainer reads them from the source into memory (ETJ_SCRATCH) when it resumes, and if that fails, the next
    conversion writes files. Auto is Virtual if an attempt of this spec has restored through elastic_trainer, the files
    of a node's ranks fit twice into the free memory, and at least 5 seconds are saved. Otherwise, and with a template
    or parallelism above 1, Auto is Materialize. status.reshard.modeReason has the reason. For DCP, Auto is Load,
    unless a conversion before the load is estimated to be faster; status.plan.reason has the estimate. Default Auto.
    """
    timeout_seconds: Annotated[int, Strict(), Field(ge=1, le=604_800), WHOLE, INT32] = 3600
    """Longest time for one conversion in seconds. Default 3600."""
    parallelism: Annotated[int, Strict(), Field(ge=1, le=64), WHOLE, INT32] = 1
    """Number of pods that share one conversion. The conversion ends when the first of them ends successfully, so a lost
    or slow pod does not delay it. Default 1.
    """
    backoff_limit: Annotated[int, Strict(), Field(ge=0, le=100), WHOLE, INT32] = 3
    """Number of retries of a conversion that failed for a reason that may pass. Tries that the infrastructure ended do
    not count. Default 3.
    """
    on_failure: Literal["RetainTopology", "Fail"] = "RetainTopology"
    """RetainTopology waits until the old topology can run again, and converts again from time to time. Fail ends the
    job. Default RetainTopology.
    """
    resources: Resources | None = None
    """Resources of the container that converts, not with a template. Default: requests of 1 CPU and 512Mi of memory,
    limits of 8 CPUs and 1Gi, which is enough for a checkpoint of any size. After a try that ran out of memory, the
    operator doubles the memory of the next.
    """
    template: Annotated[Mapping[str, Any], CheckedAs(ReshardPodTemplate), OPEN] | None = None
    """PodTemplateSpec of the reshard pod, which needs no accelerators. If absent, the operator derives it from the
    training container.
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartBudget:
    """`spec.recovery.restartBudget`."""

    limit: Annotated[int, Strict(), Field(ge=0, le=100_000), WHOLE, INT32] = 10
    """Largest number of recoveries from crashes and hangs of the program within the window; one more, and the job
    fails. Default 10.
    """
    window_seconds: Annotated[int, Strict(), Field(ge=1, le=31_536_000), WHOLE, INT32] = 3600
    """Length of the window in seconds. Default 3600."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySpec:
    """`spec.recovery`."""

    suspect_seconds: Annotated[int, Strict(), Field(ge=1, le=86_400), WHOLE, INT32] = 20
    """Time in seconds for which one weak failure signal (a node that is not Ready, a stale Lease, a silent rank 0) must
    last before it counts. Two independent signals count at once. Default 20.
    """
    batch_window_seconds: Annotated[int, Strict(), Field(ge=0, le=86_400), WHOLE, INT32] = 15
    """Time in seconds, before the launch that answers a node failure, in which further failures belong to the same
    recovery. Default 15.
    """
    force_delete_seconds: Annotated[int, Strict(), Field(ge=0, le=86_400), WHOLE, INT32] = 60
    """Time in seconds after which a pod of a stopped attempt that has not ended no longer delays the job. On a lost
    node, the operator deletes it by force. On a Ready node, it avoids the node until the pod is gone. Default 60.
    """
    drain_seconds: Annotated[int, Strict(), Field(ge=1, le=86_400), WHOLE, INT32] = 300
    """Longest time in seconds that a planned change waits until the training has committed and exited. Default 300."""
    scale_up_stable_seconds: Annotated[int, Strict(), Field(ge=0, le=604_800), WHOLE, INT32] = 600
    """Time in seconds for which more capacity must have been there before the job grows. Default 600."""
    exclude_node_seconds: Annotated[int, Strict(), Field(ge=0, le=31_536_000), WHOLE, INT32] = 14400
    """Time in seconds for which the operator avoids a node that was lost twice, or on which the job failed twice within
    an hour. Default 14400.
    """
    hang_seconds: Annotated[int, Strict(), Field(ge=1, le=604_800), WHOLE, INT32] = 1800
    """Time in seconds without a finished step after which a running training counts as hung. Default 1800."""
    pod_disruption_budget: Flag = True
    """If true, each attempt has a PodDisruptionBudget, so that an eviction (kubectl drain) waits until the training has
    committed. If false, an evicted pod has its terminationGracePeriodSeconds for that. Set it to false if the pods
    have a PodDisruptionBudget of yours, because Kubernetes evicts no pod that has two. A change counts from the next
    attempt on. Default true.
    """
    restart_budget: RestartBudget = RestartBudget()
    """Number of recoveries from failures of the program itself (classes Crash and Hang) that the job may need within a
    window before it fails. Failures of the infrastructure are not charged to it.
    """
    budgets: Annotated[tuple[ClassBudget, ...], Field(min_length=1, max_length=8), BY_CLASS, ABSENT] = ()
    """Budgets of single classes of failures. Without an entry, Crash and Hang have restartBudget together, Image has a
    budget of the same size, and the others have no limit. An entry for Crash or Hang counts besides restartBudget.
    """
    pod_failure_policy: PodFailurePolicy | None = None
    """Meaning of exit codes of the training container, as in the podFailurePolicy of a Job. Without it, every exit code
    counts as a crash.
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """`spec`, the whole."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(alias_generator=to_camel_case)

    suspend: Flag = False
    """If true, the training commits and stops, and the job holds no GPUs until it is false again. Default false."""
    managed_by: ManagerName | None = None
    """Controller that manages the job, as in a Job. If it is not elastictraining.dev/elastic-training-operator, the
    operator leaves the job alone and never writes its status; queueing systems over several clusters need that. Cannot
    be changed. If absent, the operator manages the job.
    """
    active_deadline_seconds: Annotated[int, Strict(), Field(ge=1, le=2**31 - 1), WHOLE, INT32] | None = None
    """Time in seconds, from the launch of the first attempt, after which the training commits and stops, and the job is
    Failed with reason DeadlineExceeded. Recoveries count, time spent suspended or without quota does not. If absent,
    there is no limit.
    """
    ttl_seconds_after_finished: Annotated[int, Strict(), Field(ge=0, le=2**31 - 1), WHOLE, INT32] | None = None
    """Time in seconds after which a job that is Complete or Failed is deleted with its Jobs and pods, never with its
    checkpoints. If absent, it stays.
    """
    failed_attempts_history_limit: Annotated[int, Strict(), Field(ge=0, le=10), WHOLE, INT32] = 3
    """Number of failed attempts whose failed pods stay for their logs (kubectl etj logs --attempt). Such pods hold no
    accelerators. Pods that the operator had to stop leave no log. Default 3.
    """
    accelerator: Accelerator
    """Kind of accelerators, and their number in one pod."""
    nodes: Nodes
    """Range of numbers of nodes on which the job can run."""
    parallelism: Parallelism = Parallelism()
    """Degrees of parallelism that the training script can run with. The degree of data parallelism follows from the
    number of GPUs.
    """
    batch: Batch
    """Batch sizes. The global batch is the same at every number of GPUs; gradient accumulation makes up the difference.
    An edit is a planned change.
    """
    model: Model | None = None
    """Facts about the model, from which the planner derives which topologies are possible, fit into memory and are
    fast. Without it, only the batch decides. Facts that determine the sizes of tensors cannot change; an edit of any
    other fact is a planned change.
    """
    checkpoint: CheckpointSpec
    """Place of the checkpoints, and the time between commits."""
    reshard: ReshardSpec = ReshardSpec()
    """Conversion of a checkpoint to another topology."""
    recovery: RecoverySpec = RecoverySpec()
    """Detection of failures, and the answer to them."""
    gang: Annotated[Gang | None, ABSENT] = None
    """Scheduler whose PodGroups let all pods of an attempt start together or none: Kubernetes (scheduling.k8s.io,
    behind feature gates), Coscheduling (scheduling.x-k8s.io; set schedulerName of the template) or Volcano
    (scheduling.volcano.sh). Without it, pods are scheduled one by one.
    """
    template: Annotated[Mapping[str, Any], CheckedAs(TrainingPodTemplate), OPEN]
    """PodTemplateSpec of the training pods. The first container trains; the operator adds environment, accelerators,
    and the checkpoint claim at /checkpoint.
    """

    @property
    def may_be_virtual(self) -> bool:
        """True if a conversion may be virtual, so that training pods need a volume in memory."""
        mode = self.reshard.mode
        if mode != AUTO or self.checkpoint.format == DCP:
            return mode == VIRTUAL
        return self.reshard.parallelism == 1 and self.reshard.template is None
