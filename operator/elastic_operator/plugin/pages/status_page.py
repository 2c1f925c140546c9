"""`kubectl etj status` as text: the present on top, then every recovery, newest last. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_operator.plugin.pages.job_report import JobReport, RecoveryReport
from elastic_operator.plugin.pages.text import age, clock, count, fields, seconds, size, table, wrapped
from elastic_operator.reconcile.goodput import SUSPENDED
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
"""What has been reached at the end of each part of a recovery."""

_INDENT = 13


def story(job: JobReport, now: float, *, max_events: int = 10) -> str:
    """The whole page."""
    sections = [fields(_facts(job, now)), "", "Now:  " + wrapped(job.now.doing, 6)]
    if job.now.waits_for:
        sections.append("      waits for " + wrapped(job.now.waits_for, 16))
    if job.now.advice:
        sections.append("      hint: " + wrapped(job.now.advice, 12))
    sections += ["", f"Recoveries ({_summary(job)}):" if job.recoveries else "Recoveries: none"]
    for number, item in enumerate(job.recoveries, 1):
        sections += ["", *_recovery(number, item, now)]
    if max_events and job.events:
        sections += ["", _events(job, now, max_events)]
    return "\n".join(sections)


def _facts(job: JobReport, now: float) -> Iterator[tuple[str, str]]:
    why = f" ({job.reason})" if job.reason and job.reason not in (job.phase, "Training") else ""
    yield "Job", f"{job.namespace}/{job.name}, created {age(_since(job.create_time, now))} ago"
    yield "Phase", f"{job.phase}{why}"
    if job.attempt:
        shape = f"{job.topology} on {count(job.nodes, 'node')}, {job.gpus} x {job.resource}" if job.topology else "none"
        yield "Attempt", f"{job.attempt}: {shape}" if job.topology else f"{job.attempt} was the last one"
    yield "Resumed", job.resumed_from
    if job.commit is not None:
        num_bytes = f", {size(job.commit.num_bytes)}" if job.commit.num_bytes else ""
        yield "Commit", f"step {job.commit.step} ({job.commit.topology}{num_bytes}): {job.commit.uri}"
    yield "Goodput", _goodput(job)
    budget = job.restart_budget
    if budget is not None and budget.limit:
        yield "Budget", f"{budget.used} of {budget.limit} unplanned restarts used in {age(budget.window_seconds)}"
    for item in job.excluded_nodes:
        until = "while it is not Ready" if item.until is None else f"for {age(item.until - now)} more"
        yield "Avoided", f"node {item.name}, {until}: {item.reason}"


def _goodput(job: JobReport) -> str:
    ettr = job.goodput.get("ettr")
    if ettr is None:
        return ""
    lost = count(int(job.goodput.get("lostSteps", 0)), "step")
    return f"{ettr:.1%} of {age(job.goodput.get('windowSeconds'))} was training that counted; {lost} done twice"


def _summary(job: JobReport) -> str:
    failures = sum(not item.planned for item in job.recoveries)
    planned = len(job.recoveries) - failures
    parts = [count(failures, "loss")] if failures else []
    parts += [count(planned, "planned change")] if planned else []
    # After a power loss the first sign comes seconds later, and nobody here knows how many.
    return ", ".join(parts) + ", oldest first" + ("; a loss counts from its first sign" if failures else "")


def _recovery(number: int, item: RecoveryReport, now: float) -> Iterator[str]:
    lost = f", lost {', '.join(item.lost)}" if item.lost else ""
    kind = "planned" if item.planned else "unplanned"
    yield f"{number}. {clock(item.start_time)}  {item.cause} ({kind}){lost}: {_length(item, now)}"
    yield _line("why", item.message)
    yield _line("topology", _change(item))
    if item.to_attempt and item.state != "Abandoned":
        yield _line("steps", _steps(item))
        yield _line("moved", _moved(item))
    reached = 0.0
    for part in item.parts:
        reached += part.seconds
        what = PARTS.get(part.name, part.name)
        if part.name == "detect" and item.planned:
            what = "committed, ready to exit"
        head = "timeline" if part is item.parts[0] else ""
        yield f"   {head:<9} {reached:7.1f} s  {f'+{part.seconds:.1f}':>7}  {what}"
    if item.state == "Open" and item.cause != SUSPENDED:
        yield f"   {'':<9} {'...':>9}  {'':>7}  not over yet"


def _length(item: RecoveryReport, now: float) -> str:
    if item.state == "Done":
        return f"training again after {seconds(item.total_seconds)}"
    if item.state == "Open":
        return f"no training for {seconds(_since(item.start_time, now) or 0.0)} so far"
    return "ended by the next one"


def _change(item: RecoveryReport) -> str:
    old, new = _with_gpus(item.from_), _with_gpus(item.to)
    before = f"{old} (attempt {item.from_attempt})"
    if not item.to_attempt:
        return f"{before} -> none yet" if item.state == "Open" else before
    if item.from_ == item.to:
        return f"{old}, the same in attempts {item.from_attempt} and {item.to_attempt}"
    return f"{before} -> {new} (attempt {item.to_attempt})"


def _with_gpus(topology: str) -> str:
    try:
        return f"{topology} on {count(Topology.parse(topology).world_size, 'GPU')}" if topology else "none"
    except TopologyError:
        return topology


def _steps(item: RecoveryReport) -> str:
    lost = f"{count(item.lost_steps, 'step')} to do again" if item.lost_steps else "nothing lost"
    on = "went on" if item.state == "Done" else "goes on"
    return f"stopped after step {item.last_step}, {on} from the commit of step {item.commit_step}: {lost}"


def _moved(item: RecoveryReport) -> str:
    done = item.conversion
    if done is not None:
        verified = "verified" if done.verified else "not verified"
        figures = f"{size(done.bytes_read)} read, {size(done.bytes_written)} written in {seconds(done.seconds)}"
        return f"{figures} ({done.mode}, {verified})"
    if any(part.name == "reshard" for part in item.parts):
        return "checkpoint resharded"
    if item.from_ != item.to and item.state == "Open" and item.commit_step:
        return "not yet"
    return "nothing: the checkpoint is used as it is" if item.commit_step else "nothing: there was no commit"


def _line(name: str, value: str) -> str:
    return f"   {name:<9} {wrapped(value, _INDENT)}"


def _events(job: JobReport, now: float, max_events: int) -> str:
    shown = job.events[-max_events:]
    older = len(job.events) - len(shown)
    head = "Events (newest last" + (f", {older} older ones left out):" if older else "):")
    rows = [
        (age(_since(item.time, now)), item.reason + (f" x{item.count}" if item.count > 1 else ""), _short(item.message))
        for item in shown
    ]
    return head + "\n" + table(("AGE", "REASON", "MESSAGE"), rows)


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= 120 else line[:117] + "..."


def _since(moment: float | None, now: float) -> float | None:
    return None if moment is None else now - moment
