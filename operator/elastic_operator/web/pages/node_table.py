"""Tables of nodes with their accelerators as small squares, and what runs there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elastic_operator.observed.observation import WORKER, Key
from elastic_operator.plugin.pages.text import pluralize
from elastic_operator.web.pages.document import View, cell, write_table
from elastic_operator.web.pages.inventory import READY, NodeUse, Pod

MAX_PODS = 8
"""Pods of one node that are listed."""

_MAX_SQUARES = 16
"""Accelerators of one node that are drawn one by one."""

_SHAPES = {
    "jobs": '<rect class="gj" x="{x}" y="1" width="10" height="10"/>',
    "others": '<rect class="go" x="{x}" y="1" width="10" height="10"/>'
    '<rect class="goi" x="{x}" y="6" width="10" height="5"/>',
    "out": '<path class="gx" d="M{x},1 h10 v10 h-10 z l10,10 m0,-10 l-10,10"/>',
    "free": '<rect class="gf" x="{x}" y="1" width="10" height="10"/>',
}
"""One square by use; they differ in shape, not only in colour."""

_WORDS = {"jobs": "used by jobs", "others": "used by others", "out": "out of use", "free": "free"}


def write_legend() -> str:
    """Explain the squares."""
    return (
        '<p class="legend">' + "".join(f"<span>{_draw({use: 1})}{word}</span>" for use, word in _WORDS.items()) + "</p>"
    )


def write_nodes(
    nodes: Sequence[NodeUse], caption: str, view: View, *, root: str = "", current: Key | None = None
) -> str:
    """Return a table of nodes; an empty string without nodes.

    Args:
        nodes: the nodes.
        caption: what the table shows, escaped.
        view: what the reader chose.
        root: relative path of the fleet's page, for links to jobs.
        current: job whose page it is; it is not linked.
    """
    if not nodes:
        return ""
    header = ("Node", "State", "GPUs", "What runs there")
    return write_table(caption, header, (_row(node, view, root, current) for node in nodes))


def _row(node: NodeUse, view: View, root: str, current: Key | None) -> str:
    reason = f"<small>{cell(node.reason)}</small>" if node.reason else ""
    kind = "good" if node.state == READY else "work" if node.state == "Cordoned" else "bad"
    return (
        f'<tr><th scope="row">{cell(node.name)}</th>'
        f'<td data-label="State"><span class="phase {kind}">{cell(node.state)}</span>{reason}</td>'
        f'<td data-label="GPUs">{_gpus(node)}</td>'
        f'<td data-label="Runs">{_pods(node.pods, view, root, current)}</td></tr>'
    )


def _gpus(node: NodeUse) -> str:
    counts = {"jobs": node.jobs, "others": node.others, "out": node.out, "free": node.free}
    words = ", ".join(f"{count} {_WORDS[use]}" for use, count in counts.items() if count)
    if not node.is_usage_known and node.free:
        words = words.replace("free", "free or used by others")
    drawn = _draw(counts) if node.total <= _MAX_SQUARES else ""
    return f"{drawn}{words}<small>{node.total} x {cell(node.resource)}</small>"


def _draw(counts: dict[str, int]) -> str:
    uses = [use for use, count in counts.items() for _ in range(count)]
    squares = "".join(_SHAPES[use].format(x=1 + 14 * position) for position, use in enumerate(uses))
    width = 14 * len(uses)
    return f'<svg class="gpus" viewBox="0 0 {width} 12" width="{width}" height="12" aria-hidden="true">{squares}</svg>'


def _pods(pods: Sequence[Pod], view: View, root: str, current: Key | None) -> str:
    if not pods:
        return "nothing of a job"
    return f"<ul>{''.join(f'<li>{item}</li>' for item in _describe(pods, view, root, current))}</ul>"


def _describe(pods: Sequence[Pod], view: View, root: str, current: Key | None) -> Iterator[str]:
    for pod in pods[:MAX_PODS]:
        name = cell("/".join(pod.job))
        job = name if pod.job == current else f'<a href="{view.job(pod.job, root)}">{name}</a>'
        what = f"pod {'?' if pod.index is None else pod.index}" if pod.role == WORKER else "reshard pod"
        gpus = f", {pluralize(pod.gpus, 'GPU')}" if pod.gpus else ""
        yield f"{job} attempt {pod.attempt}, {what}{gpus}: {cell(pod.phase)}"
    if len(pods) > MAX_PODS:
        yield f"and {pluralize(len(pods) - MAX_PODS, 'more pod')}"
