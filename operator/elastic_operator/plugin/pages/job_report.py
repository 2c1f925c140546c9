"""The report of one job as data, made from the resource and its Events only. Pure.

`-o json` prints it in camelCase, without empty fields; `status_page` makes the text for people from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_operator.api import status_reader
from elastic_operator.api.serialization import Time, parse_time
from elastic_operator.api.spec import Spec, SpecError, parse_spec
from elastic_operator.api.status import Conversion, ExcludedNode, FailureCount, Recovery, RestartBudget, Status, short
from elastic_operator.plugin.pages.job_source import JobSource
from elastic_operator.plugin.pages.wait_reason import Waiting, explain_wait
from elastic_operator.reconcile import goodput
from elastic_operator.reconcile.record import is_managed_elsewhere


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a recovery with its duration and its end."""

    name: str
    seconds: float
    time: Time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """One change from an attempt to the next.

    Attributes:
        state: `Done`, `Open` (in progress), `Abandoned` (another recovery or a suspension replaced it).
        message: why the attempt was replaced.
        lost: lost nodes.
        from_: topology before.
        to: topology after; empty while it is not planned.
        start_time: first failure signal, or the request of a planned change.
        end_time: first step of the next attempt.
        parts: parts in the order in which they happened.
        total_seconds: sum of the parts so far.
        start_mode: how the next attempt starts: `AsIs`, `Load` or `Reshard`; empty if it has no commit, or no plan yet.
        conversion: result of the reshard Job; None if none was needed.
    """

    cause: str
    message: str
    planned: bool
    state: str
    lost: tuple[str, ...] = ()
    from_: str = ""
    to: str = ""
    from_attempt: int = 0
    to_attempt: int = 0
    start_time: Time | None = None
    end_time: Time | None = None
    parts: tuple[Part, ...] = ()
    total_seconds: float = 0.0
    last_step: int = 0
    commit_step: int = 0
    lost_steps: int = 0
    start_mode: str = ""
    conversion: Conversion | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EventReport:
    """One Event about the job."""

    time: Time | None
    type: str
    reason: str
    message: str
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitReport:
    """The newest commit from which the job can resume."""

    step: int
    uri: str
    topology: str
    num_bytes: int = 0
    writer: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """The report of one job.

    Attributes:
        now: what the job does now, and what it waits for.
        topology: topology of the attempt that runs or starts.
        step_time: when the operator last observed a new step.
        samples: global samples consumed.
        resumed_from: the checkpoint from which that attempt resumed.
        recoveries: oldest first; the status keeps the last ten.
        events: oldest first.
    """

    name: str
    namespace: str
    phase: str
    reason: str
    message: str
    now: Waiting
    create_time: Time | None = None
    resource: str = ""
    attempt: int = 0
    topology: str = ""
    nodes: int = 0
    gpus: int = 0
    step: int | None = None
    step_time: Time | None = None
    samples: int | None = None
    loss: float | None = None
    resumed_from: str = ""
    commit: CommitReport | None = None
    recoveries: tuple[RecoveryReport, ...] = ()
    excluded_nodes: tuple[ExcludedNode, ...] = ()
    restart_budget: RestartBudget | None = None
    failure_counts: tuple[FailureCount, ...] = ()
    goodput: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    events: tuple[EventReport, ...] = ()


def make_report(resource: Mapping[str, Any], now: float, events: Sequence[Mapping[str, Any]] = ()) -> JobReport:
    """Make the report of a job.

    Args:
        resource: the resource as the API server returned it.
        now: current time in seconds since the epoch.
        events: core/v1 Events about the job, in any order.
    """
    return report_job(read_source(resource), now, events)


def report_job(source: JobSource, now: float, events: Sequence[Mapping[str, Any]] = ()) -> JobReport:
    """Make the report of a job as `make_report` does, from parsed parts."""
    status, spec = source.status, source.spec
    progress, resume = status.progress, status.current.resume if status.current else None
    return JobReport(
        name=source.name,
        namespace=source.namespace,
        phase=status.phase if source.is_seen else "Unknown",
        reason=status.reason,
        message=status.message,
        now=explain_wait(source, now),
        create_time=None if source.created_at is None else Time(source.created_at),
        resource=spec.accelerator.resource if spec else "",
        attempt=status.attempt,
        topology=status.topology_text,
        nodes=status.replicas,
        gpus=status.gpus,
        step=progress.step if progress else None,
        step_time=None if progress is None or progress.step_time is None else Time(progress.step_time),
        samples=progress.samples if progress else None,
        loss=progress.loss if progress else None,
        resumed_from=resume.reason if resume else "",
        commit=_commit(status),
        recoveries=recovery_reports(status),
        excluded_nodes=status.excluded_nodes,
        restart_budget=status.restart_budget,
        failure_counts=status.failure_counts,
        goodput=status.goodput,
        events=event_reports(events),
    )


