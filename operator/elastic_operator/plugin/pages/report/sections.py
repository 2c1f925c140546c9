"""Tables and sentences of the page, the same for Markdown and HTML. Pure.

A cell is a text of this program or of the cluster; each writer quotes or escapes all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from elastic_operator.plugin.pages.job_report import RecoveryReport
from elastic_operator.plugin.pages.report.story import Story, losses_of, reached_at
from elastic_operator.plugin.pages.status_page import (
    PARTS,
    describe_change,
    describe_length,
    describe_moved,
    describe_steps,
    list_facts,
)
from elastic_operator.plugin.pages.text import format_age, format_clock, format_seconds
from elastic_operator.reconcile.goodput import PARTS as PART_NAMES

NO_LOSSES = (
    "The status holds fewer than two training losses: rank 0 has reported no more, or the operator is of an earlier"
    " release. `kubectl etj watch NAME --record FILE` observes every one, and `--history FILE` adds them."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with a caption; numbers stand in the columns whose numbers are in `right`."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()


def facts(story: Story) -> tuple[tuple[str, str], ...]:
    """Return the facts about the job, and what it does now."""
    now = story.job.now
    more = (("Now", now.doing), ("Waits for", now.waits_for), ("Hint", now.advice))
    return tuple((name, value) for name, value in (*list_facts(story.job, story.time), *more) if value)


def losses(story: Story) -> Table:
    """Return the observed losses by attempt: first, last, least, and their place."""
    rows = []
    found = losses_of(story)
    for attempt in dict.fromkeys(item.attempt for item in found):
        own = [item for item in found if item.attempt == attempt]
        values = [item.loss for item in own if item.loss is not None]
        rows.append((
            str(attempt),
            str(len(own)),
            f"{own[0].samples} to {own[-1].samples}",
            f"{own[0].step} to {own[-1].step}",
            f"{values[0]:.4g}",
            f"{values[-1]:.4g}",
            f"{min(values):.4g}",
        ))  # fmt: skip
    header = ("Attempt", "Observed", "Samples", "Steps", "First", "Last", "Least")
    return Table(caption="Training loss by attempt", header=header, rows=tuple(rows), right=frozenset({0, 1, 4, 5, 6}))


def attempts(story: Story) -> Table:
    """Return when each attempt trained."""
    rows = tuple(
        (
            str(item.attempt),
            format_clock(item.start_time),
            format_clock(item.end_time),
            format_age(item.end_time - item.start_time),
            f"{item.first_step} to {item.last_step}",
        )
        for item in story.spans
    )
    header = ("Attempt", "First step", "Until", "Trained", "Steps")
    return Table(caption="When the attempts trained", header=header, rows=rows, right=frozenset({0, 3}))


def recovery_facts(item: RecoveryReport, now: float) -> tuple[tuple[str, str], ...]:
    """Return the facts about one recovery."""
    found = [
        ("Began", format_clock(item.start_time)),
        ("Kind", "planned" if item.planned else "unplanned"),
        ("Why", item.message),
        ("Lost", ", ".join(item.lost)),
        ("Topology", describe_change(item)),
    ]
    if item.to_attempt and item.state != "Abandoned":
        found += [("Steps", describe_steps(item)), ("Moved", describe_moved(item))]
    return tuple((name, value) for name, value in (*found, ("Result", describe_length(item, now))) if value)


def timeline(item: RecoveryReport) -> Table:
    """Return the parts of one recovery."""
    rows = tuple(
        (name, f"{end - begin:.1f}", f"{end:.1f}", _until(name, is_planned=item.planned))
        for name, begin, end in reached_at(item)
    )
    return Table(
        caption="Timeline", header=("Part", "Seconds", "Ended at", "Until"), rows=rows, right=frozenset({1, 2})
    )


def _until(name: str, *, is_planned: bool) -> str:
    return "committed, ready to exit" if name == "detect" and is_planned else PARTS.get(name, name)


def goodput(story: Story) -> Table:
    """Return goodput, mean times and the suggested checkpoint interval, as far as the status has them."""
    return Table(caption="Goodput", header=("Measure", "Value"), rows=tuple(_goodput(story)))


def _goodput(story: Story) -> Iterator[tuple[str, str]]:
    found = story.job.goodput
    if (ettr := found.get("ettr")) is not None:
        yield "Effective training time ratio", f"{ettr:.1%}"
    if (window := found.get("windowSeconds")) is not None:
        yield "Time accounted for", format_age(window)
    if "lostSteps" in found:
        yield "Steps done twice", str(found["lostSteps"])
    for key, name in (("lostSeconds", "Time for steps done twice"), ("mtbfSeconds", "Mean time between failures"),
                      ("mttrSeconds", "Mean time to recover")):  # fmt: skip
        if (value := found.get(key)) is not None:
            yield name, format_seconds(value)
    parts = found.get("partsSeconds") or {}
    for name in PART_NAMES:
        if name in parts:
            yield f"Mean time of part {name}", format_seconds(parts[name])
    if (interval := found.get("suggestedIntervalSeconds")) is not None:
        yield "Suggested checkpoint interval", format_age(interval)


def reasons(story: Story) -> Table:
    """Return the reasons of the last decision, with the fields that hold them."""
    rows = tuple((item.subject, item.text, item.source) for item in story.explanation.reasons)
    return Table(caption="Reasons of the last decision", header=("About", "Reason", "Field"), rows=rows)


def rejected(story: Story) -> Table:
    """Return the topologies that the last plan refused."""
    rows = tuple((item.topology, item.reason) for item in story.explanation.rejected)
    return Table(caption="Topologies that could not run", header=("Topology", "Why"), rows=rows)


def events(story: Story) -> Table:
    """Return the decisions and observations that the operator reported as Events, oldest first."""
    rows = tuple(
        (
            format_clock(item.time),
            item.type,
            f"{item.reason} x{item.count}" if item.count > 1 else item.reason,
            item.message,
        )
        for item in story.job.events
    )
    return Table(caption="Events, oldest first", header=("Time", "Type", "Reason", "Message"), rows=rows)


def decision(story: Story) -> str:
    """Return the last decision with its time."""
    found = story.explanation
    when = "" if found.time is None else f" ({format_clock(found.time)})"
    return f"{found.decision}{when}"


def origin(story: Story, version: str) -> str:
    """Return where the page comes from."""
    of = f", resource version {story.version}" if story.version else ""
    unusable = f" {story.num_unusable} lines of the recording could not be read." if story.num_unusable else ""
    return (
        f"Made by kubectl etj {version} from the resource and its Events at {format_clock(story.time)}{of}. The status"
        f" keeps the last ten recoveries, and the cluster keeps Events for about an hour.{unusable}"
    )
