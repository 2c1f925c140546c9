"""Parts of an HTML page of a job: style, tables, attempts, recoveries, goodput, decisions. Pure.

Every text of the cluster is escaped and stands between tags, never in an attribute, a style or a chart.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from elastic_operator.plugin.pages.job_report import RecoveryReport
from elastic_operator.plugin.pages.report import sections
from elastic_operator.plugin.pages.report.charts import steps_chart, timeline_chart
from elastic_operator.plugin.pages.report.sections import Table
from elastic_operator.plugin.pages.report.story import Story, count_gpus, draw_topology
from elastic_operator.plugin.pages.text import pluralize

STYLE = """\
:root{color-scheme:light dark;--fg:#1b1f24;--bg:#fff;--soft:#57606a;--line:#d0d7de;--t0:#dbeafe;--t1:#ede9fe;
--curve:#1d4ed8;--gap:#fecaca;--p0:#fca5a5;--p1:#fdba74;--p2:#fde047;--p3:#d9d9d9;--p4:#a5f3fc;--p5:#93c5fd;--p6:#86efac}
@media(prefers-color-scheme:dark){:root{--fg:#e6edf3;--bg:#0d1117;--soft:#9aa4af;--line:#30363d;--t0:#172554;--t1:#2e1065;
--curve:#93c5fd;--gap:#5f1d1d}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);margin:0 auto;max-width:60rem;padding:1rem}
h1,h2,h3{line-height:1.2;margin:1.6em 0 .5em}h2{border-bottom:1px solid var(--line)}
table{border-collapse:collapse;width:100%;margin:.7em 0}caption{text-align:left;color:var(--soft)}
th,td{border:1px solid var(--line);padding:.25em .5em;text-align:left;vertical-align:top;overflow-wrap:anywhere}
.n{text-align:right;font-variant-numeric:tabular-nums}.wide{overflow-x:auto}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2em 1em}dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
svg{width:100%;height:auto}.axis{fill:none;stroke:var(--soft)}.curve{fill:none;stroke:var(--curve);stroke-width:2}
.dot{fill:var(--curve)}.commit{stroke:var(--fg)}.gap{fill:var(--gap)}.t0{fill:var(--t0)}.t1{fill:var(--t1)}
.tick,.label{fill:var(--soft);font-size:12px}.end{text-anchor:end}.middle{text-anchor:middle}
.onbar{fill:#111;font-size:12px}.p0{fill:var(--p0)}.p1{fill:var(--p1)}.p2{fill:var(--p2)}.p3{fill:var(--p3)}
.p4{fill:var(--p4)}.p5{fill:var(--p5)}.p6{fill:var(--p6)}
.grids{display:flex;flex-wrap:wrap;gap:1rem 3rem}figure{margin:.5em 0}pre{margin:.3em 0;line-height:1.3}
footer{color:var(--soft);margin-top:2em;font-size:.9em}
@media(max-width:45rem){.stack,.stack tbody,.stack tr,.stack td,.stack th[scope=row]{display:block;border:0}
.stack caption{display:block}.stack thead{position:absolute;left:-999rem}
.stack tr{border:1px solid var(--line);border-radius:6px;margin:.6rem 0;padding:.3rem .6rem}
.stack td{padding:.1em 0;text-align:left}.stack td::before{content:attr(data-label) ": ";color:var(--soft)}
.stack th[scope=row]{padding:.1em 0}dl:not(.cards){grid-template-columns:1fr}dl:not(.cards) dd{margin-bottom:.4em}
.tick,.label{font-size:20px}}"""
"""On a narrow screen the rows of a table become cards, in which `data-label` names each value."""


def text(value: str) -> str:
    """Escape a text, for use between tags."""
    return html.escape(value, quote=True)


def text_with_code(value: str) -> str:
    """Return a text of ours for HTML; what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text(value))


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return names and values as a description list."""
    return f"<dl>{''.join(f'<dt>{text(name)}</dt><dd>{text(value)}</dd>' for name, value in pairs)}</dl>"


def table(content: Table) -> str:
    """Return a table with caption and header cells; an empty string if it has no rows."""
    if not content.rows:
        return ""

    def cell(tag: str, position: int, value: str, more: str) -> str:
        number = ' class="n"' if position in content.right else ""
        return f"<{tag}{more}{number}>{text(value)}</{tag}>"

    names = [f' data-label="{text(name)}"' for name in content.header]
    head = "".join(cell("th", position, name, ' scope="col"') for position, name in enumerate(content.header))
    rows = "".join(
        f"<tr>{''.join(cell('td', position, value, names[position]) for position, value in enumerate(row))}</tr>\n"
        for row in content.rows
    )
    caption = f"<caption>{text(content.caption)}</caption>"
    columns = f"<thead><tr>{head}</tr></thead>"
    return f'<div class="wide"><table class="stack">{caption}{columns}\n<tbody>{rows}</tbody></table></div>'


def attempts(story: Story) -> Iterator[str]:
    """Yield when the attempts trained: a chart of steps over time, and a table."""
    yield "<h2>Attempts</h2>"
    if chart := steps_chart(story.spans):
        note = "Steps over time: a line from the first to the last step of each attempt, as the status keeps them."
        yield f"<figure>{chart}<figcaption>{note} Shaded: no training.</figcaption></figure>"
    yield table(sections.attempts(story)) or "<p>None has made a step yet.</p>"


def recoveries(story: Story, *, is_newest_first: bool = False) -> Iterator[str]:
    """Yield each recovery with its facts, its topologies and its timeline."""
    yield "<h2>Recoveries</h2>"
    if not story.job.recoveries:
        yield "<p>None.</p>"
    numbered = list(enumerate(story.job.recoveries, 1))
    for number, item in reversed(numbered) if is_newest_first else numbered:
        yield f"<section><h3>{number}. {text(item.cause)}</h3>"
        yield facts(sections.recovery_facts(item, story.time))
        yield _topologies(item)
        if chart := timeline_chart(item):
            yield f"<figure>{chart}</figure>"
        yield f"{table(sections.timeline(item))}</section>"


def goodput(story: Story) -> Iterator[str]:
    """Yield goodput and mean times."""
    yield "<h2>Goodput</h2>"
    yield table(sections.goodput(story)) or "<p>Nothing was measured yet.</p>"


def decisions(story: Story) -> Iterator[str]:
    """Yield the last decision, its reasons, and the topologies that the last plan refused."""
    yield "<h2>Decisions</h2>"
    yield f"<p>The last decision: {text(sections.decision(story))}.</p>"
    yield table(sections.reasons(story))
    yield table(sections.rejected(story))


def _topologies(item: RecoveryReport) -> str:
    if not item.to or item.from_ == item.to:
        return ""
    figures = []
    for when, topology in (("Before", item.from_), ("After", item.to)):
        caption = f"{when}: {pluralize(count_gpus(topology), 'GPU')}"
        grid = "\n".join(draw_topology(topology))
        figures.append(f"<figure><figcaption>{caption}</figcaption><pre>{text(grid)}</pre></figure>")
    return f'<div class="grids">{"".join(figures)}</div>'
