"""Detection: which signs there are, and what they amount to."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from elastic_operator.observed import signals
from elastic_operator.observed.observation import (
    JobView,
    LeaseView,
    NodeView,
    Observation,
    PodView,
    Taint,
    node_view,
)
from elastic_operator.observed.signal_kinds import KINDS, Kind, Weight
from elastic_operator.observed.signals import Signal
from elastic_operator.observed.timeouts import Timeouts
from reshard.contract import LeaseKey, TrainerPhase

NOW = 1_800_000_000.0
LIMITS = Timeouts()
GPU = "amd.com/gpu"
GRACES = {
    "suspect_seconds": 20.0,
    "hang_seconds": 1800.0,
    "device_seconds": 10.0,
    "device_plugin_seconds": 300.0,
    "planned_seconds": 10.0,
    "image_seconds": 120.0,
    "unschedulable_seconds": 60.0,
    "startup_seconds": 1800.0,
}


def signal(kind: Kind, age: float = 0.0, node: str = "n1") -> Signal:
    return Signal(kind=kind, since=NOW - age, message="", node=node)


@pytest.mark.parametrize(
    ("found", "lost", "failed"),
    [
        pytest.param([], (), None, id="nothing"),
        pytest.param([signal(Kind.NODE_NOT_READY, 5)], (), None, id="one-weak-signal-waits"),
        pytest.param([signal(Kind.NODE_NOT_READY, 20)], ("n1",), Kind.NODE_NOT_READY, id="one-past-its-grace"),
        pytest.param(
            [signal(Kind.NODE_NOT_READY, 1), signal(Kind.NODE_LEASE_STALE, 1)],
            ("n1",),
            Kind.NODE_NOT_READY,
            id="two-independent-sources",
        ),
        pytest.param(
            [signal(Kind.NODE_NOT_READY, 1), signal(Kind.NODE_LEASE_STALE, 1, node="n2")],
            (),
            None,
            id="two-sources-about-two-nodes",
        ),
        pytest.param(
            [signal(Kind.NODE_LEASE_STALE, 1), signal(Kind.HEARTBEAT_STALE, 1)],
            ("n1",),
            Kind.NODE_LEASE_STALE,
            id="kubelet-and-rank-0-silent",
        ),
        pytest.param([signal(Kind.HEARTBEAT_STALE, 1)], (), None, id="rank-0-silent-for-a-moment"),
        pytest.param([signal(Kind.HEARTBEAT_STALE, 21)], (), Kind.HEARTBEAT_STALE, id="rank-0-silent-keeps-the-node"),
        pytest.param([signal(Kind.NODE_DELETED)], ("n1",), Kind.NODE_DELETED, id="deleted-node"),
        pytest.param([signal(Kind.POD_FAILED)], (), Kind.POD_FAILED, id="failed-pod-keeps-the-node"),
        pytest.param(
            [signal(Kind.POD_FAILED, node="n2"), signal(Kind.NODE_OUT_OF_SERVICE)],
            ("n1",),
            Kind.NODE_OUT_OF_SERVICE,
            id="the-gravest-cause-is-named",
        ),
        pytest.param(
            [signal(Kind.POD_FAILED), signal(Kind.RESUME_REFUSED, node="")],
            (),
            Kind.RESUME_REFUSED,
            id="a-refused-commit-explains-the-failed-pod",
        ),
        pytest.param([signal(Kind.IMAGE, 119)], (), None, id="image-within-its-deadline"),
        pytest.param([signal(Kind.IMAGE, 121)], (), Kind.IMAGE, id="image-past-its-deadline"),
        pytest.param([signal(Kind.HANG, 1799, node="")], (), None, id="slow-step"),
        pytest.param([signal(Kind.HANG, 1801, node="")], (), Kind.HANG, id="hang"),
    ],
)
def test_confirmation(found: list[Signal], lost: tuple[str, ...], failed: Kind | None) -> None:
    verdict = signals.judge(found, GRACES, NOW)
    assert verdict.lost_nodes == lost
    assert (verdict.failure.kind if verdict.failure else None) == failed


def test_an_unconfirmed_loss_makes_its_node_suspect_and_says_when_to_look_again() -> None:
    verdict = signals.judge([signal(Kind.NODE_NOT_READY, 5)], GRACES, NOW)
    assert verdict.suspects == ("n1",)
    assert verdict.wake_at == NOW + 15


def test_a_cordon_asks_for_a_drain_and_nothing_else() -> None:
    verdict = signals.judge([signal(Kind.NODE_CORDONED, 11)], GRACES, NOW)
    assert verdict.failure is None
    assert [item.kind for item in verdict.planned] == [Kind.NODE_CORDONED]


def test_a_cordon_within_its_grace_asks_for_nothing_and_says_when_to_look_again() -> None:
    verdict = signals.judge([signal(Kind.NODE_CORDONED, 5)], GRACES, NOW)
    assert not verdict.planned
    assert verdict.wake_at == NOW + 5


@pytest.mark.parametrize(
    ("num_withdrawn", "age", "planned"),
    [
        pytest.param(0, 11, True, id="for-the-first-time"),
        pytest.param(1, 19, False, id="once-withdrawn"),
        pytest.param(1, 21, True, id="once-withdrawn-and-it-lasts"),
        pytest.param(3, 79, False, id="three-times"),
        pytest.param(3, 81, True, id="three-times-and-it-lasts"),
        pytest.param(16, 599, False, id="often"),
        pytest.param(16, 601, True, id="often-and-it-lasts-for-the-longest-grace"),
    ],
)
def test_the_grace_of_a_planned_signal_doubles_each_time_it_is_withdrawn(
    num_withdrawn: int, age: float, planned: bool
) -> None:
    withdrawals = tuple(("cordon", NOW - age - 1) for _ in range(num_withdrawn))
    node = dataclasses.replace(NODE, unschedulable=True, cordoned_since=NOW - age, withdrawals=withdrawals)
    verdict = signals.judge(signals.detect_planned_signals(node, {}, NOW), GRACES, NOW)
    assert bool(verdict.planned) == planned
    assert planned or verdict.wake_at == NOW - age + signals.damped_seconds(10.0, num_withdrawn)


def test_a_pod_that_has_to_stop_asks_for_a_drain_until_its_grace_period_ends() -> None:
    found = signals.detect_pod_signals(dataclasses.replace(POD, deleted_at=NOW + 30), NOW)
    verdict = signals.judge(found, GRACES, NOW)
    assert verdict.failure is None
    assert [item.kind for item in verdict.planned] == [Kind.POD_TERMINATING]
    assert verdict.wake_at == NOW + 30 + signals.TERMINATION_SLACK_SECONDS


@pytest.mark.parametrize(
    ("status", "message", "is_shutting_down"),
    [
        pytest.param("False", "node is shutting down", True, id="it-shuts-down"),
        pytest.param("False", "[container runtime is down, node is shutting down]", True, id="among-other-problems"),
        pytest.param("False", "container runtime is down", False, id="another-problem"),
        pytest.param("Unknown", "Kubelet stopped posting node status.", False, id="it-is-off"),
        pytest.param("True", None, False, id="no-message"),
    ],
)
def test_a_kubelet_says_in_the_ready_condition_that_its_node_shuts_down(
    status: str, message: str | None, is_shutting_down: bool
) -> None:
    ready = {"type": "Ready", "status": status, "message": message, "lastTransitionTime": "2027-01-15T08:00:00Z"}
    view = node_view({"metadata": {"name": "n1"}, "status": {"conditions": [ready]}})
    assert view.is_shutting_down is is_shutting_down


@pytest.mark.parametrize(
    ("suspended", "num_pods", "started", "kinds"),
    [
        pytest.param(True, 0, False, [], id="queued-however-long"),
        pytest.param(False, 0, False, [], id="no-pods"),
        pytest.param(True, 1, False, [Kind.JOB_SUSPENDED, Kind.STARTUP_TIMEOUT], id="suspended-in-its-start"),
        pytest.param(True, 1, True, [Kind.JOB_SUSPENDED], id="suspended"),
        pytest.param(True, 0, True, [Kind.JOB_SUSPENDED], id="suspended-and-stopped"),
    ],
)
def test_signals_of_a_job_that_someone_else_suspends(
    suspended: bool, num_pods: int, started: bool, kinds: list[Kind]
) -> None:
    job = JobView(name="gpt-a1", uid="j", attempt=1, role="worker", suspended=suspended)
    world = Observation(nodes={"n1": NODE}, pods=(POD,) * num_pods, jobs=(job,))
    found = signals.detect_attempt_signals(
        world, attempt=1, resource=GPU, tolerated={}, launch_time=NOW - 3600, job_seen=True, started=started,
        limits=LIMITS, now=NOW,
    )  # fmt: skip
    assert sorted(item.kind for item in found) == sorted(kinds)


@pytest.mark.parametrize(
    ("reason", "pods", "kind"),
    [
        pytest.param("BackoffLimitExceeded", (), Kind.POD_DELETED, id="no-pod-is-left"),
        pytest.param("BackoffLimitExceeded", ({"deleted_at": NOW},), Kind.POD_DELETED, id="the-others-end"),
        pytest.param("BackoffLimitExceeded", ({"phase": "Failed"},), Kind.JOB_FAILED, id="a-pod-has-failed"),
        pytest.param("BackoffLimitExceeded", ({"phase": "Running"},), Kind.JOB_FAILED, id="pods-read-before-the-job"),
        pytest.param("DeadlineExceeded", (), Kind.JOB_FAILED, id="deadline"),
    ],
)
def test_a_failed_job_without_a_failed_pod_has_lost_a_pod_to_someone_else(
    reason: str, pods: tuple[dict[str, Any], ...], kind: Kind
) -> None:
    job = JobView(name="gpt-a1", uid="j", attempt=1, role="worker", failed=True, failed_reason=reason)
    views = tuple(dataclasses.replace(POD, **{"phase": "Running", **fields}) for fields in pods)
    world = Observation(nodes={"n1": NODE}, pods=views, jobs=(job,))
    found = signals.detect_attempt_signals(
        world, attempt=1, resource=GPU, tolerated={}, launch_time=NOW, job_seen=True, started=True,
        limits=LIMITS, now=NOW,
    )  # fmt: skip
    (of_job,) = [item for item in found if item.message.startswith("Job gpt-a1")]
    assert of_job.kind is kind


def test_every_kind_has_a_meaning_and_every_weak_one_a_grace() -> None:
    assert set(KINDS) == set(Kind)
    for kind, meaning in KINDS.items():
        has_grace = meaning.weight is Weight.WEAK or kind in (
            Kind.NODE_UNHEALTHY, Kind.NODE_CORDONED, Kind.NODE_TAINTED
        )  # fmt: skip
        assert bool(meaning.grace) == has_grace, kind


NODE = NodeView(name="n1", allocatable={GPU: 2}, capacity={GPU: 2}, lease_age_seconds=1)


@pytest.mark.parametrize(
    ("node", "kinds"),
    [
        pytest.param(NODE, [], id="healthy"),
        pytest.param(None, [Kind.NODE_DELETED], id="gone"),
        pytest.param(dataclasses.replace(NODE, ready="Unknown"), [Kind.NODE_NOT_READY], id="unknown"),
        pytest.param(dataclasses.replace(NODE, ready="False"), [Kind.NODE_NOT_READY], id="not-ready"),
        pytest.param(dataclasses.replace(NODE, lease_age_seconds=19), [], id="half-of-40-seconds-not-over"),
        pytest.param(dataclasses.replace(NODE, lease_age_seconds=21), [Kind.NODE_LEASE_STALE], id="stale"),
        pytest.param(
            dataclasses.replace(NODE, lease_age_seconds=4, lease_duration_seconds=4),
            [],
            id="short-lease-has-a-floor",
        ),
        pytest.param(
            dataclasses.replace(NODE, taints=(Taint(key="node.kubernetes.io/out-of-service", effect="NoExecute"),)),
            [Kind.NODE_OUT_OF_SERVICE],
            id="out-of-service",
        ),
    ],
)
def test_signals_of_a_node(node: NodeView | None, kinds: list[Kind]) -> None:
    assert [item.kind for item in signals.detect_node_signals(node, "n1", LIMITS, NOW)] == kinds


POD = PodView(
    name="gpt-a1-0", uid="u", attempt=1, role="worker", node="n1", index=0, phase="Running", requests={GPU: 2},
    created_at=NOW - 100,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        pytest.param({}, [], id="running"),
        pytest.param({"phase": "Failed", "exit_code": 1}, [Kind.POD_FAILED], id="failed"),
        pytest.param({"phase": "Failed", "disruption": "EvictionByEvictionAPI"}, [Kind.POD_DISRUPTED], id="evicted"),
        pytest.param({"deleted_at": NOW + 30}, [Kind.POD_TERMINATING], id="deleted-with-time-left"),
        pytest.param({"deleted_at": NOW - 1}, [Kind.POD_TERMINATING], id="its-last-commit-may-still-arrive"),
        pytest.param({"deleted_at": NOW - 3}, [Kind.POD_DELETED], id="deleted"),
        pytest.param({"deleted_at": NOW + 30, "phase": "Pending"}, [Kind.POD_DELETED], id="deleted-before-it-ran"),
        pytest.param({"deleted_at": NOW + 30, "exit_code": 143}, [Kind.POD_DELETED], id="deleted-and-has-ended"),
        pytest.param(
            {"deleted_at": NOW + 30, "disruption": "PreemptionByScheduler"}, [Kind.POD_TERMINATING], id="preempted"
        ),
        pytest.param(
            {"deleted_at": NOW - 3, "disruption": "PreemptionByScheduler"}, [Kind.POD_PREEMPTED], id="grace-is-over"
        ),
        pytest.param(
            {"disrupted_at": NOW - 29, "disruption": "TerminationByKubelet"}, [Kind.POD_TERMINATING], id="node-shutdown"
        ),
        pytest.param(
            {"disrupted_at": NOW - 33, "disruption": "TerminationByKubelet"}, [Kind.POD_DISRUPTED], id="shut-down"
        ),
        pytest.param({"phase": "Pending", "waiting_reason": "ErrImagePull"}, [Kind.IMAGE], id="image"),
        pytest.param({"phase": "Pending", "node": None, "unschedulable": "0/3"}, [Kind.UNSCHEDULABLE], id="no-place"),
        pytest.param({"phase": "Succeeded"}, [], id="succeeded"),
    ],
)
def test_signals_of_a_pod(changes: dict[str, object], kinds: list[Kind]) -> None:
    pod = dataclasses.replace(POD, **changes)
    assert [item.kind for item in signals.detect_pod_signals(pod, NOW)] == kinds


def test_a_sick_device_under_a_pod_is_a_loss_at_once() -> None:
    (found,) = signals.detect_device_signals(
        NODE, [dataclasses.replace(POD, unhealthy_devices=1)], used_by_others=0, resource=GPU, now=NOW
    )
    assert KINDS[found.kind].weight is Weight.STRONG
    assert "n1" in found.message


@pytest.mark.parametrize(
    ("offered", "since", "step_time", "failure"),
    [
        pytest.param(1, 3, 1000, None, id="fewer-devices-for-a-moment"),
        pytest.param(1, 11, 1000, Kind.DEVICE_MISSING, id="fewer-devices"),
        pytest.param(0, 11, 1000, None, id="none-while-the-plugin-restarts"),
        pytest.param(0, 299, 1000, None, id="none-for-less-than-the-grace"),
        pytest.param(0, 301, 1000, Kind.DEVICE_PLUGIN_GONE, id="none-and-no-step"),
        pytest.param(0, 3600, 299, None, id="none-but-steps"),
    ],
)
def test_a_node_without_any_device_has_lost_its_plugin_and_not_its_devices(
    offered: int, since: float, step_time: float, failure: Kind | None
) -> None:
    node = dataclasses.replace(NODE, allocatable={GPU: offered}, allocatable_since=NOW - since)
    found = signals.detect_device_signals(
        node, [POD], used_by_others=0, resource=GPU, now=NOW, step_time=NOW - step_time
    )
    verdict = signals.judge(found, GRACES, NOW)
    assert (verdict.failure.kind if verdict.failure else None) == failure


@pytest.mark.parametrize(
    ("renewed", "step_age", "notes", "started", "kinds"),
    [
        pytest.param(1, None, {}, True, [], id="fresh"),
        pytest.param(16, None, {}, True, [Kind.HEARTBEAT_STALE], id="three-beats-missed"),
        pytest.param(None, None, {}, True, [], id="never-written"),
        pytest.param(1, None, {}, False, [Kind.STARTUP_TIMEOUT], id="not-started"),
        pytest.param(1, None, {LeaseKey.RESUME_ERROR: "CRC"}, True, [Kind.RESUME_REFUSED], id="refused"),
        pytest.param(
            1, 3600, {LeaseKey.PHASE: TrainerPhase.TRAINING}, True, [Kind.HANG], id="old-step-on-a-fresh-lease"
        ),
        pytest.param(
            1,
            None,
            {LeaseKey.PHASE: TrainerPhase.TRAINING, LeaseKey.STEP_TIME: "2027-01-15T07:00:00Z"},
            True,
            [],
            id="a-time-by-the-trainers-clock-says-nothing",
        ),
    ],
)
def test_signals_of_the_lease(
    renewed: float | None, step_age: float | None, notes: dict[str, str], started: bool, kinds: list[Kind]
) -> None:
    lease = LeaseView(
        name="gpt-a1",
        attempt=1,
        renewed_at=None if renewed is None else NOW - renewed,
        step_seen_at=None if step_age is None else NOW - step_age,
        annotations=dict(notes),
    )
    found = signals.detect_lease_signals(
        lease, rank_0_node="n1", placed_time=NOW - 100, started=started, limits=LIMITS, now=NOW
    )
    assert [item.kind for item in found] == kinds


def test_a_tolerated_taint_is_no_reason_to_leave_and_another_is() -> None:
    taint = Taint(key="amd-gpu-unhealthy", effect="NoSchedule")
    node = dataclasses.replace(NODE, taints=(taint,))
    assert [item.kind for item in signals.detect_planned_signals(node, {}, NOW)] == [Kind.NODE_TAINTED]
    assert signals.detect_planned_signals(node, {taint: math.inf}, NOW) == []


@pytest.mark.parametrize("key", [f"node.kubernetes.io/{name}-pressure" for name in ("memory", "disk", "pid")])
def test_a_taint_by_a_pressure_that_comes_and_goes_is_no_reason_to_leave(key: str) -> None:
    node = dataclasses.replace(NODE, taints=(Taint(key=key, effect="NoSchedule"),))
    assert signals.detect_planned_signals(node, {}, NOW) == []


def test_times_before_an_interruption_of_the_api_server_count_for_nobody() -> None:
    lease = LeaseView(
        name="gpt-a1", attempt=1, renewed_at=NOW - 300, step_seen_at=NOW - 2000,
        annotations={LeaseKey.PHASE: TrainerPhase.TRAINING},
    )  # fmt: skip
    waiting = dataclasses.replace(
        POD, phase="Pending", waiting_reason="ErrImagePull", cannot_start_since=NOW - 300, node="n1"
    )
    world = Observation(nodes={"n1": NODE}, pods=(waiting,), leases={1: lease})

    def judge(world: Observation) -> Kind | None:
        found = signals.detect_attempt_signals(
            world, attempt=1, resource=GPU, tolerated={}, launch_time=NOW - 3600, job_seen=False, started=False,
            limits=LIMITS, now=NOW,
        )  # fmt: skip
        failure = signals.judge(found, GRACES, NOW).failure
        return failure.kind if failure else None

    assert judge(world) is not None
    assert judge(dataclasses.replace(world, evidence_since=NOW - 5)) is None
    assert judge(dataclasses.replace(world, evidence_since=NOW + 30)) is None


@pytest.mark.parametrize(("widespread", "step_age", "lost"), [(True, 5, False), (True, 60, True), (False, 5, True)])
def test_steps_outweigh_the_silence_of_most_nodes_of_the_cluster(widespread: bool, step_age: float, lost: bool) -> None:
    silent = dataclasses.replace(NODE, ready="Unknown", ready_since=NOW - 50, lease_age_seconds=55)
    lease = LeaseView(name="gpt-a1", attempt=1, renewed_at=NOW - 1, step_seen_at=NOW - step_age)
    world = Observation(nodes={"n1": silent}, pods=(POD,), leases={1: lease}, is_widespread=widespread)
    found = signals.detect_attempt_signals(
        world, attempt=1, resource=GPU, tolerated={}, launch_time=NOW - 3600, job_seen=False, started=True,
        limits=LIMITS, now=NOW,
    )  # fmt: skip
    assert bool(signals.judge(found, GRACES, NOW).lost_nodes) == lost


def judge_world(world: Observation, **changes: Any) -> signals.Verdict:
    facts: dict[str, Any] = {
        "attempt": 1, "resource": GPU, "tolerated": {}, "launch_time": NOW - 3600, "job_seen": False, "started": True,
        "limits": LIMITS, "now": NOW,
    }  # fmt: skip
    return signals.judge(signals.detect_attempt_signals(world, **facts | changes), GRACES, NOW)


def heard(seconds_ago: float, step_age: float) -> dict[int, LeaseView]:
    return {1: LeaseView(name="gpt-a1", attempt=1, renewed_at=NOW - seconds_ago, step_seen_at=NOW - step_age)}


@pytest.mark.parametrize(
    ("widespread", "removed_age", "step_age", "failure"),
    [
        pytest.param(False, 1, 1, Kind.NODE_DELETED, id="one-node"),
        pytest.param(True, 1, 300, None, id="most-nodes-at-once"),
        pytest.param(True, 60, 1, None, id="most-nodes-and-steps-since"),
        pytest.param(True, 60, 300, Kind.NODE_DELETED, id="most-nodes-and-no-step-for-the-grace"),
    ],
)
def test_the_removal_of_most_node_objects_needs_a_second_opinion(
    widespread: bool, removed_age: float, step_age: float, failure: Kind | None
) -> None:
    world = Observation(
        pods=(POD,), leases=heard(1, step_age), is_widespread=widespread, removed={"n1": NOW - removed_age}
    )
    verdict = judge_world(world)
    assert (verdict.failure.kind if verdict.failure else None) == failure
    assert verdict.lost_nodes == (("n1",) if failure else ())


@pytest.mark.parametrize(
    ("widespread", "is_hold_over", "changes", "failure"),
    [
        pytest.param(True, False, {}, None, id="nobody-can-report"),
        pytest.param(False, False, {}, Kind.NODE_NOT_READY, id="the-others-report"),
        pytest.param(True, True, {}, Kind.NODE_NOT_READY, id="for-too-long"),
        pytest.param(True, False, {"phase": "Failed", "exit_code": 1}, Kind.POD_FAILED, id="a-pod-that-failed"),
    ],
)
def test_a_silence_of_everybody_accuses_nobody(
    widespread: bool, is_hold_over: bool, changes: dict[str, Any], failure: Kind | None
) -> None:
    silent = dataclasses.replace(NODE, ready="Unknown", ready_since=NOW - 250, lease_age_seconds=300)
    pods = (POD, dataclasses.replace(POD, name="gpt-a1-1", index=1, node="n2", **changes))
    world = Observation(
        nodes={"n1": silent, "n2": dataclasses.replace(silent, name="n2")}, pods=pods, leases=heard(300, 300),
        is_widespread=widespread, is_hold_over=is_hold_over,
    )  # fmt: skip
    verdict = judge_world(world)
    assert (verdict.failure.kind if verdict.failure else None) == failure


@pytest.mark.parametrize("changes", [{"ready": "Unknown", "ready_since": NOW - 60}, {"lease_age_seconds": 300}])
def test_a_node_signal_counts_from_the_end_of_an_interruption(changes: dict[str, Any]) -> None:
    world = Observation(nodes={"n1": dataclasses.replace(NODE, **changes)}, pods=(POD,), leases=heard(1, 1))
    assert judge_world(world).failure is not None
    assert judge_world(dataclasses.replace(world, evidence_since=NOW - 5)).failure is None


@pytest.mark.parametrize(
    "changes",
    [
        {"unschedulable": True, "cordoned_since": NOW - 60},
        {"unhealthy": ("GPU",), "unhealthy_since": NOW - 60},
        {"taints": (Taint(key="sick", since=NOW - 60),)},
        {"allocatable": {GPU: 1}, "allocatable_since": NOW - 60},
    ],
)
def test_a_planned_or_device_signal_counts_from_the_end_of_an_interruption(changes: dict[str, Any]) -> None:
    def acts(floor: float) -> bool:
        node = dataclasses.replace(NODE, **changes)
        world = Observation(nodes={"n1": node}, pods=(POD,), leases=heard(1, 1), evidence_since=floor)
        verdict = judge_world(world)
        return bool(verdict.planned or verdict.failure)

    assert acts(0.0)
    assert not acts(NOW - 5)


@pytest.mark.parametrize(
    ("short_since", "changed_since", "failure"),
    [
        pytest.param(1, 3600, None, id="another-pod-was-bound-for-a-moment"),
        pytest.param(9, 3600, None, id="within-the-grace"),
        pytest.param(11, 3600, Kind.DEVICE_MISSING, id="past-the-grace"),
        pytest.param(200, 1, None, id="a-plugin-that-was-gone-offers-its-devices-one-after-another"),
    ],
)
def test_a_shortage_of_devices_counts_from_when_the_pods_first_held_more_than_there_are(
    short_since: float, changed_since: float, failure: Kind | None
) -> None:
    node = dataclasses.replace(NODE, allocatable_since=NOW - changed_since)
    world = Observation(
        nodes={"n1": node}, pods=(POD,), leases=heard(1, 1), used={"n1": 1}, short_since={"n1": NOW - short_since}
    )
    assert signals.find_short_nodes(world, 1, GPU) == ["n1"]
    assert signals.find_short_nodes(dataclasses.replace(world, used={}), 1, GPU) == []
    verdict = judge_world(world)
    assert (verdict.failure.kind if verdict.failure else None) == failure


@pytest.mark.parametrize(
    ("seconds", "age", "planned"),
    [
        pytest.param(3600, 1790, False, id="half-of-the-time-is-left"),
        pytest.param(3600, 1810, True, id="half-of-the-time-is-over"),
        pytest.param(8, 3, False, id="short-time"),
        pytest.param(8, 5, True, id="half-of-a-short-time"),
    ],
)
def test_a_taint_that_pods_tolerate_for_a_time_makes_them_leave_halfway(
    seconds: float, age: float, planned: bool
) -> None:
    taint = Taint(key="sick", effect="NoExecute", since=NOW - age)
    node = dataclasses.replace(NODE, taints=(taint,))
    world = Observation(nodes={"n1": node}, pods=(POD,), leases=heard(1, 1))
    assert bool(judge_world(world, tolerated={taint: seconds}).planned) == planned


def test_a_signal_that_has_not_begun_confirms_no_other() -> None:
    both = [signal(Kind.NODE_NOT_READY, -5), signal(Kind.NODE_LEASE_STALE, -5)]
    assert signals.judge(both, GRACES, NOW).failure is None


def test_a_pod_that_was_never_scheduled_has_no_node_to_lose() -> None:
    world = Observation(pods=(dataclasses.replace(POD, node=None, phase="Pending"),))
    found = signals.detect_attempt_signals(
        world, attempt=1, resource=GPU, tolerated={}, launch_time=NOW, job_seen=False, started=True,
        limits=LIMITS, now=NOW,
    )  # fmt: skip
    assert found == []
