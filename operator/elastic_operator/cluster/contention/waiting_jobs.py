"""The order in which jobs that wait for nodes take them: by priority, then by age. Nothing is preempted.

Every job is planned on its own, whenever something wakes it. Without an order, nodes that come back would go to the job
that happens to be looked at first. A job that waits therefore leaves those nodes alone that waiting jobs ahead of it
would take now. What jobs ahead cannot use, because it is too little for them, it takes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic_operator.api.spec import Spec
from elastic_operator.api.status import Phase, Status
from elastic_operator.cluster.contention.reservations import RESERVATION_SECONDS
from elastic_operator.observed.observation import Key
from elastic_operator.reconcile import goodput
from elastic_operator.reconcile.record import Record

PASSED_SECONDS = 60.0
"""A job that leaves nodes to others asks again every second; one that has not asked for so long has none to leave."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PriorityClasses:
    """The values of the cluster's PriorityClasses.

    Attributes:
        values: by name.
        default: value of pods that name no class.
    """

    values: Mapping[str, int] = dataclasses.field(default_factory=dict)
    default: int = 0

    def priority_of(self, spec: Spec) -> int:
        """Return the priority that the API server gives the training pods; 0 for a class that does not exist."""
        name = (spec.template.get("spec") or {}).get("priorityClassName")
        return self.values.get(name, 0) if name else self.default


def read_priority_classes(objects: Iterable[Mapping[str, Any]]) -> PriorityClasses:
    """Read PriorityClasses; one without a whole number as its value is left out."""
    values: dict[str, int] = {}
    default = 0
    for item in objects:
        value = item.get("value", 0)
        if isinstance(value, int) and not isinstance(value, bool):
            values[item["metadata"]["name"]] = value
            default = value if item.get("globalDefault") is True else default
    return PriorityClasses(values=values, default=default)


def is_waiting(record: Record) -> bool:
    """Return whether a job wants nodes and has none: it is new, was resumed, or found too few.

    A job that recovers from a failure is not waiting: it keeps the nodes that it has.
    """
    status = record.status
    if not isinstance(record.spec, Spec) or record.spec.suspend or record.deleting or record.is_managed_elsewhere:
        return False
    if status.terminal or status.current is not None:
        return False
    return status.phase == Phase.WAITING or status.attempt == 0 or _was_suspended(status)


def _was_suspended(status: Status) -> bool:
    return bool(status.changes) and status.changes[-1].cause == goodput.SUSPENDED


def select_ahead(job: Record, others: Iterable[Record], classes: PriorityClasses) -> Sequence[Record]:
    """Return the waiting jobs that take nodes of the same kind before this one, the first one first."""
    assert isinstance(job.spec, Spec)
    resource = job.spec.accelerator.resource
    ranked = sorted(
        (_rank(other, other.spec, classes), other)
        for other in others
        if is_waiting(other) and isinstance(other.spec, Spec) and other.spec.accelerator.resource == resource
    )
    own = _rank(job, job.spec, classes)
    return [other for rank, other in ranked if rank < own]


def _rank(record: Record, spec: Spec, classes: PriorityClasses) -> tuple[int, float, str]:
    return -classes.priority_of(spec), record.job.created_at or 0.0, record.job.name


class YieldTimes:
    """Bounds how long a job leaves nodes to jobs ahead of it, which may be unable to take them for other reasons."""

    def __init__(self) -> None:
        self._since: dict[Key, float] = {}
        self._asked: dict[Key, float] = {}

    def is_over(self, key: Key) -> bool:
        """Return whether the job has left nodes to others for long enough.

        The time begins with the first call, and with one that comes PASSED_SECONDS after the last one: other nodes are
        free then, or other jobs are ahead.
        """
        now = time.monotonic()
        if now - self._asked.get(key, now) >= PASSED_SECONDS:
            self._since.pop(key, None)
        self._asked[key] = now
        return now - self._since.setdefault(key, now) >= RESERVATION_SECONDS

    def forget(self, key: Key) -> None:
        """Begin anew: the job has taken nodes, or is gone."""
        self._since.pop(key, None)
        self._asked.pop(key, None)
