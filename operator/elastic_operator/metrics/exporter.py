"""The edge to Prometheus: adds up what `transitions` counts and shows what `gauges` says. docs/metrics.md lists it all.

A replica that stands by serves the same page, with `etj_leader` 0 and without series of jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)

from elastic_operator.metrics import definitions
from elastic_operator.metrics.counters import Sample
from elastic_operator.metrics.definitions import MetricDefinition, Type

Key = tuple[str, str]
"""Namespace and name of a job."""

REGISTRY = CollectorRegistry()

_phases: dict[Key, str] = {}
"""Phase that is shown of each job."""


def _make(family: MetricDefinition) -> Counter | Gauge | Histogram:
    made: Counter | Gauge | Histogram
    match family.type:
        case Type.COUNTER:
            made = Counter(family.name, family.help, family.labels, registry=REGISTRY)
        case Type.GAUGE:
            made = Gauge(family.name, family.help, family.labels, registry=REGISTRY)
        case Type.HISTOGRAM:
            made = Histogram(family.name, family.help, family.labels, registry=REGISTRY, buckets=family.buckets)
    for values in family.series:
        made.labels(*values)
    return made


# Times of creation would double the number of series, and every one is the start of this process.
disable_created_metrics()  # type: ignore[no-untyped-call]
_METRICS = {family.name: _make(family) for family in definitions.FAMILIES}
for _collector in (ProcessCollector, PlatformCollector):
    _collector(registry=REGISTRY)


def serve(port: int, leads: Callable[[], bool]) -> None:
    """Serve /metrics; port 0 means not at all. `leads` is asked at every scrape."""
    if port:
        _gauge(definitions.LEADER).set_function(lambda: float(leads()))
        _gauge(definitions.BUILD, version("elastic-training-operator")).set(1)
        start_http_server(port, registry=REGISTRY)


def count(samples: Iterable[Sample]) -> None:
    """Add samples to their counters and histograms."""
    for sample in samples:
        metric = _METRICS[sample.family.name]
        child = metric.labels(*_bounded(sample)) if sample.labels else metric
        if isinstance(child, Histogram):
            child.observe(sample.value)
        else:
            child.inc(sample.value)


def show(key: Key, phase: str, gauges: Mapping[MetricDefinition, float | None]) -> None:
    """Set the gauges of one job; those without a value are not exported."""
    for family, value in gauges.items():
        if value is None:
            _remove(family, *key)
        else:
            _gauge(family, *key).set(value)
    shown = _phases.get(key)
    if shown is not None and shown != phase:
        _remove(definitions.JOB_PHASE, *key, shown)
    _gauge(definitions.JOB_PHASE, *key, phase).set(1)
    _phases[key] = phase


def forget(key: Key) -> None:
    """The job does not exist any more: nor do its series."""
    for family in definitions.FAMILIES:
        if family.labels == definitions.JOB:
            _remove(family, *key)
    phase = _phases.pop(key, None)
    if phase is not None:
        _remove(definitions.JOB_PHASE, *key, phase)


def _bounded(sample: Sample) -> tuple[str, ...]:
    """Labels of the sample, with `Other` for what is on no list."""
    family = sample.family
    if not family.is_bounded:
        return sample.labels
    allowed = ({values[index] for values in family.series} for index in range(len(family.labels)))
    return tuple(
        label if label in known else definitions.OTHER for label, known in zip(sample.labels, allowed, strict=True)
    )


def _gauge(family: MetricDefinition, *labels: str) -> Gauge:
    metric = _METRICS[family.name]
    found = metric.labels(*labels) if labels else metric
    assert isinstance(found, Gauge)
    return found


def _remove(family: MetricDefinition, *labels: str) -> None:
    # Nothing happens where there is no such series.
    _METRICS[family.name].remove(*labels)
