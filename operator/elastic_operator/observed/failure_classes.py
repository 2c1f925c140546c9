"""Classes of failures: who answers for a failure, whose budget it is charged to, and what counts as progress after it.

`CLASSES` is the table; docs/operations.md prints it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from elastic_operator.api.failure_policy import FailureClass
from elastic_operator.observed.signal_kinds import Kind


class Budget(enum.Enum):
    """Budget of a class, unless `spec.recovery.budgets` limits the class."""

    NONE = "none: the class never ends the job"
    SHARED = "restartBudget, shared by all classes with this entry"
    OWN = "its own, as large as restartBudget"


class Progress(enum.Enum):
    """What ends the backoff of a class."""

    STEP = "a step"
    COMMIT = "a newer commit"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassRule:
    """Row of the table.

    Attributes:
        kinds: causes of recoveries, by the names of their signals.
        blames_node: True if the node where the failure began is avoided after two of them.
        compares_nodes: True if the same failure on other nodes speaks for a cause in the program, not in a node.
    """

    kinds: tuple[str, ...]
    budget: Budget
    progress: Progress
    blames_node: bool = False
    compares_nodes: bool = False


CLASSES: Mapping[FailureClass, ClassRule] = {
    FailureClass.NODE: ClassRule(
        kinds=(
            Kind.NODE_DELETED,
            Kind.NODE_OUT_OF_SERVICE,
            Kind.NODE_NOT_READY,
            Kind.NODE_LEASE_STALE,
            Kind.POD_REJECTED,
            Kind.POD_LOST,
            "CapacityLost",  # a planned attempt does not fit any more before its launch
        ),
        budget=Budget.NONE,
        progress=Progress.STEP,
        blames_node=True,
        compares_nodes=True,
    ),
    FailureClass.DEVICE: ClassRule(
        kinds=(Kind.DEVICE_UNHEALTHY, Kind.DEVICE_MISSING, Kind.DEVICE_PLUGIN_GONE),
        budget=Budget.NONE,
        progress=Progress.STEP,
        blames_node=True,
    ),
    FailureClass.PREEMPTION: ClassRule(kinds=(Kind.POD_PREEMPTED,), budget=Budget.NONE, progress=Progress.STEP),
    FailureClass.EVICTION: ClassRule(
        kinds=(Kind.POD_DISRUPTED, Kind.POD_DELETED, Kind.JOB_DELETED), budget=Budget.NONE, progress=Progress.STEP
    ),
    FailureClass.SCHEDULING: ClassRule(kinds=(Kind.UNSCHEDULABLE,), budget=Budget.NONE, progress=Progress.STEP),
    FailureClass.IMAGE: ClassRule(
        kinds=(Kind.IMAGE,), budget=Budget.OWN, progress=Progress.STEP, blames_node=True, compares_nodes=True
    ),
    FailureClass.HANG: ClassRule(
        kinds=(Kind.HANG, Kind.HEARTBEAT_STALE), budget=Budget.SHARED, progress=Progress.COMMIT
    ),
    FailureClass.CRASH: ClassRule(
        kinds=(Kind.POD_FAILED, Kind.JOB_FAILED, Kind.RESUME_REFUSED, Kind.STARTUP_TIMEOUT),
        budget=Budget.SHARED,
        progress=Progress.COMMIT,
        blames_node=True,
        compares_nodes=True,
    ),
}

_BY_KIND: Mapping[str, FailureClass] = {kind: name for name, rule in CLASSES.items() for kind in rule.kinds}


def classify_failure(cause: str) -> FailureClass:
    """Return the class of a recovery's cause; a cause that an older operator named differently is a crash."""
    return _BY_KIND.get(cause, FailureClass.CRASH)


def is_infrastructure(cause: str) -> bool:
    """Return whether the infrastructure answers for a failure, so that no default budget is charged for it."""
    return CLASSES[classify_failure(cause)].budget is Budget.NONE
