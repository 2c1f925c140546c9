"""Selects the pod whose log to print: rank 0 of the running attempt, or the pod that failed first. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elastic_operator.api.status import Phase, Status
from elastic_operator.observed.observation import RESHARD, WORKER, PodView
from elastic_operator.plugin.errors import Exit, PluginError
from elastic_operator.plugin.pages.text import pluralize

_AFTERMATH = 128
"""Exit codes above it mean that a signal ended the process; such pods were usually stopped after another one failed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Options that select a pod; None for the default.

    Attributes:
        attempt: number of the attempt.
        index: completion index of a training pod; there is one pod per node.
        rank: global rank; its pod follows from the number of accelerators per pod.
        reshard: select a reshard pod instead of a training pod.
    """

    attempt: int | None = None
    index: int | None = None
    rank: int | None = None
    reshard: bool = False


def choose_pod(name: str, status: Status, pods: Sequence[PodView], wanted: LogQuery, resource: str) -> PodView:
    """Choose the pod that matches the options.

    Raises:
        PluginError: no pod matches; the message says which pods there are.
    """
    role = RESHARD if wanted.reshard else WORKER
    of_role = [pod for pod in pods if pod.role == role]
    attempt = _attempt(status, of_role) if wanted.attempt is None else wanted.attempt
    of_attempt = [pod for pod in of_role if pod.attempt == attempt]
    if not of_attempt:
        raise PluginError(Exit.REFUSED, _none(name, status, of_role, attempt, wanted))
    index = wanted.index
    if wanted.rank is not None:
        index = wanted.rank // max(1, of_attempt[0].requests.get(resource, 1))
    if index is None:
        return _most_telling(of_attempt)
    chosen = next((pod for pod in of_attempt if pod.index == index), None)
    if chosen is None:
        there = ", ".join(str(pod.index) for pod in sorted(of_attempt, key=lambda pod: pod.index or 0))
        raise PluginError(Exit.REFUSED, f"attempt {attempt} of {name} has no pod {index}; it has {there}")
    return chosen


def _attempt(status: Status, pods: Sequence[PodView]) -> int:
    """Return the newest attempt that has pods, or the newest attempt if none has."""
    return max((pod.attempt for pod in pods), default=status.attempt)


def _most_telling(pods: Sequence[PodView]) -> PodView:
    """Return the failed pod that most likely failed first; without failed pods that of rank 0."""
    failed = [pod for pod in pods if pod.has_failed]
    if not failed:
        return min(pods, key=lambda pod: pod.index or 0)
    return min(failed, key=lambda pod: ((pod.exit_code or 0) > _AFTERMATH or not pod.exit_code, pod.index or 0))


def _none(name: str, status: Status, pods: Sequence[PodView], attempt: int, wanted: LogQuery) -> str:
    if wanted.reshard:
        attempts = sorted({pod.attempt for pod in pods})
        there = f"; there are some of attempt {', '.join(map(str, attempts))}" if attempts else ""
        return f"{name} has no reshard pods of attempt {attempt}{there}; finished ones stay until the next conversion"
    attempts = sorted({pod.attempt for pod in pods})
    if wanted.attempt is not None and wanted.attempt > status.attempt:
        return f"{name} has had {pluralize(status.attempt, 'attempt')}, there is no attempt {wanted.attempt}"
    if attempts:
        there = f"those of attempt {', '.join(map(str, attempts))} are there"
        return (
            f"the pods of attempt {attempt} of {name} are gone: only pods that failed by themselves stay, those of the "
            f"last failed attempts (spec.failedAttemptsHistoryLimit); {there}"
        )
    if status.attempt == 0:
        return f"{name} has not started anything yet: `kubectl etj status {name}` says why"
    if status.phase == Phase.SUSPENDED:
        return f"{name} is suspended: its pods are gone, and their logs with them"
    last = f"; the last one ended because {status.changes[-1].message}" if status.changes else ""
    return f"{name} has no training pods now (phase {status.phase}){last}"


def explain_missing_log(pod: PodView) -> str:
    """Return why the pod has no log yet, or an empty string if it should have one."""
    if pod.unschedulable:
        return f"pod {pod.name} has no node yet: {pod.unschedulable}"
    if pod.waiting_reason:
        return f"the container of pod {pod.name} cannot start: {pod.waiting_reason}: {pod.waiting_message}"
    return f"pod {pod.name} is being started on {pod.node or 'no node yet'}" if pod.phase == "Pending" else ""
