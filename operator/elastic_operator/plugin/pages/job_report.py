"""What there is to say about one job, as data: read from the resource and its events alone. Pure.

`-o json` is this, in camelCase; the text for people (`story`) is made from it. Fields without a value are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_operator.api import status_reader
from elastic_operator.api.serialization import Time, parse_time
from elastic_operator.api.spec import Spec, SpecError, parse_spec
from elastic_operator.api.status import Conversion, ExcludedNode, Recovery, RestartBudget, Status, short
from elastic_operator.plugin.pages.wait_reason import Waiting, waits_for
from elastic_operator.reconcile import goodput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a recovery: what was waited for, for how long, until when."""

    name: str
    seconds: float
    time: Time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """One change of the running attempt.

    Attributes:
        state: `Done`, `Open` (goes on now), `Abandoned` (another one, or a suspension, took its place).
        message: why.
        lost: nodes, as far as any.
        from_: topology before.
        to: topology after; empty while there is none.
        start_time: first sign, or the request of a planned change.
        end_time: first step of the attempt that followed.
        parts: in the order in which they happened.
        total_seconds: of all parts so far.
        conversion: what the reshard Job moved; None where none was needed.
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
    conversion: Conversion | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EventReport:
    """One event of the job."""

    time: Time | None
    type: str
    reason: str
    message: str
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitReport:
    """The newest commit that can be gone on from."""

    step: int
    uri: str
    topology: str
    num_bytes: int = 0
    writer: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """Everything about a job.

    Attributes:
        now: what is happening, and what it waits for.
        topology: of the attempt that runs or is being started.
        resumed_from: what that attempt continues from.
        recoveries: oldest first; the operator keeps the last ten.
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
    loss: float | None = None
    resumed_from: str = ""
    commit: CommitReport | None = None
    recoveries: tuple[RecoveryReport, ...] = ()
    excluded_nodes: tuple[ExcludedNode, ...] = ()
    restart_budget: RestartBudget | None = None
    goodput: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    events: tuple[EventReport, ...] = ()


def report(resource: Mapping[str, Any], now: float, events: Sequence[Mapping[str, Any]] = ()) -> JobReport:
    """The report of a resource as the API server has it.

    Args:
        now: seconds since the epoch.
        events: core/v1 Events about it, in any order.
    """
    meta, status = resource["metadata"], read_status(resource)
    spec, problem = read_spec(resource)
    progress, resume = status.progress, status.current.resume if status.current else None
    return JobReport(
        name=meta["name"],
        namespace=meta["namespace"],
        phase=status.phase if resource.get("status") else "Unknown",
        reason=status.reason,
        message=status.message,
        now=waits_for(resource, spec, problem, status, now),
        create_time=parse_time(meta.get("creationTimestamp")),
        resource=spec.accelerator.resource if spec else "",
        attempt=status.attempt,
        topology=status.topology_text,
        nodes=status.replicas,
        gpus=status.gpus,
        step=progress.step if progress else None,
        loss=progress.loss if progress else None,
        resumed_from=resume.reason if resume else "",
        commit=_commit(status),
        recoveries=recoveries(status),
        excluded_nodes=status.excluded_nodes,
        restart_budget=status.restart_budget,
        goodput=status.goodput,
        events=event_reports(events),
    )


def read_status(resource: Mapping[str, Any]) -> Status:
    """The typed status; all defaults where the operator has written none."""
    return status_reader.read_status(resource.get("status") or {}).status


def read_spec(resource: Mapping[str, Any]) -> tuple[Spec | None, str]:
    """The typed spec, or what is wrong with it."""
    try:
        return parse_spec(resource["spec"]), ""
    except SpecError as error:
        return None, "; ".join(error.problems)


def recoveries(status: Status) -> tuple[RecoveryReport, ...]:
    """All recoveries that the operator remembers, oldest first."""
    newest = len(status.recoveries) - 1
    return tuple(
        _recovery(item, is_newest=position == newest and not status.terminal)
        for position, item in enumerate(status.recoveries)
    )


def event_reports(events: Sequence[Mapping[str, Any]]) -> tuple[EventReport, ...]:
    """Events in the order in which they happened last."""
    found = [
        EventReport(
            time=parse_time(item.get("lastTimestamp") or item.get("eventTime")),
            type=item.get("type") or "Normal",
            reason=item.get("reason") or "",
            message=item.get("message") or "",
            count=int(item.get("count") or 1),
        )
        for item in sorted(events, key=_order)
    ]
    return tuple(found)


def _order(event: Mapping[str, Any]) -> tuple[str, str]:
    # Event times have whole seconds; the resource version decides within one.
    version = str((event.get("metadata") or {}).get("resourceVersion") or "")
    return str(event.get("lastTimestamp") or event.get("eventTime") or ""), version.zfill(20)


def _recovery(item: Recovery, *, is_newest: bool) -> RecoveryReport:
    begin = item.signal_time if item.signal_time is not None else item.detect_time
    reached, found = float(begin or 0.0), list[Part]()
    for name, seconds in goodput.parts(item).items():
        reached += seconds
        found.append(Part(name=name, seconds=round(seconds, 3), time=Time(reached)))
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
        parts=tuple(found),
        total_seconds=round(sum(part.seconds for part in found), 3),
        last_step=item.last_step,
        commit_step=item.commit_step,
        lost_steps=item.lost_steps,
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
