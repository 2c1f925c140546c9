"""The condition that says, before any failure, that the resharder would refuse the commits of a training."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.pod_reports import parse_refused
from elastic_operator.api.status import Condition, Status
from elastic_operator.reconcile.actions import Decision
from tests.unit.elastic_operator.reconcile.test_decide_phases import NOW, WORLD, look, settled, training

CLASS = {"message": "mp_rank_00_model_states.pt: mine.State at trainer", "toAllow": ["mine.State"]}
LAYOUT = {"message": "is an elastic checkpoint", "toAllow": []}
NOTHING = {"message": "", "toAllow": []}


def hear(status: Status, said: dict[str, Any] | None, *, now: float = NOW, allowed: tuple[str, ...] = ()) -> Decision:
    notes = {} if said is None else {"REFUSED": json.dumps(said)}
    world = dataclasses.replace(WORLD, leases=training(**notes))
    checkpoint = {"claimName": "ckpt", "path": "gpt", "allowedGlobals": list(allowed)}
    return look(status, world, now=now, checkpoint=checkpoint)


def told(decision: Decision) -> Condition | None:
    return find(decision.status.conditions, Type.COMMITS_CONVERTIBLE)


def reasons(decision: Decision) -> list[str]:
    return [event.reason for event in decision.events]


def test_a_class_that_is_refused_is_told_once_with_the_whole_list_to_set() -> None:
    first = hear(settled(), CLASS, allowed=("mine.Old",))
    condition = told(first)
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "NotConvertible")
    assert "mine.State at trainer" in condition.message
    assert "set spec.checkpoint.allowedGlobals: [mine.Old, mine.State]" in condition.message
    assert reasons(first).count("NotConvertible") == 1
    assert first.actions == look(settled()).actions, "a warning and nothing else"
    assert "NotConvertible" not in reasons(hear(first.status, CLASS, now=NOW + 60, allowed=("mine.Old",)))


@pytest.mark.parametrize(
    ("then", "allowed", "status"),
    [
        pytest.param(CLASS, ("mine.State",), "True", id="allowed"),
        pytest.param(CLASS, ("mine.Other",), "False", id="another-name-is-allowed"),
        pytest.param(NOTHING, (), "True", id="the-next-attempt-saves-plain-data"),
        pytest.param(LAYOUT, ("mine.State",), "False", id="no-name-helps"),
        pytest.param(None, (), "False", id="not-known-yet"),
    ],
)
def test_the_condition_ends_with_its_cause(then: dict[str, Any] | None, allowed: tuple[str, ...], status: str) -> None:
    before = hear(settled(), CLASS).status
    condition = told(hear(before, then, now=NOW + 60, allowed=allowed))
    assert condition is not None
    assert condition.status == status


@pytest.mark.parametrize(("said", "allowed"), [(NOTHING, ()), (CLASS, ("mine.State",)), (None, ())])
def test_what_is_convertible_needs_no_condition(said: dict[str, Any] | None, allowed: tuple[str, ...]) -> None:
    decision = hear(settled(), said, allowed=allowed)
    assert told(decision) is None
    assert "NotConvertible" not in reasons(decision)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"message": 1, "toAllow": []}',
        '{"message": "", "toAllow": "a.B"}',
        '{"message": "", "toAllow": [1]}',
        '{"message": "", "toAllow": ["a.*"]}',
        json.dumps({"message": "", "toAllow": ["a.B"] * 65}),
    ],
)
def test_what_does_not_fit_is_not_believed(text: str) -> None:
    with pytest.raises(ValueError, match="expected a message and toAllow"):
        parse_refused(text)
