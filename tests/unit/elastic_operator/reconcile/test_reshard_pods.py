"""A reshard pod that cannot start, or is killed, is told at once and never waited for longer than its grace."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.conditions import Type, find
from elastic_operator.api.serialization import Time, to_wire
from elastic_operator.api.status import Phase, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.observed import pod_diagnosis, reshard_pods
from elastic_operator.observed.observation import JobView, NodeView, Observation, PodDiagnosis, PodView
from elastic_operator.reconcile.actions import Create, Decision, DeleteJob
from reshard.contract import ExitCode, ReshardReport
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    BIG,
    NOW,
    after_loss,
    kinds,
    look,
    lost_node,
    nodes,
)

IMAGE_SECONDS, UNSCHEDULABLE_SECONDS, STARTUP_SECONDS = 120, 60, 1800
NO_ROOM = "0/3 nodes are available: 3 Insufficient memory"


def job(**changes: Any) -> JobView:
    values: dict[str, Any] = {"name": "gpt-a2-reshard", "uid": "r2", "attempt": 2, "role": "reshard"}
    return JobView(**{**values, "created_at": NOW, **changes})


def pod(name: str = "x", **changes: Any) -> PodView:
    values: dict[str, Any] = {"attempt": 2, "role": "reshard", "owner": "r2", "created_at": NOW}
    return PodView(**{**values, "name": f"gpt-a2-reshard-{name}", "uid": f"r-{name}", **changes})


def seen(*pods: PodView, members: dict[str, NodeView] | None = None, **of_job: Any) -> Observation:
    return Observation(nodes=lost_node().nodes if members is None else members, pods=pods, jobs=(job(**of_job),))


def resharding() -> Status:
    status = after_loss()
    assert (status.phase, status.attempt) == (Phase.RESHARDING, 2)
    return status


def failures(decision: Decision) -> int:
    return decision.status.reshard.failures if decision.status.reshard is not None else 0


def told(decision: Decision) -> tuple[str, str]:
    condition = find(decision.status.conditions, Type.RESHARDING)
    assert condition is not None
    assert (condition.status, condition.message) == ("True", decision.status.message)
    return condition.reason, condition.message


NO_IMAGE = pod(node="n1", waiting_reason="ErrImagePull", waiting_message="manifest unknown")
ABSENT = pod(node="n1", waiting_reason="ErrImageNeverPull", waiting_message="Container image is not present")
CHARGED, FREE = "retry 1 of 3", "the next try, which uses no retry,"
NO_NODE = pod(unschedulable=NO_ROOM)
STARTS = pod(node="n1")


@pytest.mark.parametrize(
    ("pods", "reason", "words"),
    [
        pytest.param([NO_IMAGE], "ContainerCannotStart", "cannot start: ErrImagePull: manifest unknown", id="image"),
        pytest.param([NO_NODE], "Unschedulable", f"finds no node: {NO_ROOM}", id="no-node"),
        pytest.param([STARTS], "NodeNotReady", "", id="it-starts"),
        pytest.param([NO_IMAGE, pod("y", phase="Running", node="n2")], "NodeNotReady", "", id="another-converts"),
        pytest.param([NO_NODE, dataclasses.replace(NO_IMAGE, name="i")], "ContainerCannotStart", "", id="both"),
        pytest.param([pod(phase="Running", node="n1")], "NodeNotReady", "", id="it-converts"),
        pytest.param([dataclasses.replace(NO_IMAGE, owner="r1"), STARTS], "NodeNotReady", "", id="of-an-earlier-job"),
    ],
)
def test_what_keeps_the_pod_from_starting_is_told_at_once(pods: list[PodView], reason: str, words: str) -> None:
    decision = look(resharding(), seen(*pods), now=NOW + 1)
    found, message = told(decision)
    assert (found, decision.status.phase, failures(decision)) == (reason, Phase.RESHARDING, 0)
    assert words in message
    is_trouble = reason != "NodeNotReady"
    assert [event.warning for event in decision.events if event.reason == reason] == ([True] if is_trouble else [])
    again = look(decision.status, seen(*pods), now=NOW + 2)
    assert not [event for event in again.events if event.reason == reason], "told once"


@pytest.mark.parametrize(
    ("pods", "seconds", "name", "retry"),
    [
        pytest.param([NO_IMAGE], IMAGE_SECONDS, "ContainerCannotStart", FREE, id="image"),
        pytest.param([ABSENT], IMAGE_SECONDS, "ContainerCannotStart", CHARGED, id="image-that-may-not-be-pulled"),
        pytest.param([STARTS], STARTUP_SECONDS, "StartupTimeout", CHARGED, id="no-reason-given"),
        pytest.param([], STARTUP_SECONDS, "StartupTimeout", CHARGED, id="pods-are-refused"),
    ],
)
def test_a_pod_that_cannot_start_is_a_failed_try_after_its_grace(
    pods: list[PodView], seconds: float, name: str, retry: str
) -> None:
    early = look(resharding(), seen(*pods), now=NOW + seconds - 1)
    assert failures(early) == 0
    late = look(early.status, seen(*pods), now=NOW + seconds)
    assert failures(late) == (1 if retry == CHARGED else 0)
    assert DeleteJob(name="gpt-a2-reshard", uid="r2") in late.actions
    condition = find(late.status.conditions, Type.RESHARD_FAILED)
    assert condition is not None
    assert (condition.status, condition.reason) == ("True", name)
    assert f"{retry} in 10 s" in condition.message
    assert [(outcome.mode, outcome.result) for outcome in late.reshards] == [("", name)]
    after = look(late.status, Observation(nodes=lost_node().nodes), now=NOW + seconds + 11)
    assert [type(action) for action in after.actions] == [Create]


def test_tries_that_cannot_start_end_after_the_limit() -> None:
    status, now = resharding(), NOW
    for number in range(4):
        world = seen(dataclasses.replace(ABSENT, owner=f"j{number}", created_at=now), uid=f"j{number}", created_at=now)
        now += IMAGE_SECONDS
        status = look(status, world, now=now).status
        now += 100
        status = look(status, Observation(nodes=lost_node().nodes), now=now).status
    assert (status.phase, status.reason, status.pinned) == (Phase.WAITING, "ReshardFailed", BIG)
    assert now - NOW < 900, "and not 4 hours"


def test_a_pod_that_finds_no_node_waits_and_uses_no_try() -> None:
    status = look(resharding(), seen(NO_NODE), now=NOW + reshard_pods.UNPLACED_SECONDS - 1).status
    assert status.reshard is not None
    assert (status.reshard.failures, status.reshard.failed_uid) == (0, "")
    decision = look(status, seen(NO_NODE), now=NOW + reshard_pods.UNPLACED_SECONDS)
    assert DeleteJob(name="gpt-a2-reshard", uid="r2") in decision.actions, "before its deadline ends it"
    assert failures(decision) == 0
    after = look(decision.status, Observation(nodes=lost_node().nodes), now=NOW + 700)
    assert [type(action) for action in after.actions] == [Create]


@pytest.mark.parametrize(
    ("pods", "seconds", "returns"),
    [
        pytest.param([NO_NODE], UNSCHEDULABLE_SECONDS - 1, False, id="not-yet"),
        pytest.param([NO_NODE], UNSCHEDULABLE_SECONDS, True, id="no-node"),
        pytest.param([], UNSCHEDULABLE_SECONDS, True, id="no-pod"),
        pytest.param([NO_IMAGE], UNSCHEDULABLE_SECONDS, False, id="no-image"),
        pytest.param([pod(phase="Running", node="n1")], UNSCHEDULABLE_SECONDS, False, id="it-converts"),
    ],
)
def test_a_conversion_without_room_is_dropped_where_the_topology_of_the_commit_fits_again(
    pods: list[PodView], seconds: float, returns: bool
) -> None:
    back = nodes("n1", "n2", "n4")
    decision = look(resharding(), seen(*pods, members=back), now=NOW + seconds)
    assert ("LaunchAttempt" in kinds(decision)) is returns
    assert ([event.reason for event in decision.events].count("PlanOutdated") == 1) is returns
    if returns:
        assert decision.status.current is not None
        assert decision.status.current.topology == BIG


def test_an_edit_of_the_conversion_reaches_a_job_that_has_not_started() -> None:
    edited = {"reshard": {"resources": {"requests": {"memory": "256Mi"}}}}
    decision = look(resharding(), seen(NO_NODE), now=NOW + 1, **edited)
    assert DeleteJob(name="gpt-a2-reshard", uid="r2") in decision.actions
    assert failures(decision) == 0
    assert "SpecChanged" in [event.reason for event in decision.events]
    after = look(decision.status, Observation(nodes=lost_node().nodes), now=NOW + 2, **edited)
    (create,) = [action for action in after.actions if isinstance(action, Create)]
    (container,) = create.manifest["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"memory": "256Mi"}}
    running = look(resharding(), seen(pod(phase="Running", node="n1")), now=NOW + 1, **edited)
    assert running.actions == (), "a conversion that runs goes on"


def test_an_edit_between_two_tries_makes_one_new_job() -> None:
    failed = look(resharding(), seen(KILLED, failed=True), now=NOW + 1).status
    edited = {"reshard": {"timeoutSeconds": 60}}
    created = look(failed, Observation(nodes=lost_node().nodes), now=NOW + 20, **edited)
    assert [type(action) for action in created.actions] == [Create]
    decision = look(created.status, seen(uid="r3", created_at=NOW + 20), now=NOW + 21, **edited)
    assert decision.actions == ()


def test_a_status_of_an_older_operator_says_nothing_about_an_edit() -> None:
    status = resharding()
    assert status.reshard is not None
    older = dataclasses.replace(status, reshard=dataclasses.replace(status.reshard, spec_hash=""))
    decision = look(older, seen(NO_NODE), now=NOW + 1)
    assert decision.actions == ()
    assert decision.status.reshard is not None
    assert decision.status.reshard.spec_hash == status.reshard.spec_hash
    assert read_status(to_wire(decision.status)).problems == ()


KILLED = pod(node="n1", phase="Failed", exit_code=137, exit_reason="OOMKilled")
INTERNAL = ReshardReport(ok=False, exit_code=ExitCode.INTERNAL, message="a process of it was killed")


@pytest.mark.parametrize(
    ("found", "name", "words", "retry"),
    [
        pytest.param(KILLED, "OutOfMemory", "(OOMKilled): the next try gets twice", CHARGED, id="killed"),
        pytest.param(
            dataclasses.replace(KILLED, termination_message=INTERNAL.to_json(), exit_code=INTERNAL.exit_code),
            "OutOfMemory",
            "ran out of memory",
            CHARGED,
            id="a-child-was-killed",
        ),
        pytest.param(
            pod(node="n1", phase="Failed", status_reason="Evicted", disruption="TerminationByKubelet"),
            "PodDisrupted",
            "on node n1 is being disrupted: TerminationByKubelet",
            FREE,
            id="evicted",
        ),
        pytest.param(
            pod(node="n1", phase="Failed", disruption="PreemptionByScheduler"),
            "PodPreempted",
            "PreemptionByScheduler",
            FREE,
            id="preempted",
        ),
        pytest.param(
            pod(node="n1", phase="Failed", exit_code=1), "NoReport", "with exit code 1", CHARGED, id="without-a-report"
        ),
    ],
)
def test_a_failed_try_is_named_by_its_pod(found: PodView, name: str, words: str, retry: str) -> None:
    world = seen(found, failed=True, failed_reason="BackoffLimitExceeded", failed_message="limit")
    decision = look(resharding(), world, now=NOW + 1)
    condition = find(decision.status.conditions, Type.RESHARD_FAILED)
    assert condition is not None
    assert condition.reason == name
    assert words in condition.message
    assert retry in condition.message
    (event,) = [event for event in decision.events if event.reason == "ReshardFailed"]
    assert words in event.message


def test_each_try_that_ran_out_of_memory_doubles_the_memory_of_the_next_also_in_later_attempts() -> None:
    world = seen(KILLED, failed=True, failed_reason="BackoffLimitExceeded")
    status = look(resharding(), world, now=NOW + 1).status
    assert status.reshard is not None
    assert status.reshard.oom_kills == 1
    decision = look(status, Observation(nodes=lost_node().nodes), now=NOW + 20)
    (create,) = [action for action in decision.actions if isinstance(action, Create)]
    (container,) = create.manifest["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "2Gi"
    edited = {"parallelism": {"tensor": [1, 2], "pipeline": [1, 3]}}
    replanned = look(decision.status, Observation(nodes=lost_node().nodes), now=NOW + 30, **edited).status
    assert replanned.reshard is not None
    assert (replanned.attempt, replanned.reshard.attempt, replanned.reshard.oom_kills) == (3, 3, 1)


def test_a_template_that_is_short_of_memory_is_named() -> None:
    template = {"template": {"spec": {"containers": [{"name": "convert", "image": "image"}]}}}
    decision = look(resharding(), seen(KILLED, failed=True), now=NOW + 1, reshard=template)
    assert decision.status.reshard is not None
    assert "give it more in spec.reshard.template" in decision.status.reshard.message


@pytest.mark.parametrize(
    ("world", "seconds", "expected"),
    [
        pytest.param(seen(), 2, None, id="the-job-is-new"),
        pytest.param(seen(), 3, (pod_diagnosis.PODS_REFUSED, "r2"), id="no-pod"),
        pytest.param(seen(STARTS), 19, None, id="it-starts"),
        pytest.param(seen(STARTS), 20, (pod_diagnosis.POD_STUCK, "r-x"), id="it-does-not-start"),
        pytest.param(seen(NO_IMAGE), 20, None, id="its-status-says-why"),
        pytest.param(seen(NO_NODE), 20, None, id="the-scheduler-says-why"),
        pytest.param(seen(failed=True), 20, None, id="the-job-has-failed"),
        pytest.param(seen(pod(phase="Running", node="n1")), 20, None, id="it-converts"),
        pytest.param(Observation(), 20, None, id="no-job"),
    ],
)
def test_events_are_read_while_the_reshard_pods_are_missing(
    world: Observation, seconds: float, expected: tuple[str, str] | None
) -> None:
    query = pod_diagnosis.choose_event_query(resharding(), world, NOW + seconds)
    assert (None if query is None else (query.reason, query.uid)) == expected


def test_a_quota_that_refuses_the_pods_is_told_with_the_words_of_the_job_controller() -> None:
    query = pod_diagnosis.choose_event_query(resharding(), seen(), NOW + 3)
    assert query is not None
    text = 'Error creating: pods "gpt-a2-reshard-abcde" is forbidden: exceeded quota: none'
    diagnosis = pod_diagnosis.diagnose_from_events(
        query, [{"type": "Warning", "reason": "FailedCreate", "message": text}]
    )
    decision = look(resharding(), dataclasses.replace(seen(), pod_diagnosis=diagnosis), now=NOW + 3)
    reason, message = told(decision)
    assert reason == "PodsRefused"
    assert 'pods "gpt-a2-reshard-*" is forbidden: exceeded quota: none' in message
    assert "PodsRefused" in [event.reason for event in decision.events]


def test_an_old_diagnosis_is_not_told_while_the_next_try_waits() -> None:
    status = resharding()
    assert status.reshard is not None
    waits = dataclasses.replace(status.reshard, retry_time=Time(NOW + 30), message="it failed")
    world = dataclasses.replace(seen(), pod_diagnosis=PodDiagnosis(attempt=2, reason="PodsRefused", message="quota"))
    decision = look(dataclasses.replace(status, reshard=waits), world, now=NOW + 3)
    assert told(decision)[0] == "ReshardRetry"
