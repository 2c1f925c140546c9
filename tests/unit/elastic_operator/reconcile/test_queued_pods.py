"""Pods that find no node: one attempt waits as long as it takes, unless another plan fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.status import Status
from elastic_operator.observed.observation import Observation, PodView
from elastic_operator.reconcile.actions import Decision
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    NOW,
    WORLD,
    kinds,
    lease,
    look,
    nodes,
    settled,
    worker_job,
    workers,
)

WORDS = "0/3 nodes are available: 3 Insufficient memory."
THREE: dict[str, Any] = {"nodes": {"min": 3, "max": 3}}


def launched(**changes: Any) -> Status:
    """The status of attempt 1 right after its launch."""
    status = settled(**changes)
    assert status.current is not None
    current = dataclasses.replace(status.current, launch_time=status.start_time, schedule_time=None)
    return dataclasses.replace(status, current=dataclasses.replace(current, first_step_time=None))


def pending(count: int = 3, placed: int = 0, placed_at: float = NOW - 90) -> tuple[PodView, ...]:
    """Pods of attempt 1, of which the first `placed` have a node."""
    pods = workers(count=count)
    return (
        *(dataclasses.replace(pod, phase="Running", scheduled_at=placed_at) for pod in pods[:placed]),
        *(dataclasses.replace(pod, phase="Pending", node=None, unschedulable=WORDS) for pod in pods[placed:]),
    )


def queued(pods: tuple[PodView, ...] | None = None, **changes: Any) -> Observation:
    world = Observation(
        nodes=WORLD.nodes, pods=pending() if pods is None else pods, jobs=(worker_job(),), leases=lease(age=-10_000)
    )
    silent = {1: dataclasses.replace(world.leases[1], renewed_at=None)}
    return dataclasses.replace(world, leases=silent, **changes)


TAKEN = {"used": {"n1": 2, "n2": 2, "n3": 2}}
"""Other jobs hold all accelerators."""


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(queued(), id="the-same-plan-fits-but-for-memory"),
        pytest.param(queued(**TAKEN), id="nothing-fits"),
        pytest.param(queued(pods=()), id="the-pods-are-refused-by-a-quota"),
    ],
)
def test_two_hours_in_the_queue_are_one_job_and_cost_no_budget(world: Observation) -> None:
    status, decisions = launched(), list[Decision]()
    for second in range(0, 7200, 30):
        decisions.append(look(status, world, now=NOW + second, **THREE))
        status = decisions[-1].status
    assert (status.attempt, status.restart_budget.used, status.failure_counts) == (1, 0, ())
    assert {kind for item in decisions for kind in kinds(item)} <= {"ReleaseCommits"}
    condition = find(status.conditions, Type.LAUNCHED)
    assert condition is not None
    assert condition.status == "False"
    if world.pods:
        assert (condition.reason, WORDS in condition.message) == ("Unschedulable", True)
    placed = tuple(dataclasses.replace(pod, scheduled_at=NOW + 7201) for pod in workers())
    started = look(status, dataclasses.replace(world, pods=placed, used={}), now=NOW + 7202, **THREE)
    assert started.status.attempt == 1
    assert started.status.current is not None
    assert started.status.current.schedule_time is not None


def test_the_time_to_start_begins_when_the_last_pod_has_a_node() -> None:
    pods = tuple(dataclasses.replace(pod, scheduled_at=NOW + 7200) for pod in workers())
    assert look(launched(), queued(pods), now=NOW + 7200 + 1700).status.attempt == 1
    late = look(launched(), queued(pods), now=NOW + 7200 + 1801).status
    assert (late.attempt, late.recoveries[-1].cause) == (2, "StartupTimeout")


def test_a_smaller_plan_that_fits_replaces_the_attempt_and_costs_no_budget() -> None:
    status = look(launched(), queued(used={"n3": 2})).status
    assert status.current is not None
    assert (status.attempt, status.current.num_nodes) == (2, 2)
    assert (status.recoveries[-1].cause, WORDS in status.recoveries[-1].message) == ("Unschedulable", True)
    assert [(item.failure_class, item.total) for item in status.failure_counts] == [("Scheduling", 1)]
    assert status.restart_budget.used == 0


def test_an_attempt_that_avoids_a_node_that_may_be_used_again_is_replaced() -> None:
    status = launched()
    assert status.current is not None
    avoiding = dataclasses.replace(status, current=dataclasses.replace(status.current, avoid=("n3",)))
    four = nodes("n1", "n2", "n3", "n4")
    assert look(avoiding, queued(nodes=four), **THREE).status.attempt == 2
    taken = queued(nodes=four, used={"n3": 2})
    assert look(avoiding, taken, **THREE).status.attempt == 1, "there is no room on it"
    assert look(status, queued(nodes=four), **THREE).status.attempt == 1


def test_accelerators_that_an_attempt_holds_in_vain_are_released() -> None:
    """Two jobs that hold half of what each needs would wait for each other forever."""
    world = queued(pods=pending(placed=2), used={"n3": 2})
    held = look(launched(), world, **THREE)
    assert held.status.current is None
    assert held.status.failure_counts[0].failure_class == "Scheduling"
    assert "DeleteJob" in kinds(held)
    patient = queued(pods=pending(placed=2, placed_at=NOW - 10), used={"n3": 2})
    assert look(launched(), patient, **THREE).status.attempt == 1, "a node came ten seconds ago, another may follow"


def test_ranks_that_give_up_waiting_for_a_peer_without_a_node_cost_no_budget() -> None:
    pods = pending(placed=2)
    gave_up = (dataclasses.replace(pods[0], phase="Failed", exit_code=1), *pods[1:])
    status = look(launched(), queued(pods=gave_up), **THREE).status
    assert status.recoveries[-1].cause == "Unschedulable"
    assert (status.recoveries[-1].blamed, status.restart_budget.used) == ("", 0)


def test_an_edit_of_the_spec_ends_the_wait() -> None:
    template = {"spec": {"containers": [{"name": "train", "image": "smaller"}]}}
    assert look(launched(), queued(**TAKEN), template=template, **THREE).status.attempt == 1
    decision = look(launched(), queued(), template=template, **THREE)
    assert decision.status.attempt == 2
    assert decision.status.recoveries[-1].planned


AUTOSCALED: dict[str, Any] = {"nodes": {"min": 2, "max": 4, "autoscaling": True}}


def test_where_an_autoscaler_adds_nodes_the_pods_of_the_smallest_size_are_pending_at_once() -> None:
    empty = Observation(nodes={})
    waiting = look(Status(), empty, nodes={"min": 2, "max": 4}).status
    assert (waiting.phase, waiting.attempt) == ("Waiting", 0), "without autoscaling the job waits without pods"
    decision = look(Status(), empty, **AUTOSCALED)
    current = decision.status.current
    assert current is not None
    assert (decision.status.attempt, current.num_nodes, current.awaits_nodes) == (1, 2, True)
    assert current.launch_time is not None
    assert decision.status.plan is not None
    assert "an autoscaler has to add" in decision.status.plan.reason
    assert look(decision.status, empty, **AUTOSCALED).status.attempt == 1, "the missing nodes do not outdate the plan"


def test_nodes_that_are_there_are_preferred_to_new_ones() -> None:
    current = look(Status(), Observation(nodes=nodes("n1", "n2", "n3")), **AUTOSCALED).status.current
    assert current is not None
    assert (current.num_nodes, current.awaits_nodes) == (3, False)


def test_an_attempt_that_waits_for_an_autoscaler_keeps_its_nodes_for_a_while() -> None:
    status = launched()
    assert status.current is not None
    status = dataclasses.replace(status, current=dataclasses.replace(status.current, awaits_nodes=True))
    autoscaled = {"nodes": {"min": 3, "max": 3, "autoscaling": True}}
    world = queued(pods=pending(placed=2), used={"n3": 2})
    assert look(status, world, **autoscaled).status.attempt == 1, "the third node is on its way"
    late = queued(pods=pending(placed=2, placed_at=NOW - 901), used={"n3": 2})
    given_up = look(status, late, **autoscaled).status
    assert given_up.failure_counts[0].failure_class == "Scheduling", "the nodes are released, then it tries again"
