"""`kubectl etj watch`: one frame of the live view as data, as a rich renderable, and as one line of text. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic_operator.plugin.pages.job_report import EventReport, JobReport
from elastic_operator.plugin.pages.live.losses import Sample, sparkline
from elastic_operator.plugin.pages.live.node_picture import SYMBOLS, NodeState, draw_gpus, summarize_rest
from elastic_operator.plugin.pages.live.pace import PartProgress, RecoveryProgress
from elastic_operator.plugin.pages.status_page import PARTS
from elastic_operator.plugin.pages.text import format_age, format_clock, format_seconds, format_size, pluralize

if TYPE_CHECKING:
    from rich.console import RenderableType

_PHASE_STYLES = {
    "Running": "bold green", "Complete": "bold green", "Failed": "bold red", "Waiting": "bold yellow",
    "Suspended": "bold yellow", "Unknown": "bold yellow",
}  # fmt: skip
_STATE_STYLES = {"Ready": "green", "Unseen": "", "Cordoned": "yellow", "Avoided": "yellow"}
_BAR_WIDTH = 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Content of the live view at one moment.

    Attributes:
        rate: steps per second since the first step of the attempt; None if it is unknown.
        trainer: what rank 0 says that it does; empty if its Lease cannot be read.
        recovery: the recovery in progress; None if there is none.
        nodes: those of interest first; empty if neither nodes nor pods can be read.
        samples: progress that this watch has observed, oldest first.
        target_step: `--target-step`; None without it.
        notes: what could not be read, and since when.
    """

    job: JobReport
    now: float
    rate: float | None = None
    trainer: str = ""
    recovery: RecoveryProgress | None = None
    nodes: tuple[NodeState, ...] = ()
    samples: tuple[Sample, ...] = ()
    target_step: int | None = None
    notes: tuple[str, ...] = ()


def format_line(frame: Frame) -> str:
    """Format a frame as one line, for files and pipes."""
    job = frame.job
    step = "" if job.step is None else f" step {job.step}"
    shape = f" {job.topology} on {pluralize(job.nodes, 'node')}" if job.topology else ""
    left = ""
    if frame.recovery is not None:
        left = f" ({frame.recovery.cause} for {format_seconds(frame.recovery.seconds)}{_eta(frame.recovery)})"
    return f"{format_clock(frame.now)}  {job.phase}  attempt {job.attempt}{shape}{step}{left}  {job.now.doing}"


def render(frame: Frame, *, max_nodes: int = 16, max_events: int = 5, is_ascii: bool = False) -> RenderableType:
    """Make the renderable of a frame; every text in it must be printable already (`text.make_printable`).

    Texts of the cluster are `Text`, because rich reads markup in plain strings.
    """
    from rich.console import Group
    from rich.text import Text

    sections: list[RenderableType] = [_head(frame), Text()]
    if frame.recovery is not None:
        sections += [_timeline(frame.recovery), Text()]
    if frame.nodes:
        sections += [_nodes(frame.nodes, max_nodes, is_ascii=is_ascii), _legend(is_ascii=is_ascii), Text()]
    if max_events and frame.job.events:
        sections.append(_events(frame.job.events[-max_events:], frame.now))
    sections += [Text(f"note: {note}", style="yellow") for note in frame.notes]
    return Group(*sections)


def _head(frame: Frame) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    job = frame.job
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    phase = Text(job.phase, style=_PHASE_STYLES.get(job.phase, "bold cyan"))
    grid.add_row(Text(f"{job.namespace}/{job.name}"), Text.assemble(phase, f"  {format_clock(frame.now)}"))
    if job.topology:
        shape = f"{job.topology} on {pluralize(job.nodes, 'node')}, {job.gpus} x {job.resource}"
        grid.add_row("attempt", Text(f"{job.attempt}: {shape}"))
    if job.step is not None:
        grid.add_row("step", _step(frame))
    if frame.trainer:
        grid.add_row("trainer", Text(frame.trainer))
    if losses := [item.loss for item in frame.samples if item.loss is not None]:
        grid.add_row("loss", f"{losses[-1]:.4g}  {sparkline(losses)}".rstrip())
    if job.commit is not None:
        num_bytes = f", {format_size(job.commit.num_bytes)}" if job.commit.num_bytes else ""
        grid.add_row("commit", f"step {job.commit.step}{num_bytes}")
    if (ettr := job.goodput.get("ettr")) is not None:
        grid.add_row("goodput", f"{ettr:.1%} of {format_age(job.goodput.get('windowSeconds'))}")
    grid.add_row("now", Text(job.now.doing))
    if job.now.waits_for:
        grid.add_row("waits for", Text(job.now.waits_for))
    if job.now.advice:
        grid.add_row("hint", Text(job.now.advice, style="cyan"))
    if frame.target_step is not None and job.step is not None:
        grid.add_row("target", _target(frame, job.step, frame.target_step))
    return grid


