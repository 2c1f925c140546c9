"""Select the objects that belong to a resource, by the UIDs of their controllers and never by labels alone. Pure.

Anybody who may create pods or Leases in a namespace may give them a job's labels. A Job or Lease belongs to the
resource if the resource controls it (by UID) and its name has the form that the operator uses (`<job>-a<attempt>`). A
pod belongs to the resource if such a Job controls it (by UID). Attempt and role follow from these names, not from
labels.
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
"""Number of newest Jobs of a resource whose UIDs are kept, in addition to those whose pods still exist."""

_View = TypeVar("_View", JobView, PodView)

_ATTEMPT = re.compile(r"-a([1-9][0-9]{0,8})(-reshard)?")


def select_own(world: Observation, job: JobRef, known: Collection[str]) -> Observation:
    """Return the observation with only the Jobs, pods and Leases of one resource; nodes and `used` stay as they are.

    Args:
        world: what the operator sees.
        job: the resource.
        known: UIDs of Jobs that were seen before (`Status.job_uids`), because a Job may be gone before its pods are.
    """
    jobs = select_own_jobs(world.jobs, job)
    return dataclasses.replace(
        world,
        jobs=jobs,
        pods=select_own_pods(world.pods, job.name, {item.uid for item in jobs} | set(known)),
        leases=select_own_leases(world.leases.values(), job),
    )


def select_own_jobs(jobs: Iterable[JobView], job: JobRef) -> tuple[JobView, ...]:
    """Return the Jobs that the resource controls and whose names the operator gives."""
    own: list[JobView] = []
    for item in jobs:
        attempt_and_role = _parse_name(item.name, job.name)
        if item.owner == job.uid and attempt_and_role is not None:
            own.append(_with_attempt_and_role(item, *attempt_and_role))
    return tuple(own)


def select_own_pods(pods: Iterable[PodView], job: str, uids: Collection[str]) -> tuple[PodView, ...]:
    """Return the pods that one of the Jobs with these UIDs controls."""
    own: list[PodView] = []
    for pod in pods:
        attempt_and_role = _parse_name(pod.owner_name, job)
        if pod.owner in uids and attempt_and_role is not None:
            own.append(_with_attempt_and_role(pod, *attempt_and_role))
    return tuple(own)


def select_own_leases(leases: Iterable[LeaseView], job: JobRef) -> dict[int, LeaseView]:
    """Return the Leases that the resource controls, by attempt; an attempt has one Lease of its name."""
    own: dict[int, LeaseView] = {}
    for lease in leases:
        attempt, role = _parse_name(lease.name, job.name) or (0, "")
        if lease.owner == job.uid and role == WORKER:
            own[attempt] = lease if lease.attempt == attempt else dataclasses.replace(lease, attempt=attempt)
    return own


def record_job_uids(status: Status, world: Observation) -> Status:
    """Add the UIDs of the Jobs in `world` to the status, so that their pods are known once the Jobs are gone."""
    current = status.current.job_uid if status.current is not None else ""  # older operators kept only this one
    uids_now = dict.fromkeys((current, *(item.uid for item in world.jobs)))
    new = [uid for uid in uids_now if uid and uid not in status.job_uids]
    uids = [*status.job_uids, *new]
    if len(uids) > RECENT_JOBS:
        needed = {item.uid for item in world.jobs} | {pod.owner for pod in world.pods} | set(uids[-RECENT_JOBS:])
        uids = [uid for uid in uids if uid in needed]
    return status if tuple(uids) == status.job_uids else dataclasses.replace(status, job_uids=tuple(uids))


def is_controlled_by(item: Mapping[str, Any], uid: str) -> bool:
    """Return whether the controller of an object has this UID."""
    return bool(uid) and controller_of(item["metadata"]).get("uid") == uid


def describe_owner(item: Mapping[str, Any]) -> str:
    """Return a sentence that names the owner of an object."""
    owner = controller_of(item["metadata"])
    return (
        f"it belongs to {owner.get('kind')} {owner.get('name')}, UID {owner.get('uid')}" if owner else "it has no owner"
    )


def select_predecessors(
    pods: Iterable[PodView], jobs: Iterable[JobView], job: JobRef, uids: Collection[str]
) -> list[PodView | JobView]:
    """Return what earlier resources of the same name have left behind, and what may still run or make pods.

    The pods of a Job that is gone are older than the resource by the API server's clock, so no pod that is created
    later is taken for one. A Job that is still there may make pods later.

    Args:
        pods: pods with the job's label.
        jobs: Jobs with the job's label.
        job: the resource.
        uids: UIDs of its own Jobs.
    """
    theirs = [item for item in jobs if item.owner not in ("", job.uid) and _parse_name(item.name, job.name)]
    their_uids = {item.uid for item in theirs}
    running = [
        pod
        for pod in pods
        if pod.owner not in uids
        and _parse_name(pod.owner_name, job.name) is not None
        and not pod.terminal
        and pod.node
        and (pod.owner in their_uids or _is_older(pod, job))
    ]
    active = [
        item
        for item in theirs
        if (_parse_name(item.name, job.name) or (0, ""))[1] == WORKER
        and not (item.complete or item.failed or item.deleting)
    ]
    return [*running, *active]


def _is_older(pod: PodView, job: JobRef) -> bool:
    return pod.created_at is not None and job.created_at is not None and pod.created_at <= job.created_at


def _parse_name(name: str, job: str) -> tuple[int, str] | None:
    """Return attempt and role of an object of the job from its name; None for any other name."""
    if not name.startswith(job):
        return None
    match = _ATTEMPT.fullmatch(name, len(job))
    if match is None:
        return None
    attempt = int(match[1])
    return attempt, RESHARD if match[2] else WORKER


def _with_attempt_and_role(view: _View, attempt: int, role: str) -> _View:
    if (view.attempt, view.role) == (attempt, role):
        return view
    return dataclasses.replace(view, attempt=attempt, role=role)
