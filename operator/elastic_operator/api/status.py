"""The resource's status as frozen data: with the accepted specs (`reconcile.effective_spec`), the operator's memory.

The operator writes its decisions to the status *before* it acts on them. If the operator dies at any moment, the next
one reads the status and goes on. `serialization` converts the classes to the CRD's JSON, `status_reader` reads it.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from elastic_operator.api.schema_types import OPEN, Keywords, SelectedAs, to_camel_case
from elastic_operator.api.status_parts import (
    MAX_COMMITS,
    MAX_WITHHELD,
    Checkpoint,
    Commit,
    Condition,
    Conversion,
    Current,
    Drain,
    ExcludedNode,
    FailureCount,
    Growth,
    Loader,
    Pin,
    PlacementLimit,
    Plan,
    Progress,
    Recovery,
    Rejected,
    ReshardStatus,
    RestartBudget,
    Resume,
)
from elastic_operator.api.status_types import (
    MAX_ITEMS,
    Count,
    Count32,
    LongText,
    Moment,
    NumbersByName,
    OptionalDegrees,
    Real,
    ShortText,
    Text,
    Word,
)
from reshard.topology import Topology

__all__ = [
    "MAX_COMMITS", "MAX_LOSSES", "MAX_RECOVERIES", "MAX_WITHHELD", "TERMINAL", "Checkpoint", "Commit", "Condition",
    "Conversion", "Current", "Drain", "ExcludedNode", "FailureCount", "Growth", "Loader", "LossPoint", "Phase", "Pin",
    "PlacementLimit", "Plan", "Progress", "Recovery", "Rejected", "ReshardStatus", "RestartBudget", "Resume",
    "ResumeChoice", "StartMode", "StartedFrom", "Status", "add_change", "edit_last_change", "short", "with_newest",
]  # fmt: skip

MAX_LOSSES = 64
MAX_RECOVERIES = 10
_NO_CHECKPOINT, _NO_BUDGET = Checkpoint(), RestartBudget()


class Phase(enum.StrEnum):
    """Summary of a job's state for people; programs read the conditions."""

    PENDING = "Pending"
    WAITING = "Waiting"
    STARTING = "Starting"
    RUNNING = "Running"
    DRAINING = "Draining"
    STOPPING = "Stopping"
    RESHARDING = "Resharding"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class StartMode(enum.StrEnum):
    """How an attempt starts from its commit."""

    AS_IS = "AsIs"
    """The commit has the topology of the attempt."""
    LOAD = "Load"
    """The attempt loads a commit of another topology by itself."""
    RESHARD = "Reshard"
    """A reshard Job converts the commit first."""


TERMINAL = (Phase.COMPLETE, Phase.FAILED)

