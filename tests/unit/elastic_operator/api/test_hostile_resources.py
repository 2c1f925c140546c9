"""Specs and statuses that are almost right, or made to harm: each mistake is told once, and nothing else is lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.api.serialization import to_wire
from elastic_operator.api.spec import SpecError, parse_spec, spec_hash
from elastic_operator.api.status import Status
from elastic_operator.api.status_reader import read_status
from tests.unit.elastic_operator.api.test_spec import MINIMAL, MODEL, with_field
from tests.unit.elastic_operator.api.test_status import FULL


def problems(spec: dict[str, Any]) -> list[str]:
    with pytest.raises(SpecError) as refused:
        parse_spec(spec)
    return [problem.split(" ")[0].rstrip(":") for problem in refused.value.problems]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "346892a5d09a"),
        ({"patterns": "./a.yaml"}, "cea347319680"),
        ({"like": "a/./b", "names": "n.yaml"}, "16a16a205eaf"),
    ],
)
def test_the_hash_of_a_spec_is_that_of_older_operators(options: dict[str, str], expected: str) -> None:
    spec = with_field("checkpoint.startFrom", "old/run")
    if options:
        spec["checkpoint"]["startOptions"] = options
    assert spec_hash(parse_spec(spec)) == expected, "an upgrade would restart every running job"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (
            "parallelism",
            {"strategy": "Fixed", "topologies": [{"tensor": "x"}]},
            ["spec.parallelism.topologies[0].tensor"],
        ),
        ("parallelism", {"strategy": "Ranked", "zeroStage": 7, "topologies": [{}, {}]}, ["spec.parallelism.zeroStage"]),
        ("model", {**MODEL, "attentionHeads": "x", "keyValueHeads": None}, ["spec.model.attentionHeads"]),
        ("model", {**MODEL, "attentionHeads": None, "keyValueHeads": None}, ["spec.model.attentionHeads"]),
        ("template", {"spec": {"containers": [{"name": "t"}]}}, ["spec.template.spec.containers[0].image"]),
        (
            "template",
            {"metadata": {"labels": ["a"]}, "spec": {"containers": [{"name": "t", "image": "i"}]}},
            ["spec.template.metadata.labels"],
        ),
        (
            "template",
            {"spec": {"containers": [{"name": "t", "image": "i", "resources": {"limits": {"cpu": [1]}}}]}},
            ["spec.template.spec.containers[0].resources.limits.cpu"],
        ),
        (
            "template",
            {"spec": {"containers": [{"name": "t", "image": "i", "resources": {"limits": {"cpu": True}}}]}},
            ["spec.template.spec.containers[0].resources.limits.cpu"],
        ),
        ("checkpoint.startOptions", {"like": "."}, ["spec.checkpoint.startOptions"]),
    ],
)
def test_one_mistake_is_one_problem(path: str, value: Any, expected: list[str]) -> None:
    assert problems(with_field(path, value)) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FULL_SPEC: dict[str, Any] = {
    **MINIMAL,
    "model": MODEL,
    "parallelism": {"strategy": "Fixed", "tensor": [1], "zeroStage": 1, "topologies": [{"tensor": 1, "data": 2}]},
    "reshard": {"mode": "Auto", "template": {"spec": {"containers": [{"name": "r", "image": "i"}]}}},
    "recovery": {"hangSeconds": 60, "restartBudget": {"limit": 1}},
    "suspend": False,
}


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if here:
        yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*here, key))


def replaced(value: Any, path: tuple[Any, ...], item: Any) -> Any:
    changed = copy.deepcopy(value)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = item
    return changed


@given(st.sampled_from(list(paths(FULL_SPEC))), JSON)
def test_every_problem_of_a_spec_is_told_in_our_words(path: tuple[Any, ...], item: Any) -> None:
    try:
        parse_spec(replaced(FULL_SPEC, path, item))
    except SpecError as error:
        for problem in error.problems:
            assert problem.startswith("spec."), problem
            assert "Input" not in problem and "pydantic" not in problem and "unable to" not in problem, problem


@given(st.sampled_from(list(paths(json.loads(json.dumps(to_wire(FULL)))))), JSON)
def test_every_problem_of_a_status_is_told_in_our_words(path: tuple[Any, ...], item: Any) -> None:
    for problem in read_status(replaced(json.loads(json.dumps(to_wire(FULL))), path, item)).problems:
        assert ": expected " in problem and ", found " in problem, problem
        assert "Input" not in problem and "unable to" not in problem, problem


def stored(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(to_wire(FULL))), **changes}


CURRENT = {"topology": {"tp": 2}, "numNodes": 1, "gpusPerNode": 1}
COMMIT = {"uri": "/c", "step": 1, "samples": 1, "attempt": 1, "topology": {"dp": 2}}


@pytest.mark.parametrize(
    ("wire", "is_lost", "expected"),
    [
        ({"current": {**CURRENT, "topology": {"tp": 2, "pp": None}}}, True, ["status.current.topology"]),
        ({"current": {**CURRENT, "topology": {}}}, True, ["status.current.topology"]),
        ({"checkpoint": {"topology": {}}, "topology": {}, "pinned": {}, "plan": {"target": {}}}, False, []),
        ({"recoveries": [{"cause": "a", "seconds": {"x": 10**400}}]}, False, ["status.recoveries[0].seconds"]),
        ({"goodput": {"partsSeconds": {"x": 10**400}, "ettr": 0.5}}, False, ["status.goodput.partsSeconds"]),
        ({"\ud800": 1, "attempt": 3}, False, []),
        (
            {"checkpoint": {"history": [5, {**COMMIT, "uri": 5}, COMMIT, {**COMMIT, "step": -1}]}},
            False,
            [
                "status.checkpoint.history[0]",
                "status.checkpoint.history[1].uri",
                "status.checkpoint.history[3].step",
            ],
        ),
        ({"conditions": [{"type": "Running", "status": "Maybe"}]}, False, None),
    ],
)
def test_a_damaged_status_loses_what_is_damaged_and_nothing_else(
    wire: dict[str, Any], is_lost: bool, expected: list[str] | None
) -> None:
    found = read_status(wire)
    assert bool(found.lost) is is_lost
    if expected is not None:
        assert [problem.split(":")[0] for problem in found.problems] == expected


def test_unknown_fields_of_goodput_are_left_out() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = {"x": deep}
    status = read_status({"goodput": {"x": deep, "ettr": 0.5}}).status
    assert status.goodput == {"ettr": 0.5}
    json.dumps(to_wire(status))


def test_the_whole_of_a_number_is_told() -> None:
    (problem,) = read_status({"observedGeneration": -1}).problems
    assert "from 0 to 9223372036854775807" in problem


@pytest.mark.parametrize(
    "wire",
    [
        {"excludedNodes": [5] * 65_536},
        {"jobUids": [5] * 65_536},
        {"recoveries": [dict.fromkeys(("cause", "lost", "planTime", "seconds"), 5)] * 16_000},
    ],
)
def test_every_one_of_very_many_mistakes_is_told(wire: dict[str, Any]) -> None:
    ((_, items),) = wire.items()
    assert len(read_status(wire).problems) >= len(items)


def test_the_reader_accepts_nothing_that_the_schema_would_refuse_to_store() -> None:
    long = "x" * 3000
    status = read_status(
        stored(
            reason=long, selector=long, excludedNodes=[{"name": long, "reason": "r", "since": "2026-11-01T10:00:00Z"}]
        )
    ).status
    assert len(status.reason) <= 1024
    assert status.selector == Status().selector
    assert status.excluded_nodes == ()


def test_nothing_of_a_full_status_is_a_problem() -> None:
    assert read_status(stored()).problems == ()
    assert read_status(stored()).status == FULL
    assert problems(copy.deepcopy(MINIMAL) | {"nodes": None}) == ["spec.nodes"]
