"""A conversion that the infrastructure interrupts is repeated without an end, and a pinned topology is never final."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import format_time, to_wire
from elastic_operator.api.status import Phase, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.observed.observation import NodeView, Observation, PodView
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Create, Decision
from elastic_operator.reconcile.decide import decide
from elastic_operator.reconcile.failures.pinned_topology import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS
from elastic_operator.reconcile.user_requests import can_retry_conversion
from reshard.contract import ExitCode, ReshardReport
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    BIG,
    JOB,
    NOW,
    SMALL,
    kinds,
    look,
    lost_node,
    nodes,
    spec,
    worker_job,
    workers,
)
from tests.unit.elastic_operator.reconcile.test_reshard_pods import IMAGE_SECONDS, NO_IMAGE, job, pod, resharding

TWO = lost_node().nodes
SIGTERM = ReshardReport(ok=False, exit_code=ExitCode.INTERRUPTED, message="received SIGTERM").to_json()
UNSUPPORTED = ReshardReport(ok=False, exit_code=ExitCode.UNSUPPORTED, message="no rule").to_json()
FULL = ReshardReport(ok=False, exit_code=ExitCode.STORAGE_FULL, message="full").to_json()

PREEMPTED = pod(node="n1", phase="Failed", disruption="PreemptionByScheduler")
TERMINATES = pod(node="n1", phase="Running", disruption="PreemptionByScheduler", disrupted_at=NOW, deleted_at=NOW + 30)
REPORTED = pod(node="n1", phase="Failed", disruption="EvictionByEvictionAPI", termination_message=SIGTERM, exit_code=50)
REJECTED = pod(node="n1", phase="Failed", status_reason="OutOfmemory")
RESTARTED = pod(node="n1", phase="Failed", exit_reason="ContainerStatusUnknown", exit_code=137)
DELETED = pod(node="n1", phase="Running", deleted_at=NOW + 30)
DISRUPTED_LATE = dataclasses.replace(REPORTED, termination_message=UNSUPPORTED, exit_code=ExitCode.UNSUPPORTED)
SLOW = pod(node="n1", phase="Failed", termination_message=SIGTERM, exit_code=50)


def ended(*pods: PodView, reason: str = "BackoffLimitExceeded", uid: str = "r2") -> Observation:
    """The reshard Job has failed."""
    owned = tuple(dataclasses.replace(item, owner=uid) for item in pods)
    failed = job(uid=uid, failed=True, failed_reason=reason, failed_message="limit")
    return Observation(nodes=TWO, pods=owned, jobs=(failed,))


@pytest.mark.parametrize(
    ("world", "reason", "is_charged"),
    [
        pytest.param(ended(PREEMPTED), "PodPreempted", False, id="preempted"),
        pytest.param(ended(TERMINATES), "PodPreempted", False, id="preempted-and-still-in-its-grace-period"),
        pytest.param(ended(REPORTED), "PodDisrupted", False, id="evicted-and-the-program-reports-a-signal"),
        pytest.param(ended(REJECTED), "PodRejected", False, id="rejected-by-the-kubelet"),
        pytest.param(ended(RESTARTED), "PodLost", False, id="the-node-restarted"),
        pytest.param(ended(), "PodDeleted", False, id="the-pod-is-gone-with-its-node"),
        pytest.param(ended(DELETED), "PodDeleted", False, id="deleted"),
        pytest.param(ended(reason="DeadlineExceeded"), "NoReport", True, id="too-slow-and-gone"),
        pytest.param(ended(SLOW, reason="DeadlineExceeded"), "Interrupted", True, id="too-slow"),
        pytest.param(ended(pod(node="n1", phase="Failed", exit_code=1)), "NoReport", True, id="the-program"),
        pytest.param(
            ended(dataclasses.replace(SLOW, termination_message=FULL)), "StorageFull", True, id="the-volume-is-full"
        ),
    ],
)
def test_only_what_the_program_causes_uses_a_retry(world: Observation, reason: str, is_charged: bool) -> None:
    status = look(resharding(), world, now=NOW + 1).status
    assert status.reshard is not None
    assert (status.reshard.failures, status.reshard.interruptions) == (int(is_charged), int(not is_charged))
    condition = find(status.conditions, Type.RESHARD_FAILED)
    assert condition is not None
    assert (condition.status, condition.reason) == ("True", reason)
    assert ("uses no retry" in condition.message) is not is_charged
    assert (status.phase, status.reason) == (Phase.RESHARDING, "ReshardRetry")
    assert read_status(to_wire(status)).problems == ()


def test_a_report_that_no_retry_can_change_is_final_although_its_pod_was_evicted() -> None:
    status = look(resharding(), ended(DISRUPTED_LATE), now=NOW + 1).status
    assert (status.phase, status.pinned) == (Phase.WAITING, BIG)


def repeat(status: Status, tries: int, *pods: PodView, now: float = NOW, **changes: Any) -> tuple[Status, list[float]]:
    """Let so many Jobs of the conversion fail one after another; return the pauses before the next ones, too."""
    pauses: list[float] = []
    for number in range(tries):
        status = look(status, ended(*pods, uid=f"j{number}"), now=now, **changes).status
        if status.reshard is None or status.current is None or status.reshard.retry_time is None:
            break
        pauses.append(status.reshard.retry_time - now)
        now = status.reshard.retry_time
        decision = look(status, Observation(nodes=TWO), now=now, **changes)
        assert kinds(decision) == ["Create"]
        status = decision.status
    return status, pauses


def test_a_week_of_preemptions_ends_no_conversion_and_the_pauses_have_a_bound() -> None:
    status, pauses = repeat(resharding(), 2000, PREEMPTED)
    assert pauses[:7] == [10, 20, 40, 80, 160, 300, 300]
    assert set(pauses[7:]) == {300}
    assert (len(pauses), status.pinned, status.phase) == (2000, None, Phase.RESHARDING)


def test_a_week_of_preemptions_does_not_fail_a_job_that_a_failed_conversion_would_fail() -> None:
    status, pauses = repeat(resharding(), 50, PREEMPTED, reshard={"onFailure": "Fail"})
    assert (len(pauses), status.phase) == (50, Phase.RESHARDING)


def test_a_registry_that_is_away_for_hours_ends_no_conversion() -> None:
    status, now = resharding(), NOW
    while now < NOW + 8 * 3600:
        waits = dataclasses.replace(NO_IMAGE, created_at=now, owner=f"j{now}")
        now += IMAGE_SECONDS
        world = Observation(nodes=TWO, pods=(waits,), jobs=(job(uid=f"j{now - IMAGE_SECONDS}", created_at=now),))
        status = look(status, world, now=now).status
        assert status.reshard is not None
        assert status.reshard.retry_time is not None
        assert "ErrImagePull: manifest unknown" in status.message
        now = status.reshard.retry_time
        status = look(status, Observation(nodes=TWO), now=now).status
    assert (status.phase, status.pinned) == (Phase.RESHARDING, None)
    assert status.reshard is not None
    assert (status.reshard.failures, status.reshard.interruptions > 50) == (0, True)


def test_an_image_that_may_not_be_pulled_uses_a_retry() -> None:
    absent = dataclasses.replace(NO_IMAGE, waiting_reason="ErrImageNeverPull")
    world = Observation(nodes=TWO, pods=(absent,), jobs=(job(),))
    status = look(resharding(), world, now=NOW + IMAGE_SECONDS).status
    assert status.reshard is not None
    assert (status.reshard.failures, status.reshard.interruptions) == (1, 0)


@pytest.mark.parametrize(("tries", "returns"), [(3, False), (4, True)])
def test_a_conversion_that_is_interrupted_again_and_again_is_dropped_where_the_commits_topology_fits(
    tries: int, returns: bool
) -> None:
    status, _ = repeat(resharding(), tries, PREEMPTED)
    decision = look(status, Observation(nodes=nodes("n1", "n2", "n4")), now=NOW + 10_000)
    assert ("LaunchAttempt" in kinds(decision)) is returns
    assert decision.status.pinned == (BIG if returns else None)


EDITED: dict[str, Any] = {"reshard": {"resources": {"requests": {"memory": "256Mi"}}}}
ALLOWED: dict[str, Any] = {"checkpoint": {"claimName": "ckpt", "path": "gpt", "allowedGlobals": ["mine.Progress"]}}
TEMPLATE: dict[str, Any] = {"template": {"spec": {"containers": [{"name": "train", "image": "other"}]}}}
EDITS = pytest.mark.parametrize(
    "changes",
    [
        pytest.param(EDITED, id="reshard"),
        pytest.param(ALLOWED, id="allowed-globals"),
        pytest.param(TEMPLATE, id="template"),
    ],
)


@EDITS
def test_an_edit_ends_the_pause_before_the_next_try(changes: dict[str, Any]) -> None:
    status, _ = repeat(resharding(), 9, PREEMPTED)
    paused = look(status, ended(PREEMPTED, uid="last"), now=NOW + 5000).status
    assert paused.reshard is not None
    assert paused.reshard.retry_time == NOW + 5300
    assert kinds(look(paused, Observation(nodes=TWO), now=NOW + 5001)) == []
    decision = look(paused, Observation(nodes=TWO), now=NOW + 5001, **changes)
    assert "Create" in kinds(decision)
    assert decision.status.reshard is not None
    assert (decision.status.reshard.interruptions, decision.status.reshard.failures) == (0, 0)


def pinned(pod_: PodView, tries: int = 4) -> Status:
    """The status of a job that waits after its conversion has failed for good at `NOW`, or so."""
    status, _ = repeat(resharding(), tries, pod_)
    assert (status.phase, status.reason, status.pinned) == (Phase.WAITING, "ReshardFailed", BIG)
    return status


def ask(status: Status, *, now: float, members: dict[str, NodeView] | None = None) -> Decision:
    world = Observation(nodes=TWO if members is None else members)
    return decide(dataclasses.replace(JOB, retry_request="1"), spec(), status, world, limits=Timeouts(), now=now)


BROKEN = pod(node="n1", phase="Failed", exit_code=1)
FINAL = pod(node="n1", phase="Failed", exit_code=ExitCode.UNSUPPORTED, termination_message=UNSUPPORTED)


@pytest.mark.parametrize("cause", [pytest.param(BROKEN, id="tries-used-up"), pytest.param(FINAL, id="unsupported")])
@EDITS
def test_an_edit_lifts_a_pin_and_converts_at_once(cause: PodView, changes: dict[str, Any]) -> None:
    status = pinned(cause)
    decision = look(status, Observation(nodes=TWO), now=NOW + 200, **changes)
    assert decision.status.phase == Phase.RESHARDING
    assert decision.status.current is not None
    assert (decision.status.current.topology, decision.status.pinned) == (SMALL, None)
    assert "Create" in kinds(decision)
    assert "SpecChanged" in [event.reason for event in decision.events]
    (arguments,) = (
        action.manifest["spec"]["template"]["spec"]["containers"][0]["args"]
        for action in decision.actions
        if isinstance(action, Create)
    )
    assert ("--allow-global" in arguments) is (changes is ALLOWED)


@pytest.mark.parametrize("cause", [pytest.param(BROKEN, id="tries-used-up"), pytest.param(FINAL, id="unsupported")])
def test_a_retry_lifts_a_pin_and_converts_at_once(cause: PodView) -> None:
    decision = ask(pinned(cause), now=NOW + 200)
    assert (decision.status.phase, decision.status.pinned) == (Phase.RESHARDING, None)
    assert "Create" in kinds(decision)
    assert decision.status.reshard is not None
    assert (decision.status.reshard.failures, decision.status.retry_request) == (0, "1")
    assert "RetryRequested" in [event.reason for event in decision.events]


def test_a_retry_ends_the_pause_before_the_next_try_once() -> None:
    status, _ = repeat(resharding(), 9, PREEMPTED)
    paused = look(status, ended(PREEMPTED, uid="last"), now=NOW + 5000).status
    asked = ask(paused, now=NOW + 5001)
    assert kinds(asked) == ["Create"]
    again = look(asked.status, ended(PREEMPTED, uid="after"), now=NOW + 5002).status
    assert kinds(ask(again, now=NOW + 5003)) == [], "a request is answered once"


@pytest.mark.parametrize(
    ("status", "now", "expected"),
    [
        pytest.param(repeat(resharding(), 1, PREEMPTED)[0], NOW + 5, True, id="the-next-try-waits"),
        pytest.param(repeat(resharding(), 1, PREEMPTED)[0], NOW + 10, False, id="the-next-try-runs"),
        pytest.param(pinned(BROKEN), NOW + 5000, True, id="pinned"),
        pytest.param(dataclasses.replace(pinned(BROKEN), phase=Phase.COMPLETE), NOW, False, id="complete"),
        pytest.param(resharding(), NOW, False, id="nothing-has-failed"),
    ],
)
def test_a_retry_is_for_conversions_that_wait(status: Status, now: float, expected: bool) -> None:
    assert can_retry_conversion(status, now) is expected


def first_retry(status: Status) -> float:
    assert status.pin is not None
    assert status.pin.retry_time is not None
    return status.pin.retry_time


def test_a_job_that_waits_for_nodes_in_vain_converts_again_after_a_pause_that_grows() -> None:
    status, pauses = pinned(BROKEN), list[float]()
    for _ in range(5):
        due = first_retry(status)
        early = look(status, Observation(nodes=TWO), now=due - 1)
        assert (early.status.phase, kinds(early)) == (Phase.WAITING, [])
        assert f"tried again at {format_time(due)}" in early.status.message
        decision = look(early.status, Observation(nodes=TWO), now=due)
        assert (decision.status.phase, decision.status.pinned) == (Phase.RESHARDING, None)
        attempt = decision.status.attempt
        now, status = due, decision.status
        for number in range(4):
            again = dataclasses.replace(BROKEN, attempt=attempt, owner=f"k{number}")
            failed = job(uid=f"k{number}", attempt=attempt, failed=True, failed_reason="BackoffLimitExceeded")
            status = look(status, Observation(nodes=TWO, pods=(again,), jobs=(failed,)), now=now).status
        assert (status.phase, status.pinned) == (Phase.WAITING, BIG)
        pauses.append(first_retry(status) - now)
    assert pauses == [2 * FIRST_RETRY_SECONDS, 4 * FIRST_RETRY_SECONDS, *3 * [LAST_RETRY_SECONDS]]


@pytest.mark.parametrize(("late", "converts"), [(-1, False), (0, True)])
def test_pods_that_wait_for_an_autoscaler_in_the_pinned_topology_give_way_to_another_conversion(
    late: float, converts: bool
) -> None:
    autoscaled = {"nodes": {"min": 1, "max": 3, "autoscaling": True}}
    status, _ = repeat(resharding(), 4, BROKEN, **autoscaled)
    assert status.current is not None
    assert (status.current.topology, status.current.awaits_nodes, status.pinned) == (BIG, True, BIG)
    due = first_retry(status)
    pods = workers(status.attempt, phase="Pending", unschedulable="no node")
    waiting = tuple(dataclasses.replace(item, node=None) for item in pods)
    world = Observation(nodes=TWO, pods=waiting, jobs=(worker_job(status.attempt),))
    decision = look(status, world, now=due + late, **autoscaled)
    assert (decision.status.phase == Phase.RESHARDING) is converts
    assert (decision.status.pinned is None) is converts


def test_a_conversion_that_is_not_supported_is_not_repeated_by_itself() -> None:
    status = pinned(FINAL, tries=1)
    week = look(status, Observation(nodes=TWO), now=NOW + 7 * 86400)
    assert (week.status.phase, week.status.pinned, kinds(week)) == (Phase.WAITING, BIG, [])
    assert (
        "an edit of spec.checkpoint.allowedGlobals, spec.reshard or spec.template, or kubectl etj retry gpt"
        in week.status.message
    )


def test_nodes_for_the_pinned_topology_are_used_without_another_conversion() -> None:
    status = pinned(BROKEN)
    decision = look(status, Observation(nodes=nodes("n1", "n2", "n4")), now=first_retry(status) + 1)
    assert "LaunchAttempt" in kinds(decision)
    assert decision.status.current is not None
    assert decision.status.current.topology == BIG


def test_a_topology_that_an_older_operator_pinned_is_not_final_either() -> None:
    older = dataclasses.replace(pinned(BROKEN), pin=None)
    status = look(older, Observation(nodes=TWO), now=NOW + 200).status
    assert status.phase == Phase.WAITING
    assert first_retry(status) == NOW + 200 + FIRST_RETRY_SECONDS
    assert look(status, Observation(nodes=TWO), now=first_retry(status)).status.phase == Phase.RESHARDING