_DEGREES = {
    "tp": "Tensor parallelism.", "pp": "Pipeline stages.", "dp": "Data parallelism.", "ep": "Expert parallelism.",
    "cp": "Context parallelism.", "zero": "ZeRO stage.",
}  # fmt: skip
CurrentTopology = Annotated[
    OptionalDegrees,
    Keywords(properties={
        name: {"description": text, "type": "integer", "format": "int32"} for name, text in _DEGREES.items()
    }),
]  # fmt: skip
ConditionList = Keywords(**{"maxItems": 32, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """`status.goodput`, which `reconcile.goodput` computes and keeps as a mapping."""

    ettr: Real | None = None
    """Effective training time ratio: productive time over wall time."""
    lost_steps: Count = 0
    """Steps that had to be repeated."""
    window_seconds: Real = 0.0
    """Length in seconds of the time that is accounted for, without suspensions."""
    lost_seconds: Real = 0.0
    """Time in seconds that the repeated steps took."""
    failures: Count = 0
    """Unplanned recoveries."""
    mtbf_seconds: Real | None = None
    """Mean time between failures in seconds."""
    mttr_seconds: Real | None = None
    """Mean time to recover in seconds."""
    parts_seconds: NumbersByName = dataclasses.field(default_factory=dict)
    """Mean time to recover by part, in seconds. The parts add up to mttrSeconds."""
    suggested_interval_seconds: Real | None = None
    """Suggested checkpoint interval (Young/Daly) in seconds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """A training loss that rank 0 reported."""

    attempt: Count32
    """Attempt that made the step."""
    step: Count
    """Optimizer steps done."""
    samples: Count = 0
    """Global samples consumed."""
    loss: Real = 0.0
    """Loss of that step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartedFrom:
    """The foreign checkpoint from which the job started (`spec.checkpoint.startFrom`)."""

    source: Text
    """Folder of that checkpoint as the pods see it."""
    step: Count = 0
    """Optimizer steps done in it."""
    samples: Count = 0
    """Global samples consumed; 0 if the checkpoint does not record them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumeChoice:
    """The value of `spec.checkpoint.resumeFrom`, which acts once, and not on commits that were made after it."""

    value: Word
    """The value."""
    after_attempt: Count32 = 0
    """Attempt of the newest commit of the training when the operator first saw the value."""
    after_step: Count = 0
    """Step of that commit."""
    attempt: Count32 = 0
    """Attempt that was planned by it; 0 before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The `status` of an ElasticTrainingJob."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(alias_generator=to_camel_case)

    observed_generation: Count = 0
    """Generation of the spec that this status refers to."""
    phase: Word = Phase.PENDING
    """Summary for people: Pending, Waiting, Resharding, Starting, Running, Draining, Stopping, Suspended, Complete or
    Failed. Programs read the conditions.
    """
    reason: Annotated[ShortText, Keywords(maxLength=1024)] = ""
    """One word for the reason of the phase."""
    message: LongText = ""
    """Reason of the phase, in one sentence."""
    attempt: Count32 = 0
    """Number of the newest attempt, which never decreases; names of its objects end in a<attempt>."""
    replicas: Count32 = 0
    """Nodes of the current attempt."""
    selector: Word = ""
    """Label selector of the training pods."""
    nodes_text: Word = ""
    """Number of nodes with a running training pod, a slash, and the desired number (spec.nodes.preferred, else max)."""
    gpus: Count32 = 0
    """Accelerators of the current attempt."""
    ettr_text: Word = ""
    """status.goodput.ettr in percent, for instance 97.3%."""
    topology_text: Word = ""
    """Topology in one line, for instance tp=2,pp=1,dp=4,zero=1."""
    topology: CurrentTopology = None
    """Degrees of parallelism of the current attempt."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=MAX_ITEMS), ConditionList] = ()
    """State of the job for programs."""
    progress: Annotated[Progress, OPEN] | None = None
    """Last report of rank 0."""
    losses: Annotated[
        tuple[Annotated[LossPoint, OPEN], ...], Field(max_length=MAX_ITEMS), Keywords(maxItems=MAX_LOSSES)
    ] = ()
    """Training losses since the job began, oldest first. Above 64, the operator drops every second one."""
    plan: Annotated[Plan, OPEN] | None = None
    """Last result of the planner."""
    checkpoint: Annotated[Checkpoint, OPEN] = _NO_CHECKPOINT
    """The newest commit that can be used, and those that are still needed."""
    started_from: Annotated[StartedFrom, OPEN] | None = None
    """Foreign checkpoint from which the job started (spec.checkpoint.startFrom); absent if there is none."""
    resume_choice: Annotated[ResumeChoice, OPEN] | None = None
    """What became of spec.checkpoint.resumeFrom; absent while the field is empty."""
    first_step_time: Moment | None = None
    """Time of the first step of the first attempt."""
    reshard: Annotated[ReshardStatus, OPEN] | None = None
    """Reshard Job of the current attempt, or of the last one that needed one."""
    loader: Annotated[Loader, OPEN] | None = None
    """What the training can load besides files of its topology, as it last reported. Mode Auto depends on it."""
    recoveries: Annotated[
        tuple[Annotated[Recovery, OPEN], ...], Field(max_length=MAX_ITEMS), Keywords(maxItems=16)
    ] = ()
    """Changes from an attempt to the next after failures, and planned ones; newest last. The last ten changes are kept:
    these, and those in pauses."""
    pauses: Annotated[tuple[Annotated[Recovery, OPEN], ...], Field(max_length=MAX_ITEMS), Keywords(maxItems=16)] = ()
    """Changes in between which nothing may run: the job is suspended, or a queueing system has taken its quota."""
    drain_request: Word = ""
    """Last drain request of a user (kubectl etj drain) that was answered."""
    retry_request: Word = ""
    """Last retry request of a user (kubectl etj retry) that was answered."""
    queue_time: Moment | None = None
    """Time since which the job has wanted to run and has had no attempt."""
    excluded_nodes: Annotated[tuple[Annotated[ExcludedNode, OPEN], ...], Field(max_length=MAX_ITEMS)] = ()
    """Nodes on which no attempt is placed for now."""
    restart_budget: Annotated[RestartBudget, OPEN] = _NO_BUDGET
    """Recoveries from crashes and hangs of the program within the window."""
    failure_counts: Annotated[
        tuple[Annotated[FailureCount, OPEN], ...], Field(max_length=MAX_ITEMS), Keywords(maxItems=16)
    ] = ()
    """Unplanned recoveries by class of failure."""
    goodput: Annotated[Mapping[str, Any], SelectedAs(Goodput), OPEN] = dataclasses.field(default_factory=dict)
    """Share of the time in which the training made progress."""
    current: Annotated[Current, OPEN] | None = None
    """The newest attempt; absent while no attempt may run."""
    drain: Annotated[Drain, OPEN] | None = None
    """The planned change in progress."""
    growth: Annotated[Growth, OPEN] | None = None
    """A better topology that fits the cluster, but not for long enough yet."""
    placement_limit: Annotated[PlacementLimit, OPEN] | None = None
    """Number of nodes that plans may count on, because the scheduler did not place all pods of an attempt."""
    pinned: OptionalDegrees = None
    """The only allowed topology, because conversions to other topologies have failed."""
    pin: Annotated[Pin, OPEN] | None = None
    """Circumstances of pinned. It stays until a conversion succeeds, so that the pauses between them grow."""
    start_time: Moment | None = None
    """Time at which the operator first saw the job."""
    finish_time: Moment | None = None
    """Time at which the job became Complete or Failed."""
    active_since: Moment | None = None
    """Time since which the job has been active (spec.activeDeadlineSeconds); absent while it rests or is over.
    """
    active_seconds: Annotated[Real, Field(ge=0)] = 0.0
    """Time in seconds for which the job was active before that."""
    job_uids: Annotated[tuple[Word, ...], Field(max_length=MAX_ITEMS)] = ()
    """UIDs of its training and reshard Jobs whose pods may still exist."""

    @property
    def changes(self) -> tuple[Recovery, ...]:
        """Recoveries and pauses in the order in which they began."""
        return tuple(heapq.merge(self.recoveries, self.pauses, key=_begin)) if self.pauses else self.recoveries

    @property
    def launched(self) -> bool:
        """True if the Job of the current attempt may exist."""
        return self.current is not None and self.current.launch_time is not None

    @property
    def terminal(self) -> bool:
        """True if the job is Complete or Failed, so that no attempt is started."""
        return self.phase in TERMINAL


def short(topology: Topology | None) -> str:
    """Format a topology as `tp=2,pp=1,dp=2,zero=1`; return an empty string for no topology."""
    return "" if topology is None else str(topology)


def with_newest(checkpoint: Checkpoint) -> Checkpoint:
    """Set the fields of the newest commit in `checkpoint` from its history."""
    best = next((item for item in checkpoint.history if not item.invalid), None)
    if best is None:
        return Checkpoint(history=checkpoint.history, released=checkpoint.released, withheld=checkpoint.withheld)
    return Checkpoint(
        uri=best.uri,
        step=best.step,
        samples=best.samples,
        attempt=best.attempt,
        topology=best.topology,
        verified=best.verified,
        history=checkpoint.history,
        released=checkpoint.released,
        withheld=checkpoint.withheld,
    )


def add_change(status: Status, change: Recovery, *, is_pause: bool) -> Status:
    """Add a recovery or a pause, and drop the oldest change if there are more than MAX_RECOVERIES."""
    recoveries = status.recoveries if is_pause else (*status.recoveries, change)
    pauses = (*status.pauses, change) if is_pause else status.pauses
    if len(recoveries) + len(pauses) > MAX_RECOVERIES:
        if recoveries and (not pauses or _begin(recoveries[0]) <= _begin(pauses[0])):
            recoveries = recoveries[1:]
        else:
            pauses = pauses[1:]
    return dataclasses.replace(status, recoveries=recoveries, pauses=pauses)


def edit_last_change(status: Status, **fields: Any) -> Status:
    """Replace fields of the newest change in `status`."""
    last = status.changes[-1]
    edited = dataclasses.replace(last, **fields)
    if status.recoveries and status.recoveries[-1] is last:
        return dataclasses.replace(status, recoveries=(*status.recoveries[:-1], edited))
    return dataclasses.replace(status, pauses=(*status.pauses[:-1], edited))


def _begin(change: Recovery) -> tuple[int, float]:
    # Attempts are compared first: the stored time is rounded.
    return change.from_attempt, change.detect_time or 0.0
