"""A job that has Failed goes on when a person asks for it: once, from its newest commit, with a fresh budget."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_operator.api.serialization import to_wire
from elastic_operator.api.status import Commit, Phase, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Decision
from elastic_operator.reconcile.decide import decide
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    BIG,
    JOB,
    NOW,
    WORLD,
    nodes,
    settled,
    spec,
    worker_job,
    workers,
)

COMMIT = Commit(uri="/checkpoint/gpt/a1/step-00000010", step=10, samples=200, attempt=1, topology=BIG)
NO_BUDGET = {"recovery": {"restartBudget": {"limit": 0, "windowSeconds": 3600}}}
FAILED_PODS = Observation(nodes=WORLD.nodes, pods=workers(phase="Failed"), jobs=(worker_job(failed=True),))
EMPTY = Observation(nodes=nodes("n1", "n2", "n3"))


def look(status: Status, world: Observation = EMPTY, *, request: str = "", now: float = NOW) -> Decision:
    job = dataclasses.replace(JOB, retry_request=request)
    return decide(job, spec(**NO_BUDGET), status, world, limits=Timeouts(), now=now)


def failed() -> Status:
    """The first failure is one too many."""
    status = look(settled(), FAILED_PODS).status
    assert (status.phase, status.reason) == (Phase.FAILED, "RestartBudgetExceeded")
    return status


def test_a_failed_job_rests_until_somebody_asks() -> None:
    later = look(failed(), now=NOW + 1e6)
    assert later.status.phase == Phase.FAILED
    assert later.actions == ()


def test_a_retry_goes_on_under_the_next_number_from_the_newest_commit() -> None:
    before = failed()
    decision = look(before, request="1", now=NOW + 3600)
    status = decision.status
    assert (status.phase, status.attempt) == (Phase.STARTING, 2)
    assert status.current is not None
    assert status.current.resume.step == before.checkpoint.step > 0
    assert "LaunchAttempt" in [type(action).__name__ for action in decision.actions]
    assert decision.events[0].reason == "RetryRequested"


def test_a_retry_has_the_whole_budget_again() -> None:
    assert failed().restart_budget.used == 1
    assert look(failed(), request="1").status.restart_budget.used == 0


def test_the_record_of_the_recovery_holds_the_time_until_the_retry() -> None:
    status = look(failed(), request="1", now=NOW + 3600).status
    (record,) = status.recoveries
    assert (record.from_attempt, record.to_attempt) == (1, 2)
    assert record.launch_time is not None
    assert record.signal_time is not None
    assert record.launch_time - record.signal_time == pytest.approx(3600)
    assert status.finish_time is None


def test_a_request_is_answered_once() -> None:
    again = look(failed(), request="1").status
    failed_again = dataclasses.replace(again, phase=Phase.FAILED, reason="RestartBudgetExceeded", current=None)
    assert look(failed_again, request="1").status.phase == Phase.FAILED
    assert look(failed_again, request="2").status.phase == Phase.STARTING


def test_an_answered_request_outlives_the_operator() -> None:
    status = look(failed(), request="1").status
    assert read_status(to_wire(status)).status.retry_request == "1"


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.COMPLETE])
def test_what_has_not_failed_is_left_alone_and_a_later_failure_is_no_answer(phase: Phase) -> None:
    status = settled() if phase == Phase.RUNNING else dataclasses.replace(settled(), phase=phase, finish_time=None)
    decision = look(status, WORLD, request="1")
    assert decision.status.phase == phase
    assert decision.status.retry_request == "1"
    assert decision.actions == ()
