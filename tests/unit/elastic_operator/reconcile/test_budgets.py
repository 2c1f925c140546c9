"""Budgets and backoff by class of failure, and rules about exit codes: a failure goes in, a status comes out."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from elastic_operator.api.failure_policy import FailureClass
from elastic_operator.api.serialization import Time, to_wire
from elastic_operator.api.spec import SpecError
from elastic_operator.api.status import Commit, FailureCount, Phase, RestartBudget, Status
from elastic_operator.api.status_reader import read_status
from elastic_operator.observed.failure_classes import CLASSES, Budget, classify_failure
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.signal_kinds import KINDS, Weight
from elastic_operator.reconcile.failures.budgets import backoff_seconds
from elastic_operator.reconcile.goodput import measure_parts
from reshard.contract import TrainerPhase
from tests.pages import ROOT, rows, section
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    BIG,
    NOW,
    WORLD,
    kinds,
    lease,
    look,
    nodes,
    settled,
    spec,
    worker_job,
    workers,
)


def failed_anywhere(status: Status) -> Observation:
    """The same, on another node after every attempt, so that no node is to blame."""
    return failed(status, index=status.attempt % 3)


def failed(status: Status, index: int = 2, code: int | None = 1, **changes: Any) -> Observation:
    """The world of a launched attempt of which one pod has failed."""
    pods = list(workers(status.attempt))
    pods[index] = dataclasses.replace(pods[index], phase="Failed", exit_code=code, **changes)
    return Observation(
        nodes=WORLD.nodes, pods=tuple(pods), jobs=(worker_job(status.attempt),),
        leases=lease(status.attempt, age=-10_000.0, PHASE=TrainerPhase.TRAINING, STEP="12"),
    )  # fmt: skip


def disrupted(status: Status, reason: str) -> Observation:
    pods = list(workers(status.attempt))
    pods[1] = dataclasses.replace(pods[1], disruption=reason)
    spare = nodes("n4")  # the place of a preempted pod has gone to another pod
    return dataclasses.replace(failed(status), pods=tuple(pods), nodes=WORLD.nodes | spare)


def empty(status: Status) -> Observation:
    """The same nodes without pods, after the last attempt has stopped."""
    del status
    return Observation(nodes=WORLD.nodes)


def launch(status: Status, now: float, **changes: Any) -> Status:
    """Look until an attempt is launched, one second after another; it does not make a step."""
    for second in range(1000):
        decision = look(status, empty(status), now=now + second, **changes)
        if "LaunchAttempt" in kinds(decision):
            return decision.status
        status = decision.status
    raise AssertionError(status)


def count(status: Status, name: FailureClass) -> FailureCount:
    return next(item for item in status.failure_counts if item.failure_class == name)


SICK_NODE = {**nodes("n1", "n2"), **nodes("n3", ready="Unknown", ready_since=NOW - 60)}
SICK_DEVICE = tuple(
    dataclasses.replace(pod, unhealthy_devices=int(pod.index == 1)) for pod in WORLD.pods
)  # fmt: skip
CANNOT_START = tuple(
    dataclasses.replace(pod, phase="Pending", waiting_reason="ErrImagePull", created_at=NOW - 500)
    for pod in WORLD.pods
)  # fmt: skip


@pytest.mark.parametrize(
    ("world", "cause", "name", "charged"),
    [
        pytest.param(dataclasses.replace(WORLD, nodes=SICK_NODE), "NodeNotReady", "Node", 0, id="node"),
        pytest.param(dataclasses.replace(WORLD, pods=SICK_DEVICE), "DeviceUnhealthy", "Device", 0, id="device"),
        pytest.param(disrupted(settled(), "PreemptionByScheduler"), "PodPreempted", "Preemption", 0, id="preempted"),
        pytest.param(disrupted(settled(), "EvictionByEvictionAPI"), "PodDisrupted", "Eviction", 0, id="evicted"),
        pytest.param(dataclasses.replace(WORLD, pods=CANNOT_START), "ContainerCannotStart", "Image", 0, id="image"),
        pytest.param(failed(settled()), "PodFailed", "Crash", 1, id="crash"),
        pytest.param(failed(settled(), code=None, status_reason="Evicted"), "PodFailed", "Crash", 1, id="over-limit"),
        pytest.param(
            failed(settled(), code=None, status_reason="UnexpectedAdmissionError"), "PodRejected", "Node", 0,
            id="rejected",
        ),
        pytest.param(failed(settled(), code=255, exit_reason="Unknown"), "PodLost", "Node", 0, id="quick-reboot"),
        pytest.param(
            failed(settled(), code=None, status_reason="OutOfamd.com/gpu"), "PodRejected", "Node", 0,
            id="rejected-for-accelerators",
        ),
        pytest.param(
            dataclasses.replace(WORLD, leases=lease(age=100.0, PHASE=TrainerPhase.TRAINING)), "HeartbeatStale", "Hang",
            1, id="silent",
        ),
        pytest.param(dataclasses.replace(WORLD, jobs=()), "JobDeleted", "Eviction", 0, id="job-deleted"),
    ],
)  # fmt: skip
def test_a_failure_is_charged_to_the_budget_of_its_class(
    world: Observation, cause: str, name: str, charged: int
) -> None:
    status = look(settled(), world).status
    assert status.recoveries[-1].cause == cause
    assert [(item.failure_class, item.total, item.in_a_row) for item in status.failure_counts] == [(name, 1, 1)]
    assert status.restart_budget.used == charged
    assert status.attempt == 2, "the first failure costs no wait"


@pytest.mark.parametrize(
    ("world", "name"),
    [
        (lambda status: disrupted(status, "PreemptionByScheduler"), FailureClass.PREEMPTION),
        (lambda status: disrupted(status, "DeletionByTaintManager"), FailureClass.EVICTION),
    ],
)
def test_the_infrastructure_never_ends_a_job(world: Any, name: FailureClass) -> None:
    status, now = settled(), NOW
    for _ in range(30):
        status = look(status, world(status), now=now).status
        assert status.phase != Phase.FAILED
        status = launch(status, now)
        now = (status.current.launch_time or now) + 5  # type: ignore[union-attr]
    assert status.restart_budget.used == 0
    assert count(status, name).total == 30
    limited = {"budgets": [{"failureClass": name.value, "limit": 0, "windowSeconds": 60}]}
    ended = look(status, world(status), now=now, recovery=limited).status
    assert (ended.phase, ended.reason) == (Phase.FAILED, "RestartBudgetExceeded")
    assert f"1 unplanned restarts of class {name} within 60 s exceed the budget of 0" in ended.message


@pytest.mark.parametrize(
    ("in_a_row", "seconds"), [(1, 0), (2, 10), (3, 20), (4, 40), (5, 80), (6, 160), (7, 300), (8, 300), (10**6, 300)]
)
def test_the_pause_doubles_up_to_its_limit(in_a_row: int, seconds: float) -> None:
    assert backoff_seconds(in_a_row) == seconds


def test_failures_in_a_row_wait_longer_and_longer_and_a_commit_ends_that() -> None:
    status, now, pauses = settled(), NOW, []
    for _ in range(4):
        status = look(status, failed_anywhere(status), now=now).status
        status = launch(status, now)
        assert status.current is not None
        pauses.append((status.current.plan_time or 0.0) - now)
        now = (status.current.launch_time or now) + 5
    assert pauses == [0, 10, 20, 40]
    commit = Commit(uri="/checkpoint/gpt/a5/step-00000020", step=20, samples=400, attempt=5, topology=BIG)
    newer = dataclasses.replace(
        status, checkpoint=dataclasses.replace(status.checkpoint, history=(commit,), uri=commit.uri, step=20)
    )
    after = look(newer, failed(newer), now=now).status
    assert (after.attempt, count(after, FailureClass.CRASH).in_a_row) == (status.attempt + 1, 1)
    assert after.restart_budget.used == 5, "a commit ends the wait, not the window of the budget"


def test_a_wait_is_told_and_ends_in_time_or_with_an_edit_or_a_retry() -> None:
    status = look(settled(), failed(settled())).status
    status = launch(status, NOW)
    decision = look(status, failed(status), now=NOW + 5)
    waiting = decision.status
    assert (waiting.phase, waiting.reason, waiting.current) == (Phase.STOPPING, "PodFailed", None)
    assert "RestartDelayed" in [event.reason for event in decision.events]
    still = look(waiting, empty(waiting), now=NOW + 6)
    assert (still.status.phase, still.status.reason, still.status.queue_time) == (Phase.PENDING, "Backoff", None)
    assert "2 failures of class Crash in a row" in still.status.message
    assert count(still.status, FailureClass.CRASH).retry_time == NOW + 15
    assert not still.actions
    assert still.requeue_seconds <= 9
    assert look(still.status, empty(still.status), now=NOW + 15).status.attempt == 3
    template = {"spec": {"containers": [{"name": "train", "image": "corrected"}]}}
    assert look(still.status, empty(still.status), now=NOW + 7, template=template).status.attempt == 3


def test_a_wait_before_the_next_attempt_is_not_taken_for_pods_that_do_not_end() -> None:
    status = launch(look(settled(), failed_anywhere(settled())).status, NOW)
    stopping = look(status, failed_anywhere(status), now=NOW + 5).status
    assert stopping.recoveries[-1].stop_time is None
    waiting = look(stopping, empty(stopping), now=NOW + 7).status
    launched = launch(waiting, NOW + 7)
    assert launched.current is not None
    assert launched.current.plan_time == NOW + 15
    parts = measure_parts(launched.recoveries[-1])
    assert (parts["stop"], parts["plan"]) == (2, 8)


def test_a_step_ends_the_wait_after_the_infrastructure_but_not_after_a_crash() -> None:
    def run(world: Any) -> int:
        status, now = settled(), NOW
        for _ in range(3):
            status = look(status, world(status), now=now).status
            status = launch(status, now)
            assert status.current is not None
            now = (status.current.launch_time or now) + 5
            stepped = dataclasses.replace(status.current, first_step_time=Time(now), job_uid=f"j{status.attempt}")
            status = dataclasses.replace(status, current=stepped)
        return look(status, world(status), now=now).status.failure_counts[0].in_a_row

    assert run(lambda status: disrupted(status, "PreemptionByScheduler")) == 1
    assert run(failed_anywhere) == 4


def test_a_crash_and_a_hang_share_the_budget_and_an_image_has_its_own() -> None:
    recovery = {"restartBudget": {"limit": 1, "windowSeconds": 3600}}
    status = look(settled(), dataclasses.replace(WORLD, pods=CANNOT_START), recovery=recovery).status
    assert (status.restart_budget.used, count(status, FailureClass.IMAGE).used) == (0, 1)
    status = launch(status, NOW, recovery=recovery)
    status = look(status, failed(status), now=NOW + 5, recovery=recovery).status
    status = launch(status, NOW + 5, recovery=recovery)
    assert (status.phase, status.restart_budget.used) == (Phase.STARTING, 1)
    silent = dataclasses.replace(failed(status), pods=workers(status.attempt), leases=lease(status.attempt, age=500.0))
    assert look(status, silent, now=NOW + 10, recovery=recovery).status.reason == "RestartBudgetExceeded"


def test_a_program_that_fails_after_minutes_spends_its_budget_in_spite_of_the_pauses() -> None:
    status, now = settled(), NOW
    for number in range(10):
        status = look(status, failed_anywhere(status), now=now).status
        assert (status.phase == Phase.FAILED, status.restart_budget.used) == (False, number + 1)
        status = launch(status, now)
        assert status.current is not None
        now = (status.current.launch_time or now) + 300
    assert now - NOW > spec().recovery.restart_budget.window_seconds
    status = look(status, failed_anywhere(status), now=now).status
    assert (status.reason, status.restart_budget.used) == ("RestartBudgetExceeded", 11)


POLICY = {
    "podFailurePolicy": {
        "rules": [
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42, 43]}},
            {"action": "Count", "onExitCodes": {"operator": "In", "values": [1]}},
            {"action": "Ignore", "onExitCodes": {"operator": "NotIn", "values": [2]}},
        ]
    }
}


@pytest.mark.parametrize(
    ("code", "phase", "charged"),
    [
        pytest.param(42, Phase.FAILED, 0, id="the-job-fails"),
        pytest.param(1, Phase.STOPPING, 1, id="the-first-rule-that-applies-decides"),
        pytest.param(2, Phase.STOPPING, 1, id="no-rule-applies"),
        pytest.param(7, Phase.STOPPING, 0, id="ignored"),
    ],
)
def test_exit_codes_decide(code: int, phase: Phase, charged: int) -> None:
    decision = look(settled(), failed(settled(), code=code), recovery=POLICY)
    assert decision.status.phase == phase
    assert decision.status.restart_budget.used == charged
    assert (decision.status.recoveries[-1].exit_code, decision.status.recoveries[-1].blamed) == (code, "n3")


def test_a_job_that_an_exit_code_ends_names_the_rule_and_the_pod() -> None:
    decision = look(settled(), failed(settled(), code=43), recovery=POLICY)
    assert decision.status.reason == "PodFailurePolicy"
    assert decision.status.message.startswith(
        "spec.recovery.podFailurePolicy.rules[0] (FailJob) applies to exit code 43 of pod gpt-a1-2"
    )
    assert "PodFailurePolicy" in [event.reason for event in decision.events]
    again = look(decision.status, Observation(nodes=WORLD.nodes), recovery=POLICY)
    assert again.status.phase == Phase.FAILED


def test_the_exit_code_of_the_pod_that_failed_first_decides() -> None:
    times = {0: NOW - 5.0, 1: NOW - 20.0, 2: NOW - 3.0}
    codes = {0: 1, 1: 42, 2: 1}
    pods = tuple(
        dataclasses.replace(pod, phase="Failed", exit_code=codes[pod.index], failed_at=times[pod.index])
        for pod in workers() if pod.index is not None
    )  # fmt: skip
    status = look(settled(), dataclasses.replace(WORLD, pods=pods), recovery=POLICY).status
    assert (status.reason, status.recoveries[-1].blamed) == ("PodFailurePolicy", "n2")
    assert "pod gpt-a1-1 on node n2" in status.recoveries[-1].message


@pytest.mark.parametrize(
    ("recovery", "problem"),
    [
        (
            {"budgets": [{"failureClass": "Node", "limit": 1, "windowSeconds": 9}] * 2},
            "spec.recovery.budgets: has 2 entries for failureClass Node; expected one",
        ),
        (
            {"budgets": [{"failureClass": "Bad", "limit": 1, "windowSeconds": 9}]},
            "spec.recovery.budgets[0].failureClass is 'Bad'",
        ),
        ({"podFailurePolicy": {"rules": []}}, "spec.recovery.podFailurePolicy.rules is []"),
        (
            {"podFailurePolicy": {"rules": [{"action": "Ignore", "onExitCodes": {"operator": "In", "values": [0]}}]}},
            "spec.recovery.podFailurePolicy.rules[0].onExitCodes.values[0] is 0",
        ),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(recovery: Any, problem: str) -> None:
    with pytest.raises(SpecError, match=re.escape(problem)):
        spec(recovery=recovery)


def test_a_status_of_an_older_operator_keeps_its_budget() -> None:
    wire = to_wire(settled(restart_budget=RestartBudget(limit=10, used=2, window_seconds=3600, times=(Time(NOW - 9),))))
    assert "failureCounts" not in wire
    status = read_status(wire).status
    after = look(status, failed(status)).status
    assert (after.restart_budget.used, count(after, FailureClass.CRASH).total) == (2, 1)
    assert read_status(to_wire(after)).status == after


def test_every_signal_of_a_failure_has_one_class() -> None:
    listed = [kind for rule in CLASSES.values() for kind in rule.kinds]
    assert len(listed) == len(set(listed))
    unplanned = {str(kind) for kind, meaning in KINDS.items() if meaning.weight is not Weight.PLANNED}
    assert set(listed) == unplanned | {"CapacityLost"}
    assert set(CLASSES) == set(FailureClass)
    assert classify_failure("NameOfAnOlderOperator") is FailureClass.CRASH


def test_the_classes_in_the_documentation_are_those_of_the_program() -> None:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    budgets = {
        Budget.NONE: "no limit",
        Budget.SHARED: "restartBudget",
        Budget.OWN: "its own, as large as restartBudget",
    }
    told = {name: row for name, *row in rows(section(page, "Classes of failures"))}
    assert told == {
        str(name): [
            ", ".join(rule.kinds),
            budgets[rule.budget],
            rule.progress.value,
            "yes" if rule.blames_node else "no",
        ]
        for name, rule in CLASSES.items()
    }
