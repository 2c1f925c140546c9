"""Nodes that are avoided: a series of failures goes in, the excluded nodes come out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Drain, ExcludedNode, Phase, Recovery
from elastic_operator.observed.observation import Observation
from elastic_operator.reconcile.actions import Decision
from reshard.contract import TrainerPhase
from tests.unit.elastic_operator.reconcile.test_budgets import CANNOT_START, SICK_DEVICE, failed
from tests.unit.elastic_operator.reconcile.test_decide_phases import NOW, WORLD, look, nodes, settled, training, workers


def past(node: str, cause: str = "PodFailed", code: int | None = 1, age: float = 600.0) -> Recovery:
    """A recovery that is over."""
    return Recovery(
        cause=cause, blamed=node, exit_code=code, from_attempt=1, to_attempt=1, signal_time=Time(NOW - age),
        detect_time=Time(NOW - age), plan_time=Time(NOW - age), launch_time=Time(NOW - age + 5),
        first_step_time=Time(NOW - age + 9),
    )  # fmt: skip


def excluded(decision: Decision) -> list[str]:
    return [item.name for item in decision.status.excluded_nodes]


def reasons(decision: Decision) -> list[str]:
    return [event.reason for event in decision.events]


@pytest.mark.parametrize(
    ("before", "excluded_now"),
    [
        pytest.param((), [], id="once"),
        pytest.param((past("n3"),), ["n3"], id="twice"),
        pytest.param((past("n3", code=139),), ["n3"], id="twice-with-different-codes"),
        pytest.param((past("n3", age=3700),), [], id="twice-but-long-ago"),
        pytest.param((past("n1"),), [], id="on-two-nodes"),
        pytest.param((past("n3"), past("n1")), [], id="the-same-elsewhere"),
        pytest.param((past("n3"), past("n1"), past("n3")), ["n3"], id="far-more-often-than-elsewhere"),
        pytest.param((past("n3"), past("n1", code=139)), ["n3"], id="another-failure-elsewhere"),
        pytest.param((past("n1"), past("n2"), past("n3"), past("n1"), past("n2")), [], id="everywhere-in-turn"),
        pytest.param((past(""), past("")), [], id="of-unknown-place"),
    ],
)
def test_a_node_is_avoided_after_two_failures_unless_the_program_is_to_blame(
    before: tuple[Recovery, ...], excluded_now: list[str]
) -> None:
    decision = look(settled(recoveries=before), failed(settled()))
    assert decision.status.recoveries[-1].blamed == "n3"
    assert excluded(decision) == excluded_now
    assert ("NodeExcluded" in reasons(decision)) == bool(excluded_now)


def test_the_next_attempt_is_planned_without_the_node_and_the_event_says_why() -> None:
    decision = look(settled(recoveries=(past("n3"),)), failed(settled()))
    (told,) = [event.message for event in decision.events if event.reason == "NodeExcluded"]
    assert told == (
        "the job failed 2 times on node n3 within 3600 s, at last with PodFailed (exit code 1): avoided for 14400 s"
    )
    (item,) = decision.status.excluded_nodes
    assert (item.reason, item.hurts) == ("PodFailed", 2)
    # The second crash in a row waits for ten seconds.
    later = look(dataclasses.replace(decision.status, failure_counts=()), Observation(nodes=WORLD.nodes), now=NOW + 1)
    assert later.status.current is not None
    assert (later.status.current.num_nodes, later.status.current.avoid) == (2, ("n3",))
    assert later.status.excluded_nodes[0].until == NOW + 14400


def test_a_program_that_fails_everywhere_leaves_the_nodes_usable() -> None:
    """Two crashes on one node exclude it; two on the next one show that the program is to blame."""
    status = settled(recoveries=(past("n3", age=700), past("n3"), past("n2", age=300)))
    status = dataclasses.replace(
        status, excluded_nodes=(ExcludedNode(name="n3", reason="PodFailed", since=Time(NOW - 600), hurts=2),)
    )
    decision = look(status, failed(settled(), index=1))
    assert excluded(decision) == []
    (told,) = [event.message for event in decision.events if event.reason == "NodeReadmitted"]
    assert told == "node n3 may be used again: PodFailed (exit code 1) happens on other nodes as often"


def test_an_exclusion_of_a_lost_node_is_not_lifted_by_crashes_elsewhere() -> None:
    lost = ExcludedNode(name="n3", reason="NodeNotReady", since=Time(NOW - 600), hurts=2)
    status = settled(recoveries=(past("n2", age=700), past("n2")), excluded_nodes=(lost,))
    assert excluded(look(status, failed(settled(), index=0))) == ["n3"]


def all_failed(*times: float | None) -> Observation:
    pods = tuple(
        dataclasses.replace(pod, phase="Failed", exit_code=1, failed_at=time)
        for pod, time in zip(workers(), times, strict=True)
    )
    return dataclasses.replace(failed(settled()), pods=pods)


@pytest.mark.parametrize(
    ("world", "blamed"),
    [
        pytest.param(failed(settled(), index=1), "n2", id="one-pod"),
        pytest.param(all_failed(NOW - 5, NOW - 20, NOW - 4), "n2", id="the-first-of-all"),
        pytest.param(all_failed(NOW - 20, NOW - 20, NOW - 4), "", id="two-at-once"),
        pytest.param(all_failed(None, None, None), "", id="times-unknown"),
        pytest.param(dataclasses.replace(WORLD, pods=SICK_DEVICE), "n2", id="device"),
        pytest.param(dataclasses.replace(WORLD, pods=CANNOT_START), "", id="image-everywhere"),
        pytest.param(
            dataclasses.replace(WORLD, pods=(*WORLD.pods[:2], CANNOT_START[2])), "n3", id="image-on-one-node"
        ),
        pytest.param(
            dataclasses.replace(failed(settled(), index=0), nodes=nodes("n1", "n2") | nodes("n3", ready="Unknown")),
            "", id="a-peers-node-is-about-to-be-lost",
        ),
    ],
)  # fmt: skip
def test_the_node_where_a_failure_began_is_recorded(world: Observation, blamed: str) -> None:
    assert look(settled(), world).status.recoveries[-1].blamed == blamed


def test_devices_of_a_node_are_not_compared_with_those_of_others() -> None:
    before = (past("n1", cause="DeviceUnhealthy", code=None), past("n2", cause="DeviceUnhealthy", code=None))
    decision = look(settled(recoveries=before), dataclasses.replace(WORLD, pods=SICK_DEVICE))
    assert excluded(decision) == ["n2"]


def test_the_only_node_is_used_again_although_it_is_to_blame() -> None:
    least: dict[str, Any] = {"nodes": {"min": 3, "max": 3}}
    decision = look(settled(recoveries=(past("n3"),)), failed(settled()), **least)
    assert "ExclusionLifted" in reasons(decision)
    assert decision.status.current is not None
    assert decision.status.current.num_nodes == 3
    assert excluded(decision) == []


ALL_THREE = {"min": 3, "max": 3}
CORDONED = dataclasses.replace(WORLD.nodes["n3"], unschedulable=True, cordoned_since=NOW - 30)


def after_a_cordon() -> Decision:
    """The decision that ends an attempt because n3 was cordoned."""
    drained = dataclasses.replace(
        WORLD, nodes={**WORLD.nodes, "n3": CORDONED}, leases=training(PHASE=TrainerPhase.DRAINED)
    )
    drain = Drain(cause="NodeCordoned", message="cordoned", start_time=Time(NOW - 5), nodes=("n3",))
    return look(settled(drain=drain), drained, nodes=ALL_THREE)


@pytest.mark.parametrize(
    ("changes", "seconds", "is_excluded"),
    [
        pytest.param({"unschedulable": True}, 900, True, id="still-cordoned"),
        pytest.param({"withdrawals": (("cordon", NOW + 50),)}, 59, True, id="uncordoned-a-moment-ago"),
        pytest.param({"withdrawals": (("cordon", NOW + 50),)}, 61, False, id="uncordoned-for-the-grace"),
        pytest.param({"withdrawals": (("cordon", NOW), ("cordon", NOW + 50))}, 69, True, id="it-flaps"),
        pytest.param({"withdrawals": (("cordon", NOW), ("cordon", NOW + 50))}, 71, False, id="it-has-flapped"),
        pytest.param({}, 9, True, id="a-new-operator-that-has-not-seen-the-end"),
        pytest.param({}, 11, False, id="a-new-operator"),
        pytest.param({"ready": "Unknown"}, 900, True, id="not-ready"),
    ],
)
def test_a_node_that_was_left_as_planned_is_used_again_once_it_is_clean_for_its_grace(
    changes: dict[str, Any], seconds: float, is_excluded: bool
) -> None:
    status = after_a_cordon().status
    assert [(item.name, item.reason) for item in status.excluded_nodes] == [("n3", "NodeCordoned")]
    assert status.recoveries[-1].lost == ()
    clean = dataclasses.replace(WORLD.nodes["n3"], **changes)
    decision = look(status, Observation(nodes={**WORLD.nodes, "n3": clean}), now=NOW + seconds, nodes=ALL_THREE)
    assert excluded(decision) == (["n3"] if is_excluded else []), "not even if the job cannot run without it"
    assert (decision.status.phase == Phase.WAITING) == is_excluded


def test_a_change_that_no_node_has_caused_excludes_none() -> None:
    drain = Drain(cause="SpecChanged", message="edited", start_time=Time(NOW - 5))
    decision = look(settled(drain=drain), dataclasses.replace(WORLD, leases=training(PHASE=TrainerPhase.DRAINED)))
    assert excluded(decision) == []
