"""What the operator's metrics page really says, and what a PromQL expression asks of it."""

from __future__ import annotations

import re
from typing import Any

import promql_parser
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elastic_operator.metrics import definitions, exporter
from elastic_operator.metrics.counters import Sample
from elastic_operator.metrics.definitions import Type

TARGET_LABELS = {"instance", "job", "pod"}
"""What Prometheus itself adds to every series."""

GRAFANA = {"$__rate_interval": "5m", "$__range": "6h", "$__interval": "1m"}


def page() -> str:
    """The page as it is served now."""
    return generate_latest(exporter.REGISTRY).decode()


def exposed() -> dict[str, set[str]]:
    """Labels by name of series, `_bucket` and so on included, where every metric has something to tell."""
    key = ("exposed", "everything")
    exporter.show(
        key, "Running", {family: 1.0 for family in definitions.DEFINITIONS if family.labels == definitions.JOB}
    )
    for family in definitions.DEFINITIONS:
        if family.labels and family.labels[:2] != definitions.JOB and family.type != Type.GAUGE:
            exporter.count(
                [Sample(definition=family, labels=family.series[0] if family.series else ("any",), value=0.0)]
            )
    exporter._gauge(definitions.BUILD, "1").set(1)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    exporter.forget(key)
    return found


def check(expression: str, known: dict[str, set[str]]) -> list[str]:
    """What is wrong with an expression; ValueError where it is no PromQL."""
    for variable, value in GRAFANA.items():
        expression = expression.replace(variable, value)
    problems: list[str] = []
    available = set(TARGET_LABELS)
    asked: list[str] = []
    seen: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            seen.add(node.name)
            labels = known.get(node.name, set())
            available.update(labels)
            problems.extend([] if labels or node.name in known else [f"no metric {node.name}"])
            used = {matcher.name for matcher in node.matchers.matchers}
            problems.extend(f"{node.name} has no label {name}" for name in sorted(used - labels - TARGET_LABELS))
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            asked.extend(node.modifier.labels)
        elif isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None:
            asked.extend(node.modifier.matching.labels if node.modifier.matching is not None else ())

    promql_parser.walk(promql_parser.parse(expression), visit)
    unseen = set(re.findall(r"\betj_\w+", expression)) - seen
    problems += [f"{name} was not looked at" for name in sorted(unseen)]
    return problems + [f"nothing in it has a label {name}" for name in asked if name not in available]