def read_source(resource: Mapping[str, Any]) -> JobSource:
    """Parse a resource as the API server returned it."""
    meta, written = resource["metadata"], resource.get("spec") or {}
    spec, problem = read_spec(resource)
    return JobSource(
        name=meta["name"],
        namespace=meta["namespace"],
        status=read_status(resource),
        spec=spec,
        problem=problem,
        generation=meta.get("generation", 0),
        created_at=parse_time(meta.get("creationTimestamp")),
        version=str(meta.get("resourceVersion") or ""),
        managed_by=written["managedBy"] if is_managed_elsewhere(written) else "",
        is_seen=bool(resource.get("status")),
    )


def read_status(resource: Mapping[str, Any]) -> Status:
    """Read the status of a resource; all fields have their defaults if the operator has not written it yet."""
    return status_reader.read_status(resource.get("status") or {}).status


def read_spec(resource: Mapping[str, Any]) -> tuple[Spec | None, str]:
    """Read the spec of a resource; return None and the problems if it is invalid."""
    try:
        return parse_spec(resource["spec"]), ""
    except SpecError as error:
        return None, "; ".join(error.problems)


def recovery_reports(status: Status) -> tuple[RecoveryReport, ...]:
    """Report all recoveries in the status, oldest first; pauses are none."""
    newest = status.changes[-1] if status.changes else None
    return tuple(_recovery(item, is_newest=item is newest and not status.terminal) for item in status.recoveries)


def event_reports(events: Sequence[Mapping[str, Any]]) -> tuple[EventReport, ...]:
    """Report Events in the order of their last occurrence."""
    reports = [
        EventReport(
            time=parse_time(item.get("lastTimestamp") or item.get("eventTime")),
            type=item.get("type") or "Normal",
            reason=item.get("reason") or "",
            message=item.get("message") or "",
            count=int(item.get("count") or 1),
        )
        for item in sorted(events, key=_order)
    ]
    return tuple(reports)


def is_about(event: Mapping[str, Any], resource: Mapping[str, Any]) -> bool:
    """Return whether an Event is about this resource; those of a deleted one with the same name may still exist."""
    return (event.get("involvedObject") or {}).get("uid") in (None, "", resource["metadata"]["uid"])


def _order(event: Mapping[str, Any]) -> tuple[str, str]:
    # Event times have whole seconds; the resourceVersion orders the Events of one second.
    version = str((event.get("metadata") or {}).get("resourceVersion") or "")
    return str(event.get("lastTimestamp") or event.get("eventTime") or ""), version.zfill(20)


def _recovery(item: Recovery, *, is_newest: bool) -> RecoveryReport:
    begin = item.signal_time if item.signal_time is not None else item.detect_time
    end, parts = float(begin or 0.0), list[Part]()
    for name, seconds in goodput.measure_parts(item).items():
        end += seconds
        parts.append(Part(name=name, seconds=round(seconds, 3), time=Time(end)))
    state = "Done" if item.first_step_time is not None else "Open" if is_newest else "Abandoned"
    return RecoveryReport(
        cause=item.cause,
        message=item.message,
        planned=item.planned,
        state=state,
        lost=item.lost,
        from_=item.from_,
        to=item.to,
        from_attempt=item.from_attempt,
        to_attempt=item.to_attempt,
        start_time=begin,
        end_time=item.first_step_time,
        parts=tuple(parts),
        total_seconds=round(sum(part.seconds for part in parts), 3),
        last_step=item.last_step,
        commit_step=item.commit_step,
        lost_steps=item.lost_steps,
        start_mode=item.start_mode,
        conversion=item.conversion,
    )


def _commit(status: Status) -> CommitReport | None:
    newest = next((item for item in status.checkpoint.history if not item.invalid), None)
    if newest is None:
        return None
    return CommitReport(
        step=newest.step,
        uri=newest.uri,
        topology=short(newest.topology),
        num_bytes=newest.num_bytes,
        writer=newest.writer,
    )
