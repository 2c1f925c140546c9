"""A container that others have put beside ours, and that does not end, decides neither when a pod ends nor how."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.status import Phase
from elastic_operator.observed.observation import Observation, PodView, pod_view
from elastic_operator.reconcile.actions import DeleteJob
from reshard.contract import ExitCode, ReshardReport, TrainerPhase
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    NOW,
    WORLD,
    after_loss,
    kinds,
    lease,
    look,
    lost_node,
    resharded,
    settled,
    workers,
)


def beside(*codes: int | None, **changes: Any) -> Observation:
    """The world of a running attempt whose training containers ended with these codes beside a proxy."""
    pods = workers()
    ended = (
        dataclasses.replace(pod, exit_code=code, outlived_by="" if code is None else "proxy", **changes)
        for pod, code in zip(pods, codes, strict=True)
    )
    return dataclasses.replace(WORLD, pods=tuple(ended))


@pytest.mark.parametrize(
    ("world", "phase", "causes"),
    [
        pytest.param(beside(0, None, None), Phase.RUNNING, [], id="one-is-done"),
        pytest.param(beside(0, 0, 0), Phase.COMPLETE, [], id="all-are-done"),
        pytest.param(beside(None, 7, None), Phase.STOPPING, ["PodFailed"], id="one-failed"),
        pytest.param(beside(0, 7, 0), Phase.STOPPING, ["PodFailed"], id="one-failed-at-the-end"),
        pytest.param(
            dataclasses.replace(beside(0, 0, 0), leases=lease(PHASE=TrainerPhase.COMPLETE, STEP="30")),
            Phase.COMPLETE, [], id="and-rank-0-says-so",
        ),
        pytest.param(
            dataclasses.replace(WORLD, pods=workers(phase="Failed", exit_code=0)), Phase.COMPLETE, [],
            id="the-proxies-failed-as-they-were-stopped",
        ),
        pytest.param(
            dataclasses.replace(WORLD, pods=(*workers(phase="Failed", exit_code=0)[:1], *workers()[1:])),
            Phase.STOPPING, ["PodFailed"], id="a-proxy-failed-while-others-train",
        ),
    ],
)  # fmt: skip
def test_an_attempt_ends_with_its_training_containers(world: Observation, phase: Phase, causes: list[str]) -> None:
    decision = look(settled(), world)
    assert decision.status.phase == phase
    assert [item.cause for item in decision.status.recoveries] == causes
    if causes:
        recovery = decision.status.recoveries[0]
        assert (recovery.exit_code or 0, "proxy goes on" in recovery.message) in ((7, True), (0, False))


def test_pods_that_a_proxy_holds_open_are_deleted_with_their_job_once_the_training_is_complete() -> None:
    decision = look(settled(), beside(0, 0, 0))
    assert DeleteJob(name="gpt-a1", uid="j1") in decision.actions
    assert kinds(decision).count("DeletePod") == 3
    assert "initContainers" in next(event.message for event in decision.events if event.reason == "Complete")
    ended = dataclasses.replace(WORLD, pods=workers(phase="Succeeded", exit_code=0))
    assert "DeleteJob" not in kinds(look(settled(), ended)), "a Job that ends by itself stays, for its logs"


def conversion(code: ExitCode, **of_pod: Any) -> tuple[PodView, ...]:
    """A reshard pod whose container ended beside a proxy."""
    _, pod = resharded()
    report = ReshardReport.from_json(pod.termination_message)
    text = dataclasses.replace(report, ok=code == 0, exit_code=code, message="said").to_json()
    values = {"phase": "Running", "exit_code": int(code), "outlived_by": "proxy", "termination_message": text}
    return (dataclasses.replace(pod, **{**values, **of_pod}),)


@pytest.mark.parametrize(
    ("code", "is_ready", "failures"),
    [
        pytest.param(ExitCode.OK, True, 0, id="done"),
        pytest.param(ExitCode.TARGET_FAILED, False, 1, id="failed"),
    ],
)
def test_a_conversion_ends_with_its_container(code: ExitCode, is_ready: bool, failures: int) -> None:
    job, _ = resharded()
    world = dataclasses.replace(lost_node(), pods=conversion(code), jobs=(dataclasses.replace(job, complete=False),))
    decision = look(after_loss(), world, now=NOW + 1)
    current, reshard = decision.status.current, decision.status.reshard
    assert current is not None
    assert reshard is not None
    assert (current.resume.ready, reshard.failures) == (is_ready, failures)
    assert DeleteJob(name=job.name, uid=job.uid) in decision.actions, "it would not end before its deadline"


def waiting_beside(kind: str = "containerStatuses") -> PodView:
    """The view of a pod whose first container runs while another one waits for its image, or crashes in a loop."""
    is_init = kind == "initContainerStatuses"
    reason, phase = ("CrashLoopBackOff", "Running") if is_init else ("ImagePullBackOff", "Pending")
    status: dict[str, Any] = {"phase": phase, "containerStatuses": [{"name": "train", "state": {"running": {}}}]}
    status.setdefault(kind, []).append({"name": "proxy", "state": {"waiting": {"reason": reason}}})
    names = [{"name": "train"}] if is_init else [{"name": "train"}, {"name": "proxy"}]
    item = {"metadata": {"name": "p", "uid": "u"}, "spec": {"nodeName": "n1", "containers": names}, "status": status}
    return pod_view(item)


@pytest.mark.parametrize("kind", ["containerStatuses", "initContainerStatuses"])
def test_a_sidecar_that_waits_ends_no_training_and_no_conversion(kind: str) -> None:
    view = waiting_beside(kind)
    seen = {"phase": view.phase, "waiting_reason": view.waiting_reason, "cannot_start_since": NOW - 700}
    trains = tuple(dataclasses.replace(pod, **seen) for pod in workers())
    leases = lease(PHASE=TrainerPhase.TRAINING, STEP="90")
    status = look(settled(), dataclasses.replace(WORLD, pods=trains, leases=leases)).status
    assert (status.phase, status.recoveries, status.nodes_text) == (Phase.RUNNING, (), "3/3")
    job, pod = resharded()
    converts = dataclasses.replace(pod, **seen, node="n1", exit_code=None, termination_message="")
    job = dataclasses.replace(job, complete=False, created_at=NOW - 5000)
    world = dataclasses.replace(lost_node(), pods=(converts,), jobs=(job,))
    status = look(after_loss(), world, now=NOW + 1).status
    assert (status.phase, status.reason) == (Phase.RESHARDING, "NodeNotReady")
    assert status.reshard is not None
    assert status.reshard.failures == 0