def _step(frame: Frame) -> str:
    rate, age = frame.rate, frame.job.step_time
    text = f"{frame.job.step}"
    if rate is not None:
        text += f", {rate:.3g} steps/s" if rate >= 1 else f", {1 / rate:.3g} s a step"
    if age is not None:
        text += f", seen {format_age(frame.now - age)} ago"
    return text


def _target(frame: Frame, step: int, target: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    left = max(0, target - step)
    is_training = frame.job.phase == "Running" and frame.rate
    eta = f"about {format_age(left / frame.rate)} left" if is_training and frame.rate else "time left unknown"
    grid = Table.grid(padding=(0, 2))
    grid.add_row(ProgressBar(total=max(1, target), completed=step, width=_BAR_WIDTH), f"step {step} of {target}: {eta}")
    return grid


def _timeline(recovery: RecoveryProgress) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    title = f"{recovery.cause}: no training for {format_seconds(recovery.seconds)}{_eta(recovery)} ({recovery.basis})"
    table = Table(box=None, pad_edge=False)
    for name in ("PART", "SECONDS", "EXPECTED", "PROGRESS", "UNTIL"):
        table.add_column(name, justify="right" if name in ("SECONDS", "EXPECTED") else "left", no_wrap=name != "UNTIL")
    for part in recovery.parts:
        seconds = "" if part.state == "Ahead" else f"{part.seconds:.1f}"
        expected = "" if part.expected_seconds is None else f"{part.expected_seconds:.1f}"
        style = {"Done": "green", "Current": "bold yellow"}.get(part.state, "dim")
        table.add_row(Text(part.name), seconds, expected, _bar(part), PARTS.get(part.name, ""), style=style)
    return Group(Text(title, style="bold"), table)


def _bar(part: PartProgress) -> RenderableType:
    from rich.progress_bar import ProgressBar

    if part.state == "Done":
        return ProgressBar(total=1, completed=1, width=_BAR_WIDTH)
    if part.state == "Ahead":
        return ProgressBar(total=1, completed=0, width=_BAR_WIDTH)
    if not part.expected_seconds:
        return "..."
    # A part that takes longer than before is not over.
    return ProgressBar(total=1, completed=min(0.95, part.seconds / part.expected_seconds), width=_BAR_WIDTH)


def _eta(recovery: RecoveryProgress) -> str:
    return "" if recovery.left_seconds is None else f", first step in about {format_seconds(recovery.left_seconds)}"


def _nodes(nodes: Sequence[NodeState], max_nodes: int, *, is_ascii: bool) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = [node for node in nodes if node.is_of_interest][:max_nodes]
    shown += [node for node in nodes if not node.is_of_interest][: max_nodes - len(shown)]
    table = Table(box=None, pad_edge=False)
    for name in ("NODE", "GPUS", "STATE", "PODS"):
        table.add_column(name, no_wrap=name != "PODS")
    for node in shown:
        style = _STATE_STYLES.get(node.state, "bold red")
        state, gpus = Text(node.state, style=style), Text(draw_gpus(node, is_ascii=is_ascii), style=style)
        table.add_row(Text(node.name), gpus, state, Text(", ".join(node.pods)))
    rest = [node for node in nodes if node not in shown]
    return Group(table, Text(summarize_rest(rest), style="dim")) if rest else table


def _legend(*, is_ascii: bool) -> RenderableType:
    from rich.text import Text

    names = {"job": "this job", "others": "other pods", "free": "free", "broken": "not usable"}
    return Text("  ".join(f"{SYMBOLS[use][is_ascii]} {name}" for use, name in names.items()), style="dim")


def _events(events: Sequence[EventReport], now: float) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    ages = [format_age(None if item.time is None else now - item.time) for item in events]
    # A long message must not take the room of the columns before it, nor may a long reason take all.
    table.add_column("AGE", no_wrap=True, min_width=max(map(len, ages)))
    table.add_column("EVENT", no_wrap=True, min_width=min(40, max(len(item.reason) for item in events)))
    table.add_column("MESSAGE", no_wrap=True, overflow="ellipsis")
    for item, age in zip(events, ages, strict=True):
        style = "yellow" if item.type == "Warning" else ""
        table.add_row(Text(age), Text(item.reason, style=style), Text(item.message))
    return table
