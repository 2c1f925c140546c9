"""spec.activeDeadlineSeconds: which time counts, and what happens when it is over."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Phase, Status
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.queueing.workloads import QueueView
from elastic_operator.observed.timeouts import Timeouts
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

COMMIT = CommitRef(uri="/checkpoint/gpt/a1/step-00000012", step=12, samples=240, attempt=1, topology=BIG.to_dict())
DRAINED = dataclasses.replace(WORLD, leases=training(PHASE=TrainerPhase.DRAINED, COMMIT=COMMIT.to_json()))
RESTORING = Observation(
    nodes=WORLD.nodes, pods=workers(), jobs=(worker_job(),), leases=lease(PHASE=TrainerPhase.RESTORING)
)
EMPTY = Observation(nodes=nodes("n1", "n2", "n3"))
NO_NODES = Observation()


def look(status: Status, world: Observation = WORLD, *, now: float = NOW, retry: str = "", **changes: Any) -> Decision:
    job = dataclasses.replace(JOB, retry_request=retry)
    return decide(job, spec(**changes), status, world, limits=Timeouts(), now=now)


def over(**changes: Any) -> Status:
    """A job that was launched 100 s ago and may be active for 100 s."""
    return settled(active_since=Time(NOW - 100), **changes)


def test_a_job_whose_time_is_over_drains_and_then_fails() -> None:
    draining = look(over(), activeDeadlineSeconds=100)
    assert (draining.status.phase, draining.status.reason) == (Phase.DRAINING, "DeadlineExceeded")
    assert [type(action).__name__ for action in draining.actions] == ["RequestDrain"]
    failed = look(draining.status, DRAINED, activeDeadlineSeconds=100)
    assert (failed.status.phase, failed.status.reason) == (Phase.FAILED, "DeadlineExceeded")
    assert failed.status.message == "spec.activeDeadlineSeconds 100 has passed; the newest commit is of step 12"
    assert failed.status.finish_time == NOW
    (record,) = failed.status.recoveries
    assert (record.cause, record.planned, failed.status.restart_budget.used) == ("DeadlineExceeded", True, 0)
    assert "DeadlineExceeded" in [event.reason for event in failed.events if event.warning]


def test_a_drain_that_does_not_end_is_not_waited_for_longer_than_its_time() -> None:
    draining = look(over(), activeDeadlineSeconds=100).status
    late = look(draining, now=NOW + 301, activeDeadlineSeconds=100).status
    assert (late.phase, late.reason) == (Phase.FAILED, "DeadlineExceeded")


def stopped(**changes: Any) -> Status:
    """The same job after its attempt has ended."""
    return dataclasses.replace(over(), current=None, **changes)


@pytest.mark.parametrize(
    ("status", "world"),
    [
        pytest.param(over(), RESTORING, id="the attempt has nothing to commit yet"),
        pytest.param(stopped(), EMPTY, id="the next attempt is about to be planned"),
        pytest.param(stopped(phase=Phase.WAITING), NO_NODES, id="the job waits for nodes"),
    ],
)
def test_where_nothing_trains_the_job_fails_at_once(status: Status, world: Observation) -> None:
    found = look(status, world, activeDeadlineSeconds=100).status
    assert (found.phase, found.reason, found.current) == (Phase.FAILED, "DeadlineExceeded", None)


def test_a_training_that_ends_during_the_drain_is_complete() -> None:
    draining = look(over(), activeDeadlineSeconds=100).status
    done = dataclasses.replace(
        WORLD,
        pods=workers(phase="Succeeded"),
        jobs=(worker_job(complete=True),),
        leases=training(PHASE=TrainerPhase.COMPLETE),
    )
    assert look(draining, done, activeDeadlineSeconds=100).status.phase == Phase.COMPLETE


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        pytest.param(over(), {}, id="there is no limit"),
        pytest.param(over(), {"activeDeadlineSeconds": 101}, id="there is time left"),
        pytest.param(settled(active_seconds=50.0), {"activeDeadlineSeconds": 200}, id="the sum is below the limit"),
    ],
)
def test_a_job_with_time_left_goes_on(status: Status, changes: dict[str, Any]) -> None:
    assert look(status, **changes).status.phase == Phase.RUNNING


def test_the_time_begins_with_the_launch_of_an_attempt_and_the_next_look_is_at_its_end() -> None:
    assert look(Status(), NO_NODES).status.active_since is None
    decision = look(settled(), activeDeadlineSeconds=103)
    assert decision.status.active_since == NOW - 100
    assert decision.requeue_seconds == pytest.approx(3)


def test_time_spent_suspended_does_not_count() -> None:
    suspended = look(stopped(), EMPTY, suspend=True).status
    assert (suspended.phase, suspended.active_since, suspended.active_seconds) == (Phase.SUSPENDED, None, 100.0)
    resumed = look(suspended, NO_NODES, now=NOW + 1000, activeDeadlineSeconds=101).status
    assert (resumed.phase, resumed.active_since) == (Phase.WAITING, None)
    launched = over(active_seconds=100.0)
    assert look(launched, now=NOW, activeDeadlineSeconds=201).status.phase == Phase.RUNNING
    assert look(launched, now=NOW, activeDeadlineSeconds=200).status.phase == Phase.DRAINING


def test_time_without_quota_does_not_count() -> None:
    job = dataclasses.replace(JOB, labels={"kueue.x-k8s.io/queue-name": "team"})

    def look_in_queue(status: Status, world: Observation, now: float) -> Status:
        unadmitted = dataclasses.replace(world, queue=QueueView())
        limits = Timeouts()
        return decide(job, spec(activeDeadlineSeconds=101), status, unadmitted, limits=limits, now=now).status

    running = dataclasses.replace(EMPTY, pods=workers())
    stopping = look_in_queue(stopped(), running, NOW)
    assert (stopping.phase, stopping.active_since) == (Phase.STOPPING, NOW - 100), "its pods still run"
    queued = look_in_queue(stopped(), EMPTY, NOW)
    assert (queued.phase, queued.reason) == (Phase.WAITING, "Queued")
    assert (queued.active_since, queued.active_seconds) == (None, 100.0)
    assert look_in_queue(queued, EMPTY, NOW + 10_000).phase == Phase.WAITING


def test_a_suspended_job_whose_time_is_over_fails_when_it_is_resumed() -> None:
    suspended = look(stopped(), EMPTY, suspend=True, activeDeadlineSeconds=50).status
    assert suspended.phase == Phase.SUSPENDED
    assert look(suspended, EMPTY, activeDeadlineSeconds=50).status.reason == "DeadlineExceeded"


def test_a_retry_gives_the_whole_time_again() -> None:
    failed = look(stopped(), EMPTY, activeDeadlineSeconds=100).status
    again = look(failed, EMPTY, retry="1", activeDeadlineSeconds=100).status
    assert (again.attempt, again.active_seconds, again.finish_time) == (2, 0.0, None)
    assert again.phase != Phase.FAILED
