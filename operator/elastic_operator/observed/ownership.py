"""Which objects are a resource's own: known by the UIDs of their controllers, and never by labels alone. Pure.

Anybody who may create pods or Leases in a namespace may label them as a job's. A Job or Lease is the resource's own if
its controller is the resource (by UID) and its name is one that the operator gives (`<job>-a<attempt>`); a pod is own
if its controller is such a Job (by UID). Attempt and role follow from these names, not from labels.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from elastic_operator.api.status import Status
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.observed.observation import (
    RESHARD,
    WORKER,
    JobView,
    LeaseView,
    Observation,
    PodView,
    controller_of,
)

RECENT_JOBS = 16
"""UIDs of so many of a resource's Jobs are remembered, and of all whose pods are still there."""

_View = TypeVar("_View", JobView, PodView)

_ATTEMPT = re.compile(r"-a([1-9][0-9]{0,8})(-reshard)?")


def own(world: Observation, job: JobRef, known: Collection[str]) -> Observation:
    """The part of a world that belongs to one resource; nodes and what others use are left as they are.

    Args:
        known: UIDs of its Jobs that were seen before (`Status.job_uids`): a Job may be gone before its pods are.
    """
    jobs = own_jobs(world.jobs, job)
    return dataclasses.replace(
        world,
        jobs=jobs,
        pods=own_pods(world.pods, job.name, {item.uid for item in jobs} | set(known)),
        leases=own_leases(world.leases.values(), job),
    )


def own_jobs(jobs: Iterable[JobView], job: JobRef) -> tuple[JobView, ...]:
    """Jobs that the resource controls, under names that the operator gives."""
    found: list[JobView] = []
    for item in jobs:
        place = _place(item.name, job.name)
        if item.owner == job.uid and place is not None:
            found.append(_corrected(item, *place))
    return tuple(found)


def own_pods(pods: Iterable[PodView], job: str, uids: Collection[str]) -> tuple[PodView, ...]:
    """Pods that one of the Jobs with these UIDs controls."""
    found: list[PodView] = []
    for pod in pods:
        place = _place(pod.owner_name, job)
        if pod.owner in uids and place is not None:
            found.append(_corrected(pod, *place))
    return tuple(found)


def own_leases(leases: Iterable[LeaseView], job: JobRef) -> dict[int, LeaseView]:
    """Leases that the resource controls, by attempt: of one attempt there is only one with its name."""
    found: dict[int, LeaseView] = {}
    for lease in leases:
        attempt, role = _place(lease.name, job.name) or (0, "")
        if lease.owner == job.uid and role == WORKER:
            found[attempt] = lease if lease.attempt == attempt else dataclasses.replace(lease, attempt=attempt)
    return found


def remember(status: Status, world: Observation) -> Status:
    """`status` with the UIDs of the Jobs in its own `world`, so that their pods are known once the Jobs are gone."""
    current = status.current.job_uid if status.current is not None else ""  # all that older operators kept
    found = dict.fromkeys((current, *(item.uid for item in world.jobs)))
    seen = [uid for uid in found if uid and uid not in status.job_uids]
    uids = [*status.job_uids, *seen]
    if len(uids) > RECENT_JOBS:
        needed = {item.uid for item in world.jobs} | {pod.owner for pod in world.pods} | set(uids[-RECENT_JOBS:])
        uids = [uid for uid in uids if uid in needed]
    return status if tuple(uids) == status.job_uids else dataclasses.replace(status, job_uids=tuple(uids))


def is_controlled_by(item: Mapping[str, Any], uid: str) -> bool:
    """The controller of an object has this UID."""
    return bool(uid) and controller_of(item["metadata"]).get("uid") == uid


def owner_text(item: Mapping[str, Any]) -> str:
    """Whose an object is, for people."""
    owner = controller_of(item["metadata"])
    return (
        f"it belongs to {owner.get('kind')} {owner.get('name')}, UID {owner.get('uid')}" if owner else "it has no owner"
    )


def predecessors_pods(pods: Iterable[PodView], job: JobRef, uids: Collection[str]) -> list[PodView]:
    """Pods that a Job of an earlier resource of the same name made, and that may still run.

    They are older than the resource by the API server's own clock; nothing that is made later can pass for one.
    """
    return [
        pod
        for pod in pods
        if pod.owner not in uids
        and _place(pod.owner_name, job.name) is not None
        and not pod.terminal
        and pod.node
        and pod.created_at is not None
        and job.created_at is not None
        and pod.created_at <= job.created_at
    ]


def _place(name: str, job: str) -> tuple[int, str] | None:
    """Attempt and role of the object with this name; None for a name that the operator gives to nothing of the job."""
    if not name.startswith(job):
        return None
    found = _ATTEMPT.fullmatch(name, len(job))
    if found is None:
        return None
    attempt = int(found[1])
    return attempt, RESHARD if found[2] else WORKER


def _corrected(view: _View, attempt: int, role: str) -> _View:
    if (view.attempt, view.role) == (attempt, role):
        return view
    return dataclasses.replace(view, attempt=attempt, role=role)
