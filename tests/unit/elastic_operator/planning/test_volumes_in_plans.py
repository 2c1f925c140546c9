"""Volumes in decisions: attempts are planned where the volumes are, and a claim that keeps pods waiting is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.status import Phase, Status
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.placement.volumes import ClaimView
from elastic_operator.reconcile.actions import Decision
from tests.unit.elastic_operator.reconcile.test_decide_phases import WORLD, kinds, look, nodes, settled

IN_A = ClaimView(name="ckpt", terms=({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},))
REACH = "volume of claim ckpt is only reachable from zone a: 1 more nodes"


def world(*volumes: ClaimView, base: Observation | None = None) -> Observation:
    """Three nodes, two of them in zone a."""
    members = {**nodes("n1", "n2", labels={"zone": "a"}), **nodes("n3", labels={"zone": "b"})}
    return dataclasses.replace(base or Observation(), nodes=members, volumes=volumes)


def told(decision: Decision) -> list[tuple[str, bool]]:
    return [(item.message, item.warning) for item in decision.events if item.reason == "ClaimNotUsable"]


def test_an_attempt_is_planned_on_the_nodes_that_reach_its_volume() -> None:
    status = look(Status(), world(IN_A)).status
    assert status.current is not None
    assert status.plan is not None
    assert (status.current.num_nodes, status.attempt) == (2, 1)
    assert REACH in status.plan.reason


def test_a_job_that_needs_more_nodes_than_reach_its_volume_waits_and_says_why() -> None:
    decision = look(Status(), world(IN_A), nodes={"min": 3, "max": 3})
    assert (decision.status.phase, decision.status.attempt, kinds(decision)) == (Phase.WAITING, 0, [])
    assert REACH in decision.status.message


def test_a_running_attempt_does_not_grow_onto_nodes_that_do_not_reach_its_volume() -> None:
    status = settled()
    assert status.current is not None
    small = dataclasses.replace(status.current, num_nodes=2)
    running = dataclasses.replace(WORLD, pods=WORLD.pods[:2])
    status = dataclasses.replace(status, current=small)
    assert look(status, world(base=running)).status.growth is not None
    assert look(status, world(IN_A, base=running)).status.growth is None


@pytest.mark.parametrize(
    ("claim", "limits", "text"),
    [
        pytest.param(ClaimView(name="c", problem="does not exist"), {}, "claim c does not exist", id="missing"),
        pytest.param(
            ClaimView(name="c", is_attached_once=True), {}, "claim c is ReadWriteOnce: most drivers", id="several-nodes"
        ),
        pytest.param(ClaimView(name="c", is_attached_once=True), {"max": 1}, "", id="one-node"),
        pytest.param(ClaimView(name="c", is_attached_once=True), {"podsPerNode": "Many"}, "", id="pods-share-a-node"),
        pytest.param(
            ClaimView(name="c", has_one_pod=True), {"podsPerNode": "Many"}, "claim c is ReadWriteOncePod", id="one-pod"
        ),
        pytest.param(IN_A, {}, "", id="usable"),
    ],
)
def test_a_claim_that_keeps_pods_waiting_is_named_and_the_attempt_is_launched_all_the_same(
    claim: ClaimView, limits: dict[str, Any], text: str
) -> None:
    """Its pods are Pending where the scheduler sees them, and start once somebody has corrected the claim."""
    decision = look(Status(), world(claim), nodes={"min": 1, "max": 3, **limits})
    plan = decision.status.plan
    assert plan is not None
    assert (decision.status.attempt, kinds(decision)) == (1, ["LaunchAttempt"])
    assert len(told(decision)) == bool(text)
    if text:
        ((message, is_warning),) = told(decision)
        assert is_warning
        assert message.startswith(f"attempt 1: {text}")
        assert text in plan.reason


def test_claims_that_cannot_be_read_change_no_plan() -> None:
    assert look(Status(), world()).status.plan == look(Status(), world(ClaimView(name="ckpt"))).status.plan


def test_a_job_that_waits_for_nodes_names_a_missing_claim_too() -> None:
    decision = look(Status(), world(ClaimView(name="ckpt", problem="does not exist")), nodes={"min": 9, "max": 9})
    assert decision.status.phase == Phase.WAITING
    assert decision.status.message.endswith("Volumes: claim ckpt does not exist.")
