"""Reservations: nodes for pods of launched attempts that are not scheduled yet.

Every job is planned on its own, from the accelerators that pods use. Two jobs that are planned in the same second would
count on the same free nodes. The scheduler would give the nodes to one job, or some to each, and then both would wait
until they time out and restart. Therefore a plan is delayed while it needs nodes that are reserved for other jobs.
"""

from __future__ import annotations

import dataclasses
import time

from elastic_operator.api.status import Status
from elastic_operator.observed.capacity import Capacity
from elastic_operator.observed.observation import Key, Observation

RESERVATION_SECONDS = 15.0
"""Lifetime of a reservation. Pods are scheduled within a second or two, or wait for something else."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The pods of one attempt that have no node yet.

    Attributes:
        until: end of the reservation, in seconds since the epoch.
    """

    resource: str
    num_pods: int
    until: float


class Reservations:
    """The reservations of all jobs. They are kept in memory only, because they last for seconds."""

    def __init__(self) -> None:
        self._by_job: dict[Key, Reservation] = {}

    def update(self, key: Key, resource: str, status: Status, world: Observation) -> None:
        """Replace the reservation of a job by one for its pods that have no node yet."""
        reservation = _reserve(resource, status, world)
        if reservation is None:
            self._by_job.pop(key, None)
        else:
            self._by_job[key] = reservation

    def forget(self, key: Key) -> None:
        """Remove the reservation of a deleted job."""
        self._by_job.pop(key, None)

    def count_pods_of_others(self, key: Key, resource: str) -> int:
        """Return the number of pods of other jobs that have reserved accelerators of this kind."""
        now = time.time()
        self._by_job = {name: item for name, item in self._by_job.items() if item.until > now}
        return sum(item.num_pods for name, item in self._by_job.items() if name != key and item.resource == resource)


def is_contested(before: Status, after: Status, free: Capacity, reserved: int) -> bool:
    """Return whether a new plan needs nodes that are reserved for other jobs.

    Args:
        before: status before the pass.
        after: status with the plan.
        free: the capacity from which the plan was made.
        reserved: pods of other jobs that have no node yet; each may take any node.
    """
    current = after.current
    if not reserved or current is None or after.attempt == before.attempt or current.awaits_nodes:
        return False
    return free.num_usable(current.gpus_per_node) - reserved < current.num_nodes


def _reserve(resource: str, status: Status, world: Observation) -> Reservation | None:
    current = status.current
    start = None if current is None else current.launch_time or current.plan_time
    if current is None or start is None:
        return None
    num_placed = sum(pod.node is not None for pod in world.workers(status.attempt))
    if num_placed >= current.num_nodes:
        return None
    return Reservation(resource=resource, num_pods=current.num_nodes - num_placed, until=start + RESERVATION_SECONDS)
