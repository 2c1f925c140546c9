"""The parts of the status: frozen data, one class per section. Module `status` combines them.

crds/elastictrainingjobs.yaml and docs/crd-reference.md are generated from these classes (`make generate`): types and
bounds come from the fields, descriptions from the text below each field. A new field needs a default, so that the
status of an older operator is still read.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import AfterValidator, Field, Strict

from elastic_operator.api.schema_types import OPEN, Flag, Keywords, not_expected
from elastic_operator.api.status_types import (
    MAX_ITEMS,
    Count,
    Count32,
    Degrees,
    LongText,
    Moment,
    NodeNames,
    NumbersByName,
    OptionalDegrees,
    Real,
    ShortText,
    Text,
    Word,
)
from reshard.contract import MAX_RELEASED, CommitRef
from reshard.topology import Topology

_CONDITION_STATUSES = ("True", "False", "Unknown")


def _check_condition_status(text: str) -> str:
    if text not in _CONDITION_STATUSES:
        raise not_expected(f"one of {', '.join(_CONDITION_STATUSES)}")
    return text


MAX_COMMITS = 16
"""Maximum length of the commit history."""

MAX_WITHHELD = 256
"""Largest number of commits that wait for their release. With the longest names they take a third of a status."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A metav1.Condition."""

    type: Annotated[str, Strict(), Field(min_length=1, max_length=316)]
    """Name of the condition."""
    status: Annotated[Word, AfterValidator(_check_condition_status), Keywords(enum=list(_CONDITION_STATUSES))]
    """True, False or Unknown."""
    observed_generation: Count = 0
    """Generation of the spec that the condition refers to."""
    last_transition_time: Moment
    """Time of the last change of status."""
    reason: Annotated[ShortText, Keywords(minLength=1, maxLength=1024)]
    """One word."""
    message: Annotated[LongText, Keywords(maxLength=32_768)]
    """One sentence."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A committed checkpoint that was reported to the operator."""

    uri: Text
    """Folder of the commit as the pods see it."""
    step: Count
    """Optimizer steps done."""
    samples: Count
    """Global samples consumed."""
    attempt: Count32
    """Attempt whose folder contains it."""
    topology: Degrees
    """Topology in which it was written."""
    num_bytes: Count = 0
    """Size of its files in bytes; 0 if it is not known."""
    writer: Word = "trainer"
    """trainer or reshard."""
    format: Word = ""
    """Format of its files, for instance deepspeed or dcp; empty if it is not known."""
    verified: Flag = False
    """A resharder compared it with its source."""
    invalid: Flag = False
    """A reader rejected it; the operator does not use it again."""
    invalid_reason: ShortText = ""
    """Reason for which a reader rejected it."""
    put_aside: Flag = False
    """spec.checkpoint.resumeFrom named a start before it, so it is not used; it is invalid, too."""

    @classmethod
    def from_ref(cls, ref: CommitRef) -> Commit:
        """Create a commit from the reference that rank 0 published."""
        return cls(
            uri=ref.uri,
            step=ref.step,
            samples=ref.samples,
            attempt=ref.attempt,
            topology=Topology.from_dict(ref.topology),
            num_bytes=ref.num_bytes,
            format=ref.format,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The newest valid commit, and the commits that may still be needed."""

    uri: Text = ""
    """Folder of the commit as the pods see it."""
    step: Count = 0
    """Optimizer steps done."""
    samples: Count = 0
    """Global samples consumed."""
    attempt: Count32 = 0
    """Attempt that wrote it."""
    topology: OptionalDegrees = None
    """Topology in which it was written."""
    verified: Flag = False
    """A resharder compared it with its source."""
    history: Annotated[
        tuple[Annotated[Commit, OPEN], ...], Field(max_length=MAX_ITEMS), Keywords(maxItems=MAX_COMMITS)
    ] = ()
    """Commits on storage, newest first. If the newest is damaged, the operator falls back to the next."""
    released: Annotated[
        tuple[Annotated[str, Strict(), Field(max_length=128)], ...],
        Field(max_length=MAX_ITEMS),
        Keywords(maxItems=MAX_RELEASED),
    ] = ()
    """Names of commits (a<N>/step-...) that nothing refers to any more. The training removes them from the volume after
    its next save.
    """
    withheld: Annotated[
        tuple[Annotated[str, Strict(), Field(max_length=128)], ...],
        Field(max_length=MAX_ITEMS),
        Keywords(maxItems=MAX_WITHHELD),
    ] = ()
    """Names of commits that this job no longer needs, oldest first. They are released once no other job that starts
    from this job's folder may read them, and released has room.
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The checkpoint from which the current attempt resumes; chosen once, when the attempt is planned."""

    uri: Text = ""
    """Folder that the attempt loads; empty for a start from step 0."""
    source: Text = ""
    """Commit that is read; differs from uri if a reshard Job converts it."""
    step: Count = 0
    """Optimizer steps done in it."""
    samples: Count = 0
    """Global samples consumed in it."""
    ready: Flag = True
    """uri is committed."""
    external: Flag = False
    """source is spec.checkpoint.startFrom, or path with takeOver: Resume; its step is known after the conversion."""
    mode: Word = ""
    """AsIs: the commit has the topology of the attempt. Load: the attempt loads a commit of another topology itself.
    Reshard: a reshard Job converts the commit first. Empty without a commit."""
    reason: ShortText = ""
    """Reason for this choice, or for a start without a commit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """The attempt with the number `status.attempt`. Its topology never changes; a new plan is a new attempt."""

    topology: Degrees
    """Degrees of parallelism."""
    num_nodes: Count32
    """Number of training pods."""
    gpus_per_node: Count32
    """Accelerators per pod."""
    resume: Annotated[Resume, OPEN] = Resume()
    """The checkpoint from which it resumes."""
    avoid: NodeNames = ()
    """Nodes on which its pods must not be placed, as far as the scheduler would use them; at most 128."""
    spec_hash: Word = ""
    """Hash of the parts of the spec from which it was planned."""
    global_samples: Count = 0
    """spec.batch.globalSamples of that spec; 0 if it is not known."""
    sequence_length: Count = 0
    """spec.model.sequenceLength of that spec; 0 if it is not known."""
    plan_time: Moment | None = None
    """Time at which it was planned."""
    launch_time: Moment | None = None
    """Time at which the operator decided to create its Job; absent before."""
    job_uid: Word = ""
    """UID of its Job, once observed; if the Job is missing later, somebody deleted it."""
    schedule_time: Moment | None = None
    """Time at which all pods were running."""
    first_step_time: Moment | None = None
    """Time at which it completed its first step."""
    awaits_nodes: bool = False
    """True if it was planned for nodes that an autoscaler has to add."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacementLimit:
    """The scheduler placed fewer pods than the operator had counted room for, so plans count on fewer nodes for now."""

    num_nodes: Count32
    """Pods that the scheduler placed."""
    missing: Count32
    """Pods for which the operator had counted room and the scheduler had none."""
    until: Moment
    """End of the limit; the job may grow again then."""
    tries: Count32 = 1
    """Tries in a row that the scheduler did not place in full; each doubles the time until the next."""
    spec_hash: Word = ""
    """Hash of the spec of the pods; an edit ends the limit."""
    message: ShortText = ""
    """Message of the scheduler."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A planned change: the operator asked the attempt to commit and exit."""

    cause: Word
    """One word for the reason of the change."""
    message: ShortText
    """One sentence about the reason of the change."""
    start_time: Moment
    """Time of the request."""
    nodes: NodeNames = ()
    """Nodes that the attempt has to leave."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A better topology that has fitted the cluster for some time, but not for long enough yet."""

    topology: Word
    """The better topology."""
    num_nodes: Count32
    """Nodes that it needs."""
    since: Moment
    """Since when it has fitted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardStatus:
    """The reshard Job of the current attempt, or of the last attempt that needed one."""

    job_name: Word = ""
    """The reshard Job."""
    attempt: Count32 = 0
    """Attempt for which it converts."""
    mode: Word = ""
    """materialize or virtual."""
    mode_reason: ShortText = ""
    """Reason for the mode, if spec.reshard.mode is Auto."""
    bytes_read: Count = 0
    """Bytes read."""
    bytes_written: Count = 0
    """Bytes written."""
    seconds: Real = 0.0
    """Wall time in seconds."""
    peak_rss_bytes: Count = 0
    """Largest resident memory of one of its processes in bytes."""
    verified: Flag = False
    """The result was compared with its source."""
    digest: Word = ""
    """Digest of all tensors, equal for source and result."""
    failures: Count = 0
    """Number of failed tries that reshard.backoffLimit counts."""
    interruptions: Count32 = 0
    """Number of tries that the infrastructure ended. They use no retry."""
    retry_time: Moment | None = None
    """Time of the next try."""
    failed_uid: Word = ""
    """UID of the Job that failed last, or that was replaced."""
    oom_kills: Count32 = 0
    """Number of tries that ran out of memory. Each one doubles the memory of the next."""
    spec_hash: Word = ""
    """Hash of spec.reshard from which the Job was made."""
    message: ShortText = ""
    """One sentence about the last result."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Circumstances of a pinned topology: its cause, and the time of the next conversion."""

    spec_hash: Word = ""
    """Hash of what conversions and attempts were made from; an edit ends the pin."""
    tries: Count32 = 0
    """Conversions of the newest commit that failed or did not start, each with all its retries."""
    retry_time: Moment | None = None
    """Time from which a job without nodes for the pinned topology converts again; absent if that cannot help."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """What an attempt can load besides files of its topology, as it reported (`reshard.contract.VirtualLoader`)."""

    manifests: Annotated[tuple[Count32, ...], Field(max_length=MAX_ITEMS), Keywords(maxItems=64)] = ()
    """Versions of the manifests of virtual commits that its elastic_trainer reads."""
    memory_bytes: Count = 0
    """Memory in bytes that was free for their files on the node of rank 0."""
    formats: Annotated[tuple[Word, ...], Field(max_length=MAX_ITEMS), Keywords(maxItems=64)] = ()
    """Formats of commits that its elastic_trainer accepts in any topology."""
    spec_hash: Word = ""
    """Hash of the spec from which the attempt was planned; after an edit of the spec, the next attempt reports anew."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Result of the reshard Job of a recovery."""

    mode: Word = ""
    """materialize or virtual."""
    bytes_read: Count = 0
    """Bytes read."""
    bytes_written: Count = 0
    """Bytes written."""
    seconds: Real = 0.0
    """Wall time of the conversion in seconds, without the start of its pods."""
    verified: Flag = False
    """The result was compared with its source."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One change from an attempt to the next, with the time of every part."""

    cause: Word
    """One word for the cause."""
    message: ShortText = ""
    """One sentence about the cause."""
    lost: NodeNames = ()
    """Nodes or pods that were lost."""
    blamed: Word = ""
    """Node where the failure began, if one pod or device failed first; empty if that is not known."""
    exit_code: Count32 | None = None
    """Exit code of the training container that failed first; absent if none failed."""
    failed_pods: Count32 = 0
    """Pods that had failed by themselves when blamed and exitCode were decided."""
    charged: Flag = False
    """The recovery is charged to a budget: restartBudget, or one in failureCounts."""
    planned: Flag = False
    """The attempt was drained first, so no step was lost."""
    from_: Word = ""
    """Topology before."""
    to: Word = ""
    """Topology after."""
    from_attempt: Count32 = 0
    """Attempt before."""
    to_attempt: Count32 = 0
    """Attempt after."""
    signal_time: Moment | None = None
    """Time of the first failure signal."""
    detect_time: Moment | None = None
    """Time at which the failure was confirmed, or the drain requested."""
    stop_time: Moment | None = None
    """Time from which no pod of the old attempt could run."""
    plan_time: Moment | None = None
    """Time at which the next attempt was planned."""
    reshard_start_time: Moment | None = None
    """Time at which the reshard Job was created."""
    reshard_end_time: Moment | None = None
    """Time at which the reshard Job had finished."""
    launch_time: Moment | None = None
    """Time at which the next attempt was launched."""
    schedule_time: Moment | None = None
    """Time at which all pods of the next attempt were running."""
    first_step_time: Moment | None = None
    """Time at which the next attempt completed its first step."""
    last_step: Count = 0
    """Last step that the old attempt reported."""
    commit_step: Count = 0
    """Step of the commit from which the next attempt resumes."""
    lost_steps: Count = 0
    """Steps that the next attempt repeats."""
    start_mode: Word = ""
    """How the next attempt starts: AsIs, Load or Reshard, as in current.resume.mode."""
    conversion: Annotated[Conversion, OPEN] | None = None
    """Result of the reshard Job; absent if none was needed, or if it has not finished."""
    seconds: NumbersByName = dataclasses.field(default_factory=dict)
    """Seconds per part of the recovery, and their total."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedNode:
    """A node on which no attempt is placed for now."""

    name: Word
    """Name of the node."""
    reason: ShortText
    """Reason for the exclusion."""
    since: Moment
    """Since when it is excluded."""
    until: Moment | None = None
    """End of the exclusion; absent while the node is not Ready, while the reason lasts for which an attempt left it, or
    while a pod of a stopped attempt does not end there."""
    hurts: Count32 = 1
    """Number of recoveries that the node caused."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartBudget:
    """The recoveries from crashes and hangs of the program inside the time window."""

    limit: Count32 = 0
    """spec.recovery.restartBudget.limit."""
    used: Count32 = 0
    """Recoveries inside the window."""
    window_seconds: Count = 0
    """Length of the window in seconds."""
    times: Annotated[tuple[Moment, ...], Field(max_length=MAX_ITEMS)] = ()
    """Times at which they happened, later by the pauses that followed them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    """The unplanned recoveries of one class of failures, and its backoff."""

    failure_class: Word
    """Node, Device, Preemption, Eviction, Scheduling, Image, Hang or Crash."""
    total: Count32 = 0
    """Recoveries of this class since the job began, or since the last retry by hand."""
    in_a_row: Count32 = 0
    """Those of them without progress in between: a newer commit after Crash and Hang, a step after the others."""
    retry_time: Moment | None = None
    """Time before which no new attempt is planned; absent if the next attempt did not have to wait."""
    commit_step: Count = 0
    """Step of the newest commit at the last of them."""
    spec_hash: Word = ""
    """Hash of the spec at the last of them; an edit of the spec ends the wait."""
    limit: Count32 | None = None
    """Limit of the budget of this class; absent if it has none of its own."""
    used: Count32 = 0
    """Recoveries that are charged to that budget."""
    window_seconds: Count = 0
    """Length of its window in seconds."""
    times: Annotated[tuple[Moment, ...], Field(max_length=MAX_ITEMS)] = ()
    """Times at which those happened, later by the pauses that followed them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A topology that the planner rejected, with the reason."""

    topology: Word
    """Rejected topology."""
    reason: ShortText
    """Reason, in one sentence."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The last result of the planner."""

    target: OptionalDegrees = None
    """Chosen topology."""
    nodes: Count32 = 0
    """Number of nodes."""
    per_node: Count32 = 0
    """Accelerators per node."""
    reason: ShortText = ""
    """Reason for the choice, in one sentence."""
    rejected: Annotated[tuple[Annotated[Rejected, OPEN], ...], Field(max_length=MAX_ITEMS), Keywords(maxItems=16)] = ()
    """First few rejected topologies, with the reasons."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The last progress report of rank 0; written less often than heartbeats arrive."""

    phase: Word = ""
    """Phase of the training pods."""
    step: Count = 0
    """Optimizer steps done; until an attempt reports its first step, the step from which it resumes."""
    samples: Count = 0
    """Global samples consumed."""
    loss: Real | None = None
    """Loss of the last step."""
    time: Moment | None = None
    """Time at which the operator last observed a change of any of these fields."""
    step_time: Moment | None = None
    """Time at which the operator last observed a new step; a restart alone does not change it."""
