"""Loss curves of the elastic run and of the reference run, and whether they agree. Pure, but for reading the files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One optimizer step: the global batch's mean loss after `samples` global samples."""

    attempt: int
    step: int
    samples: int
    loss: float
    time: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """One step at which the elastic run is off the reference."""

    point: Point
    expected: float
    relative: float

    def __str__(self) -> str:
        return (
            f"attempt {self.point.attempt}, step {self.point.step} ({self.point.samples} samples): "
            f"loss {self.point.loss:.9g}, reference {self.expected:.9g}, off by {self.relative:.1e}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All steps of all attempts against the reference."""

    num_compared: Mapping[int, int]
    largest_relative: Mapping[int, float]
    disagreements: tuple[Disagreement, ...]
    missing: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Every step agrees and none is missing on either side."""
        return not self.disagreements and not self.missing and bool(self.num_compared)


def read_points(folder: Path) -> dict[int, list[Point]]:
    """Read `loss-a<attempt>.jsonl` files; an unfinished last line (the writer was killed) is left out."""
    attempts: dict[int, list[Point]] = {}
    for path in sorted(folder.glob("loss-a*.jsonl")):
        points = [
            point for line in path.read_text(encoding="utf-8").splitlines(keepends=True) for point in _parse(line)
        ]
        if points:
            attempts[points[0].attempt] = points
    return dict(sorted(attempts.items()))


def _parse(line: str) -> Iterable[Point]:
    if not line.endswith("\n"):
        return
    value = json.loads(line)
    yield Point(
        attempt=int(value["attempt"]),
        step=int(value["step"]),
        samples=int(value["samples"]),
        loss=float(value["loss"]),
        time=float(value["time"]),
    )


def compare(
    elastic: Mapping[int, Sequence[Point]], reference: Sequence[Point], *, relative_tolerance: float, num_steps: int
) -> Comparison:
    """Compare every step of every attempt, repeated steps included, with the reference at the same sample.

    Args:
        elastic: points by attempt.
        reference: points of the run that nothing disturbed.
        relative_tolerance: largest |elastic - reference| / |reference|.
        num_steps: steps that both runs had to do; a step that no attempt did is reported as missing.
    """
    expected = {point.samples: point.loss for point in reference}
    disagreements: list[Disagreement] = []
    largest: dict[int, float] = {}
    counts: dict[int, int] = {}
    for attempt, points in elastic.items():
        for point in points:
            want = expected.get(point.samples, math.nan)
            relative = abs(point.loss - want) / abs(want)
            counts[attempt] = counts.get(attempt, 0) + 1
            largest[attempt] = max(largest.get(attempt, 0.0), relative)
            if not relative <= relative_tolerance:
                disagreements.append(Disagreement(point=point, expected=want, relative=relative))
    done = {point.step for points in elastic.values() for point in points}
    return Comparison(
        num_compared=counts,
        largest_relative=largest,
        disagreements=tuple(disagreements),
        missing=tuple(step for step in range(1, num_steps + 1) if step not in done),
    )
