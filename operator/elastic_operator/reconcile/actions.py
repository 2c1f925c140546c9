"""What `decide` may ask for. Every action is idempotent: doing it twice is doing it once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_operator.api.status import Status
from elastic_operator.manifests.attempt import JobRef


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Create an object; that it exists already is fine where its controller is the same."""

    manifest: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchAttempt:
    """Create the objects of an attempt, the Job last, after a fresh look that no pod of an older one can run.

    Attributes:
        attempt: the attempt.
        job: the resource; its own pods must be gone, and those of an earlier one of its name.
        lost_nodes: nodes whose pods cannot be waited for.
        job_uids: of its Jobs that were seen before, whose pods are its own, too.
    """

    attempt: int
    manifests: tuple[Mapping[str, Any], ...]
    job: JobRef
    lost_nodes: tuple[str, ...] = ()
    job_uids: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJob:
    """Delete a Job, its pods in the background. `uid` guards against deleting a successor of the same name."""

    name: str
    uid: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Delete one pod; 0 seconds of grace removes it from the API without asking its node."""

    name: str
    uid: str
    grace_seconds: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RevokeAttempt:
    """Fence a stopped attempt: take away its access to its Lease, then remove its other objects.

    Only what the resource with the UID `owner` controls: another object may have one of these names.
    """

    name: str
    owner: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestDrain:
    """Ask rank 0, through the Lease, to commit and exit. `uid`: of the Lease."""

    lease: str
    uid: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCommits:
    """Tell rank 0, through the Lease, which commits nothing refers to any more (LeaseKey.RELEASED).

    Attributes:
        uid: of the Lease.
    """

    lease: str
    names: tuple[str, ...]
    uid: str = ""


Action = Create | LaunchAttempt | DeleteJob | DeletePod | RevokeAttempt | RequestDrain | ReleaseCommits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A core/v1 Event about the resource."""

    reason: str
    message: str
    warning: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOutcome:
    """The end of one reshard Job, for the metrics: the status may have moved on to the next one in the same pass.

    Attributes:
        mode: `materialize`, `virtual`, or empty where nobody said.
        result: `Succeeded`, or why not, as in the reason of the condition ReshardFailed.
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
        status: written before anything is done.
        actions: done in order.
        reshards: reshard Jobs that were found to have ended.
        requeue_seconds: look again after so long, whatever happens.
        needs_fresh_capacity: look at the cluster's free accelerators and decide again; nothing else of this counts.
    """

    status: Status
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    reshards: tuple[ReshardOutcome, ...] = ()
    requeue_seconds: float = 30.0
    needs_fresh_capacity: bool = False
