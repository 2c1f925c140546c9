"""A drain that a person asks for: answered once, by a drain or by a reason why not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.serialization import to_wire
from elastic_operator.api.status import Phase, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile import user_requests
from elastic_operator.reconcile.actions import Decision
from elastic_operator.reconcile.decide import decide
from reshard.contract import CommitRef, TrainerPhase
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    BIG,
    JOB,
    NOW,
    WORLD,
    lease,
    nodes,
    settled,
    spec,
    training,
    worker_job,
    workers,
)

STARTING = Observation(
    nodes=WORLD.nodes, pods=workers(), jobs=(worker_job(),), leases=lease(PHASE=TrainerPhase.RESTORING)
)


def look(status: Status, world: Observation = WORLD, *, request: str, **changes: Any) -> Decision:
    job = dataclasses.replace(JOB, drain_request=request)
    return decide(job, spec(**changes), status, world, limits=Timeouts(), now=NOW)


def reasons(decision: Decision) -> list[str]:
    return [event.reason for event in decision.events]


def kinds(decision: Decision) -> list[str]:
    return [type(action).__name__ for action in decision.actions]


def test_a_request_drains_what_trains_and_is_remembered() -> None:
    decision = look(settled(), request="1")
    assert (decision.status.phase, decision.status.reason) == (Phase.DRAINING, user_requests.CAUSE)
    assert decision.status.drain_request == "1"
    assert kinds(decision) == ["RequestDrain"]


def test_a_drained_attempt_starts_again_as_a_planned_change_that_costs_no_budget() -> None:
    commit = CommitRef(uri="/checkpoint/gpt/a1/step-00000012", step=12, samples=240, attempt=1, topology=BIG.to_dict())
    drained = dataclasses.replace(WORLD, leases=training(PHASE="Drained", COMMIT=commit.to_json()))
    status = look(look(settled(), request="1").status, drained, request="1").status
    (change,) = status.recoveries
    assert (change.cause, change.planned, change.to_attempt, change.lost_steps) == (user_requests.CAUSE, True, 2, 0)
    assert status.restart_budget.used == 0
    assert status.drain is None


@pytest.mark.parametrize("request_", ["", "1"])
def test_no_request_and_an_answered_one_change_nothing(request_: str) -> None:
    status = settled(drain_request="1")
    decision = look(status, request=request_)
    assert decision.status.phase == Phase.RUNNING
    assert kinds(decision) == []


def test_another_token_is_another_request() -> None:
    assert look(settled(drain_request="1"), request="2").status.phase == Phase.DRAINING


def test_an_answered_request_outlives_the_operator() -> None:
    status = look(settled(), request="1").status
    assert read_status(to_wire(status)).status.drain_request == "1"


def test_what_does_not_train_yet_is_not_disturbed_and_the_reason_is_told() -> None:
    status = look(settled(), STARTING, request="1")
    assert status.status.drain is None
    assert status.status.drain_request == "1"
    assert reasons(status) == ["DrainNotPossible"]
    assert kinds(status) == []


def test_a_drain_under_way_takes_the_request_up() -> None:
    cordoned = dataclasses.replace(
        WORLD, nodes={**WORLD.nodes, **nodes("n1", unschedulable=True, cordoned_since=NOW - 11)}
    )
    draining = look(settled(), cordoned, request="").status
    assert draining.drain is not None
    again = look(draining, cordoned, request="1").status
    assert again.drain == draining.drain
    assert again.drain_request == "1"


def test_a_suspension_drains_under_its_own_name() -> None:
    decision = look(settled(), request="1", suspend=True)
    assert decision.status.reason == "Suspended"
    assert decision.status.drain_request == "1"


def test_a_request_that_came_with_a_new_job_is_no_reason_to_complain() -> None:
    decision = look(Status(), Observation(nodes=nodes("n1", "n2", "n3")), request="1")
    assert "DrainNotPossible" not in reasons(decision)
    assert decision.status.attempt == 1
