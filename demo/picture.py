"""The picture of a recovery: loss against samples above, phases against the clock below."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes

from demo.curves import Point

mpl.use("Agg")

PHASE_COLOURS = {
    "Pending": "#d9d9d9",
    "Starting": "#fdd49e",
    "Running": "#a1d99b",
    "Draining": "#c6dbef",
    "Stopping": "#fc9272",
    "Resharding": "#bcbddc",
    "Waiting": "#f7f7f7",
    "Complete": "#74c476",
}
ATTEMPT_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8d5a97", "#c98b2b")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The job was in `phase` from `start` to `end` (seconds since the job was applied)."""

    phase: str
    attempt: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event of the cluster at `time` (seconds since the job was applied)."""

    time: float
    text: str


def draw(
    path: Path,
    *,
    elastic: Mapping[int, Sequence[Point]],
    reference: Sequence[Point],
    topologies: Mapping[int, str],
    spans: Sequence[Span],
    marks: Sequence[Mark],
    subtitle: str,
) -> None:
    """Write the picture to `path` (its suffix chooses the format)."""
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(11, 7), height_ratios=(3, 1.1), layout="constrained", dpi=130)
    figure.suptitle(f"One training job through the loss and the return of a node\n{subtitle}", fontsize=12)
    _losses(above, elastic, reference, topologies)
    _phases(below, spans, marks)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _losses(
    axes: Axes,
    elastic: Mapping[int, Sequence[Point]],
    reference: Sequence[Point],
    topologies: Mapping[int, str],
) -> None:
    axes.plot(
        [point.samples for point in reference],
        [point.loss for point in reference],
        color="#555555",
        linewidth=5,
        alpha=0.35,
        label="undisturbed reference run",
        zorder=1,
    )
    for index, (attempt, points) in enumerate(elastic.items()):
        colour = ATTEMPT_COLOURS[index % len(ATTEMPT_COLOURS)]
        first, last = points[0].samples, points[-1].samples
        axes.axvspan(first, last, color=colour, alpha=0.10, linewidth=0)
        axes.plot(
            [point.samples for point in points],
            [point.loss for point in points],
            color=colour,
            linewidth=1.6,
            label=f"attempt {attempt}: {topologies.get(attempt, '?')}",
            zorder=2 + index,
        )
        axes.plot(last, points[-1].loss, "o", color=colour, markersize=5, zorder=9)
    axes.set_xlabel("global samples (the global batch stays the same)")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.margins(x=0.01)


def _phases(axes: Axes, spans: Sequence[Span], marks: Sequence[Mark]) -> None:
    seen: set[str] = set()
    for span in spans:
        label = None if span.phase in seen else span.phase
        seen.add(span.phase)
        axes.barh(
            0,
            span.end - span.start,
            left=span.start,
            height=0.8,
            color=PHASE_COLOURS.get(span.phase, "#eeeeee"),
            edgecolor="white",
            label=label,
        )
        if span.phase == "Running":
            axes.text((span.start + span.end) / 2, 0, f"attempt {span.attempt}", ha="center", va="center", fontsize=9)
    for index, mark in enumerate(marks):
        axes.axvline(mark.time, color="#b2182b", linewidth=1.5)
        height = 0.47 + 0.27 * (index % 2)  # neighbours' texts do not run into each other
        axes.annotate(mark.text, (mark.time, height), xytext=(4, 0), textcoords="offset points", color="#b2182b")
    axes.set_ylim(-0.5, 1.0)
    axes.set_yticks([])
    axes.set_xlabel("seconds since `kubectl apply`")
    axes.legend(ncols=8, loc="upper center", bbox_to_anchor=(0.5, -0.32), frameon=False, fontsize=9)
    axes.margins(x=0.01)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
