"""`kubectl etj why`: the last decision of the operator and its reasons, each with the field that holds it. Pure.

Nothing is computed anew: every sentence is one that the operator wrote when it decided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Phase, Rejected, Status, short
from elastic_operator.plugin.pages.job_report import read_source
from elastic_operator.plugin.pages.job_source import JobSource
from elastic_operator.plugin.pages.text import format_age, format_clock, format_fields, pluralize
from elastic_operator.plugin.pages.wait_reason import Waiting, explain_wait


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason of a decision.

    Attributes:
        subject: what the reason is about, in one or two words.
        text: the operator's sentence.
        source: field of the resource that holds it.
    """

    subject: str
    text: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The last decision about a job.

    Attributes:
        decision: what the operator decided.
        time: when; None if the status does not record it.
        reasons: reasons of the decision, the direct one first.
        rejected: topologies that the last plan refused, as far as the status keeps them.
        now: what the job does now, and what it waits for.
    """

    name: str
    namespace: str
    phase: str
    decision: str
    now: Waiting
    time: Time | None = None
    reasons: tuple[Reason, ...] = ()
    rejected: tuple[Rejected, ...] = ()


def explain(resource: Mapping[str, Any], now: float) -> Explanation:
    """Explain the last decision about a job.

    Args:
        resource: the resource as the API server returned it.
        now: current time in seconds since the epoch.
    """
    return explain_source(read_source(resource), now)


def explain_source(source: JobSource, now: float) -> Explanation:
    """Explain the last decision about a job as `explain` does, from parsed parts."""
    status, is_seen = source.status, source.is_seen
    decision, moment = _decision(status) if is_seen else ("nothing has been decided yet", None)
    return Explanation(
        name=source.name,
        namespace=source.namespace,
        phase=status.phase if is_seen else "Unknown",
        decision=decision,
        time=None if moment is None else Time(moment),
        reasons=tuple(_reasons(status, now)) if is_seen else (),
        rejected=status.plan.rejected if status.plan is not None else (),
        now=explain_wait(source, now),
    )


def format_explanation(found: Explanation, now: float) -> str:
    """Format an explanation: the decision, its reasons, what could not run, and what follows."""
    ago = "" if found.time is None else f" ({format_clock(found.time)}, {format_age(now - found.time)} ago)"
    sections = [f"{found.name}: {found.decision}{ago}."]
    if found.reasons:
        sections += ["", format_fields((item.subject, item.text) for item in found.reasons)]
    if found.rejected:
        sections += ["", "Could not run:"]
        sections += [f"  {item.topology}: {item.reason}" for item in found.rejected]
    facts = [("Now", found.now.doing), ("Waits for", found.now.waits_for), ("Hint", found.now.advice)]
    return "\n".join([*sections, "", format_fields(facts)])


def _decision(status: Status) -> tuple[str, float | None]:
    current = status.current
    if status.terminal:
        return f"the job is {status.phase}", status.finish_time
    if status.drain is not None:
        return f"attempt {status.attempt} has to commit and exit", status.drain.start_time
    if status.phase == Phase.SUSPENDED:
        return "nothing may run", _last_stop(status)
    if current is not None:
        shape = f"{short(current.topology)} on {pluralize(current.num_nodes, 'node')}"
        state = "runs" if current.first_step_time else "starts" if current.launch_time else "is planned"
        return f"attempt {status.attempt} {state} as {shape}", current.plan_time
    if status.phase == Phase.WAITING:
        return "no attempt starts until a topology fits", status.queue_time
    return "no attempt runs", _last_stop(status)


def _last_stop(status: Status) -> float | None:
    return status.changes[-1].detect_time if status.changes else None


def _reasons(status: Status, now: float) -> Iterator[Reason]:
    if status.current is None or status.terminal:
        yield from _as_reason("Because", status.message, "status.message")
    yield from _drain(status)
    if status.changes:
        yield from _change(status)
    if status.plan is not None:
        subject = "Last plan" if status.current is None else "Topology"
        yield from _as_reason(subject, status.plan.reason, "status.plan.reason")
    yield from _restrictions(status, now)
    yield from _checkpoint(status)
    for position, node in enumerate(status.excluded_nodes):
        until = "" if node.until is None else f", for {format_age(node.until - now)} more"
        yield from _as_reason("Avoided", f"node {node.name}{until}: {node.reason}", f"status.excludedNodes[{position}]")
    if status.growth is not None and status.drain is None:
        better = f"{status.growth.topology} on {pluralize(status.growth.num_nodes, 'node')}"
        text = f"{better} has fitted for {format_age(now - status.growth.since)}, but not for long enough yet"
        yield from _as_reason("Growth", text, "status.growth")


def _drain(status: Status) -> Iterator[Reason]:
    if status.drain is not None:
        yield from _as_reason("Because", f"{status.drain.cause}: {status.drain.message}", "status.drain.message")


def _change(status: Status) -> Iterator[Reason]:
    """Yield why the attempt before ended, from the newest recovery or pause."""
    item = status.changes[-1]
    is_recovery = bool(status.recoveries) and status.recoveries[-1] is item
    held = "recoveries" if is_recovery else "pauses"
    source = f"status.{held}[{len(getattr(status, held)) - 1}]"
    kind = "planned" if item.planned else "unplanned"
    yield from _as_reason("Change", f"{item.cause} ({kind}): {item.message}", f"{source}.message")
    yield from _as_reason("Lost", ", ".join(item.lost), f"{source}.lost")
    code = "" if item.exit_code is None else f" with exit code {item.exit_code}"
    if item.blamed or code:
        where = f" on node {item.blamed}" if item.blamed else ""
        yield from _as_reason("Began", f"the first failure was{where}{code}", f"{source}.blamed")
    if item.charged:
        yield from _as_reason("Budget", "the recovery is charged to a restart budget", f"{source}.charged")


def _restrictions(status: Status, now: float) -> Iterator[Reason]:
    """Yield what limits the next plan besides the nodes."""
    limit, pin = status.placement_limit, status.pin
    if limit is not None:
        text = f"plans count on {pluralize(limit.num_nodes, 'node')} for {format_age(limit.until - now)}"
        yield from _as_reason(
            "Limit", f"{text}, as many as the scheduler placed: {limit.message}", "status.placementLimit"
        )
    if status.pinned is not None:
        again = "" if pin is None or pin.retry_time is None else f"; next try in {format_age(pin.retry_time - now)}"
        text = f"only {short(status.pinned)}, because conversions to other topologies have failed{again}"
        yield from _as_reason("Pinned", text, "status.pinned")
    for position, count in enumerate(status.failure_counts):
        if count.retry_time is not None and count.retry_time > now:
            left = format_age(count.retry_time - now)
            text = f"{count.failure_class} {count.in_a_row} in a row: planned again in {left}"
            yield from _as_reason("Pause", text, f"status.failureCounts[{position}].retryTime")


def _checkpoint(status: Status) -> Iterator[Reason]:
    """Yield why the attempt starts from its commit, and how it is converted."""
    if status.current is not None:
        yield from _as_reason("Checkpoint", status.current.resume.reason, "status.current.resume.reason")
    for position, commit in enumerate(status.checkpoint.history):
        if commit.invalid:
            text = f"the commit of step {commit.step} in attempt {commit.attempt}: {commit.invalid_reason}"
            yield from _as_reason("Not used", text, f"status.checkpoint.history[{position}].invalidReason")
    job = status.reshard
    if job is not None and job.attempt == status.attempt:
        yield from _as_reason(
            "Conversion", f"{job.mode}: {job.mode_reason}" if job.mode_reason else "", "status.reshard"
        )
        yield from _as_reason("Result", job.message, "status.reshard.message")


def _as_reason(subject: str, text: str, source: str) -> Iterator[Reason]:
    if text:
        yield Reason(subject=subject, text=text, source=source)
