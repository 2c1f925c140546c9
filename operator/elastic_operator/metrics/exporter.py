"""Prometheus exporter: adds the samples of `counters` and sets the values of `gauges` (see docs/metrics.md).

A standby replica serves the same page, with `etj_leader` 0 and without series of jobs.
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
"""Exported phase of each job."""


def _make(definition: MetricDefinition) -> Counter | Gauge | Histogram:
    metric: Counter | Gauge | Histogram
    match definition.type:
        case Type.COUNTER:
            metric = Counter(definition.name, definition.help, definition.labels, registry=REGISTRY)
        case Type.GAUGE:
            metric = Gauge(definition.name, definition.help, definition.labels, registry=REGISTRY)
        case Type.HISTOGRAM:
            metric = Histogram(
                definition.name, definition.help, definition.labels, registry=REGISTRY, buckets=definition.buckets
            )
    for values in definition.series:
        metric.labels(*values)
    return metric


# Creation times would double the number of series, and each would be the start of this process.
disable_created_metrics()  # type: ignore[no-untyped-call]
_METRICS = {definition.name: _make(definition) for definition in definitions.DEFINITIONS}
for _collector in (ProcessCollector, PlatformCollector):
    _collector(registry=REGISTRY)


def serve(port: int, leads: Callable[[], bool]) -> None:
    """Serve /metrics; port 0 disables it. Every scrape calls `leads`."""
    if port:
        _gauge(definitions.LEADER).set_function(lambda: float(leads()))
        _gauge(definitions.BUILD, version("elastic-training-operator")).set(1)
        start_http_server(port, registry=REGISTRY)


def count(samples: Iterable[Sample]) -> None:
    """Add samples to their counters and histograms."""
    for sample in samples:
        metric = _METRICS[sample.definition.name]
        child = metric.labels(*_bound_labels(sample)) if sample.labels else metric
        if isinstance(child, Histogram):
            child.observe(sample.value)
        else:
            child.inc(sample.value)


def show(key: Key, phase: str, gauges: Mapping[MetricDefinition, float | None]) -> None:
    """Set the gauges of one job; those without a value are not exported."""
    for definition, value in gauges.items():
        if value is None:
            _remove(definition, *key)
        else:
            _gauge(definition, *key).set(value)
    old_phase = _phases.get(key)
    if old_phase is not None and old_phase != phase:
        _remove(definitions.JOB_PHASE, *key, old_phase)
    _gauge(definitions.JOB_PHASE, *key, phase).set(1)
    _phases[key] = phase


def forget(key: Key) -> None:
    """Remove all series of a job that does not exist any more."""
    for definition in definitions.DEFINITIONS:
        if definition.labels == definitions.JOB:
            _remove(definition, *key)
    phase = _phases.pop(key, None)
    if phase is not None:
        _remove(definitions.JOB_PHASE, *key, phase)


def _bound_labels(sample: Sample) -> tuple[str, ...]:
    """Return the labels of the sample, with `Other` for a value that is on no list."""
    definition = sample.definition
    if not definition.is_bounded:
        return sample.labels
    allowed = ({values[index] for values in definition.series} for index in range(len(definition.labels)))
    return tuple(
        label if label in permitted else definitions.OTHER
        for label, permitted in zip(sample.labels, allowed, strict=True)
    )


def _gauge(definition: MetricDefinition, *labels: str) -> Gauge:
    metric = _METRICS[definition.name]
    gauge = metric.labels(*labels) if labels else metric
    assert isinstance(gauge, Gauge)
    return gauge


def _remove(definition: MetricDefinition, *labels: str) -> None:
    # `remove` ignores a missing series.
    _METRICS[definition.name].remove(*labels)
