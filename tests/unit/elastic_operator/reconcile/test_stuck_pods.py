"""A pod that does not end on a Ready node: the job goes on elsewhere, and avoids and fences the node."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import ExcludedNode, Phase, Status
from elastic_operator.observed.observation import NodeView, Observation, PodView
from elastic_operator.reconcile.actions import Decision, DeletePod, LaunchAttempt
from elastic_operator.reconcile.context import POD_STUCK_TERMINATING
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    NOW,
    kinds,
    look,
    nodes,
    settled,
    worker_job,
    workers,
)

LIMIT = 60
FOUR = nodes("n1", "n2", "n3", "n4")


def stuck(overdue: float, *, index: int = 0, **changes: Any) -> PodView:
    """A pod of attempt 1 that had to end `overdue` seconds ago."""
    return dataclasses.replace(workers()[index], deleted_at=NOW - overdue, deletion_grace_seconds=2, **changes)


def seen(*pods: PodView, members: dict[str, NodeView] | None = None, **changes: Any) -> Observation:
    return Observation(nodes=FOUR if members is None else members, pods=pods, **changes)


def failed_once(members: dict[str, NodeView] | None = None) -> Status:
    """The status just after attempt 1 has failed: attempt 2 is planned and waits for the pods of attempt 1."""
    pods = workers(phase="Running")
    world = seen(*pods, members=members, jobs=(worker_job(failed=True),))
    return look(settled(), world).status


def launch(decision: Decision) -> LaunchAttempt:
    return next(action for action in decision.actions if isinstance(action, LaunchAttempt))


def avoided(decision: Decision) -> list[str]:
    return [item.name for item in decision.status.excluded_nodes if item.reason == POD_STUCK_TERMINATING]


READY_LATE = {**FOUR, "n1": dataclasses.replace(FOUR["n1"], ready_since=NOW - 10)}


@pytest.mark.parametrize(
    ("world", "changes", "launched"),
    [
        pytest.param(seen(stuck(LIMIT - 1)), {}, False, id="not-yet"),
        pytest.param(seen(stuck(LIMIT)), {}, True, id="overdue"),
        pytest.param(seen(dataclasses.replace(stuck(LIMIT), deleted_at=None)), {}, False, id="not-deleted-yet"),
        pytest.param(seen(stuck(LIMIT), stuck(LIMIT - 1, index=1)), {}, False, id="another-still-has-time"),
        pytest.param(seen(stuck(LIMIT, phase="Failed")), {}, True, id="its-containers-ended"),
        pytest.param(seen(stuck(LIMIT), members=READY_LATE), {}, False, id="its-node-has-just-come-back"),
        pytest.param(seen(stuck(16)), {"recovery": {"forceDeleteSeconds": 16}}, True, id="a-shorter-bound"),
        pytest.param(seen(stuck(14)), {"recovery": {"forceDeleteSeconds": 0}}, False, id="no-bound-is-a-moment"),
        pytest.param(
            seen(stuck(LIMIT), jobs=(worker_job(deleting=True),)), {}, True, id="its-job-is-deleted-in-the-foreground"
        ),
        pytest.param(seen(stuck(LIMIT), jobs=(worker_job(),)), {}, False, id="its-job-could-make-another"),
    ],
)
def test_the_launch_waits_for_a_pod_until_it_is_overdue(
    world: Observation, changes: dict[str, Any], launched: bool
) -> None:
    decision = look(failed_once(), world, **changes)
    assert ("LaunchAttempt" in kinds(decision)) is launched
    assert "PodStuckTerminating" in [event.reason for event in decision.events] or not avoided(decision)


def test_the_next_attempt_avoids_the_node_and_the_event_names_pod_and_node() -> None:
    decision = look(failed_once(), seen(stuck(LIMIT)))
    assert avoided(decision) == ["n1"]
    assert launch(decision).stuck_pods == ("p10",)
    assert decision.status.current is not None
    assert decision.status.current.avoid == ("n1",)
    (event,) = [event for event in decision.events if event.reason == POD_STUCK_TERMINATING]
    assert event.warning
    assert "pod gpt-a1-0 of attempt 1" in event.message
    assert "node n1 is Ready" in event.message
    assert decision.status.restart_budget.used == 1, "the failure that ended attempt 1, and nothing else"


def test_nothing_is_deleted_by_force_on_a_ready_node() -> None:
    decision = look(failed_once(), seen(stuck(10_000)))
    assert not [action for action in decision.actions if isinstance(action, DeletePod)]


@pytest.mark.parametrize(("grace", "shortened"), [(30, True), (2, False)])
def test_a_pod_that_others_deleted_with_more_time_gets_no_more_than_the_operators(grace: int, shortened: bool) -> None:
    pod = dataclasses.replace(stuck(-grace), deletion_grace_seconds=grace)
    decision = look(failed_once(), seen(pod))
    assert (DeletePod(name=pod.name, uid=pod.uid, grace_seconds=2) in decision.actions) is shortened


def test_a_smaller_plan_is_made_where_too_few_nodes_are_left_and_the_recovery_stays_one() -> None:
    three = nodes("n1", "n2", "n3")
    decision = look(failed_once(three), seen(stuck(LIMIT), members=three))
    status = decision.status
    assert (status.attempt, status.phase) == (3, Phase.RESHARDING)
    assert status.current is not None
    assert (status.current.num_nodes, status.current.avoid) == (2, ("n1",))
    assert (len(status.recoveries), status.recoveries[-1].to_attempt) == (1, 3)
    assert status.restart_budget.used == 1
    (event,) = [event for event in decision.events if event.reason == "PlanOutdated"]
    assert "pod gpt-a1-0 on node n1 does not end" in event.message


def test_a_job_that_too_few_nodes_are_left_for_waits_and_names_the_pod() -> None:
    three = nodes("n1", "n2", "n3")
    need_all: dict[str, Any] = {"nodes": {"min": 3, "max": 3}}
    decision = look(failed_once(three), seen(stuck(LIMIT), members=three), **need_all)
    assert (decision.status.phase, decision.status.reason) == (Phase.WAITING, "NoFeasibleTopology")
    assert "pod gpt-a1-0 on node n1, which does not end" in decision.status.message
    (event,) = [event for event in decision.events if event.reason == "NoFeasibleTopology"]
    assert "gpt-a1-0" in event.message
    still = look(decision.status, seen(stuck(LIMIT), members=three), now=NOW + 10_000, **need_all)
    assert still.status.phase == Phase.WAITING
    gone = look(still.status, seen(members=three), now=NOW + 10_001, **need_all)
    assert gone.status.phase == Phase.STARTING


def test_the_node_is_used_again_a_while_after_the_pod_has_gone() -> None:
    status = look(failed_once(), seen(stuck(LIMIT))).status
    held = look(status, seen(stuck(LIMIT)), now=NOW + 500).status
    assert [item.until for item in held.excluded_nodes] == [None]
    freed = look(held, seen(), now=NOW + 600).status
    assert [item.until for item in freed.excluded_nodes] == [NOW + 630]
    assert look(freed, seen(), now=NOW + 631).status.excluded_nodes == ()


def test_a_node_with_a_stuck_pod_is_lost_only_by_signals_of_its_own() -> None:
    status = look(failed_once(), seen(stuck(LIMIT))).status
    doubtful = {**FOUR, "n1": dataclasses.replace(FOUR["n1"], ready="Unknown", ready_since=NOW + 99)}
    deleted = DeletePod(name="gpt-a1-0", uid="p10", grace_seconds=0)
    early = look(status, seen(stuck(LIMIT), members=doubtful), now=NOW + 100)
    late = look(status, seen(stuck(LIMIT), members=doubtful), now=NOW + 120)
    assert (deleted in early.actions, deleted in late.actions) == (False, True)


def test_a_job_that_is_suspended_meanwhile_names_the_pod_that_holds_its_accelerators() -> None:
    status = look(failed_once(), seen(stuck(LIMIT)), suspend=True).status
    assert status.phase == Phase.STOPPING
    assert "do not end: pod gpt-a1-0 on node n1" in status.message


def test_an_offender_stays_an_offender() -> None:
    offender = ExcludedNode(name="n1", reason="NodeNotReady", since=Time(NOW - 5), until=Time(NOW + 999), hurts=2)
    status = dataclasses.replace(failed_once(), excluded_nodes=(offender,))
    decision = look(status, seen(stuck(LIMIT)))
    assert [(item.reason, item.hurts, item.until) for item in decision.status.excluded_nodes] == [
        (POD_STUCK_TERMINATING, 2, None)
    ]
