"""The picture of a model's life: training loss against samples, stage by stage, and what evaluations found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from demo.curves import Point
from demo.picture import ATTEMPT_COLOURS

mpl.use("Agg")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Training by one framework at one topology."""

    name: str
    points: tuple[Point, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Loss of a commit on a text that nothing trains on."""

    name: str
    samples: int
    loss: float


def draw(path: Path, *, stages: Sequence[Stage], evaluations: Sequence[Evaluation], text: str) -> None:
    """Write the picture to `path` (its suffix chooses the format)."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 5.5), layout="constrained", dpi=130)
    figure.suptitle(
        "The life of a model: at each border a reshard, after which the next framework has the same loss", fontsize=12
    )
    for number, stage in enumerate(stages):
        colour = ATTEMPT_COLOURS[number]
        samples = [point.samples for point in stage.points]
        axes.axvspan(samples[0], samples[-1], color=colour, alpha=0.10, linewidth=0)
        losses = [point.loss for point in stage.points]
        axes.plot(samples, losses, color=colour, linewidth=1.6, label=f"training loss: {stage.name}")
    axes.plot(
        [item.samples for item in evaluations],
        [item.loss for item in evaluations],
        "D",
        color="#b2182b",
        label="loss of a commit on held-out documentation (transformers)",
    )
    for number, item in enumerate(evaluations):
        side = {"xytext": (-6, -16), "ha": "right"} if number else {"xytext": (6, 12), "ha": "left"}
        axes.annotate(item.name, (item.samples, item.loss), textcoords="offset points", color="#b2182b", **side)
    axes.set_xlabel(f"samples\nthe fine-tuned model writes: {text!r}")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.margins(x=0.01)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
