"""The condition types of the resource, and how a condition is set.

Conditions follow metav1: the set of types is stable, and `lastTransitionTime` changes only when
the status changes.
"""

from __future__ import annotations

import dataclasses
import enum

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Condition

MESSAGE_LIMIT = 4096
"""Maximum characters of a condition's message; the API allows 32768."""


class Type(enum.StrEnum):
    SPEC_VALID = "SpecValid"
    """The spec is valid."""
    QUOTA_RESERVED = "QuotaReserved"
    """Kueue has admitted the job; False: the message is Kueue's. Absent for a job that is in no queue."""
    PLANNED = "Planned"
    """A topology fits the available nodes."""
    RESUMED = "Resumed"
    """The current attempt resumes from a committed checkpoint; False: it starts from step 0, or none can be used."""
    CHECKPOINT_OWNED = "CheckpointOwned"
    """This job owns `spec.checkpoint.path`; False: another job owns it, so this job must not write there."""
    COMMITS_RELEASED = "CommitsReleased"
    """Old commits are removed; False: jobs that are about to start from them keep them. Absent until that happens."""
    COMMITS_CONVERTIBLE = "CommitsConvertible"
    """False: the resharder would refuse the commits of this training. Absent until that happens."""
    LAUNCHED = "Launched"
    """All pods of the current attempt have started; False: the message says why not."""
    RUNNING = "Running"
    """The training loop completes steps."""
    DRAINING = "Draining"
    """A change is planned, and the operator waits for the attempt to commit and exit."""
    RESHARDING = "Resharding"
    """A reshard Job is converting the checkpoint."""
    RESHARD_FAILED = "ReshardFailed"
    """The last reshard Job failed; the source checkpoint is unchanged."""
    REPORTS_VALID = "ReportsValid"
    """False: a pod wrote an invalid report, which the operator ignores. Absent until that happens."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true and no pod runs."""
    COMPLETE = "Complete"
    """Training has finished."""
    FAILED = "Failed"
    """The operator starts no further attempt."""


def set_condition(
    conditions: tuple[Condition, ...],
    type_: Type,
    status: bool,
    *,
    reason: str,
    message: str,
    now: float,
    generation: int,
) -> tuple[Condition, ...]:
    """Add or replace one condition, and sort the conditions in the order of `Type`."""
    text = "True" if status else "False"
    old = next((item for item in conditions if item.type == type_), None)
    new = Condition(
        type=type_.value,
        status=text,
        reason=reason,
        message=message[:MESSAGE_LIMIT],
        last_transition_time=old.last_transition_time if old and old.status == text else Time(now),
        observed_generation=generation,
    )
    others = [item for item in conditions if item.type != type_]
    order = {name.value: position for position, name in enumerate(Type)}
    return tuple(sorted([*others, new], key=lambda item: order.get(item.type, len(order))))


def find(conditions: tuple[Condition, ...], type_: Type) -> Condition | None:
    """Return the condition of one type, or None."""
    return next((item for item in conditions if item.type == type_), None)


def is_true(conditions: tuple[Condition, ...], type_: Type) -> bool:
    """Return whether the condition exists and its status is True."""
    condition = find(conditions, type_)
    return condition is not None and condition.status == "True"


def with_observed_generation(conditions: tuple[Condition, ...], generation: int) -> tuple[Condition, ...]:
    """Set `observedGeneration` of all conditions to `generation`."""
    return tuple(dataclasses.replace(item, observed_generation=generation) for item in conditions)
