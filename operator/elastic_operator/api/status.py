"""The resource's status as frozen data. It is all that the operator remembers.

Everything that a decision needs beyond what can be observed is written here *before* it is acted upon, so that an
operator that dies at any moment is continued by the next one. `to_wire` and `from_wire` translate to the CRD's JSON.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from elastic_operator.api.serialization import Time
from reshard.contract import CommitRef
from reshard.topology import Topology

MAX_RECOVERIES = 10
MAX_COMMITS = 16
"""Entries of the history at most, as in the schema of the resource."""


class Phase(enum.StrEnum):
    """Where a job is. For people; programs read the conditions."""

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


TERMINAL = (Phase.COMPLETE, Phase.FAILED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """metav1.Condition."""

    type: str
    status: str
    reason: str
    message: str
    last_transition_time: Time
    observed_generation: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A committed checkpoint that the operator has heard of.

    Attributes:
        attempt: attempt whose folder it lies in.
        writer: `trainer` or `reshard`.
        verified: the resharder compared it with its source.
        invalid: a reader refused it; never used again.
    """

    uri: str
    step: int
    samples: int
    attempt: int
    topology: Mapping[str, int]
    num_bytes: int = 0
    writer: str = "trainer"
    verified: bool = False
    invalid: bool = False
    invalid_reason: str = ""

    @classmethod
    def from_ref(cls, ref: CommitRef) -> Commit:
        """What rank 0 published."""
        return cls(
            uri=ref.uri,
            step=ref.step,
            samples=ref.samples,
            attempt=ref.attempt,
            topology=dict(ref.topology),
            num_bytes=ref.num_bytes,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The newest valid commit, and those that may still be needed.

    Attributes:
        history: commits that exist, newest first.
        released: names (`a<N>/step-...`) of commits that nothing refers to; the training removes them from storage.
    """

    uri: str = ""
    step: int = 0
    samples: int = 0
    attempt: int = 0
    topology: Mapping[str, int] = dataclasses.field(default_factory=dict)
    verified: bool = False
    history: tuple[Commit, ...] = ()
    released: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What the current attempt continues from; chosen once, when the attempt is planned.

    Attributes:
        uri: folder that ETJ_RESUME will name; empty for a start from nothing.
        source: commit that is read; differs from `uri` where a reshard Job converts it.
        ready: `uri` is committed.
        external: `source` is `spec.checkpoint.startFrom`; its step is known once it is converted.
        reason: why this one, or why none.
    """

    uri: str = ""
    source: str = ""
    step: int = 0
    samples: int = 0
    ready: bool = True
    external: bool = False
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """The attempt that `status.attempt` names. Its topology never changes; a new plan is a new attempt.

    Attributes:
        num_nodes: training pods.
        gpus_per_node: accelerators of each.
        avoid: nodes that its pods must not be placed on.
        spec_hash: of the parts of the spec that it was planned from.
        launch_time: when its Job was allowed to be created; None before.
        job_uid: of its Job, once seen; a Job that is gone after that was deleted by someone.
        schedule_time: when all pods ran.
        first_step_time: when it finished its first step.
    """

    topology: Mapping[str, int]
    num_nodes: int
    gpus_per_node: int
    resume: Resume = Resume()
    avoid: tuple[str, ...] = ()
    spec_hash: str = ""
    plan_time: Time | None = None
    launch_time: Time | None = None
    job_uid: str = ""
    schedule_time: Time | None = None
    first_step_time: Time | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A planned change: the attempt is asked to commit and to exit."""

    cause: str
    message: str
    start_time: Time
    nodes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A better topology that the cluster has had room for since `since`."""

    topology: str
    num_nodes: int
    since: Time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardStatus:
    """The reshard Job of the current attempt, or of the last one that needed any."""

    job_name: str = ""
    attempt: int = 0
    mode: str = ""
    mode_reason: str = ""
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    verified: bool = False
    digest: str = ""
    failures: int = 0
    retry_time: Time | None = None
    failed_uid: str = ""
    message: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """What an attempt has said that it can load besides files (`reshard.contract.VirtualLoader`).

    Attributes:
        spec_hash: of the spec that the attempt was made from; another one may have another image.
    """

    manifests: tuple[int, ...] = ()
    memory_bytes: int = 0
    spec_hash: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What the reshard Job of a recovery did.

    Attributes:
        seconds: of the conversion itself, without the start of its pods.
    """

    mode: str = ""
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    verified: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One change of the running attempt, with the time of every step of it.

    Attributes:
        planned: nothing was lost; the attempt was drained first.
        signal_time: when the first sign of it was dated.
        detect_time: when it was confirmed, or the drain was asked for.
        stop_time: when no pod of the old attempt could run any more.
        plan_time: when the attempt that followed was planned.
        lost_steps: steps that have to be done again.
        conversion: what the reshard Job did; None where none was needed, or it is not done yet.
        seconds: what it waited for, by part (`ledger.parts`), and their `total`.
    """

    cause: str
    message: str = ""
    lost: tuple[str, ...] = ()
    planned: bool = False
    from_: str = ""
    to: str = ""
    from_attempt: int = 0
    to_attempt: int = 0
    signal_time: Time | None = None
    detect_time: Time | None = None
    stop_time: Time | None = None
    plan_time: Time | None = None
    reshard_start_time: Time | None = None
    reshard_end_time: Time | None = None
    launch_time: Time | None = None
    schedule_time: Time | None = None
    first_step_time: Time | None = None
    last_step: int = 0
    commit_step: int = 0
    lost_steps: int = 0
    conversion: Conversion | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedNode:
    """A node that no attempt is placed on for now.

    Attributes:
        until: when the entry ends; None while the node is not Ready.
        hurts: recoveries that it has caused.
    """

    name: str
    reason: str
    since: Time
    until: Time | None = None
    hurts: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartBudget:
    """Unplanned recoveries inside the window."""

    limit: int = 0
    used: int = 0
    window_seconds: int = 0
    times: tuple[Time, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A topology that was considered and refused."""

    topology: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the planner said last."""

    target: Mapping[str, int] = dataclasses.field(default_factory=dict)
    nodes: int = 0
    per_node: int = 0
    reason: str = ""
    rejected: tuple[Rejected, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartedFrom:
    """The checkpoint of others that the job went on from (`spec.checkpoint.startFrom`).

    Attributes:
        source: its folder as the pods see it: the very checkpoint, where startFrom is a folder of several.
        step: optimizer steps done in it.
        samples: global samples consumed, as far as it says so.
    """

    source: str
    step: int = 0
    samples: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What rank 0 said last; not written at the rate of heartbeats.

    Attributes:
        step: optimizer steps done; from the plan of an attempt until it says more, those of what it resumes from.
        time: when anything of this was seen to change.
        step_time: when a new step was seen; a restart alone does not change it.
    """

    phase: str = ""
    step: int = 0
    samples: int = 0
    loss: float | None = None
    time: Time | None = None
    step_time: Time | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """`status` of an ElasticTrainingJob.

    Attributes:
        attempt: number of the newest attempt; never goes back.
        current: that attempt, or None while nothing may run.
        nodes_text: nodes whose training pod runs, and after a slash those wanted.
        ettr_text: effective training time ratio in percent; empty before the first step.
        drain: a planned change is on its way.
        growth: a better topology has room, but not long enough yet.
        loader: what the training last said that it can load.
        drain_request: the last request for a drain by hand that was answered (`asked`).
        retry_request: the last request to try a failed job again that was answered.
        first_step_time: when the first of all attempts made its first step.
        pinned: the only topology allowed, because resharding out of it failed for good.
        started_from: the checkpoint of others that the job went on from; None where there is none, or not yet.
        queue_time: since when the job has wanted an attempt and had none, not even a planned one; None otherwise.
        finish_time: when it became Complete or Failed.
        job_uids: of its Jobs, training and reshard, as far as their pods may still be there (`ownership`).
    """

    phase: str = Phase.PENDING
    reason: str = ""
    message: str = ""
    attempt: int = 0
    observed_generation: int = 0
    topology: Mapping[str, int] = dataclasses.field(default_factory=dict)
    topology_text: str = ""
    replicas: int = 0
    nodes_text: str = ""
    ettr_text: str = ""
    gpus: int = 0
    selector: str = ""
    conditions: tuple[Condition, ...] = ()
    current: Current | None = None
    drain: Drain | None = None
    growth: Growth | None = None
    drain_request: str = ""
    retry_request: str = ""
    pinned: Mapping[str, int] = dataclasses.field(default_factory=dict)
    plan: Plan | None = None
    progress: Progress | None = None
    checkpoint: Checkpoint = Checkpoint()
    started_from: StartedFrom | None = None
    reshard: ReshardStatus | None = None
    loader: Loader | None = None
    recoveries: tuple[Recovery, ...] = ()
    excluded_nodes: tuple[ExcludedNode, ...] = ()
    restart_budget: RestartBudget = RestartBudget()
    goodput: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    start_time: Time | None = None
    queue_time: Time | None = None
    first_step_time: Time | None = None
    finish_time: Time | None = None
    job_uids: tuple[str, ...] = ()

    @property
    def launched(self) -> bool:
        """The Job of the current attempt may exist."""
        return self.current is not None and self.current.launch_time is not None

    @property
    def terminal(self) -> bool:
        """Nothing will be started again."""
        return self.phase in TERMINAL


def short(topology: Mapping[str, int]) -> str:
    """`tp=2,pp=1,dp=2,zero=1`, or `` for none."""
    return str(Topology.from_dict(topology)) if topology else ""


def with_newest(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with the newest valid commit of its history in front."""
    best = next((item for item in checkpoint.history if not item.invalid), None)
    if best is None:
        return Checkpoint(history=checkpoint.history, released=checkpoint.released)
    return Checkpoint(
        uri=best.uri,
        step=best.step,
        samples=best.samples,
        attempt=best.attempt,
        topology=best.topology,
        verified=best.verified,
        history=checkpoint.history,
        released=checkpoint.released,
    )


def edit_last_recovery(status: Status, **changes: Any) -> Status:
    """`status` with fields of its newest recovery replaced."""
    *older, last = status.recoveries
    return dataclasses.replace(status, recoveries=(*older, dataclasses.replace(last, **changes)))
