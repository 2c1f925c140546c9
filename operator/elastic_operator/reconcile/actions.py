"""Results of `decide`: actions, events and the decision itself. Every action is idempotent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_operator.api.status import Status
from elastic_operator.manifests.attempt import JobRef


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Create an object; an existing object of the same name and the same controller is left as it is."""

    manifest: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchAttempt:
    """Create the objects of an attempt, the Job last, after a fresh read shows that no pod of an older attempt can run.

    Attributes:
        attempt: number of the attempt.
        job: the resource; its older pods must be gone, and those of an earlier resource of its name too.
        lost_nodes: nodes whose pods the launch does not wait for.
        stuck_pods: UIDs of pods that do not end and that the launch does not wait for either.
        job_uids: UIDs of the resource's earlier Jobs, which identify its pods.
    """

    attempt: int
    manifests: tuple[Mapping[str, Any], ...]
    job: JobRef
    lost_nodes: tuple[str, ...] = ()
    stuck_pods: tuple[str, ...] = ()
    job_uids: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJob:
    """Delete a Job, its pods in the background. `uid` guards against deleting a successor of the same name."""

    name: str
    uid: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Delete one pod; with `grace_seconds` 0 the API server removes it without waiting for the node."""

    name: str
    uid: str
    grace_seconds: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RevokeAttempt:
    """Fence a stopped attempt: revoke its access to its Lease, then delete its other objects.

    Only objects that the resource with the UID `owner` controls are deleted; another owner may use the same name.

    Attributes:
        gang: API version of its PodGroup; empty if it has none.
    """

    name: str
    owner: str
    gang: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestDrain:
    """Ask rank 0, through the Lease, to commit and exit. `uid`: of the Lease."""

    lease: str
    uid: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestStop:
    """Write to the Lease that the attempt is over, so that its processes exit at SIGTERM. `uid`: of the Lease."""

    lease: str
    uid: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCommits:
    """Write to the Lease which commits nothing refers to any more (LeaseKey.RELEASED), so that rank 0 removes them.

    Attributes:
        uid: of the Lease.
    """

    lease: str
    names: tuple[str, ...]
    uid: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeleteResource:
    """Delete the ElasticTrainingJob itself, after its objects; an edit since `version` prevents it."""

    name: str
    uid: str
    version: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PatchWorkload:
    """Merge changes into a Workload of Kueue, if nobody has changed it since it was read.

    Attributes:
        uid: of the Workload.
        version: its resourceVersion.
        changes: what to merge.
        subresource: `status`, or empty.
    """

    name: str
    uid: str
    version: str
    changes: Mapping[str, Any]
    subresource: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeleteWorkload:
    """Delete a Workload of Kueue. `uid` guards against deleting a successor of the same name."""

    name: str
    uid: str


Action = (
    Create
    | LaunchAttempt
    | DeleteJob
    | DeletePod
    | DeleteResource
    | RevokeAttempt
    | RequestDrain
    | RequestStop
    | ReleaseCommits
    | PatchWorkload
    | DeleteWorkload
)


def split_actions(actions: Iterable[Action]) -> tuple[list[Action], list[DeletePod], list[LaunchAttempt]]:
    """Split actions into the three groups that are executed one after another: others, deletions of pods, launches.

    Deletions of pods come late: there may be thousands, and neither the fence nor the conversion waits for them. The
    launch comes after them: a pod on a lost node that is not deleted yet would go on if its node came back.
    """
    others: list[Action] = []
    deletions: list[DeletePod] = []
    launches: list[LaunchAttempt] = []
    for action in actions:
        match action:
            case DeletePod():
                deletions.append(action)
            case LaunchAttempt():
                launches.append(action)
            case _:
                others.append(action)
    return others, deletions, launches


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A core/v1 Event about the resource."""

    reason: str
    message: str
    warning: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOutcome:
    """Result of one reshard Job, for the metrics; the status may already describe the next Job.

    Attributes:
        mode: `materialize`, `virtual`, or empty if there is no report.
        result: `Succeeded`, or the reason of the condition ReshardFailed.
        seconds: wall time of the conversion itself; None without a report.
    """

    mode: str
    result: str
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Result of one pass.

    Attributes:
        status: the new status, written before any action is performed.
        actions: performed in order.
        reshards: reshard Jobs that ended.
        requeue_seconds: time until the next pass if nothing happens.
        needs_fresh_capacity: True if the caller must read the free accelerators and decide again; then every other
            attribute is ignored.
    """

    status: Status
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    reshards: tuple[ReshardOutcome, ...] = ()
    requeue_seconds: float = 30.0
    needs_fresh_capacity: bool = False
