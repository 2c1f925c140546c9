"""Draw a profile as SVG: a bar for each phase, and a lane over time for the run and for each worker. Pure.

The lane of a worker shows at each time which share of it each phase had. The colours are readable on a light and on a
dark page; the page itself is light or dark as the viewer prefers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from reshard.cli.output import printable
from reshard.profile.clock import Phase
from reshard.profile.records import Profile, Total, Worker
from reshard.system.limits import format_bytes

MOST_LANES = 24
"""Most workers in one picture."""

_WIDTH, _LEFT, _RIGHT = 960, 190, 24
_PLOT = _WIDTH - _LEFT - _RIGHT
_LINE, _LANE, _GAP = 20, 26, 8
_CHARACTER = 6.2  # width of one character of the small text

_COLOURS = {
    "wait": "#9aa0a6",
    "prepare": "#b07aa1",
    "read": "#4e79a7",
    "populate": "#76b7b2",
    "checksum": "#f28e2b",
    "copy": "#e0b030",
    "write": "#e15759",
    "sync": "#9c6b4e",
    "other": "#6a9f58",
}
_STEP_COLOURS = ("#7f8fa9", "#a9937f")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.small{font-size:11px}.quiet{fill:#666}.name{font-weight:600}"
    ".page{fill:#fff}.lane{fill:#f0f0f0}.axis{stroke:#bbb;stroke-width:1}.mark{stroke:#222;stroke-dasharray:3 2}"
    ".inside{font-size:10px;fill:#111}"
    "@media (prefers-color-scheme:dark){text{fill:#e6e6e6}.quiet{fill:#a8a8a8}.page{fill:#16181d}.lane{fill:#262a31}"
    ".axis{stroke:#555}.mark{stroke:#e6e6e6}.inside{fill:#111}}"
)


def draw(profile: Profile) -> str:
    """Draw a profile and return the SVG document."""
    canvas = _Canvas(profile.seconds)
    _draw_title(canvas, profile)
    _draw_bars(canvas, profile.phases)
    _draw_time(canvas, profile)
    _draw_decisions(canvas, profile)
    return canvas.document()


class _Canvas:
    """Elements of the picture, and how far down it is full."""

    def __init__(self, seconds: float) -> None:
        self.scale = _PLOT / max(seconds, 1e-6)
        self.top = 12.0
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "") -> None:
        style = f' class="{kind}"' if kind else ""
        end = f' text-anchor="{anchor}"' if anchor else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{style}{end}>{escape(printable(text))}</text>')

    def rectangle(self, area: tuple[float, float, float, float], colour: str, tip: str = "") -> None:
        """Draw a rectangle of x, y, width and height; `colour` is a colour, or the class of a style."""
        x, y, width, height = area
        look = f'fill="{colour}"' if colour.startswith("#") else f'class="{colour}"'
        title = f"<title>{escape(printable(tip))}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" {look}>{title}</rect>'
        )

    def line(self, x: float, top: float, bottom: float, kind: str) -> None:
        self._parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" class="{kind}"/>')

    def document(self) -> str:
        height = self.top + 10
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}"'
            f' height="{height:.0f}">'
        )
        page = '<rect width="100%" height="100%" class="page"/>'
        return "\n".join([head, f"<style>{_STYLE}</style>", page, *self._parts, "</svg>\n"])


def _draw_title(canvas: _Canvas, profile: Profile) -> None:
    canvas.top += 12
    workers = "1 worker" if len(profile.workers) == 1 else f"{len(profile.workers)} workers"
    canvas.text(16, canvas.top, f"Where {profile.seconds:.2f} s went, {workers}", "name")
    canvas.top += 14


def _draw_bars(canvas: _Canvas, phases: Sequence[Total]) -> None:
    """Draw one bar for each phase: the seconds of all workers together."""
    most = max((total.seconds for total in phases), default=0.0)
    whole = sum(total.seconds for total in phases)
    for total in phases:
        canvas.top += _LINE
        width = (_PLOT - 250) * total.seconds / max(most, 1e-9)
        canvas.text(_LEFT - 8, canvas.top, total.name, anchor="end")
        canvas.rectangle((_LEFT, canvas.top - 11, max(width, 1), 14), _COLOURS[total.name])
        canvas.text(_LEFT + width + 8, canvas.top, _label(total, whole), "small quiet")
    canvas.top += 12


def _label(total: Total, whole: float) -> str:
    label = f"{total.seconds:.2f} s, {total.seconds / max(whole, 1e-9):.0%}"
    if total.num_bytes:
        rate = format_bytes(total.num_bytes / max(total.seconds, 1e-9))
        label += f", {format_bytes(total.num_bytes)} at {rate}/s each"
    return label


def _draw_time(canvas: _Canvas, profile: Profile) -> None:
    """Draw the lanes over time, with seconds below them and a mark for each decision."""
    top = canvas.top + 8
    canvas.top = top
    _draw_steps(canvas, profile)
    for worker in profile.workers[:MOST_LANES]:
        _draw_worker(canvas, worker)
    if len(profile.workers) > MOST_LANES:
        canvas.top += _LINE
        canvas.text(_LEFT, canvas.top, f"and {len(profile.workers) - MOST_LANES} more workers", "small quiet")
    if profile.flushes:
        lane = _begin_lane(canvas, "sync")
        for at, seconds in profile.flushes:
            area = (_LEFT + at * canvas.scale, lane, max(0.5, seconds * canvas.scale), _LANE)
            canvas.rectangle(area, _COLOURS["sync"], f"{seconds:.3f} s")
    bottom = canvas.top + 4
    for tick in _ticks(profile.seconds):
        x = _LEFT + tick * canvas.scale
        canvas.line(x, bottom, bottom + 5, "axis")
        canvas.text(x, bottom + 17, f"{tick:g} s", "small quiet", "middle")
    for number, decision in enumerate(profile.decisions[1:], 1):
        x = _LEFT + decision.at * canvas.scale
        canvas.line(x, top, bottom, "mark")
        canvas.text(x, top - 1, str(number), "small", "middle")
    canvas.top = bottom + 26


def _begin_lane(canvas: _Canvas, name: str) -> float:
    """Begin a lane, and return its top."""
    lane = canvas.top + 6
    most = int((_LEFT - 24) / _CHARACTER)
    short = name if len(name) <= most else f"...{name[3 - most :]}"
    canvas.text(_LEFT - 8, lane + _LANE / 2 + 4, short, "small", "end")
    canvas.rectangle((_LEFT, lane, _PLOT, _LANE), "lane", name)
    canvas.top = lane + _LANE
    return lane


def _draw_steps(canvas: _Canvas, profile: Profile) -> None:
    """Draw the steps of the run; a step at the same time as others gets a lane of its own."""
    free = [0.0]  # end of the last step in each lane
    lanes = [_begin_lane(canvas, "steps of the run")]
    for number, step in enumerate(sorted(profile.steps, key=lambda item: item.started)):
        at = next((at for at, end in enumerate(free) if step.started >= end - 1e-3), None)
        if at is None:
            at = len(free)
            free.append(0.0)
            lanes.append(_begin_lane(canvas, ""))
        free[at] = step.started + step.seconds
        x, width = _LEFT + step.started * canvas.scale, step.seconds * canvas.scale
        tip = f"{step.name}: {step.seconds:.3f} s"
        canvas.rectangle((x, lanes[at], max(width, 0.5), _LANE), _STEP_COLOURS[number % 2], tip)
        if width > _CHARACTER * len(step.name):
            canvas.text(x + width / 2, lanes[at] + _LANE / 2 + 4, step.name, "inside", "middle")


def _draw_worker(canvas: _Canvas, worker: Worker) -> None:
    lane = _begin_lane(canvas, worker.name)
    for started, seconds in worker.spans:
        whole = sum(seconds)
        if not whole:
            continue
        x, width, y = _LEFT + started * canvas.scale, max(0.4, whole * canvas.scale), lane
        for phase in Phase:
            name, height = phase.name.lower(), _LANE * seconds[phase] / whole
            if height >= 0.1:
                canvas.rectangle((x, y, width, height), _COLOURS[name], f"{name}: {seconds[phase]:.3f} s")
            y += height


def _ticks(seconds: float) -> list[float]:
    """Return about six round times, from 0 to the end."""
    step = 10 ** math.floor(math.log10(max(seconds, 1e-3) / 5))
    step = next(step * factor for factor in (1, 2, 5, 10) if seconds / (step * factor) <= 8)
    return [round(number * step, 6) for number in range(int(seconds / step) + 1)]


def _draw_decisions(canvas: _Canvas, profile: Profile) -> None:
    for number, decision in enumerate(profile.decisions):
        canvas.top += 16
        workers = "1 worker" if decision.workers == 1 else f"{decision.workers} workers"
        where = f"{number}" if number else "start"
        canvas.text(_LEFT - 8, canvas.top, where, "small quiet", "end")
        canvas.text(_LEFT, canvas.top, f"{workers}: {decision.reason}", "small")
