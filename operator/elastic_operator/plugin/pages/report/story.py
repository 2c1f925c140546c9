"""Collects the content of a job's page from its resource, its Events and a recording of `watch`. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Recovery, Status
from elastic_operator.plugin.pages.job_report import JobReport, RecoveryReport, read_source, report_job
from elastic_operator.plugin.pages.job_source import JobSource
from elastic_operator.plugin.pages.live.losses import Sample, samples_of
from elastic_operator.plugin.pages.text import make_printable
from elastic_operator.plugin.pages.why import Explanation, explain_source
from reshard.errors import TopologyError
from reshard.topology import Topology

MAX_TEXT = 2000
"""Characters of one text that the page shows."""

_MAX_GRID = 16
"""Stages and replicas of a topology that are drawn one by one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpan:
    """The part of one attempt in which it trained, as far as the status keeps it.

    Attributes:
        start_time: its first step.
        end_time: first sign of its end; the time of the page if it trains.
        first_step: step from which it resumed.
        last_step: last step that it reported.
    """

    attempt: int
    start_time: Time
    end_time: Time
    first_step: int
    last_step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitMark:
    """A commit that the status keeps."""

    attempt: int
    step: int
    samples: int
    is_valid: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Content of the page.

    Attributes:
        time: when the resource was read.
        version: resourceVersion of the resource.
        samples: observed progress with losses, by attempt and step.
        num_unusable: lines of the recording that could not be read.
        spans: attempts that trained, oldest first.
        commits: commits that the status keeps, oldest first.
    """

    job: JobReport
    explanation: Explanation
    time: Time
    version: str = ""
    samples: tuple[Sample, ...] = ()
    num_unusable: int = 0
    spans: tuple[AttemptSpan, ...] = ()
    commits: tuple[CommitMark, ...] = ()


def make_story(
    resource: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    now: float,
    *,
    samples: Sequence[Sample] = (),
    num_unusable: int = 0,
) -> Story:
    """Collect the story of a job; all texts of the result are printable, on one line and of bounded length.

    Args:
        resource: the resource as the API server returned it.
        events: core/v1 Events about the job.
        now: current time in seconds since the epoch.
        samples: samples of a recording.
        num_unusable: lines of the recording that could not be read.
    """
    return tell_story(read_source(resource), events, now, samples=samples, num_unusable=num_unusable)


def tell_story(
    source: JobSource,
    events: Sequence[Mapping[str, Any]],
    now: float,
    *,
    samples: Sequence[Sample] = (),
    num_unusable: int = 0,
) -> Story:
    """Collect the story of a job as `make_story` does, from parsed parts."""
    status = source.status
    story = Story(
        job=report_job(source, now, events),
        explanation=explain_source(source, now),
        time=Time(now),
        version=source.version,
        samples=_with_status(samples, status),
        num_unusable=num_unusable,
        spans=_spans(status, now),
        commits=tuple(
            CommitMark(attempt=item.attempt, step=item.step, samples=item.samples, is_valid=not item.invalid)
            for item in reversed(status.checkpoint.history)
        ),
    )
    clipped: Story = _clipped(make_printable(story))
    return clipped


def losses_of(story: Story) -> tuple[Sample, ...]:
    """Return the samples that have a loss."""
    return tuple(item for item in story.samples if item.loss is not None)


def draw_topology(text: str) -> tuple[str, ...]:
    """Draw a topology as one line per pipeline stage, with one group of symbols per data-parallel replica.

    Returns:
        Lines; a sentence instead if the topology is too large, and nothing if `text` is no topology.
    """
    try:
        topology = Topology.parse(text)
    except TopologyError:
        return ()
    width = topology.tp * topology.cp
    if topology.pp > _MAX_GRID or topology.dp > _MAX_GRID or width > _MAX_GRID:
        return (f"{topology.pp} stages of {topology.dp} replicas with {width} GPUs each",)
    cell = "\N{BLACK SQUARE}" * width
    return tuple(f"stage {stage}  {' '.join([cell] * topology.dp)}" for stage in range(topology.pp))


def count_gpus(text: str) -> int:
    """Return the number of accelerators of a topology; 0 if `text` is none."""
    try:
        return Topology.parse(text).world_size
    except TopologyError:
        return 0


def reached_at(item: RecoveryReport) -> tuple[tuple[str, float, float], ...]:
    """Return name, begin and end of each part of a recovery, in seconds since its first sign."""
    found, reached = [], 0.0
    for part in item.parts:
        found.append((part.name, reached, reached + part.seconds))
        reached += part.seconds
    return tuple(found)


def _with_status(samples: Sequence[Sample], status: Status) -> tuple[Sample, ...]:
    """Add the losses and the last progress, which the status holds, to the samples of a recording, by attempt and step.

    Of a step that both have, the recording's is taken.
    """
    found = {(item.attempt, item.step): item for item in samples_of(status)}
    progress = status.progress
    if progress is not None:
        last = Sample(attempt=status.attempt, step=progress.step, samples=progress.samples, loss=progress.loss)
        found.setdefault((last.attempt, last.step), last)
    found |= {(item.attempt, item.step): item for item in samples}
    return tuple(found[key] for key in sorted(found))


def _spans(status: Status, now: float) -> tuple[AttemptSpan, ...]:
    """Return when each attempt trained, from the recoveries on both of its sides."""
    begin: tuple[int, float, int] | None = None
    oldest = status.changes[0] if status.changes else None
    if status.first_step_time is not None and (oldest is None or oldest.from_attempt == 1):
        step = status.started_from.step if status.started_from is not None else 0
        begin = (1, status.first_step_time, step)
    spans = []
    for item in status.changes:
        end = _begin_of(item)
        if begin is not None and end is not None and end >= begin[1]:
            spans.append(_span(begin, end, item.last_step))
        begin = None if item.first_step_time is None else (item.to_attempt, item.first_step_time, item.commit_step)
    if begin is not None and status.progress is not None:
        end = status.finish_time if status.finish_time is not None else now
        spans.append(_span(begin, max(end, begin[1]), status.progress.step))
    return tuple(spans)


def _span(begin: tuple[int, float, int], end: float, last_step: int) -> AttemptSpan:
    attempt, start, first_step = begin
    return AttemptSpan(
        attempt=attempt,
        start_time=Time(start),
        end_time=Time(end),
        first_step=first_step,
        last_step=max(first_step, last_step),
    )


def _begin_of(item: Recovery) -> float | None:
    return item.signal_time if item.signal_time is not None else item.detect_time


def _clipped(value: Any) -> Any:
    """Copy data with every text cut at MAX_TEXT characters."""
    if isinstance(value, str):
        more = len(value) - MAX_TEXT
        return value if more <= 0 else f"{value[:MAX_TEXT]}... ({more} more characters)"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _clipped(getattr(value, name)) for name in names})
    if isinstance(value, Mapping):
        return {key: _clipped(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_clipped, value))
    return value
