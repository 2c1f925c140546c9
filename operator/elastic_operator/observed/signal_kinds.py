"""Kinds of signals, and the policy: how strongly each kind indicates a failure, and which grace period it has.

`signals` detects signals and judges them. `docs/operations.md` prints the table `KINDS`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping


class Kind(enum.StrEnum):
    """Names of signals, gravest first; also the reasons in conditions, events and metrics."""

    NODE_DELETED = "NodeDeleted"
    NODE_OUT_OF_SERVICE = "NodeOutOfService"
    NODE_NOT_READY = "NodeNotReady"
    NODE_LEASE_STALE = "NodeLeaseStale"
    HEARTBEAT_STALE = "HeartbeatStale"
    DEVICE_UNHEALTHY = "DeviceUnhealthy"
    DEVICE_MISSING = "DeviceMissing"
    DEVICE_PLUGIN_GONE = "DevicePluginGone"
    RESUME_REFUSED = "ResumeRefused"
    POD_PREEMPTED = "PodPreempted"
    POD_DISRUPTED = "PodDisrupted"
    POD_REJECTED = "PodRejected"
    POD_LOST = "PodLost"
    POD_FAILED = "PodFailed"
    JOB_FAILED = "JobFailed"
    POD_DELETED = "PodDeleted"  # less grave than JobFailed: the Job controller deletes the pods of a failed Job
    JOB_DELETED = "JobDeleted"
    HANG = "Hang"
    IMAGE = "ContainerCannotStart"
    UNSCHEDULABLE = "Unschedulable"
    STARTUP_TIMEOUT = "StartupTimeout"
    NODE_UNHEALTHY = "NodeUnhealthy"
    NODE_CORDONED = "NodeCordoned"
    NODE_TAINTED = "NodeTainted"
    JOB_SUSPENDED = "JobSuspended"
    POD_TERMINATING = "PodTerminating"


class Weight(enum.Enum):
    """Strength with which a signal of a kind indicates a failure."""

    STRONG = "confirms at once"
    WEAK = "needs a second source, or its grace"
    PLANNED = "drain first, after its grace"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Row of the policy table.

    Attributes:
        source: component that reports it; two weak signals confirm a node failure only if their sources differ.
        takes_node: True if the whole node is lost, not only the pod.
        grace: attribute of `recovery` or of `Timeouts` that holds the grace period of a weak or planned signal.
    """

    source: str
    weight: Weight
    takes_node: bool
    grace: str = ""


KINDS: Mapping[Kind, Meaning] = {
    Kind.NODE_DELETED: Meaning(source="node", weight=Weight.STRONG, takes_node=True),
    Kind.NODE_OUT_OF_SERVICE: Meaning(source="taint", weight=Weight.STRONG, takes_node=True),
    Kind.NODE_NOT_READY: Meaning(source="node", weight=Weight.WEAK, takes_node=True, grace="suspect_seconds"),
    Kind.NODE_LEASE_STALE: Meaning(source="lease", weight=Weight.WEAK, takes_node=True, grace="suspect_seconds"),
    Kind.HEARTBEAT_STALE: Meaning(source="heartbeat", weight=Weight.WEAK, takes_node=False, grace="suspect_seconds"),
    Kind.DEVICE_UNHEALTHY: Meaning(source="device", weight=Weight.STRONG, takes_node=False),
    Kind.DEVICE_MISSING: Meaning(source="allocatable", weight=Weight.WEAK, takes_node=False, grace="device_seconds"),
    Kind.DEVICE_PLUGIN_GONE: Meaning(
        source="allocatable", weight=Weight.WEAK, takes_node=False, grace="device_plugin_seconds"
    ),
    Kind.POD_PREEMPTED: Meaning(source="pod", weight=Weight.STRONG, takes_node=False),
    Kind.POD_DISRUPTED: Meaning(source="pod", weight=Weight.STRONG, takes_node=False),
    Kind.POD_REJECTED: Meaning(source="pod", weight=Weight.STRONG, takes_node=False),
    Kind.POD_LOST: Meaning(source="pod", weight=Weight.STRONG, takes_node=False),
    Kind.POD_DELETED: Meaning(source="pod", weight=Weight.STRONG, takes_node=False),
    Kind.POD_FAILED: Meaning(source="pod", weight=Weight.STRONG, takes_node=False),
    Kind.JOB_FAILED: Meaning(source="job", weight=Weight.STRONG, takes_node=False),
    Kind.JOB_DELETED: Meaning(source="job", weight=Weight.STRONG, takes_node=False),
    Kind.RESUME_REFUSED: Meaning(source="trainer", weight=Weight.STRONG, takes_node=False),
    Kind.HANG: Meaning(source="progress", weight=Weight.WEAK, takes_node=False, grace="hang_seconds"),
    Kind.IMAGE: Meaning(source="container", weight=Weight.WEAK, takes_node=False, grace="image_seconds"),
    Kind.UNSCHEDULABLE: Meaning(
        source="scheduler", weight=Weight.WEAK, takes_node=False, grace="unschedulable_seconds"
    ),
    Kind.STARTUP_TIMEOUT: Meaning(source="startup", weight=Weight.WEAK, takes_node=False, grace="startup_seconds"),
    # The node still works, so the job can commit first. If it stops working, its pods fail, which is another signal.
    Kind.NODE_UNHEALTHY: Meaning(source="health", weight=Weight.PLANNED, takes_node=False, grace="planned_seconds"),
    Kind.NODE_CORDONED: Meaning(source="node", weight=Weight.PLANNED, takes_node=False, grace="planned_seconds"),
    Kind.NODE_TAINTED: Meaning(source="taint", weight=Weight.PLANNED, takes_node=False, grace="planned_seconds"),
    Kind.JOB_SUSPENDED: Meaning(source="job", weight=Weight.PLANNED, takes_node=False),
    # Preempted, evicted or deleted, or the node shuts down: its processes have the grace period for a commit.
    Kind.POD_TERMINATING: Meaning(source="pod", weight=Weight.PLANNED, takes_node=False),
}

LEAVE_NODE = frozenset({Kind.NODE_UNHEALTHY, Kind.NODE_CORDONED, Kind.NODE_TAINTED})
"""Planned signals that ask for a node to be emptied, and that can be withdrawn."""

LONGEST_PLANNED_SECONDS = 600.0
"""Longest grace period of a cordon, taint or health report that comes and goes."""


def damped_seconds(seconds: float, num_withdrawn: int) -> float:
    """Return the grace period of a planned signal that comes and goes: it doubles each time, up to a bound."""
    return min(seconds * 2.0**num_withdrawn, max(seconds, LONGEST_PLANNED_SECONDS))
