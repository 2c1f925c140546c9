"""spec.ttlSecondsAfterFinished: what has ended is deleted when its time is over, and nothing else is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Phase, Status
from elastic_operator.observed.observation import Observation, PodView
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Decision, DeletePod, DeleteResource
from elastic_operator.reconcile.decide import decide
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    JOB,
    NOW,
    WORLD,
    nodes,
    settled,
    spec,
    worker_job,
    workers,
)

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


def left(*pods: PodView, node: str = "n3", seconds: float = 900.0) -> Observation:
    """The rest of a Complete job whose node `node` was lost so many seconds ago."""
    silent = nodes(node, ready="Unknown", ready_since=NOW - seconds)
    return dataclasses.replace(OVER, nodes={**WORLD.nodes, **silent}, pods=pods)


def removed(decision: Decision) -> list[tuple[str, int]]:
    return [(action.name, action.grace_seconds) for action in decision.actions if isinstance(action, DeletePod)]


def test_pods_of_a_complete_job_on_a_lost_node_are_stopped_so_that_it_can_be_deleted() -> None:
    earlier = dataclasses.replace(workers(1)[2], deleted_at=NOW - 61)
    later = dataclasses.replace(
        ended(seconds_ago=10), attempt=2, current=dataclasses.replace(settled().current, job_uid="j2")
    )
    world = left(earlier, *workers(2, phase="Succeeded", count=2))
    assert removed(look(later, world, ttlSecondsAfterFinished=0)) == [("gpt-a1-2", 0)]
    assert deletions(look(later, left(*world.pods[1:]), ttlSecondsAfterFinished=0))
    own = (*workers(phase="Succeeded")[:2], workers()[2])
    assert removed(look(ended(seconds_ago=10), left(*own))) == [("gpt-a1-2", 2)]


def test_a_process_of_a_complete_job_that_does_not_exit_is_stopped_after_hang_seconds() -> None:
    hung = dataclasses.replace(OVER, pods=(*OVER.pods[:2], workers()[2]), jobs=(worker_job(),))
    assert removed(look(ended(seconds_ago=99), hung, recovery={"hangSeconds": 100})) == []
    assert removed(look(ended(seconds_ago=100), hung, recovery={"hangSeconds": 100})) == [("gpt-a1-2", 2)]
    busy = left(*workers(phase="Succeeded")[:1], *workers()[1:])
    assert removed(look(ended(seconds_ago=99), busy, recovery={"hangSeconds": 100})) == [], "its peer still runs"


def test_the_next_look_is_at_the_end_of_the_time_or_at_the_usual_one_if_that_is_earlier() -> None:
    assert look(ended(seconds_ago=90), ttlSecondsAfterFinished=100).requeue_seconds == pytest.approx(10)
    assert look(ended(seconds_ago=90), ttlSecondsAfterFinished=10_000).requeue_seconds == Timeouts().resync_seconds


def test_a_retry_of_a_failed_job_comes_before_its_deletion() -> None:
    job = dataclasses.replace(JOB, retry_request="1")
    decision = decide(job, spec(ttlSecondsAfterFinished=0), ended(Phase.FAILED), OVER, limits=Timeouts(), now=NOW)
    assert not deletions(decision)
    assert decision.status.attempt == 2
