"""Fields of `spec.recovery` that say how often failures may happen, and what exit codes mean."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, Strict

from elastic_operator.api.schema_types import INT32, SET, WHOLE, Keywords

FAIL_JOB: Final = "FailJob"
IGNORE: Final = "Ignore"
COUNT: Final = "Count"
"""Values of the action of a rule."""

BY_CLASS = Keywords(**{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["failureClass"]})
ExitCodeNumber = Annotated[int, Strict(), Field(ge=1, le=255), WHOLE, INT32]


def _without_repeats(items: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(items)))


class FailureClass(enum.StrEnum):
    """Who or what ended an attempt. Each class has a count and a backoff of its own."""

    NODE = "Node"
    DEVICE = "Device"
    PREEMPTION = "Preemption"
    EVICTION = "Eviction"
    SCHEDULING = "Scheduling"
    IMAGE = "Image"
    HANG = "Hang"
    CRASH = "Crash"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassBudget:
    """One of `spec.recovery.budgets`."""

    failure_class: FailureClass
    """Class of failures: Node, Device, Preemption, Eviction, Scheduling, Image, Hang or Crash."""
    limit: Annotated[int, Strict(), Field(ge=0, le=100_000), WHOLE, INT32]
    """Largest number of recoveries of this class within the window; one more, and the job fails."""
    window_seconds: Annotated[int, Strict(), Field(ge=1, le=31_536_000), WHOLE, INT32]
    """Length of the window in seconds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExitCodes:
    """`onExitCodes` of a rule of `spec.recovery.podFailurePolicy`."""

    operator: Literal["In", "NotIn"]
    """In: the exit code is one of values. NotIn: it is none of them."""
    values: Annotated[
        tuple[ExitCodeNumber, ...], Field(min_length=1, max_length=255), AfterValidator(_without_repeats), SET
    ]
    """Exit codes of the first container, from 1 to 255."""

    def matches(self, exit_code: int) -> bool:
        """Return whether the rule applies to a container that ended with `exit_code`."""
        return (exit_code in self.values) == (self.operator == "In")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodFailureRule:
    """One of the rules of `spec.recovery.podFailurePolicy`."""

    action: Literal["FailJob", "Ignore", "Count"]
    """FailJob: the job is Failed at once; applies to every pod that failed by itself, with NotIn only to the one that
    failed first. Ignore: the job restarts, and the failure is charged to no budget. Count: as without a rule.
    """
    on_exit_codes: ExitCodes
    """Exit codes to which the rule applies."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodFailurePolicy:
    """`spec.recovery.podFailurePolicy`."""

    rules: Annotated[tuple[PodFailureRule, ...], Field(min_length=1, max_length=20)]
    """Rules in their order. The first one that applies to the pod that failed first decides, unless FailJob applies to
    another pod.
    """
