"""The scheduler places fewer pods than the operator has counted room for: the scheduler's count decides."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.serialization import Time, to_wire
from elastic_operator.api.status import Phase, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.observed.observation import JobView, NodeView, Observation, PodView
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Decision
from elastic_operator.reconcile.decide import decide
from elastic_operator.reconcile.failures.placement_limits import (
    FIRST_RETRY_SECONDS,
    HELD_SECONDS,
    LAST_RETRY_SECONDS,
)
from elastic_operator.reconcile.running import PROVISION_SECONDS
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    JOB,
    NOW,
    kinds,
    look,
    nodes,
    spec,
    training,
    worker_job,
    workers,
)
from tests.unit.elastic_operator.reconcile.test_queued_pods import THREE, WORDS, launched, pending, queued

AUTOSCALED: dict[str, Any] = {"nodes": {"min": 1, "max": 3, "autoscaling": True}}


@pytest.mark.parametrize(
    ("placed", "placed_at", "changes", "num_nodes"),
    [
        pytest.param(2, NOW - 90, {}, 2, id="two-of-three"),
        pytest.param(1, NOW - 90, {}, 1, id="one-of-three"),
        pytest.param(2, NOW - 59, {}, 3, id="the-second-came-a-moment-ago"),
        pytest.param(0, NOW - 90, {}, 3, id="none-so-nothing-is-held"),
        pytest.param(2, NOW - HELD_SECONDS + 1, THREE, 3, id="below-min-is-held-for-a-while"),
        pytest.param(2, NOW - HELD_SECONDS, THREE, 0, id="below-min-is-released-then"),
        pytest.param(2, NOW - PROVISION_SECONDS + 1, AUTOSCALED, 3, id="an-autoscaler-may-add-a-node"),
        pytest.param(2, NOW - PROVISION_SECONDS, AUTOSCALED, 2, id="the-autoscaler-adds-none"),
    ],
)
def test_the_next_plan_has_as_many_pods_as_the_scheduler_has_placed(
    placed: int, placed_at: float, changes: dict[str, Any], num_nodes: int
) -> None:
    world = queued(pods=pending(placed=placed, placed_at=placed_at))
    begin = launched(start_time=Time(NOW - 5000))
    status = look(begin, world, **changes).status
    assert (status.current.num_nodes if status.current else 0) == num_nodes
    if num_nodes == 3:
        assert (status.attempt, status.placement_limit) == (1, None)
        return
    assert (status.recoveries[-1].cause, WORDS in status.recoveries[-1].message) == ("Unschedulable", True)
    assert (status.restart_budget.used, [item.limit for item in status.failure_counts]) == (0, [None])
    assert status.placement_limit is not None
    assert (status.placement_limit.num_nodes, status.placement_limit.missing) == (placed, 3 - placed)
    assert WORDS in status.placement_limit.message
    assert read_status(to_wire(status)).problems == ()


def limited(members: dict[str, NodeView] | None = None, **changes: Any) -> Status:
    """The status after the scheduler has placed two of three pods."""
    world = queued(pods=pending(placed=2), **({} if members is None else {"nodes": members}))
    status = look(launched(), world, **changes).status
    assert status.placement_limit is not None
    return status


def until(status: Status) -> float:
    assert status.placement_limit is not None
    return status.placement_limit.until


@pytest.mark.parametrize(
    ("before", "after", "num_nodes"),
    [
        pytest.param(["n1", "n2", "n3"], ["n1", "n2", "n3"], 2, id="the-same-nodes"),
        pytest.param(["n1", "n2", "n3"], ["n1", "n2"], 2, id="a-lost-node-may-be-the-useless-one"),
        pytest.param(["n1", "n2", "n3"], ["n1", "n2", "n3", "n4"], 3, id="another-node-may-be-better"),
        pytest.param(["n1", "n2", "n3", "n4"], ["n1", "n2", "n3", "n4"], 2, id="two-useless-nodes"),
    ],
)
def test_a_plan_counts_on_no_more_nodes_than_the_scheduler_would_use(
    before: list[str], after: list[str], num_nodes: int
) -> None:
    status = dataclasses.replace(limited(nodes(*before)), current=None)
    planned = look(status, Observation(nodes=nodes(*after))).status
    assert planned.plan is not None
    assert planned.plan.nodes == num_nodes


def on_two_nodes(status: Status, now: float) -> tuple[Status, Observation]:
    """The smaller attempt has trained for long enough to grow."""
    assert status.current is not None
    assert status.current.num_nodes == 2
    current = dataclasses.replace(
        status.current,
        launch_time=Time(now - 5000), schedule_time=Time(now - 5000), first_step_time=Time(now - 5000),
        job_uid=f"j{status.attempt}",
        resume=dataclasses.replace(status.current.resume, ready=True),
    )  # fmt: skip
    beat = dataclasses.replace(training()[1], attempt=status.attempt, renewed_at=now, step_seen_at=now)
    world = Observation(
        nodes=nodes("n1", "n2", "n3"),
        pods=workers(status.attempt, count=2),
        jobs=(worker_job(status.attempt),),
        leases={status.attempt: beat},
    )
    return dataclasses.replace(status, current=current), world


def test_growth_waits_until_the_limit_ends_and_is_tried_again_then() -> None:
    limit = until(limited())
    assert limit == NOW + FIRST_RETRY_SECONDS
    status, world = on_two_nodes(limited(), limit - 1)
    early = look(status, world, now=limit - 1).status
    assert (early.phase, early.growth) == (Phase.RUNNING, None)
    status, world = on_two_nodes(early, limit)
    late = look(status, world, now=limit).status
    assert (late.phase, late.growth is not None) == (Phase.RUNNING, True)


def test_each_attempt_to_grow_in_vain_doubles_the_time_until_the_next() -> None:
    status, now, pauses = limited(), NOW, list[float]()
    for _ in range(6):
        pauses.append(until(status) - now)
        now = until(status)
        again = dataclasses.replace(launched(), placement_limit=status.placement_limit)
        assert again.current is not None
        again = dataclasses.replace(again, current=dataclasses.replace(again.current, launch_time=Time(now - 100)))
        status = look(again, queued(pods=pending(placed=2, placed_at=now - 90)), now=now).status
    first = FIRST_RETRY_SECONDS
    assert pauses == [first, 2 * first, 4 * first, LAST_RETRY_SECONDS, LAST_RETRY_SECONDS, LAST_RETRY_SECONDS]


def waiting(pods: tuple[PodView, ...], jobs: tuple[JobView, ...]) -> Observation:
    return Observation(nodes=nodes("n1", "n2", "n3"), pods=pods, jobs=jobs)


def test_a_smaller_attempt_that_is_not_placed_either_is_no_further_try_to_grow() -> None:
    status = limited()
    assert status.current is not None
    current = dataclasses.replace(
        status.current, launch_time=Time(NOW), resume=dataclasses.replace(status.current.resume, ready=True)
    )
    pods = tuple(dataclasses.replace(pod, attempt=2) for pod in pending(count=2, placed=1, placed_at=NOW))
    jobs = (worker_job(2),)
    after = look(dataclasses.replace(status, current=current), waiting(pods, jobs), now=NOW + 61)
    assert after.status.placement_limit is not None
    assert (after.status.placement_limit.num_nodes, after.status.placement_limit.tries) == (1, 1)
    planned = look(after.status, waiting((), ()), now=NOW + 72).status
    assert (planned.attempt, planned.current and planned.current.num_nodes) == (3, 1)


@pytest.mark.parametrize(("expired", "kept"), [(True, False), (False, True)])
def test_an_attempt_with_more_pods_that_are_all_placed_ends_the_series(expired: bool, kept: bool) -> None:
    limit = limited().placement_limit
    assert limit is not None
    limit = dataclasses.replace(limit, until=Time(NOW - 1 if expired else NOW + 100))
    status = dataclasses.replace(launched(), placement_limit=limit)
    world = Observation(nodes=nodes("n1", "n2", "n3"), pods=workers(), jobs=(worker_job(),))
    after = look(status, world).status
    assert after.current is not None
    assert after.current.schedule_time is not None
    assert (after.placement_limit is not None) is kept


def test_an_edit_of_what_the_pods_ask_for_and_a_drain_by_hand_end_the_limit() -> None:
    status = dataclasses.replace(limited(), current=None)
    template = {"spec": {"containers": [{"name": "train", "image": "smaller"}]}}
    edited = look(status, Observation(nodes=nodes("n1", "n2", "n3")), template=template).status
    assert edited.plan is not None
    assert edited.plan.nodes == 3
    runs, world = on_two_nodes(limited(), NOW + 10)
    asked = dataclasses.replace(JOB, drain_request="1")
    drained = decide(asked, spec(), runs, world, limits=Timeouts(), now=NOW + 10).status
    assert (drained.phase, drained.placement_limit) == (Phase.DRAINING, None)


def simulate(seconds: int, **changes: Any) -> tuple[list[Decision], Status]:
    """Let the scheduler place two pods of every attempt, at once, for so long."""
    status, decisions, placed_at = launched(), list[Decision](), NOW
    for now in range(int(NOW), int(NOW) + seconds, 10):
        is_launched = status.current is not None and status.current.launch_time is not None
        pods = tuple(dataclasses.replace(pod, attempt=status.attempt) for pod in pending(placed=2, placed_at=placed_at))
        world = waiting(pods, (worker_job(status.attempt),)) if is_launched else waiting((), ())
        decision = look(status, world, now=now, **changes)
        if "LaunchAttempt" in kinds(decision) or decision.status.attempt != status.attempt:
            placed_at = now
        decisions.append(decision)
        status = decision.status
    return decisions, status


def test_a_job_below_its_smallest_size_holds_accelerators_for_half_of_the_time_and_never_fails() -> None:
    decisions, status = simulate(6 * 3600, **THREE)
    tail = decisions[len(decisions) // 2 :]
    share = sum(item.status.current is not None for item in tail) / len(tail)
    assert 0.2 < share < 0.6
    assert status.attempt < 60, "about six attempts in an hour"
    assert {item.status.phase for item in decisions} == {Phase.STARTING, Phase.STOPPING, Phase.WAITING, Phase.PENDING}
    assert status.restart_budget.used == 0
    resting = [item.status for item in tail if item.status.phase in (Phase.WAITING, Phase.PENDING)]
    assert all(WORDS in item.message for item in resting), "the scheduler's words stay in the status"
