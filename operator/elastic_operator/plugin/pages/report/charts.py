"""Charts of the page as inline SVG: training loss over samples, steps over time, timeline of a recovery. Pure.

Colours are CSS classes of the page, so that light and dark follow from its style. No text of the cluster is in a chart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from elastic_operator.plugin.pages.job_report import RecoveryReport
from elastic_operator.plugin.pages.live.losses import Sample
from elastic_operator.plugin.pages.report.story import AttemptSpan, CommitMark, reached_at
from elastic_operator.reconcile.goodput import PARTS

_WIDTH, _HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 22, 40
_MAX_POINTS = 1500
"""Points of one attempt that are drawn; of more, every n-th."""

Scale = Callable[[float], float]


def loss_chart(samples: Sequence[Sample], commits: Sequence[CommitMark]) -> str:
    """Draw losses over samples, one line per attempt, with the range of each attempt shaded and commits as ticks."""
    found = [item for item in samples if item.loss is not None]
    if len(found) < 2:
        return ""
    values = [item.loss for item in found if item.loss is not None]
    x = _scale([item.samples for item in found], _LEFT, _WIDTH - _RIGHT)
    y = _scale(values, _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for number, attempt in enumerate(dict.fromkeys(item.attempt for item in found)):
        own = [item for item in found if item.attempt == attempt]
        parts.append(_shade(own, attempt, number, x))
        points = [(x(item.samples), y(item.loss)) for item in own if item.loss is not None]
        parts.append(_line(points, "curve"))
    low, high = min(item.samples for item in found), max(item.samples for item in found)
    parts += [
        f'<line class="commit" x1="{x(item.samples):.1f}" x2="{x(item.samples):.1f}" y1="{_HEIGHT - _BOTTOM}"'
        f' y2="{_HEIGHT - _BOTTOM + 7}"/>'
        for item in commits
        if low <= item.samples <= high and item.is_valid
    ]
    parts += _axes("samples", "training loss", (low, high), (min(values), max(values)))
    title = f"Training loss over samples, {len(found)} observations in {_count_attempts(found)} attempts"
    return _svg(title, parts, _HEIGHT)


def steps_chart(spans: Sequence[AttemptSpan]) -> str:
    """Draw steps over time: a line where an attempt trained, and a shaded gap where none did."""
    if not spans:
        return ""
    times = [moment for item in spans for moment in (item.start_time, item.end_time)]
    steps = [step for item in spans for step in (item.first_step, item.last_step)]
    x, y = _scale(times, _LEFT, _WIDTH - _RIGHT), _scale(steps, _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for before, after in itertools.pairwise(spans):
        left, right = x(before.end_time), x(after.start_time)
        parts.append(_box("gap", left, right))
    for item in spans:
        points = [(x(item.start_time), y(item.first_step)), (x(item.end_time), y(item.last_step))]
        parts.append(_line(points, "curve"))
        parts.append(f'<text class="label" x="{points[0][0] + 3:.1f}" y="{_TOP - 6}">{item.attempt}</text>')
    seconds = max(times) - min(times)
    parts += _axes("seconds since the first step shown", "steps", (0, seconds), (min(steps), max(steps)))
    return _svg("Steps over time by attempt; gaps without training are shaded", parts, _HEIGHT)


def timeline_chart(item: RecoveryReport) -> str:
    """Draw the parts of a recovery as one bar; the table beside it has the seconds."""
    total = item.total_seconds
    if total <= 0:
        return ""
    parts = []
    for name, begin, end in reached_at(item):
        left, width = begin / total * _WIDTH, (end - begin) / total * _WIDTH
        number = PARTS.index(name) if name in PARTS else 0
        parts.append(f'<rect class="part p{number}" x="{left:.1f}" y="0" width="{width:.1f}" height="26"/>')
        if width > 60:
            parts.append(f'<text class="onbar" x="{left + 5:.1f}" y="17">{PARTS[number]}</text>')
    return _svg(f"Timeline of {total:.1f} seconds", parts, 26)


def _count_attempts(samples: Sequence[Sample]) -> int:
    return len({item.attempt for item in samples})


def _scale(values: Sequence[float], low: float, high: float) -> Scale:
    """Map the range of `values` to that from `low` to `high`."""
    least, most = min(values), max(values)
    span = (most - least) or 1.0
    return lambda value: low + (value - least) / span * (high - low)


def _shade(own: Sequence[Sample], attempt: int, number: int, x: Scale) -> str:
    left, right = x(min(item.samples for item in own)), x(max(item.samples for item in own))
    label = f'<text class="label" x="{left + 3:.1f}" y="{_TOP - 6}">{attempt}</text>'
    return _box(f"attempt t{number % 2}", left, right) + label


def _box(name: str, left: float, right: float) -> str:
    """Draw a rectangle from the top of the chart to its axis."""
    width, height = max(1.0, right - left), _HEIGHT - _BOTTOM - _TOP
    return f'<rect class="{name}" x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{height}"/>'


def _line(points: Sequence[tuple[float, float]], name: str) -> str:
    every = max(1, len(points) // _MAX_POINTS)
    shown = [*points[::every], points[-1]]
    if len(points) == 1:
        return f'<circle class="dot" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3"/>'
    return f'<polyline class="{name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in shown)}"/>'


def _axes(x_name: str, y_name: str, x: tuple[float, float], y: tuple[float, float]) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    yield f'<path class="axis" d="M{_LEFT},{_TOP} V{bottom} H{right}"/>'
    yield f'<text class="tick" x="{_LEFT}" y="{bottom + 20}">{x[0]:.6g}</text>'
    yield f'<text class="tick end" x="{right}" y="{bottom + 20}">{x[1]:.6g}</text>'
    yield f'<text class="tick middle" x="{(_LEFT + right) / 2}" y="{bottom + 34}">{x_name}</text>'
    yield f'<text class="tick end" x="{_LEFT - 6}" y="{bottom}">{y[0]:.4g}</text>'
    yield f'<text class="tick end" x="{_LEFT - 6}" y="{_TOP + 10}">{y[1]:.4g}</text>'
    middle = (_TOP + bottom) / 2
    yield f'<text class="tick middle" transform="translate(14 {middle}) rotate(-90)">{y_name}</text>'


def _svg(title: str, parts: Sequence[str], height: int) -> str:
    content = "".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img"><title>{title}</title>{content}</svg>'
