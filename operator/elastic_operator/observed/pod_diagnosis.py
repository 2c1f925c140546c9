"""Find out why an attempt has no running pods, from the API server, the Job controller and the kubelets.

The pods themselves do not show the reason, because they do not exist or have not started. The operator reports the
reason to people; no decision depends on it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_operator.api.serialization import parse_time
from elastic_operator.api.status import Status
from elastic_operator.observed import reshard_pods
from elastic_operator.observed.observation import RESHARD, Observation, PodDiagnosis
from reshard.contract import sentence

LAUNCH_REFUSED = "LaunchRefused"
"""The API server refuses to create an attempt's objects."""

NAME_TAKEN = "NameTaken"
"""Another owner's object has the name of an object that the operator must create."""

PREDECESSOR_RUNS = "PredecessorRuns"
"""Pods of an earlier job of the same name may still run."""

LAUNCH_REASONS = (LAUNCH_REFUSED, NAME_TAKEN, PREDECESSOR_RUNS)
"""Reasons why an attempt's objects could not be created; they no longer apply once the Job exists."""

PODS_REFUSED = "PodsRefused"
"""The API server refuses the pods that the Job controller creates: quotas, pod security, limits, webhooks."""

POD_STUCK = "PodStuck"
"""A pod is bound to a node but does not start there: volumes, networks."""

PATIENCE_SECONDS = 3.0
"""Time after a launch before the operator reads events; an ordinary start needs less."""

AGAIN_SECONDS = 10.0
"""Interval between two reads of the events while the pods are missing."""

_MESSAGE_BYTES = 1024

_STUCK_SECONDS = 20.0
"""Time after a launch before a Pending pod counts as stuck: volumes and images take a while."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EventQuery:
    """The object whose warning events are read.

    Attributes:
        reason: reason of the diagnosis if there is such an event.
        uid: of the object.
    """

    attempt: int
    reason: str
    uid: str
    name: str


def choose_event_query(status: Status, world: Observation, now: float) -> EventQuery | None:
    """Choose the object whose events explain why the attempt has not started; None if it has, or is about to."""
    current = status.current
    if current is None or current.schedule_time is not None:
        return None
    if current.launch_time is None:
        return None if current.resume.ready else _choose_reshard_query(status, world, now)
    waited = now - current.launch_time
    job, pods = world.job(status.attempt), world.workers(status.attempt)
    if job is None or waited < PATIENCE_SECONDS:
        return None
    if len(pods) < current.num_nodes:
        return EventQuery(attempt=status.attempt, reason=PODS_REFUSED, uid=job.uid, name=job.name)
    stuck = [pod for pod in pods if pod.phase == "Pending" and pod.node and not pod.waiting_reason]
    if not stuck or waited < _STUCK_SECONDS:
        return None
    return EventQuery(attempt=status.attempt, reason=POD_STUCK, uid=stuck[0].uid, name=stuck[0].name)


def _choose_reshard_query(status: Status, world: Observation, now: float) -> EventQuery | None:
    job = world.job(status.attempt, RESHARD)
    is_over = job is not None and status.reshard is not None and job.uid == status.reshard.failed_uid
    if job is None or job.complete or job.failed or job.deleting or is_over or job.created_at is None:
        return None
    pods, waited = reshard_pods.select_reshard_pods(world, job), now - job.created_at
    if not pods and waited >= PATIENCE_SECONDS:
        return EventQuery(attempt=status.attempt, reason=PODS_REFUSED, uid=job.uid, name=job.name)
    trouble = reshard_pods.detect_start_trouble(pods, job, now)
    stuck = [pod for pod in pods if pod.phase == "Pending" and pod.node]
    if trouble is None or reshard_pods.is_shown(trouble) or not stuck or waited < _STUCK_SECONDS:
        return None
    return EventQuery(attempt=status.attempt, reason=POD_STUCK, uid=stuck[0].uid, name=stuck[0].name)


def diagnose_from_events(query: EventQuery, events: Iterable[Mapping[str, Any]]) -> PodDiagnosis | None:
    """Return a diagnosis with the newest warning among an object's events, or None."""
    warnings = [item for item in events if item.get("type") == "Warning" and item.get("reason") != "FailedScheduling"]
    if not warnings:
        return None
    newest = max(warnings, key=lambda item: parse_time(item.get("lastTimestamp") or item.get("eventTime")) or 0.0)
    # The Job controller gives every pod a new name; without its suffix, the same refusal gives the same message.
    reason = re.sub(
        rf"\b{re.escape(query.name)}-(\d+-)?[a-z0-9]{{5}}\b", f"{query.name}-*", _one_line(newest.get("message"))
    )
    text = f"{newest.get('reason')}: {reason}"
    subject = "the pods cannot be created" if query.reason == PODS_REFUSED else f"pod {query.name} does not begin"
    return PodDiagnosis(attempt=query.attempt, reason=query.reason, message=f"{subject}: {text}")


def diagnose_refused_launch(attempt: int, message: str | None) -> PodDiagnosis:
    """Return a diagnosis with the API server's answer to a launch."""
    return PodDiagnosis(
        attempt=attempt, reason=LAUNCH_REFUSED, message=f"the API server refuses the launch: {_one_line(message)}"
    )


def diagnose_name_conflict(attempt: int, message: str) -> PodDiagnosis:
    """Return a diagnosis for an object of another owner that has the name of an attempt's object."""
    return PodDiagnosis(attempt=attempt, reason=NAME_TAKEN, message=_one_line(message))


def diagnose_running_predecessor(attempt: int, message: str) -> PodDiagnosis:
    """Return a diagnosis for pods of an earlier job of the same name that may still run."""
    return PodDiagnosis(attempt=attempt, reason=PREDECESSOR_RUNS, message=_one_line(message))


def _one_line(text: str | None) -> str:
    return sentence(text or "", _MESSAGE_BYTES)
