"""Why an attempt does not get its pods: what the API server, the Job controller and the kubelets say of it.

None of it can be seen on the pods themselves, as they do not exist yet or have not begun. It decides nothing: it is
told to people, who can do something about it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_operator.api.serialization import parse_time
from elastic_operator.api.status import Status
from elastic_operator.observed.observation import Observation, Trouble
from reshard.contract import sentence

LAUNCH_REFUSED = "LaunchRefused"
"""The API server does not let the operator create an attempt's objects."""

NAME_TAKEN = "NameTaken"
"""An object that is not the job's has the name of one that the operator has to create."""

PREDECESSOR_RUNS = "PredecessorRuns"
"""Pods of an earlier job of the same name may still run."""

OF_THE_LAUNCH = (LAUNCH_REFUSED, NAME_TAKEN, PREDECESSOR_RUNS)
"""What keeps an attempt's objects from being created; over once they are."""

PODS_REFUSED = "PodsRefused"
"""The API server does not let the Job controller create the pods: quotas, pod security, limits, webhooks."""

POD_STUCK = "PodStuck"
"""A pod has a node, and does not begin there: volumes, networks."""

PATIENCE_SECONDS = 3.0
"""An ordinary start is further than that."""

AGAIN_SECONDS = 10.0
"""How often the events are read while it goes on."""

_MESSAGE_BYTES = 1024

_STUCK_SECONDS = 20.0
"""Volumes and images take a while."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Whose warnings to read. `uid` is that of the object."""

    attempt: int
    reason: str
    uid: str
    name: str


def question(status: Status, world: Observation, now: float) -> Question | None:
    """Whose warnings would tell why the attempt has not begun; None where it has, or is only about to."""
    current = status.current
    if current is None or current.launch_time is None or current.schedule_time is not None:
        return None
    waited = now - current.launch_time
    job, pods = world.job(status.attempt), world.workers(status.attempt)
    if job is None or waited < PATIENCE_SECONDS:
        return None
    if len(pods) < current.num_nodes:
        return Question(attempt=status.attempt, reason=PODS_REFUSED, uid=job.uid, name=job.name)
    stuck = [pod for pod in pods if pod.phase == "Pending" and pod.node and not pod.waiting_reason]
    if not stuck or waited < _STUCK_SECONDS:
        return None
    return Question(attempt=status.attempt, reason=POD_STUCK, uid=stuck[0].uid, name=stuck[0].name)


def answer(asked: Question, events: Iterable[Mapping[str, Any]]) -> Trouble | None:
    """The newest warning among the events about the object."""
    warnings = [item for item in events if item.get("type") == "Warning" and item.get("reason") != "FailedScheduling"]
    if not warnings:
        return None
    newest = max(warnings, key=lambda item: parse_time(item.get("lastTimestamp") or item.get("eventTime")) or 0.0)
    # The Job controller gives every pod that it tries to create another name, and the same thing is told once.
    said = re.sub(
        rf"\b{re.escape(asked.name)}-(\d+-)?[a-z0-9]{{5}}\b", f"{asked.name}-*", _one_line(newest.get("message"))
    )
    text = f"{newest.get('reason')}: {said}"
    whose = "the pods cannot be created" if asked.reason == PODS_REFUSED else f"pod {asked.name} does not begin"
    return Trouble(attempt=asked.attempt, reason=asked.reason, message=f"{whose}: {text}")


def refused(attempt: int, message: str | None) -> Trouble:
    """The API server's own answer to a launch."""
    return Trouble(
        attempt=attempt, reason=LAUNCH_REFUSED, message=f"the API server refuses the launch: {_one_line(message)}"
    )


def name_taken(attempt: int, message: str) -> Trouble:
    """What is in the way of an object of an attempt."""
    return Trouble(attempt=attempt, reason=NAME_TAKEN, message=_one_line(message))


def predecessor(attempt: int, message: str) -> Trouble:
    """What an earlier job of the same name has left behind, and may still run."""
    return Trouble(attempt=attempt, reason=PREDECESSOR_RUNS, message=_one_line(message))


def _one_line(text: str | None) -> str:
    return sentence(text or "", _MESSAGE_BYTES)
