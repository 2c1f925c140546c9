"""spec.failedAttemptsHistoryLimit: whose failed pods stay, so that their logs can be read."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_operator.api.status import Recovery, Status
from elastic_operator.observed.observation import JobView, Observation, PodView
from elastic_operator.reconcile.actions import DeleteJob, DeletePod, LaunchAttempt, RevokeAttempt
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    WORLD,
    look,
    nodes,
    settled,
    training,
    worker_job,
    workers,
)

FAILED = {"phase": "Failed", "exit_code": 1}


def later(*causes: tuple[str, bool]) -> Status:
    """A job whose attempts ended by these causes (planned or not), and which trains as the next attempt."""
    status = settled(
        recoveries=tuple(
            Recovery(cause=cause, planned=planned, from_attempt=number, to_attempt=number + 1)
            for number, (cause, planned) in enumerate(causes, start=1)
        )
    )
    attempt = len(causes) + 1
    assert status.current is not None
    return dataclasses.replace(
        status, attempt=attempt, current=dataclasses.replace(status.current, job_uid=f"j{attempt}")
    )


def ended(attempt: int, **changes: object) -> tuple[tuple[PodView, ...], tuple[JobView, ...]]:
    """One failed pod of an attempt, and its failed Job."""
    return workers(attempt, count=1, **{**FAILED, **changes}), (worker_job(attempt, failed=True),)


def world(status: Status, *attempts: tuple[tuple[PodView, ...], tuple[JobView, ...]]) -> Observation:
    """What is left of earlier attempts, beside the running one."""
    pods = tuple(pod for own, _ in attempts for pod in own)
    jobs = tuple(job for _, own in attempts for job in own)
    lease = dataclasses.replace(training()[1], name=f"gpt-a{status.attempt}", attempt=status.attempt)
    return Observation(
        nodes=nodes("n1", "n2", "n3"),
        pods=(*pods, *workers(status.attempt)),
        jobs=(*jobs, worker_job(status.attempt)),
        leases={status.attempt: lease},
    )


def deleted(status: Status, seen: Observation, **changes: object) -> list[str]:
    decision = look(status, seen, **changes)
    return [action.name for action in decision.actions if isinstance(action, DeleteJob)]


CRASH, PLANNED = ("PodFailed", False), ("CapacityReturned", True)


@pytest.mark.parametrize(
    ("causes", "limit", "gone"),
    [
        pytest.param([CRASH], 3, [], id="the failed attempt stays"),
        pytest.param([CRASH], 0, ["gpt-a1"], id="none is to stay"),
        pytest.param([CRASH, CRASH, CRASH], 2, ["gpt-a1"], id="the oldest goes"),
        pytest.param([PLANNED], 3, ["gpt-a1"], id="a planned change leaves nothing to read"),
        pytest.param([CRASH, PLANNED, PLANNED], 1, ["gpt-a2", "gpt-a3"], id="planned changes do not push it out"),
    ],
)
def test_the_failed_pods_of_the_last_failed_attempts_stay(
    causes: list[tuple[str, bool]], limit: int, gone: list[str]
) -> None:
    status = later(*causes)
    seen = world(status, *(ended(number) for number in range(1, len(causes) + 1)))
    assert deleted(status, seen, failedAttemptsHistoryLimit=limit) == gone


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(((), (worker_job(1, failed=True),)), id="its pods are gone with their node"),
        pytest.param(ended(1, phase="Running"), id="its pods had to be stopped"),
        pytest.param(ended(1, disruption="TerminationByKubelet"), id="its node shut down"),
        pytest.param(ended(1, deleted_at=1.0), id="its pods are being deleted"),
    ],
)
def test_an_attempt_without_a_pod_that_failed_by_itself_goes(
    left: tuple[tuple[PodView, ...], tuple[JobView, ...]],
) -> None:
    status = later(CRASH)
    assert deleted(status, world(status, left)) == ["gpt-a1"]


def test_what_stays_is_no_work_for_the_next_pass() -> None:
    status = later(CRASH)
    first = look(status, world(status, ended(1)))
    assert first.actions == ()
    assert look(first.status, world(status, ended(1))).status == first.status


def test_the_peers_of_a_failed_pod_are_stopped_and_its_rights_are_taken() -> None:
    pods = (*workers(count=1, **FAILED), *workers()[1:])
    decision = look(settled(), dataclasses.replace(WORLD, pods=pods))
    assert not any(isinstance(action, DeleteJob) for action in decision.actions)
    assert [action.name for action in decision.actions if isinstance(action, DeletePod)] == ["gpt-a1-1", "gpt-a1-2"]
    assert RevokeAttempt(name="gpt-a1", owner="uid") in decision.actions


@pytest.mark.parametrize(("has_failed", "is_launched"), [(False, False), (True, True)])
def test_the_next_attempt_waits_until_the_job_that_stays_can_make_no_pods(has_failed: bool, is_launched: bool) -> None:
    first = look(settled(), dataclasses.replace(WORLD, pods=workers(**FAILED)))
    left = Observation(nodes=WORLD.nodes, pods=workers(**FAILED), jobs=(worker_job(failed=has_failed),))
    launched = [action for action in look(first.status, left).actions if isinstance(action, LaunchAttempt)]
    assert bool(launched) == is_launched
