"""spec.ttlSecondsAfterFinished: what has ended is deleted when its time is over, and nothing else is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Phase, Status
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Decision, DeleteResource
from elastic_operator.reconcile.decide import decide
from tests.unit.elastic_operator.reconcile.test_decide_phases import JOB, NOW, WORLD, settled, spec, worker_job, workers

OVER = Observation(nodes=WORLD.nodes, pods=workers(phase="Succeeded"), jobs=(worker_job(complete=True),))


def ended(phase: str = Phase.COMPLETE, *, seconds_ago: float = 100.0) -> Status:
    status = settled(phase=phase, finish_time=Time(NOW - seconds_ago), reason="X", message="x")
    return status if phase == Phase.COMPLETE else dataclasses.replace(status, current=None)


def look(status: Status, world: Observation = OVER, **changes: Any) -> Decision:
    job = dataclasses.replace(JOB, version="77")
    return decide(job, spec(**changes), status, world, limits=Timeouts(), now=NOW)


def deletions(decision: Decision) -> list[DeleteResource]:
    return [action for action in decision.actions if isinstance(action, DeleteResource)]


@pytest.mark.parametrize("phase", [Phase.COMPLETE, Phase.FAILED])
@pytest.mark.parametrize("ttl", [0, 99, 100])
def test_a_job_that_has_ended_is_deleted_when_its_time_is_over(phase: str, ttl: int) -> None:
    decision = look(ended(phase), ttlSecondsAfterFinished=ttl)
    assert decision.actions == (DeleteResource(name="gpt", uid="uid", version="77"),)
    (event,) = decision.events
    assert event.reason == "TTLExpired"
    assert "its checkpoints stay in claim ckpt, folder gpt" in event.message


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        pytest.param(ended(), {}, id="no time is set"),
        pytest.param(ended(), {"ttlSecondsAfterFinished": 101}, id="the time is not over"),
        pytest.param(settled(), {"ttlSecondsAfterFinished": 0}, id="the job runs"),
        pytest.param(settled(), {"ttlSecondsAfterFinished": 0, "suspend": True}, id="the job is being suspended"),
    ],
)
def test_nothing_else_is_deleted(status: Status, changes: dict[str, Any]) -> None:
    assert not deletions(look(status, WORLD if not status.terminal else OVER, **changes))


def test_the_deletion_waits_for_pods_that_may_still_run() -> None:
    world = dataclasses.replace(OVER, pods=(*OVER.pods[:2], dataclasses.replace(OVER.pods[2], phase="Running")))
    assert not deletions(look(ended(Phase.FAILED), world, ttlSecondsAfterFinished=0))


def test_the_next_look_is_at_the_end_of_the_time_or_at_the_usual_one_if_that_is_earlier() -> None:
    assert look(ended(seconds_ago=90), ttlSecondsAfterFinished=100).requeue_seconds == pytest.approx(10)
    assert look(ended(seconds_ago=90), ttlSecondsAfterFinished=10_000).requeue_seconds == Timeouts().resync_seconds


def test_a_retry_of_a_failed_job_comes_before_its_deletion() -> None:
    job = dataclasses.replace(JOB, retry_request="1")
    decision = decide(job, spec(ttlSecondsAfterFinished=0), ended(Phase.FAILED), OVER, limits=Timeouts(), now=NOW)
    assert not deletions(decision)
    assert decision.status.attempt == 2
