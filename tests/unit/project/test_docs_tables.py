"""Tables of the documentation say what the program says: times, signals, conditions, events, tests of failures."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import yaml

from elastic_operator.api.conditions import Type
from elastic_operator.api.status import Phase
from elastic_operator.observed.signal_kinds import KINDS, Kind
from elastic_operator.observed.timeouts import Timeouts
from tests.pages import ROOT, rows, section

OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
FAILURES = (ROOT / "docs/failure-modes.md").read_text(encoding="utf-8")
OPERATOR = sorted((ROOT / "operator/elastic_operator").rglob("*.py"))
WORLD = "test_any_order_of_events_and_crashes_ends_complete"
"""The failure modes call it `world`."""

NO_FAILURES = re.compile(
    r"test_(testbed|crd|docs|helm_(templates|cluster_wide)|images|plugin|metrics|dashboard|prometheus|sequence|virtual"
    r"|pins|shutdown)\w*"
)
"""Modules of the cluster tier whose tests are about something else."""


@functools.cache
def schema() -> dict[str, Any]:
    crd = yaml.safe_load((ROOT / "crds/elastictrainingjobs.yaml").read_text(encoding="utf-8"))
    found: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def field(path: str) -> dict[str, Any]:
    found = schema()
    for name in path.split("."):
        found = found["properties"][name]
    return found


def times(node: dict[str, Any], path: str = "") -> set[str]:
    """Fields of the resource whose names end in Seconds and that have a default."""
    found = set()
    for name, child in node.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        found |= {here} if name.endswith("Seconds") and "default" in child else times(child, here)
    return found


def test_the_times_of_a_job_are_those_of_the_schema() -> None:
    told = {path: default for path, default, _ in rows(section(OPERATIONS, "Times of a job"))}
    assert {path: str(field(path)["default"]) for path in told} == told
    counts = {"recovery.restartBudget.limit", "reshard.backoffLimit"}
    assert set(told) == times({"properties": schema()["properties"]}) | counts


def test_the_times_of_the_operator_are_its_limits() -> None:
    told = {name: float(default) for name, default, _ in rows(section(OPERATIONS, "Times of the operator"))}
    assert told == {key.replace("_", "-"): float(value) for key, value in dataclasses.asdict(Timeouts()).items()}


def test_the_fixed_times_are_those_of_the_code() -> None:
    told = rows(section(OPERATIONS, "Times that are fixed"))
    assert len(told) > 5
    for name, seconds, _ in told:
        module, _, constant = name.strip("`").rpartition(".")
        assert getattr(importlib.import_module(module), constant) == float(seconds), name


def test_the_signals_are_those_that_are_judged() -> None:
    told = {}
    for names, sources, weight, takes_node, grace in rows(section(OPERATIONS, "Signals")):
        kinds = names.split(", ")
        several = sources.split(", ")
        for kind, source in zip(kinds, several if len(several) > 1 else several * len(kinds), strict=True):
            told[kind] = (source, weight, takes_node == "yes", re.sub(r"[-_]|(?=[A-Z])", "_", grace).lower())
    real = {
        str(kind): (meaning.source, meaning.weight.name.lower(), meaning.takes_node, meaning.grace)
        for kind, meaning in KINDS.items()
    }
    assert told == real


def test_the_conditions_are_those_that_are_set() -> None:
    assert [name for name, _ in rows(section(OPERATIONS, "Conditions"))] == [item.value for item in Type]


def test_the_phases_are_those_of_the_status() -> None:
    concepts = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    told = {name for names, _ in rows(section(concepts, "Phases")) for name in names.split(", ")}
    assert told == {phase.value for phase in Phase}


def constants() -> tuple[set[str], set[str]]:
    """Reasons of events that are written in the operator's code, and every string in it."""
    emitted, strings = set(), set()
    for path in OPERATOR:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(node.value)
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "emit":
                emitted |= {item.value for item in node.args[:1] if isinstance(item, ast.Constant)}
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Event":
                values = (item.value for item in node.keywords if item.arg == "reason")
                emitted |= {item.value for item in values if isinstance(item, ast.Constant)}
    return emitted, strings


def test_the_events_are_those_that_are_emitted() -> None:
    told = set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)*\b", section(OPERATIONS, "Events")))
    emitted, strings = constants()
    assert emitted <= told
    assert told <= strings
    assert not told & {kind.value for kind in Kind}, "signals are told by their own table"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A test function: where it is, and the text of its module, which holds the names of its cases."""

    path: Path
    module: str


def known_tests() -> dict[str, list[Known]]:
    found: dict[str, list[Known]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^(?:async )?def (test_\w+)", text, flags=re.MULTILINE):
            found.setdefault(name, []).append(Known(path=path, module=text))
    return found


def named_tests() -> list[tuple[str, str, bool]]:
    """Name, case and boldness of every test in the table."""
    cells = [row[-1].replace("`world`", f"`{WORLD}`") for row in rows(FAILURES)]
    assert len(cells) > 30
    return [
        (name, case, bold == "**")
        for cell in cells
        for bold, name, case in re.findall(r"(\*\*)?`(\w+)(?:\[([^\]]+)\])?`", cell)
    ]


def test_every_row_of_the_failure_modes_names_tests_that_exist() -> None:
    known = known_tests()
    for row in rows(FAILURES):
        assert re.search(r"`(test_|world)", row[-1]), row
    for name, case, bold in named_tests():
        places = known.get(name, [])
        assert len(places) == 1, f"{name} is defined in {[str(item.path) for item in places]}"
        assert not case or re.search(rf"\"{re.escape(case)}\"", places[0].module), f"{name} has no case {case}"
        on_cluster = places[0].path.is_relative_to(ROOT / "tests/cluster")
        assert bold == on_cluster, f"{name} is in {places[0].path}: bold means on a cluster"


def test_every_failure_that_is_tested_on_a_cluster_has_a_row() -> None:
    named = {name for name, _, _ in named_tests()}
    missing = {
        name: places[0].path.name
        for name, places in known_tests().items()
        if places[0].path.is_relative_to(ROOT / "tests/cluster")
        and not NO_FAILURES.fullmatch(places[0].path.stem)
        and name not in named
    }
    assert missing == {}


def test_every_signal_ends_an_attempt_in_a_test_on_a_cluster() -> None:
    table = {signal: cell for signal, _, cell in rows(section(FAILURES, "Signals"))}
    assert list(table) == [name for names, *_ in rows(section(OPERATIONS, "Signals")) for name in names.split(", ")]
    assert set(table) == set(Kind)
    helpers = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/cluster").glob("[!t]*.py"))
    known = known_tests()
    for signal, cell in table.items():
        (name,) = re.findall(r"`(test_\w+)`", cell)
        assert f'"{signal}"' in known[name][0].module + helpers, f"{name} never names {signal}"


def test_the_values_of_the_chart_have_the_defaults_that_the_page_says() -> None:
    chart = yaml.safe_load((ROOT / "charts/elastic-training-operator/values.yaml").read_text(encoding="utf-8"))
    told = rows(section((ROOT / "docs/install.md").read_text(encoding="utf-8"), "Values that matter"))
    assert len(told) > 10
    for path, default, _ in told:
        found = chart
        for name in path.split("."):
            assert name in found, path
            found = found[name]
        assert default == "" or yaml.safe_load(default) == found, path
