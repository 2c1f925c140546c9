"""The page of a job as Markdown (GitHub's). Pure.

Every text of the cluster stands in a code span, where it is neither markup nor a link, a mention or HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from elastic_operator.plugin.pages.live.losses import sparkline
from elastic_operator.plugin.pages.report import sections
from elastic_operator.plugin.pages.report.sections import Table
from elastic_operator.plugin.pages.report.story import Story, count_gpus, draw_topology, losses_of
from elastic_operator.plugin.pages.text import pluralize

_TICKS = re.compile(r"`+")
_PLAIN = re.compile(r"[A-Za-z0-9 .,:%+/()-]*")
"""Cells that mean nothing in Markdown; `_is_plain` excludes what becomes a link or begins a block."""


def write_markdown(story: Story, version: str) -> str:
    """Write the page.

    Args:
        story: the story of a job, with printable texts.
        version: version of this program.
    """
    job = story.job
    return "\n".join([
        f"# {quote(f'{job.namespace}/{job.name}')}: {quote(job.phase)}",
        "",
        *_bullets(sections.facts(story)),
        *_losses(story),
        *_attempts(story),
        *_recoveries(story),
        "## Goodput",
        "",
        *(_table(sections.goodput(story)) or ("Nothing was measured yet.", "")),
        "## Decisions",
        "",
        f"The last decision: {quote(sections.decision(story))}.",
        "",
        *_table(sections.reasons(story)),
        *_table(sections.rejected(story)),
        "## Events",
        "",
        *(_table(sections.events(story)) or ("None are left.", "")),
        sections.origin(story, version),
    ])  # fmt: skip


def quote(text: str) -> str:
    """Return the text as a code span that shows it unchanged; plain words stay as they are."""
    if not text.strip() or _is_plain(text):
        return text.strip()
    longest = max((len(run) for run in _TICKS.findall(text)), default=0)
    fence = "`" * (longest + 1)
    room = " " if text.startswith(("`", " ")) or text.endswith(("`", " ")) else ""
    return f"{fence}{room}{text}{room}{fence}"


def _is_plain(text: str) -> bool:
    is_link = "://" in text or "www." in text.lower()
    return bool(_PLAIN.fullmatch(text)) and not is_link and text[:1].isalnum() and text == text.strip()


def _cell(text: str) -> str:
    # A pipe ends a cell even inside of a code span, where only tables understand its escape.
    return quote(text).replace("|", "\\|") if text else ""


def _bullets(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield from (f"- **{name}**: {quote(value)}" for name, value in pairs)
    yield ""


def _table(table: Table) -> tuple[str, ...]:
    """Return the lines of a table with its caption; nothing if it has no rows."""
    if not table.rows:
        return ()
    rule = "|".join("---:" if position in table.right else "---" for position in range(len(table.header)))
    rows = (f"| {' | '.join(map(_cell, row))} |" for row in table.rows)
    return (f"**{table.caption}**", "", f"| {' | '.join(table.header)} |", f"|{rule}|", *rows, "")


def _losses(story: Story) -> Iterator[str]:
    yield from ("## Training loss", "")
    found = losses_of(story)
    yield from _table(sections.losses(story))
    if line := sparkline([item.loss for item in found if item.loss is not None]):
        yield from (f"Last {min(32, len(found))} observations: {line}", "")
    if len(found) < 2:
        yield from (sections.NO_LOSSES, "")


def _attempts(story: Story) -> Iterator[str]:
    yield from ("## Attempts", "")
    yield from _table(sections.attempts(story)) or ("None has made a step yet.", "")


def _recoveries(story: Story) -> Iterator[str]:
    yield from ("## Recoveries", "")
    if not story.job.recoveries:
        yield from ("None.", "")
    for number, item in enumerate(story.job.recoveries, 1):
        yield from (f"### {number}. {quote(item.cause)}", "")
        yield from _bullets(sections.recovery_facts(item, story.time))
        yield from _topologies(item.from_, item.to)
        yield from _table(sections.timeline(item))


def _topologies(before: str, after: str) -> Iterator[str]:
    """Yield the topology before and after, if they differ."""
    if not after or before == after:
        return
    yield "```text"
    for when, topology in (("before", before), ("after", after)):
        yield f"{when}: {pluralize(count_gpus(topology), 'GPU')}"
        yield from (f"  {line}" for line in draw_topology(topology))
    yield from ("```", "")
