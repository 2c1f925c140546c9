"""Nodes that attempts have been promised and that their pods have not reached yet.

Every job is planned by itself, from the accelerators that pods hold. Two that are planned in the same second would both
count on the same free nodes; the scheduler gives them to one, or some to each, and then both wait for the other until
they give up, at the cost of a restart. So a plan is held back while it needs nodes that others are on their way to.
"""

from __future__ import annotations

import dataclasses
import time

from elastic_operator.api.status import Status
from elastic_operator.observed.capacity import Capacity
from elastic_operator.observed.observation import Key, Observation

WORTH_SECONDS = 15.0
"""How long a promise holds others back. Pods are placed within a second or two, or wait for something else."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Pods of one attempt that have no node yet.

    Attributes:
        until: when it does not count any more, in seconds since the epoch.
    """

    resource: str
    num_pods: int
    until: float


class Reservations:
    """What all jobs of this operator have been promised. Forgotten with it: it only has to last for seconds."""

    def __init__(self) -> None:
        self._by_job: dict[Key, Reservation] = {}

    def note(self, key: Key, resource: str, status: Status, world: Observation) -> None:
        """Take up what a job has been promised, as far as its pods have no nodes yet."""
        promise = _promise(resource, status, world)
        if promise is None:
            self._by_job.pop(key, None)
        else:
            self._by_job[key] = promise

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._by_job.pop(key, None)

    def to_others(self, key: Key, resource: str) -> int:
        """Pods of other jobs that will take accelerators of this kind, and have no nodes yet."""
        now = time.time()
        self._by_job = {name: item for name, item in self._by_job.items() if item.until > now}
        return sum(item.num_pods for name, item in self._by_job.items() if name != key and item.resource == resource)


def contested(before: Status, after: Status, free: Capacity, promised: int) -> bool:
    """A new plan counts on nodes that others are on their way to.

    Args:
        free: what the plan was made from.
        promised: pods of others that have no nodes yet; each may take any node.
    """
    current = after.current
    if not promised or current is None or after.attempt == before.attempt:
        return False
    return free.num_usable(current.gpus_per_node) - promised < current.num_nodes


def _promise(resource: str, status: Status, world: Observation) -> Reservation | None:
    current = status.current
    since = None if current is None else current.launch_time or current.plan_time
    if current is None or since is None:
        return None
    num_placed = sum(pod.node is not None for pod in world.workers(status.attempt))
    if num_placed >= current.num_nodes:
        return None
    return Reservation(resource=resource, num_pods=current.num_nodes - num_placed, until=since + WORTH_SECONDS)
