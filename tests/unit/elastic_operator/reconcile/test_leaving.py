"""Pods that have to stop (preempted, evicted, deleted, node shutdown) and Jobs that someone else suspends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.status import Phase, Status
from elastic_operator.observed.observation import LeaseView, NodeView, Observation, PodView
from elastic_operator.reconcile.actions import Decision, DeletePod, RequestDrain, RequestStop
from reshard.contract import CommitRef, LeaseKey, Request, TrainerPhase
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    BIG,
    NOW,
    WORLD,
    lease,
    look,
    nodes,
    settled,
    training,
    worker_job,
    workers,
)

GRACE = 30.0
REF = CommitRef(
    uri="/checkpoint/gpt/a1/step-00000012", step=12, samples=240, attempt=1, topology=BIG.to_dict()
).to_json()
DRAINED = lease(PHASE=TrainerPhase.DRAINED, STEP="12", COMMIT=REF, REQUEST=Request.DRAIN)


def with_pod(index: int = 1, **changes: Any) -> tuple[PodView, ...]:
    """The pods of the attempt; one of them is changed."""
    return tuple(dataclasses.replace(pod, **changes) if pod.index == index else pod for pod in workers())


PREEMPTED = with_pod(deleted_at=NOW + GRACE, disruption="PreemptionByScheduler")


def world(pods: tuple[PodView, ...] = PREEMPTED, **changes: Any) -> Observation:
    return dataclasses.replace(WORLD, pods=pods, **changes)


def asked() -> Status:
    """The status after a pod has been preempted."""
    return look(settled(), world()).status


def charged(decision: Decision) -> list[tuple[str, bool, int]]:
    return [(item.cause, item.planned, decision.status.restart_budget.used) for item in decision.status.recoveries]


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param(PREEMPTED, id="preempted"),
        pytest.param(with_pod(deleted_at=NOW + GRACE), id="deleted-by-hand"),
        pytest.param(with_pod(disrupted_at=NOW - 1, disruption="TerminationByKubelet"), id="node-shutdown"),
    ],
)
def test_a_pod_that_has_to_stop_is_asked_for_a_commit_at_once(pods: tuple[PodView, ...]) -> None:
    decision = look(settled(), world(pods))
    assert decision.status.phase == Phase.DRAINING
    assert decision.status.drain is not None
    assert (decision.status.drain.cause, decision.status.drain.nodes) == ("PodTerminating", ("n2",))
    assert [type(action) for action in decision.actions] == [RequestDrain]
    assert decision.requeue_seconds <= GRACE + 2


def shutting_down(seconds_ago: float, **changes: Any) -> dict[str, NodeView]:
    """Nodes of which the kubelet of n2 shuts its node down, as it reports from the first moment."""
    return nodes("n1", "n3") | nodes(
        "n2", ready="False", ready_since=NOW - seconds_ago, is_shutting_down=True, lease_age_seconds=5.0, **changes
    )


def test_a_node_that_shuts_down_is_no_loss_while_its_pods_have_time_for_a_commit() -> None:
    decision = look(settled(), world(with_pod(grace_seconds=120.0), nodes=shutting_down(1)))
    assert decision.status.drain is not None
    assert (decision.status.drain.cause, decision.status.drain.nodes) == ("PodTerminating", ("n2",))
    assert [type(action) for action in decision.actions] == [RequestDrain]
    late = with_pod(grace_seconds=120.0)
    saving = {1: dataclasses.replace(training(PHASE=TrainerPhase.SAVING)[1], renewed_at=NOW)}
    assert charged(look(decision.status, world(late, nodes=shutting_down(90), leases=saving))) == []
    drained = look(decision.status, world(late, nodes=shutting_down(100), leases=DRAINED))
    assert charged(drained) == [("PodTerminating", True, 0)]
    assert drained.status.checkpoint.step == 12


@pytest.mark.parametrize(
    ("seconds_ago", "changes"),
    [
        pytest.param(123, {}, id="the-time-of-its-pods-is-over"),
        pytest.param(30, {"lease_age_seconds": 25.0}, id="its-kubelet-has-fallen-silent"),
        pytest.param(30, {"is_shutting_down": False}, id="it-is-not-ready-for-another-reason"),
    ],
)
def test_a_node_that_shuts_down_is_lost_where_nothing_runs_on_it_any_more(
    seconds_ago: float, changes: dict[str, Any]
) -> None:
    members = shutting_down(seconds_ago)
    members["n2"] = dataclasses.replace(members["n2"], **changes)
    ended = look(settled(), world(with_pod(grace_seconds=120.0), nodes=members))
    assert [(item.cause, item.lost) for item in ended.status.recoveries] == [("NodeNotReady", ("n2",))]


def test_a_training_that_drained_itself_on_a_node_that_shuts_down_has_not_failed() -> None:
    peers = with_pod(1, grace_seconds=120.0)
    ended = tuple(pod if pod.index == 1 else dataclasses.replace(pod, phase="Failed", exit_code=75) for pod in peers)
    decision = look(settled(), world(ended, nodes=shutting_down(5), leases=DRAINED))
    assert charged(decision) == [("PodTerminating", True, 0)]


def test_a_commit_within_the_grace_period_costs_no_step_and_no_budget() -> None:
    decision = look(asked(), world(leases=DRAINED), now=NOW + 5)
    assert charged(decision) == [("PodTerminating", True, 0)]
    assert decision.status.checkpoint.step == decision.status.recoveries[0].last_step == 12


@pytest.mark.parametrize(
    ("disruption", "num_nodes"),
    [("PreemptionByScheduler", 2), ("TerminationByKubelet", 2), ("EvictionByEvictionAPI", 3), ("", 3)],
)
def test_the_next_attempt_does_not_count_on_a_place_that_has_gone_to_someone_else(
    disruption: str, num_nodes: int
) -> None:
    pods = with_pod(deleted_at=NOW + GRACE, disruption=disruption, disrupted_at=NOW)
    status = look(look(settled(), world(pods)).status, world(pods, leases=DRAINED), now=NOW + 5).status
    assert status.current is not None
    assert (status.attempt, status.current.num_nodes) == (2, num_nodes)


def test_a_training_that_drained_itself_before_the_operator_asked_has_not_failed() -> None:
    ended = with_pod(phase="Failed", exit_code=75, deleted_at=NOW + GRACE, disruption="PreemptionByScheduler")
    decision = look(settled(), world(ended, leases=DRAINED, jobs=(worker_job(failed=True),)))
    assert charged(decision) == [("PodTerminating", True, 0)]
    assert decision.status.checkpoint.step == 12


def test_a_training_that_drained_itself_has_not_failed_although_the_pod_that_had_to_stop_is_gone() -> None:
    left = tuple(pod for pod in workers(phase="Failed", exit_code=75) if pod.index != 1)
    decision = look(settled(), world(left, leases=DRAINED, jobs=(worker_job(failed=True),)))
    assert charged(decision) == [("PodTerminating", True, 0)]
    assert decision.status.checkpoint.step == 12


def test_an_attempt_that_calls_itself_drained_without_a_reason_has_failed() -> None:
    failed = workers(phase="Failed", exit_code=75)
    decision = look(settled(), world(failed, leases=DRAINED, jobs=(worker_job(failed=True),)))
    assert charged(decision) == [("PodFailed", False, 1)]


@pytest.mark.parametrize(
    ("pods", "after", "cause"),
    [
        pytest.param(
            with_pod(phase="Failed", exit_code=137, deleted_at=NOW + GRACE, disruption="PreemptionByScheduler"),
            5,
            "PodPreempted",
            id="the-pod-ended-first",
        ),
        pytest.param(PREEMPTED, GRACE + 3, "PodPreempted", id="the-grace-period-is-over"),
    ],
)
def test_without_a_commit_in_time_it_is_a_failure(pods: tuple[PodView, ...], after: float, cause: str) -> None:
    leases = {1: dataclasses.replace(training()[1], renewed_at=NOW + after)}
    decision = look(asked(), world(pods, leases=leases), now=NOW + after)
    assert charged(decision) == [(cause, False, 0)], "the infrastructure spends no budget of the program"


@pytest.mark.parametrize("phase", ["", TrainerPhase.STARTING, TrainerPhase.RESTORING])
def test_a_start_that_is_interrupted_is_a_failure_as_before(phase: str) -> None:
    status = settled()
    current = dataclasses.replace(status.current, first_step_time=None)  # type: ignore[type-var]
    decision = look(dataclasses.replace(status, current=current), world(leases=lease(PHASE=phase)))
    assert charged(decision) == [("PodDisrupted", False, 0)]


def test_an_eviction_on_a_cordoned_node_is_put_down_to_the_cordon() -> None:
    evicted = with_pod(deleted_at=NOW + GRACE, disruption="EvictionByEvictionAPI")
    decision = look(settled(), world(evicted, nodes=nodes("n1", "n3") | nodes("n2", unschedulable=True)))
    assert decision.status.drain is not None
    assert (decision.status.drain.cause, decision.status.drain.nodes) == ("NodeCordoned", ("n2",))


def test_processes_are_told_that_the_attempt_is_over_before_they_get_sigterm() -> None:
    decision = look(settled(), world(with_pod(phase="Failed", exit_code=1)))
    first, *others = decision.actions
    assert first == RequestStop(lease="gpt-a1")
    assert [type(action) for action in others].count(DeletePod) == 2
    told = lease(PHASE=TrainerPhase.TRAINING, REQUEST=Request.STOP)
    again = look(decision.status, world(with_pod(phase="Failed", exit_code=1), leases=told))
    assert RequestStop not in [type(action) for action in again.actions]
    assert told[1].get(LeaseKey.REQUEST) == "stop"


def test_a_long_grace_period_of_someone_else_does_not_hold_up_the_next_attempt() -> None:
    pods = with_pod(phase="Failed", exit_code=1)
    graces = {2: 300}
    pods = tuple(
        dataclasses.replace(pod, deleted_at=NOW + seconds, deletion_grace_seconds=seconds)
        for pod in pods
        for seconds in (graces.get(pod.index or 0, 2),)
    )
    decision = look(settled(), world(pods))
    deletions = [(item.name, item.grace_seconds) for item in decision.actions if isinstance(item, DeletePod)]
    assert deletions == [("gpt-a1-2", 2)]


def test_a_job_that_someone_else_suspends_drains_and_ends_as_planned() -> None:
    suspended = (worker_job(suspended=True),)
    pods = workers(deleted_at=NOW + GRACE)
    status = look(settled(), world(pods, jobs=suspended)).status
    assert status.drain is not None
    assert status.drain.cause == "JobSuspended"
    assert charged(look(status, world(pods, jobs=suspended, leases=DRAINED), now=NOW + 5)) == [
        ("JobSuspended", True, 0)
    ]
    # Nobody waits for a commit of pods that are gone.
    assert charged(look(status, world((), jobs=suspended), now=NOW + 5)) == [("JobSuspended", True, 0)]


def test_a_job_that_a_queue_has_not_admitted_yet_waits_without_an_end() -> None:
    status = settled()
    current = dataclasses.replace(status.current, first_step_time=None, schedule_time=None)  # type: ignore[type-var]
    silent = {1: LeaseView(name="gpt-a1", attempt=1)}
    queued = Observation(nodes=WORLD.nodes, jobs=(worker_job(suspended=True),), leases=silent)
    decision = look(dataclasses.replace(status, current=current), queued, now=NOW + 7200)
    assert decision.status.attempt == 1
    assert decision.status.recoveries == ()
