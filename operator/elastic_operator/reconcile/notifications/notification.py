"""Notifications about a job, from its status before and after a write. Pure.

A status states facts: a recovery has ended, the job waits, failed or is complete. Each fact has an ID that only depends
on what the status keeps. Whoever reads the same status makes the same notifications with the same IDs: the operator
that wrote it, and the one that takes over after a crash.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import format_time
from elastic_operator.api.status import Phase, Status
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.reconcile.notifications.recovery_summary import (
    RecoverySummary,
    describe_recovery,
    pluralize,
    summarize_recovery,
)
from elastic_operator.reconcile.queueing.standing import QUEUED
from reshard.contract import sentence

MAX_TEXT_BYTES = 1024
"""Maximum length of a text that a notification quotes, which pods may have written."""

MAX_ID = 256

_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._:-]")
"""An ID is part of a header; the reason in it comes from a status that anybody may have edited."""

MAX_LOST = 64
"""Maximum number of lost nodes that a notification lists."""


class NotificationKind(enum.StrEnum):
    """Kind of a notification; the values are those of `--notification-kinds`."""

    RECOVERED = "Recovered"
    """The job trains again after a failure or a planned change."""
    SCALED_UP = "ScaledUp"
    """The job trains on more nodes, or in a better topology."""
    WAITING = "Waiting"
    """The job cannot go on, and waits: for nodes, for quota, or for a valid spec."""
    FAILED = "Failed"
    """The job has failed."""
    COMPLETE = "Complete"
    """Training is complete."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """One fact about a job.

    Attributes:
        id: the same for the same fact, whoever tells it and however often.
        time: when it became true, seconds since the epoch.
        text: one sentence.
        data: the fact for programs, as JSON.
    """

    kind: NotificationKind
    id: str
    time: float
    namespace: str
    name: str
    text: str
    data: Mapping[str, Any]


def find_notifications(job: JobRef, before: Status, after: Status) -> tuple[Notification, ...]:
    """Return the facts that `after` states and `before` does not, oldest first."""
    if _facts_of(before) == _facts_of(after):
        return ()
    known = {item.id for item in _list_facts(job, before)}
    return tuple(sorted((item for item in _list_facts(job, after) if item.id not in known), key=_time))


def find_recorded(job: JobRef, status: Status, since: float) -> tuple[Notification, ...]:
    """Return the facts of a stored status that became true after `since`, oldest first."""
    return tuple(sorted((item for item in _list_facts(job, status) if item.time > since), key=_time))


def _facts_of(status: Status) -> tuple[Any, ...]:
    """Return the fields that IDs depend on; most writes change only the progress, and need no texts."""
    hold = _find_hold(status)
    return status.changes, status.phase, status.finish_time, hold and (hold[0], hold[2])


def _time(item: Notification) -> float:
    return item.time


def _list_facts(job: JobRef, status: Status) -> Iterator[Notification]:
    for index in range(len(status.changes)):
        summary = summarize_recovery(status.changes, index)
        if summary is not None:
            yield _tell_recovery(job, summary, status.changes[index].from_attempt)
    if status.terminal:
        if status.finish_time is not None:
            yield _tell_end(job, status, status.finish_time)
        return
    hold = _find_hold(status)
    if hold is not None:
        reason, message, since = hold
        text = f"waits ({reason}): {sentence(message, MAX_TEXT_BYTES)}"
        yield _make(job, NotificationKind.WAITING, f"{reason}-{format_time(since)}", since, text, reason=reason)


def _tell_recovery(job: JobRef, summary: RecoverySummary, from_attempt: int) -> Notification:
    kind = NotificationKind.SCALED_UP if summary.is_growth else NotificationKind.RECOVERED
    return _make(
        job,
        kind,
        str(from_attempt),
        summary.ended_at,
        describe_recovery(summary),
        attempt=summary.attempt,
        cause=summary.cause,
        causes=list(summary.causes),
        message=sentence(summary.message, MAX_TEXT_BYTES),
        planned=summary.planned,
        lostNodes=list(summary.lost[:MAX_LOST]),
        numLostNodes=len(summary.lost),
        seconds=round(summary.seconds, 3),
        lostSteps=summary.lost_steps,
        bytesRead=summary.bytes_read,
        bytesWritten=summary.bytes_written,
        topologyBefore=summary.before,
        topologyAfter=summary.after,
    )


def _tell_end(job: JobRef, status: Status, finish_time: float) -> Notification:
    step = status.progress.step if status.progress else 0
    figures = {"attempt": status.attempt, "step": step, "reason": status.reason}
    # `kubectl etj retry` lets a failed job go on, which may fail again: the time is part of the ID.
    mark = format_time(finish_time)
    if status.phase == Phase.COMPLETE:
        ratio = f", effective training time {status.ettr_text}" if status.ettr_text else ""
        text = f"training is complete after step {step}, in {pluralize(max(1, status.attempt), 'attempt')}{ratio}"
        return _make(job, NotificationKind.COMPLETE, mark, finish_time, text, **figures)
    text = f"failed after step {step} ({status.reason}): {sentence(status.message, MAX_TEXT_BYTES)}"
    return _make(job, NotificationKind.FAILED, mark, finish_time, text, **figures)


def _find_hold(status: Status) -> tuple[str, str, float] | None:
    """Return why the job waits, as reason and sentence, and since when; None if it does not.

    A job that waits for its first quota is left out: that is the ordinary start of a job in a queue.
    """
    valid = find(status.conditions, Type.SPEC_VALID)
    is_refused = valid is not None and valid.status == "False" and status.current is None
    if valid is not None and is_refused and valid.last_transition_time is not None:
        return valid.reason, valid.message, valid.last_transition_time
    if status.phase != Phase.WAITING or status.queue_time is None:
        return None
    if status.reason == QUEUED and not status.attempt:
        return None
    return status.reason, status.message, status.queue_time


def _make(job: JobRef, kind: NotificationKind, mark: str, time: float, text: str, **data: Any) -> Notification:
    text = sentence(text, 2 * MAX_TEXT_BYTES)
    identity = {"namespace": job.namespace, "name": job.name, "uid": job.uid}
    return Notification(
        kind=kind,
        id=_NOT_IN_ID.sub("_", f"{job.uid}-{kind.lower()}-{mark}")[:MAX_ID],
        time=time,
        namespace=job.namespace,
        name=job.name,
        text=text,
        data={"job": identity, "text": text, **data},
    )
