"""The page of one job: what it does, its nodes, recoveries with timelines, goodput, the last decision and why. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from elastic_operator.observed.observation import Key
from elastic_operator.plugin.pages.report import html_parts, sections
from elastic_operator.plugin.pages.report.story import tell_story
from elastic_operator.plugin.pages.text import pluralize
from elastic_operator.web.pages.document import View, cell, write_document
from elastic_operator.web.pages.fleet_page import MAX_ROWS, phase_span
from elastic_operator.web.pages.inventory import Inventory, NodeUse
from elastic_operator.web.pages.node_table import write_legend, write_nodes
from elastic_operator.web.pages.snapshot import source_of

_ROOT = "../../"


def write_job(fleet: Inventory, key: Key, view: View, version: str) -> bytes | None:
    """Write the page of a job; return None if there is no such job.

    Args:
        fleet: what a snapshot holds.
        key: namespace and name of the job.
        view: what the reader chose.
        version: version of the operator.
    """
    snapshot = fleet.snapshot
    if key not in snapshot.records:
        return None
    record, title = snapshot.records[key], "/".join(key)
    fleet_link = f"{_ROOT}{View(is_refreshing=view.is_refreshing).link()}"
    body = [f'<nav aria-label="Breadcrumb"><a href="{fleet_link}">All jobs</a></nav>']
    if record is None:
        body += [f"<h1>{cell(title)}</h1>", "<p>The resource could not be read; the log of the operator says why.</p>"]
    else:
        story = tell_story(source_of(record), (), snapshot.time)
        body += [
            f"<h1>{cell(title)}: {phase_span(story.job.phase)}</h1>",
            html_parts.facts(sections.facts(story)),
            *_nodes(fleet, key, view),
            *html_parts.recoveries(story, is_newest_first=True),
            *html_parts.goodput(story),
            *html_parts.decisions(story),
            *html_parts.attempts(story),
        ]
    return write_document(title, body, time=snapshot.time, view=view, version=version, is_live=snapshot.is_live)


def _nodes(fleet: Inventory, key: Key, view: View) -> Iterator[str]:
    """Yield the nodes where the job runs, with all that runs there."""
    yield "<h2>Nodes</h2>"
    own = [use for use in fleet.nodes if any(pod.job == key for pod in use.pods)]
    if not own:
        yield "<p>No pod of the job is on a node.</p>"
        return
    yield write_legend()
    caption = f"{pluralize(len(own), 'node')} with pods of this job"
    if len(own) > MAX_ROWS:
        caption += f", of which {MAX_ROWS} are shown"
    shown = [_own_pods_first(use, key) for use in own[:MAX_ROWS]]
    yield write_nodes(shown, caption, view, root=_ROOT, current=key)


def _own_pods_first(use: NodeUse, key: Key) -> NodeUse:
    return dataclasses.replace(use, pods=tuple(sorted(use.pods, key=lambda pod: pod.job != key)))
