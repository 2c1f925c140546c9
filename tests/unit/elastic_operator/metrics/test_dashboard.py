"""The dashboard, the alerts and the queries in the documentation ask only for what the operator exports."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator.api.status import Phase
from elastic_operator.metrics import definitions
from elastic_operator.metrics.definitions import Type
from tests.unit.elastic_operator.metrics.exposed_metrics import TARGET_LABELS, check, exposed

ROOT = Path(__file__).parents[4]
CHART = ROOT / "charts/elastic-training-operator"
DASHBOARD = json.loads((CHART / "dashboards/elastic-training.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [
    rule for group in yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
UNITS = {"_seconds": "s", "_ratio": "percentunit", "_bytes": "bytes"}
"""Grafana's units, by the base unit at the end of a name."""


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    return exposed()


def expressions() -> list[tuple[str, str]]:
    panels = [(f"panel {panel['title']}", target["expr"]) for panel in PANELS for target in panel["targets"]]
    notes = [
        (f"annotation {note['name']}", note["expr"]) for note in DASHBOARD["annotations"]["list"] if "expr" in note
    ]
    rules = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in RULES]
    pages = [
        (f"docs/metrics.md {number}", text)
        for number, text in enumerate(
            re.findall(r"```promql\n(.*?)```", (ROOT / "docs/metrics.md").read_text(), re.DOTALL)
        )
    ]
    assert pages
    return panels + notes + rules + pages


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=lambda value: value if len(value) < 40 else "")
def test_every_expression_asks_for_metrics_and_labels_that_exist(
    where: str, expression: str, known: dict[str, set[str]]
) -> None:
    assert check(expression, known) == [], where


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(etj_lost_steps[5m])", "no metric etj_lost_steps"),
        ("etj_recovery_seconds", "no metric etj_recovery_seconds"),
        ('etj_job_step{job_name="gpt"}', "etj_job_step has no label job_name"),
        ("sum by (phase) (etj_job_step)", "nothing in it has a label phase"),
        ("etj_job_step * on (uid) etj_job_attempt", "nothing in it has a label uid"),
    ],
)
def test_the_check_finds_what_does_not_exist(expression: str, problem: str, known: dict[str, set[str]]) -> None:
    assert problem in check(expression, known)


def test_no_metric_is_left_out_of_the_dashboard() -> None:
    text = json.dumps(DASHBOARD)
    # The version is nothing to draw, and few notify; how often what was launched, and what a job lost, are seen in
    # other panels.
    hidden = {
        "etj_build_info",
        "etj_notifications_total",
        "etj_attempts_launched_total",
        "etj_attempt_starts_total",
        "etj_jobs_finished_total",
        "etj_job_lost_steps",
    }
    assert [item.name for item in definitions.DEFINITIONS if item.name not in text] == sorted(
        hidden, key=[item.name for item in definitions.DEFINITIONS].index
    )


def test_the_dashboard_is_one_that_grafana_takes_as_it_is() -> None:
    assert DASHBOARD["schemaVersion"] >= 39
    assert DASHBOARD["id"] is None
    assert DASHBOARD["uid"] == "elastic-training"
    assert [item["name"] for item in DASHBOARD["templating"]["list"]] == ["datasource", "namespace", "job"]
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        assert panel["description"], panel["title"]
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGHIJ"[: len(panel["targets"])])
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_no_two_panels_overlap_and_none_leaves_the_page() -> None:
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
    for one, other in itertools.combinations(DASHBOARD["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (one["title"], other["title"])


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_a_panel_has_the_unit_of_what_it_shows(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        first = re.findall(r"\b(?:etj|process)_\w+", target["expr"])[0]
        base = re.sub(r"_(bucket|sum|total)$", "", first)
        unit = next((found for suffix, found in UNITS.items() if base.endswith(suffix)), "short")
        if target["expr"].startswith("count(") or first.endswith("_count"):
            unit = "short"
        # Events, passes and writes in a second.
        per_second = {"short": "ops"} if re.match(r"sum( by \(\w+\) )?\(rate\(", target["expr"]) else {}
        assert panel["fieldConfig"]["defaults"]["unit"] == per_second.get(unit, unit), target["expr"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_legends_name_labels_that_are_left(panel: dict[str, Any], known: dict[str, set[str]]) -> None:
    for target in panel["targets"]:
        used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        kept = re.findall(r"\bby \(([^)]*)\)", target["expr"])
        if kept:
            assert used <= {name.strip() for name in kept[0].split(",")}, target
        else:
            first = re.findall(r"\b(?:etj|process)_\w+", target["expr"])[0]
            assert used <= known[first] | TARGET_LABELS, target


def test_the_phases_are_drawn_with_their_names() -> None:
    (panel,) = [panel for panel in PANELS if panel["title"] == "Phase"]
    drawn = re.findall(r'phase="(\w+)"\} \* 0 \+ (\d+)', panel["targets"][0]["expr"])
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    assert [(mapping["options"][number]["text"]) for _, number in drawn] == [name for name, _ in drawn]
    assert {name for name, _ in drawn} == {str(phase) for phase in Phase}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_how_bad_it_is_what_happened_and_what_to_do(
    rule: dict[str, Any], known: dict[str, set[str]]
) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    text = " ".join(rule["annotations"].values())
    used = set(re.findall(r"\$labels\.(\w+)", text))
    names = re.findall(r"\betj_\w+", rule["expr"])
    assert used <= set().union(*(known[name] for name in names))
    assert rule["alert"] in (ROOT / "docs/metrics.md").read_text()


def test_causes_phases_and_results_in_expressions_are_ones_that_exist() -> None:
    values = {str(phase) for phase in Phase} | {
        value for family in definitions.DEFINITIONS for row in family.series for value in row
    }
    for where, expression in expressions():
        for label, text in re.findall(r'(\w+)(?:=|!=|=~|!~)"([^"]*)"', expression):
            if label not in ("namespace", "name"):
                assert set(text.split("|")) <= values, (where, label, text)


def test_counters_are_read_through_a_rate() -> None:
    counters = {family.name for family in definitions.DEFINITIONS if family.type == Type.COUNTER}
    for where, expression in expressions():
        for name in counters & set(re.findall(r"\betj_\w+", expression)):
            assert re.search(rf"(rate|increase|resets)\({name}[{{\[]", expression), (where, name)
