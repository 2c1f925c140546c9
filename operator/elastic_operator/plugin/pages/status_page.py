"""`kubectl etj status` as text: the current state first, then every recovery, newest last. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_operator.api.status import FailureCount, StartMode
from elastic_operator.observed.signal_kinds import LEAVE_NODE
from elastic_operator.plugin.pages.job_report import JobReport, RecoveryReport
from elastic_operator.plugin.pages.text import (
    format_age,
    format_clock,
    format_fields,
    format_seconds,
    format_size,
    format_table,
    pluralize,
    wrap,
)
from reshard.errors import TopologyError
from reshard.topology import Topology

PARTS = {
    "detect": "loss confirmed",
    "plan": "next attempt planned",
    "reshard": "checkpoint resharded",
    "stop": "old pods gone",
    "launch": "attempt launched",
    "schedule": "all pods run",
    "load": "first step done",
}
"""The event that ends each part of a recovery."""

_INDENT = 13


def format_status(job: JobReport, now: float, *, max_events: int = 10) -> str:
    """Format the report of a job with its newest `max_events` Events."""
    sections = [format_fields(list_facts(job, now)), "", "Now:  " + wrap(job.now.doing, 6)]
    if job.now.waits_for:
        sections.append("      waits for " + wrap(job.now.waits_for, 16))
    if job.now.advice:
        sections.append("      hint: " + wrap(job.now.advice, 12))
    sections += ["", f"Recoveries ({_summary(job)}):" if job.recoveries else "Recoveries: none"]
    for number, item in enumerate(job.recoveries, 1):
        sections += ["", *_recovery(number, item, now)]
    if max_events and job.events:
        sections += ["", _events(job, now, max_events)]
    return "\n".join(sections)


def list_facts(job: JobReport, now: float) -> Iterator[tuple[str, str]]:
    """Yield names and values of the facts about a job; empty values are not known."""
    why = f" ({job.reason})" if job.reason and job.reason not in (job.phase, "Training") else ""
    yield "Job", f"{job.namespace}/{job.name}, created {format_age(_since(job.create_time, now))} ago"
    yield "Phase", f"{job.phase}{why}"
    if job.attempt:
        shape = (
            f"{job.topology} on {pluralize(job.nodes, 'node')}, {job.gpus} x {job.resource}" if job.topology else "none"
        )
        yield "Attempt", f"{job.attempt}: {shape}" if job.topology else f"{job.attempt} was the last one"
    yield "Resumed", job.resumed_from
    if job.commit is not None:
        num_bytes = f", {format_size(job.commit.num_bytes)}" if job.commit.num_bytes else ""
        yield "Commit", f"step {job.commit.step} ({job.commit.topology}{num_bytes}): {job.commit.uri}"
    yield "Goodput", _goodput(job)
    budget = job.restart_budget
    if budget is not None and budget.limit:
        window = format_age(budget.window_seconds)
        yield "Budget", f"{budget.used} of {budget.limit} restarts for crashes and hangs used in {window}"
    if job.failure_counts:
        yield "Failures", ", ".join(_count(item, now) for item in job.failure_counts)
    for item in job.excluded_nodes:
        pending = "until that is over" if item.reason in LEAVE_NODE else "while it is not Ready"
        until = pending if item.until is None else f"for {format_age(item.until - now)} more"
        yield "Avoided", f"node {item.name}, {until}: {item.reason}"


def _count(item: FailureCount, now: float) -> str:
    """Format the failures of one class, for instance `Crash 3 (3 in a row; the next attempt is planned in 20s)`."""
    details = [f"{item.in_a_row} in a row"] if item.in_a_row > 1 else []
    if item.retry_time is not None and item.retry_time > now:
        details.append(f"the next attempt is planned in {format_age(item.retry_time - now)}")
    if item.limit is not None:
        details.append(f"{item.used} of {item.limit} used in {format_age(item.window_seconds)}")
    return f"{item.failure_class} {item.total}" + (f" ({'; '.join(details)})" if details else "")


def _goodput(job: JobReport) -> str:
    ettr = job.goodput.get("ettr")
    if ettr is None:
        return ""
    lost = pluralize(int(job.goodput.get("lostSteps", 0)), "step")
    return f"{ettr:.1%} of {format_age(job.goodput.get('windowSeconds'))} was training that counted; {lost} done twice"


def _summary(job: JobReport) -> str:
    failures = sum(not item.planned for item in job.recoveries)
    planned = len(job.recoveries) - failures
    parts = [pluralize(failures, "loss")] if failures else []
    parts += [pluralize(planned, "planned change")] if planned else []
    # After a power loss the first signal comes seconds later; the length of this gap is unknown.
    return ", ".join(parts) + ", oldest first" + ("; a loss counts from its first sign" if failures else "")


def _recovery(number: int, item: RecoveryReport, now: float) -> Iterator[str]:
    lost = f", lost {', '.join(item.lost)}" if item.lost else ""
    kind = "planned" if item.planned else "unplanned"
    yield f"{number}. {format_clock(item.start_time)}  {item.cause} ({kind}){lost}: {describe_length(item, now)}"
    yield _line("why", item.message)
    yield _line("topology", describe_change(item))
    if item.to_attempt and item.state != "Abandoned":
        yield _line("steps", describe_steps(item))
        yield _line("moved", describe_moved(item))
    reached = 0.0
    for part in item.parts:
        reached += part.seconds
        what = PARTS.get(part.name, part.name)
        if part.name == "detect" and item.planned:
            what = "committed, ready to exit"
        head = "timeline" if part is item.parts[0] else ""
        yield f"   {head:<9} {reached:7.1f} s  {f'+{part.seconds:.1f}':>7}  {what}"
    if item.state == "Open":
        yield f"   {'':<9} {'...':>9}  {'':>7}  not over yet"


def describe_length(item: RecoveryReport, now: float) -> str:
    """Describe how long the job did not train."""
    if item.state == "Done":
        return f"training again after {format_seconds(item.total_seconds)}"
    if item.state == "Open":
        return f"no training for {format_seconds(_since(item.start_time, now) or 0.0)} so far"
    return "ended by the next one"


def describe_change(item: RecoveryReport) -> str:
    """Describe the topology before and after a recovery."""
    old, new = _with_gpus(item.from_), _with_gpus(item.to)
    before = f"{old} (attempt {item.from_attempt})"
    if not item.to_attempt:
        return f"{before} -> none yet" if item.state == "Open" else before
    if item.from_ == item.to:
        return f"{old}, the same in attempts {item.from_attempt} and {item.to_attempt}"
    return f"{before} -> {new} (attempt {item.to_attempt})"


def _with_gpus(topology: str) -> str:
    try:
        return f"{topology} on {pluralize(Topology.parse(topology).world_size, 'GPU')}" if topology else "none"
    except TopologyError:
        return topology


def describe_steps(item: RecoveryReport) -> str:
    """Describe where the training stopped and went on."""
    lost = f"{pluralize(item.lost_steps, 'step')} to do again" if item.lost_steps else "nothing lost"
    on = "went on" if item.state == "Done" else "goes on"
    return f"stopped after step {item.last_step}, {on} from the commit of step {item.commit_step}: {lost}"


def describe_moved(item: RecoveryReport) -> str:
    """Describe what the conversion of the checkpoint moved."""
    done = item.conversion
    if done is not None:
        verified = "verified" if done.verified else "not verified"
        sizes = f"{format_size(done.bytes_read)} read, {format_size(done.bytes_written)} written"
        return f"{sizes} in {format_seconds(done.seconds)} ({done.mode}, {verified})"
    if item.start_mode == StartMode.LOAD:
        return "nothing: the training loads the checkpoint in its new topology by itself"
    if any(part.name == "reshard" for part in item.parts):
        return "checkpoint resharded"
    if item.from_ != item.to and item.state == "Open" and item.commit_step:
        return "not yet"
    return "nothing: the checkpoint is used as it is" if item.commit_step else "nothing: there was no commit"


def _line(name: str, value: str) -> str:
    return f"   {name:<9} {wrap(value, _INDENT)}"


def _events(job: JobReport, now: float, max_events: int) -> str:
    shown = job.events[-max_events:]
    older = len(job.events) - len(shown)
    head = "Events (newest last" + (f", {older} older ones left out):" if older else "):")
    rows = [
        (
            format_age(_since(item.time, now)),
            item.reason + (f" x{item.count}" if item.count > 1 else ""),
            _short(item.message),
        )
        for item in shown
    ]
    return head + "\n" + format_table(("AGE", "REASON", "MESSAGE"), rows)


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= 120 else line[:117] + "..."


def _since(moment: float | None, now: float) -> float | None:
    return None if moment is None else now - moment
