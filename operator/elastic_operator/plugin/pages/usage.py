"""`kubectl etj top`: what jobs use and what comes out of it, one line per job and a total. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_operator.plugin.pages.job_report import make_report, read_status
from elastic_operator.plugin.pages.live.pace import steps_per_second
from elastic_operator.plugin.pages.text import NONE, format_age, format_table, pluralize

_HEADER = ("NAME", "PHASE", "GPUS", "USEFUL", "STEPS/S", "SAMPLES/S", "LAST STEP", "FAILURES", "MTTR", "LOST STEPS")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Use and results of one job.

    Attributes:
        gpus: accelerators of the current attempt.
        useful_gpus: `gpus` times the effective training time ratio; None if that is not known.
        steps_per_second: mean since the first step of the attempt; None if it does not train, or is not known.
        samples_per_second: that times the global batch.
        step_age_seconds: time since the operator last observed a new step.
        failures: unplanned recoveries that the goodput counts.
    """

    name: str
    namespace: str
    phase: str
    gpus: int = 0
    useful_gpus: float | None = None
    ettr: float | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    step_age_seconds: float | None = None
    failures: int = 0
    mttr_seconds: float | None = None
    lost_steps: int = 0


_ORDERS: Mapping[str, Callable[[Usage], Any]] = {
    "gpus": lambda item: -item.gpus,
    "useful": lambda item: (item.ettr is None, item.ettr),
    "age": lambda item: -(item.step_age_seconds or 0.0),
    "failures": lambda item: -item.failures,
}
"""Sort keys by the value of `--sort`; the first line is what deserves a look."""

SORTS = tuple(_ORDERS)


def measure_usage(resource: Mapping[str, Any], now: float) -> Usage:
    """Measure one job.

    Args:
        resource: the resource as the API server returned it.
        now: current time in seconds since the epoch.
    """
    job, status = make_report(resource, now), read_status(resource)
    found, gpus = job.goodput, job.gpus if status.launched and not status.terminal else 0
    rate = steps_per_second(status)
    batch = status.current.global_samples if status.current is not None else 0
    if not batch:
        batch = ((resource.get("spec") or {}).get("batch") or {}).get("globalSamples") or 0
    ettr = found.get("ettr")
    return Usage(
        name=job.name,
        namespace=job.namespace,
        phase=job.phase,
        gpus=gpus,
        useful_gpus=None if ettr is None else round(gpus * ettr, 2),
        ettr=ettr,
        steps_per_second=None if rate is None else round(rate, 6),
        samples_per_second=None if rate is None or not batch else round(rate * batch, 3),
        step_age_seconds=None if job.step_time is None or status.terminal else round(max(0.0, now - job.step_time), 3),
        failures=int(found.get("failures", 0)),
        mttr_seconds=found.get("mttrSeconds"),
        lost_steps=int(found.get("lostSteps", 0)),
    )


def sort_usage(items: Sequence[Usage], order: str) -> list[Usage]:
    """Sort by one of SORTS, then by name."""
    return sorted(items, key=lambda item: (_ORDERS[order](item), item.namespace, item.name))


def format_usage(items: Sequence[Usage], *, everywhere: bool) -> str:
    """Format a table with a line of totals below."""
    header = ("NAMESPACE", *_HEADER) if everywhere else _HEADER
    table = format_table(header, (((item.namespace,) if everywhere else ()) + _row(item) for item in items))
    return f"{table}\n\n{_total(items)}"


def _row(item: Usage) -> tuple[str, ...]:
    useful = "" if item.useful_gpus is None or item.ettr is None else f"{item.useful_gpus:.1f} ({item.ettr:.0%})"
    return (
        item.name,
        item.phase,
        str(item.gpus or NONE),
        useful,
        "" if item.steps_per_second is None else f"{item.steps_per_second:.3g}",
        "" if item.samples_per_second is None else f"{item.samples_per_second:.4g}",
        format_age(item.step_age_seconds),
        str(item.failures),
        format_age(item.mttr_seconds),
        str(item.lost_steps),
    )


def _total(items: Sequence[Usage]) -> str:
    phases = [item.phase for item in items]
    counts = ", ".join(f"{phases.count(phase)} {phase}" for phase in sorted(set(phases)))
    known = [item for item in items if item.useful_gpus is not None]
    useful = f", {sum(item.useful_gpus or 0.0 for item in known):.1f} of them useful" if known else ""
    return f"Total: {pluralize(len(items), 'job')} ({counts}), {pluralize(sum(i.gpus for i in items), 'GPU')}{useful}"
