"""The resource's status as frozen data. It is the only persistent state of the operator.

The operator writes its decisions to the status *before* it acts on them. If the operator dies at any moment, the next
one reads the status and goes on. `serialization` converts the classes to and from the CRD's JSON.
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
"""Maximum length of the commit history, as in the schema of the resource."""


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
    """A committed checkpoint that was reported to the operator.

    Attributes:
        attempt: attempt whose folder contains it.
        writer: `trainer` or `reshard`.
        verified: the resharder compared it with its source.
        invalid: a reader rejected it; the operator does not use it again.
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
        """Create a commit from the reference that rank 0 published."""
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
    """The newest valid commit, and the commits that may still be needed.

    Attributes:
        history: commits on storage, newest first.
        released: names (`a<N>/step-...`) of commits that nothing refers to; the trainer deletes them.
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
    """The checkpoint from which the current attempt resumes; chosen once, when the attempt is planned.

    Attributes:
        uri: folder for ETJ_RESUME; empty for a start from step 0.
        source: commit that is read; differs from `uri` if a reshard Job converts it.
        ready: `uri` is committed.
        external: `source` is `spec.checkpoint.startFrom`; its step is known after the conversion.
        reason: why this commit was chosen, or why there is none.
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
    """The attempt with the number `status.attempt`. Its topology never changes; a new plan is a new attempt.

    Attributes:
        num_nodes: number of training pods.
        gpus_per_node: accelerators per pod.
        avoid: nodes on which its pods must not be placed.
        spec_hash: hash of the parts of the spec from which it was planned.
        launch_time: when the operator decided to create its Job; None before.
        job_uid: UID of its Job, once observed; if the Job is missing later, somebody deleted it.
        schedule_time: when all pods were running.
        first_step_time: when it completed its first step.
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
    """A planned change: the operator asked the attempt to commit and exit."""

    cause: str
    message: str
    start_time: Time
    nodes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A better topology that has fitted the cluster since `since`."""

    topology: str
    num_nodes: int
    since: Time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardStatus:
    """The reshard Job of the current attempt, or of the last attempt that needed one."""

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
    """The virtual checkpoints that an attempt can load, as it reported (`reshard.contract.VirtualLoader`).

    Attributes:
        spec_hash: hash of the attempt's spec; a different spec may use an image with a different trainer.
    """

    manifests: tuple[int, ...] = ()
    memory_bytes: int = 0
    spec_hash: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Result of the reshard Job of a recovery.

    Attributes:
        seconds: duration of the conversion without the start of its pods.
    """

    mode: str = ""
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    verified: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One change from an attempt to the next, with the time of every part.

    Attributes:
        planned: the attempt was drained first, so no step was lost.
        signal_time: time of the first failure signal.
        detect_time: when the failure was confirmed, or the drain was requested.
        stop_time: when no pod of the old attempt could run any more.
        plan_time: when the next attempt was planned.
        lost_steps: steps that the next attempt repeats.
        conversion: result of the reshard Job; None if none was needed, or if it has not finished.
        seconds: duration by part (`goodput.parts`), and their `total`.
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
    """A node on which no attempt is placed for now.

    Attributes:
        until: when the exclusion ends; None while the node is not Ready.
        hurts: number of recoveries that the node caused.
    """

    name: str
    reason: str
    since: Time
    until: Time | None = None
    hurts: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartBudget:
    """The unplanned recoveries inside the time window."""

    limit: int = 0
    used: int = 0
    window_seconds: int = 0
    times: tuple[Time, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A topology that the planner rejected, with the reason."""

    topology: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The last result of the planner."""

    target: Mapping[str, int] = dataclasses.field(default_factory=dict)
    nodes: int = 0
    per_node: int = 0
    reason: str = ""
    rejected: tuple[Rejected, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartedFrom:
    """The foreign checkpoint from which the job started (`spec.checkpoint.startFrom`).

    Attributes:
        source: its folder in the pods; if startFrom is a folder with several checkpoints, the one that was used.
        step: optimizer steps done in it.
        samples: global samples consumed; 0 if the checkpoint does not record them.
    """

    source: str
    step: int = 0
    samples: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The last progress report of rank 0; written less often than heartbeats arrive.

    Attributes:
        step: optimizer steps done; until an attempt reports its first step, the step from which it resumes.
        time: when the operator last observed a change of any of these fields.
        step_time: when the operator last observed a new step; a restart alone does not change it.
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
        attempt: number of the newest attempt; never decreases.
        current: the newest attempt, or None while no attempt may run.
        nodes_text: number of nodes with a running training pod, a slash, and the desired number.
        ettr_text: effective training time ratio in percent; empty before the first step.
        drain: the planned change in progress.
        growth: a better topology fits the cluster, but not for long enough yet.
        loader: the virtual checkpoints that the trainer can load, as it last reported.
        drain_request: the last drain request of a user that was answered (`user_requests`).
        retry_request: the last retry request of a user that was answered.
        first_step_time: when the job's first attempt completed its first step.
        pinned: the only allowed topology, because resharding to other topologies failed permanently.
        started_from: the foreign checkpoint from which the job started; None if there is none, or before the start.
        queue_time: since when the job has had no attempt, not even a planned one; None if it has one or needs none.
        finish_time: when the job became Complete or Failed.
        job_uids: UIDs of its training and reshard Jobs whose pods may still exist (`ownership`).
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
        """True if the Job of the current attempt may exist."""
        return self.current is not None and self.current.launch_time is not None

    @property
    def terminal(self) -> bool:
        """True if the job is Complete or Failed, so that no attempt is started."""
        return self.phase in TERMINAL


def short(topology: Mapping[str, int]) -> str:
    """Format a topology as `tp=2,pp=1,dp=2,zero=1`; return an empty string for no topology."""
    return str(Topology.from_dict(topology)) if topology else ""


def with_newest(checkpoint: Checkpoint) -> Checkpoint:
    """Set the fields of the newest commit in `checkpoint` from its history."""
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
    """Replace fields of the newest recovery in `status`."""
    *older, last = status.recoveries
    return dataclasses.replace(status, recoveries=(*older, dataclasses.replace(last, **changes)))
