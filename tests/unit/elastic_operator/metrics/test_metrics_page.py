"""The metrics page: names by convention, bounded labels, a table in the documentation that agrees, series that go."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_operator.metrics import definitions, exporter
from elastic_operator.metrics.counters import Sample
from elastic_operator.metrics.definitions import DEFINITIONS, MetricDefinition, Type
from tests.unit.elastic_operator.metrics.exposed_metrics import page

ROOT = Path(__file__).parents[4]
PACKAGE = ROOT / "operator/elastic_operator"


def table() -> str:
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in DEFINITIONS:
        labels = ", ".join(family.labels)
        lines.append(f"| `{family.name}` | {family.type} | {labels} | {family.help} |")
    return "\n".join(lines)


def value(series: str, **labels: str) -> float | None:
    return exporter.REGISTRY.get_sample_value(series, labels)


def test_the_documentation_has_the_table_of_what_is_exported() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    found = re.search(r"<!-- table:begin -->\n(.*?)\n<!-- table:end -->", text, re.DOTALL)
    assert found, "docs/metrics.md has no table between its markers"
    assert found[1] == table(), f"put this between the markers:\n{table()}"


def test_the_page_has_exactly_the_families_of_the_table() -> None:
    for family in DEFINITIONS:
        if family.labels[:2] == definitions.JOB:
            continue
        if not family.series:
            exporter.count(
                [Sample(definition=family, labels=("any",) * len(family.labels), value=0)] * (family.type != Type.GAUGE)
            )
    served = {item.name: item.type for item in text_string_to_metric_families(page()) if item.name.startswith("etj_")}
    listed = {family.name.removesuffix("_total"): str(family.type) for family in DEFINITIONS}
    assert served == listed


@pytest.mark.parametrize("family", DEFINITIONS, ids=lambda family: str(family.name))
def test_names_follow_the_conventions(family: MetricDefinition) -> None:
    assert re.fullmatch(r"etj_[a-z]+(_[a-z]+)*", family.name)
    assert family.name.endswith("_total") == (family.type == Type.COUNTER)
    assert not re.search(r"milli|minute|hour|kilo|mib|_ms\b|percent", family.name)
    if family.type == Type.HISTOGRAM:
        assert family.name.endswith("_seconds")
        assert list(family.buckets) == sorted(set(family.buckets))
    assert len(family.help) < 140
    assert not family.help.endswith(".")


@pytest.mark.parametrize("family", DEFINITIONS, ids=lambda family: str(family.name))
def test_labels_are_bounded_but_for_those_of_one_job(family: MetricDefinition) -> None:
    if family.labels[:2] == definitions.JOB:
        assert family.type == Type.GAUGE
        assert family.labels[2:] in ((), ("phase",))
        return
    assert not {"namespace", "name", "node", "pod", "uid", "message"} & set(family.labels)
    if family.labels and family.is_bounded:
        assert family.series
        assert len(family.series) * max(1, len(family.buckets)) <= 200
        assert all(len(row) == len(family.labels) for row in family.series)


def test_every_cause_in_the_code_is_on_the_list() -> None:
    """What `recover` and `start_drain` are called with: a kind of signal, a constant, or one of these words."""
    words: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [item.value for item in node.keywords if item.arg == "cause"]
            given += node.args[2:3] if name == "start_drain" else []
            words |= {
                item.value
                for argument in given
                for item in ast.walk(argument)
                if isinstance(item, ast.Constant) and isinstance(item.value, str) and item.value
            }
    assert {"CapacityLost", "SpecChanged", "CapacityReturned"} <= words
    assert words <= set(definitions.CAUSES)


def test_a_value_that_is_on_no_list_is_counted_as_other() -> None:
    before = value("etj_reshards_total", mode="Other", result="Other") or 0
    exporter.count([Sample(definition=definitions.RESHARDS, labels=("sideways", "Haunted"))])
    assert value("etj_reshards_total", mode="Other", result="Other") == before + 1
    assert value("etj_reshards_total", mode="sideways", result="Haunted") is None


def test_what_has_not_happened_yet_is_exported_as_zero() -> None:
    # Otherwise increase() would not see the first one.
    for family in DEFINITIONS:
        suffix = "_count" if family.type == Type.HISTOGRAM else ""
        for row in family.series:
            assert value(family.name + suffix, **dict(zip(family.labels, row, strict=True))) is not None


def test_series_of_a_job_change_with_it_and_go_with_it() -> None:
    key, other = ("team", "gpt"), ("team", "bert")
    exporter.show(other, "Running", {definitions.JOB_STEP: 1})
    exporter.show(key, "Waiting", {definitions.JOB_STEP: 5, definitions.JOB_QUEUED: 1000.0})
    exporter.show(key, "Running", {definitions.JOB_STEP: 7, definitions.JOB_QUEUED: None})
    labels = {"namespace": "team", "name": "gpt"}
    assert value("etj_job_step", **labels) == 7
    assert value("etj_job_queue_start_timestamp_seconds", **labels) is None
    assert value("etj_job_phase", **labels, phase="Running") == 1
    assert value("etj_job_phase", **labels, phase="Waiting") is None
    exporter.forget(key)
    assert 'name="gpt"' not in page()
    assert 'name="bert"' in page()
    exporter.forget(other)
    exporter.forget(other)
    assert 'name="bert"' not in page()
