"""`kubectl etj list`: one line per job. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elastic_operator.api.serialization import Time
from elastic_operator.plugin.pages.job_report import JobReport
from elastic_operator.plugin.pages.text import NONE, format_age, format_table

_HEADER = ("NAME", "PHASE", "ATTEMPT", "TOPOLOGY", "NODES", "GPUS", "STEP", "COMMIT", "RECOVERIES", "ETTR", "AGE")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ListEntry:
    """One line of the list.

    Attributes:
        commit_step: step of the newest commit.
        recoveries: number of recoveries in the status, at most ten.
        ettr: effective training time ratio, from 0 to 1.
    """

    name: str
    namespace: str
    phase: str
    reason: str = ""
    attempt: int = 0
    topology: str = ""
    nodes: int = 0
    gpus: int = 0
    step: int | None = None
    commit_step: int | None = None
    recoveries: int = 0
    ettr: float | None = None
    create_time: Time | None = None


def make_entry(job: JobReport) -> ListEntry:
    """Make the line of one job from its report."""
    return ListEntry(
        name=job.name,
        namespace=job.namespace,
        phase=job.phase,
        reason=job.reason,
        attempt=job.attempt,
        topology=job.topology,
        nodes=job.nodes,
        gpus=job.gpus,
        step=job.step,
        commit_step=job.commit.step if job.commit else None,
        recoveries=len(job.recoveries),
        ettr=job.goodput.get("ettr"),
        create_time=job.create_time,
    )


def format_listing(entries: Sequence[ListEntry], now: float, *, everywhere: bool) -> str:
    """Format the list as a table like that of `kubectl get`."""
    header = ("NAMESPACE", *_HEADER) if everywhere else _HEADER
    return format_table(header, (((item.namespace,) if everywhere else ()) + _row(item, now) for item in entries))


def _row(item: ListEntry, now: float) -> tuple[str, ...]:
    return (
        item.name,
        item.phase,
        str(item.attempt or NONE),
        item.topology or NONE,
        str(item.nodes or NONE),
        str(item.gpus or NONE),
        NONE if item.step is None else str(item.step),
        NONE if item.commit_step is None else str(item.commit_step),
        str(item.recoveries),
        NONE if item.ettr is None else f"{item.ettr:.0%}",
        format_age(None if item.create_time is None else now - item.create_time),
    )
