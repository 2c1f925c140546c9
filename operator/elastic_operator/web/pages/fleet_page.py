"""The page of the fleet: totals, every job, every node with accelerators. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from elastic_operator.api.status import Phase
from elastic_operator.observed.observation import Key
from elastic_operator.plugin.pages.job_report import JobReport, report_job
from elastic_operator.plugin.pages.status_page import describe_length
from elastic_operator.plugin.pages.text import NONE, format_age, pluralize
from elastic_operator.web.pages.document import View, cell, write_document, write_table
from elastic_operator.web.pages.inventory import CORDONED, READY, Inventory
from elastic_operator.web.pages.node_table import write_legend, write_nodes
from elastic_operator.web.pages.snapshot import source_of

_T = TypeVar("_T")

MAX_ROWS = 100
"""Rows of one table on one page."""

_COLUMNS = ("Job", "Phase", "Topology", "Nodes", "GPUs", "Step", "Goodput", "Last recovery")
_NUMBERS, _NUMBER = ("Nodes", "GPUs", "Step", "Goodput"), ' class="n"'
_KINDS = {Phase.RUNNING: "good", Phase.COMPLETE: "good", Phase.FAILED: "bad", Phase.SUSPENDED: ""}


def write_fleet(fleet: Inventory, view: View, version: str) -> bytes:
    """Write the page of the fleet.

    Args:
        fleet: what a snapshot holds.
        view: what the reader chose; a page after the last one is the last one.
        version: version of the operator.
    """
    snapshot = fleet.snapshot
    body = ["<h1>Elastic training jobs</h1>", *_summary(fleet), "<h2>Jobs</h2>"]
    body += _jobs(fleet, view)
    body += ["<h2>Nodes</h2>", *_nodes(fleet, view)]
    return write_document(
        "Elastic training jobs", body, time=snapshot.time, view=view, version=version, is_live=snapshot.is_live
    )


def phase_span(phase: str) -> str:
    """Return a phase with a mark that differs in shape and colour."""
    return (
        f'<span class="phase {_KINDS.get(Phase(phase), "work") if phase in set(Phase) else "bad"}">{cell(phase)}</span>'
    )


def _summary(fleet: Inventory) -> Iterator[str]:
    yield '<dl class="cards">'
    phases = ", ".join(f"{count} {phase}" for phase, count in sorted(fleet.phases.items()))
    yield _card("Jobs", str(len(fleet.keys)), phases)
    names = {node.name for node in fleet.nodes}
    sick = {node.name for node in fleet.nodes if node.state not in (READY, CORDONED)}
    cordoned = {node.name for node in fleet.nodes if node.state == CORDONED}
    states = [f"{len(names - sick - cordoned)} Ready"]
    states += [f"{len(sick)} lost or sick"] if sick else []
    states += [f"{len(cordoned)} cordoned"] if cordoned else []
    yield _card("Nodes with GPUs", str(len(names)), ", ".join(states))
    is_known = fleet.snapshot.used is not None
    uses = [f"{fleet.count('jobs')} used by jobs"]
    uses += [f"{fleet.count('others')} used by others"] if fleet.count("others") else []
    uses += [f"{fleet.count('free')} free{'' if is_known else ' or used by others'}"]
    uses += [f"{fleet.count('out')} out of use"] if fleet.count("out") else []
    yield _card("GPUs", str(fleet.count("total")), ", ".join(uses))
    yield _goodput(fleet)
    yield "</dl>"


def _goodput(fleet: Inventory) -> str:
    known = [
        (record.status.gpus, record.status.goodput["ettr"])
        for record in fleet.snapshot.records.values()
        if record is not None and record.status.gpus and record.status.goodput.get("ettr") is not None
    ]
    gpus = sum(count for count, _ in known)
    if not known:
        return _card("Goodput", NONE, "no job trains")
    share = sum(count * ettr for count, ettr in known) / gpus
    return _card("Goodput", f"{share:.1%}", f"mean over {pluralize(gpus, 'GPU')} of {pluralize(len(known), 'job')}")


def _card(name: str, value: str, more: str) -> str:
    return f'<div><dt>{name}</dt><dd class="big">{value}</dd><dd>{cell(more)}</dd></div>'


def _jobs(fleet: Inventory, view: View) -> Iterator[str]:
    if not fleet.keys:
        yield "<p>There is no ElasticTrainingJob in the namespaces that this operator serves.</p>"
        return
    shown, number = _page_of(fleet.keys, view.page)
    caption = f"{_range(number, len(shown), len(fleet.keys), 'job')}; those that do not train come first"
    yield write_table(caption, _COLUMNS, (_row(fleet, key, view) for key in shown))
    yield _pager("jobs", number, len(fleet.keys), view, "page")


def _row(fleet: Inventory, key: Key, view: View) -> str:
    link = f'<th scope="row"><a href="{view.job(key)}">{cell("/".join(key))}</a></th>'
    record = fleet.snapshot.records[key]
    if record is None:
        return (
            f'<tr>{link}<td data-label="Phase">{phase_span("Unreadable")}</td>{"<td></td>" * (len(_COLUMNS) - 2)}</tr>'
        )
    now = fleet.snapshot.time
    job = report_job(source_of(record), now)
    ettr = job.goodput.get("ettr")
    reason = job.reason if job.reason not in (job.phase, "Training") else ""
    values = (
        f"{phase_span(job.phase)}<small>{cell(reason)}</small>",
        cell(job.topology or NONE),
        str(job.nodes or NONE),
        str(job.gpus or NONE),
        NONE if job.step is None else str(job.step),
        NONE if ettr is None else f"{ettr:.1%}",
        _last_recovery(job, now),
    )
    cells = "".join(
        f'<td data-label="{name}"{_NUMBER if name in _NUMBERS else ""}>{value}</td>'
        for name, value in zip(_COLUMNS[1:], values, strict=True)
    )
    return f"<tr>{link}{cells}</tr>"


def _last_recovery(job: JobReport, now: float) -> str:
    if not job.recoveries:
        return "none"
    last = job.recoveries[-1]
    age = "" if last.start_time is None else f"<small>{format_age(now - last.start_time)} ago</small>"
    lost = f", lost {', '.join(last.lost)}" if last.lost else ""
    return f"{cell(f'{last.cause}{lost}: {describe_length(last, now)}')}{age}"


def _nodes(fleet: Inventory, view: View) -> Iterator[str]:
    if not fleet.nodes:
        yield "<p>No node offers GPUs.</p>"
        return
    shown, number = _page_of(fleet.nodes, view.nodes)
    caption = f"{_range(number, len(shown), len(fleet.nodes), 'node')}; those that are not Ready come first"
    yield write_legend()
    yield write_nodes(shown, caption, view)
    yield _pager("nodes", number, len(fleet.nodes), view, "nodes")


def _page_of(items: Sequence[_T], number: int) -> tuple[Sequence[_T], int]:
    """Return the rows of a page, and its number, which is at most that of the last page."""
    number = min(number, max(1, -(-len(items) // MAX_ROWS)))
    return items[(number - 1) * MAX_ROWS : number * MAX_ROWS], number


def _range(number: int, num_shown: int, total: int, noun: str) -> str:
    if num_shown == total:
        return pluralize(total, noun)
    begin = (number - 1) * MAX_ROWS + 1
    return f"{noun.capitalize()}s {begin} to {begin + num_shown - 1} of {total}"


def _pager(name: str, number: int, total: int, view: View, field: str) -> str:
    pages = -(-total // MAX_ROWS)
    if pages == 1:
        return ""
    links = []
    if number > 1:
        links.append(f'<a href="{view.link(**{field: number - 1})}">Previous {name}</a>')
    links.append(f"<span>Page {number} of {pages}</span>")
    if number < pages:
        links.append(f'<a href="{view.link(**{field: number + 1})}">Next {name}</a>')
    return f'<nav aria-label="Pages of {name}">{"".join(links)}</nav>'
