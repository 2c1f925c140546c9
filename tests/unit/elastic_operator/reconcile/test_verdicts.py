"""The confirmation rule is applied to the same signals once in a pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from elastic_operator.observed import signals
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.signal_kinds import Kind
from elastic_operator.observed.signals import Signal, Verdict
from elastic_operator.reconcile.context import Context
from elastic_operator.reconcile.running import judge_attempt
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    JOB,
    NOW,
    WORLD,
    Timeouts,
    look,
    nodes,
    settled,
    spec,
)

judge = signals.judge


@pytest.fixture(name="judged")
def _judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Signal, ...]]:
    """Record the signals of every call of `signals.judge`."""
    calls: list[tuple[Signal, ...]] = []

    def record(found: Iterable[Signal], graces: Mapping[str, float], now: float) -> Verdict:
        calls.append(tuple(found))
        return judge(calls[-1], graces, now)

    monkeypatch.setattr(signals, "judge", record)
    return calls


LOST = dataclasses.replace(WORLD, nodes=nodes("n1", "n2"))


@pytest.mark.parametrize(
    ("world", "num_judged"),
    [pytest.param(WORLD, 1, id="runs"), pytest.param(LOST, 1 + 3, id="node-lost")],
)
def test_a_pass_judges_an_attempt_once_and_each_node_at_most_once(
    judged: list[tuple[Signal, ...]], world: Observation, num_judged: int
) -> None:
    look(settled(), world)
    assert len(judged) == num_judged


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"world": LOST}, id="another-world"),
        pytest.param({"now": NOW + 1000}, id="another-time"),
    ],
)
def test_a_verdict_is_not_used_for_other_inputs(changes: dict[str, Any]) -> None:
    context = Context(job=JOB, spec=spec(), world=WORLD, limits=Timeouts(), now=NOW)
    status = settled()
    assert status.current is not None
    assert judge_attempt(context, status, status.current).failure is None
    assert judge_attempt(dataclasses.replace(context, **changes), status, status.current).failure is not None


def test_a_verdict_follows_the_status_within_a_pass() -> None:
    context = Context(job=JOB, spec=spec(), world=dataclasses.replace(WORLD, jobs=()), limits=Timeouts(), now=NOW)
    status = settled()
    assert status.current is not None
    unseen = dataclasses.replace(status.current, job_uid="")
    assert judge_attempt(context, status, unseen).failure is None
    failure = judge_attempt(context, status, status.current).failure
    assert failure is not None
    assert failure.kind == Kind.JOB_DELETED
