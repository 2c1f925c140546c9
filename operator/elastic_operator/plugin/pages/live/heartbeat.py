"""The report of rank 0 on the Lease of its attempt: fresher than the status that the operator writes. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_operator.api.serialization import Time
from elastic_operator.observed.observation import lease_view
from elastic_operator.plugin.pages.job_report import JobReport
from elastic_operator.plugin.pages.live.losses import Sample
from reshard.contract import LeaseKey, sentence

_MAX_TEXT = 500


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The last report of rank 0; what it did not report, or not in the expected form, is None or empty.

    Attributes:
        phase: phase of the training pods.
        save: how the newest asynchronous save went.
    """

    phase: str = ""
    step: int | None = None
    samples: int | None = None
    loss: float | None = None
    save: str = ""


def read_heartbeat(lease: Mapping[str, Any] | None, owner: str) -> Heartbeat | None:
    """Read the Lease of an attempt; return None if there is none, or if it belongs to another resource.

    Args:
        lease: a Lease of coordination.k8s.io/v1.
        owner: UID of the job.
    """
    if lease is None:
        return None
    view = lease_view(lease, None)
    if not owner or view.owner != owner:
        return None
    save = sentence(view.get(LeaseKey.SAVE), _MAX_TEXT)
    return Heartbeat(phase=view.phase, step=view.step, samples=view.samples, loss=view.loss, save=save)


def is_newer(beat: Heartbeat | None, step: int | None) -> bool:
    """Return whether a heartbeat reports a later step than the status."""
    return beat is not None and beat.step is not None and beat.step > (step or 0)


def refresh(job: JobReport, beat: Heartbeat | None, seen: float | None) -> JobReport:
    """Return the report with step, samples and loss of the heartbeat, if they are newer.

    Args:
        job: report made from the status.
        beat: the last heartbeat.
        seen: when the caller saw its step change; None if it did not.
    """
    if beat is None or not is_newer(beat, job.step):
        return job
    time = None if seen is None else Time(seen)
    return dataclasses.replace(job, step=beat.step, samples=beat.samples, loss=beat.loss, step_time=time)


def as_sample(job: JobReport) -> Sample | None:
    """Return the progress of a report as a sample; None if it has none."""
    if job.step is None or job.samples is None:
        return None
    return Sample(attempt=job.attempt, step=job.step, samples=job.samples, loss=job.loss)


def describe(beat: Heartbeat | None) -> str:
    """Describe phase and last save of the training; empty if they are not known."""
    if beat is None:
        return ""
    return "; ".join(filter(None, (beat.phase, f"last save: {beat.save}" if beat.save else "")))
