"""metav1 conditions: a stable set, positive polarity, `lastTransitionTime` only when the status flips."""

from __future__ import annotations

import dataclasses
import enum

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Condition

MESSAGE_LIMIT = 4096
"""A longer message helps nobody; the API allows 32768."""


class Type(enum.StrEnum):
    """Types of conditions."""

    SPEC_VALID = "SpecValid"
    """The spec makes sense."""
    PLANNED = "Planned"
    """A topology was found for the nodes at hand."""
    RESUMED = "Resumed"
    """The current attempt continues from a commit; False: it starts from nothing."""
    CHECKPOINT_OWNED = "CheckpointOwned"
    """`spec.checkpoint.path` belongs to this job; False: another job writes there, and this one must not."""
    LAUNCHED = "Launched"
    """All pods of the current attempt have begun; False: why not."""
    RUNNING = "Running"
    """The training loop makes steps."""
    DRAINING = "Draining"
    """A planned change: waiting for the attempt to commit and exit."""
    RESHARDING = "Resharding"
    """A reshard Job converts the checkpoint."""
    RESHARD_FAILED = "ReshardFailed"
    """The last reshard Job failed; the source checkpoint is untouched."""
    REPORTS_VALID = "ReportsValid"
    """False: what a pod has written for the operator does not fit, and is not believed. Absent until that happens."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true and nothing runs."""
    COMPLETE = "Complete"
    """Training is done."""
    FAILED = "Failed"
    """Nothing will be tried again."""


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
    """Replace or add one condition, in the order of `Type`."""
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
    """The condition of one type."""
    return next((item for item in conditions if item.type == type_), None)


def is_true(conditions: tuple[Condition, ...], type_: Type) -> bool:
    """The condition is there and True."""
    condition = find(conditions, type_)
    return condition is not None and condition.status == "True"


def generation_of(conditions: tuple[Condition, ...], generation: int) -> tuple[Condition, ...]:
    """All conditions, marked as computed from `generation`."""
    return tuple(dataclasses.replace(item, observed_generation=generation) for item in conditions)
