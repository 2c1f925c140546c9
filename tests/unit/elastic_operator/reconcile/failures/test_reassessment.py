"""What later evidence says about a failure: a recorded recovery and a world go in, a corrected record comes out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.status import FailureCount, Phase, Recovery, Status
from elastic_operator.observed.observation import NodeView, Observation, PodView
from elastic_operator.reconcile.actions import Decision
from tests.unit.elastic_operator.reconcile.failures.test_blame import End, ended, world
from tests.unit.elastic_operator.reconcile.test_budgets import POLICY
from tests.unit.elastic_operator.reconcile.test_decide_phases import NOW, WORLD, look, nodes, settled
from tests.unit.elastic_operator.reconcile.test_node_exclusions import excluded, past, reasons


def last(decision: Decision) -> Recovery:
    return decision.status.recoveries[-1]


def classes(status: Status) -> list[tuple[str, int, int]]:
    return [(item.failure_class, item.total, item.in_a_row) for item in status.failure_counts]


FIRST = world(End(code=1), None, None)
"""The kubelet of n1 is the first to report."""


@pytest.mark.parametrize(
    ("later", "seconds", "blamed", "code"),
    [
        pytest.param(world(End(code=1), None, End(code=139, seen=NOW + 1)), 1, "n3", 139, id="a-signal"),
        pytest.param(
            world(End(code=1), End(code=1, seen=NOW + 1), End(code=42, seen=NOW + 1)), 1, "n3", 42, id="another-code"
        ),
        pytest.param(world(End(code=1), None, End(code=1, seen=NOW + 1)), 1, "", 1, id="alike"),
        pytest.param(world(End(code=1), None, End(code=139, seen=NOW + 3)), 3, "n1", 1, id="much-later"),
        pytest.param(world(End(code=1), None, End(code=139, seen=NOW + 1)), 11, "n1", 1, id="looked-at-too-late"),
        pytest.param(
            world(End(code=1), None, End(code=143, seen=NOW + 1, deleted=NOW)), 1, "n1", 1, id="stopped-by-the-operator"
        ),
        pytest.param(
            world(End(code=1), None, End(code=139, seen=NOW + 1, deleted=NOW)), 1, "n3", 139, id="while-it-was-stopped"
        ),
        pytest.param(FIRST, 1, "n1", 1, id="nothing-new"),
    ],
)
def test_failures_that_are_seen_later_correct_the_blame(
    later: Observation, seconds: int, blamed: str, code: int
) -> None:
    before = look(settled(), FIRST)
    assert (last(before).blamed, last(before).exit_code, last(before).charged) == ("n1", 1, True)
    after = look(before.status, later, now=NOW + seconds)
    assert (last(after).blamed, last(after).exit_code) == (blamed, code)
    assert (after.status.restart_budget.used, classes(after.status)) == (1, [("Crash", 1, 1)])


def test_a_corrected_blame_excludes_the_node_and_readmits_the_other() -> None:
    before = look(settled(recoveries=(past("n1"), past("n3", code=139))), FIRST)
    assert excluded(before) == ["n1"]
    after = look(before.status, world(End(code=1), None, End(code=139, seen=NOW + 1)), now=NOW + 1)
    assert excluded(after) == ["n3"]
    assert "NodeExcluded" in reasons(after)


def test_a_pod_that_is_gone_takes_no_evidence_with_it() -> None:
    both = world(End(code=1), End(code=1, seen=NOW + 1), End(code=139, seen=NOW + 1))
    blamed = look(look(settled(), FIRST).status, both, now=NOW + 1)
    assert last(blamed).failed_pods == 3
    gone = dataclasses.replace(both, pods=both.pods[:2])
    assert last(look(blamed.status, gone, now=NOW + 2)).blamed == "n3"


@pytest.mark.parametrize("deleted", [False, True], ids=["still-there", "deleted-before-the-next-pass"])
def test_a_pod_whose_exit_code_is_reported_before_its_phase_is_evidence(deleted: bool) -> None:
    first, peer, killed = ended(End(code=1), End(code=1, seen=NOW + 1), End(code=139, seen=NOW + 1))
    killed = dataclasses.replace(killed, phase="Running")
    pods, gone = ((first, peer), (killed,)) if deleted else ((first, peer, killed), ())
    later = dataclasses.replace(FIRST, pods=pods, deleted_pods=gone)
    at_once = look(settled(), later, now=NOW + 1)
    assert (last(at_once).blamed, last(at_once).exit_code) == ("n3", 139)
    assert "pod gpt-a1-2 on node n3 failed with exit code 139" in last(at_once).message
    corrected = look(look(settled(), FIRST).status, later, now=NOW + 1)
    assert (last(corrected).blamed, last(corrected).exit_code) == ("n3", 139)


def test_a_rule_fails_the_job_for_a_pod_that_is_seen_to_fail_later() -> None:
    before = look(settled(), FIRST, recovery=POLICY)
    assert before.status.restart_budget.used == 1
    after = look(before.status, world(End(code=1), None, End(code=42, seen=NOW + 5)), now=NOW + 5, recovery=POLICY)
    assert (after.status.phase, after.status.reason) == (Phase.FAILED, "PodFailurePolicy")
    assert (after.status.restart_budget.used, after.status.failure_counts, last(after).charged) == (0, (), False)


def test_a_rule_that_ignores_a_failure_seen_later_revokes_the_charge() -> None:
    before = look(settled(), FIRST, recovery=POLICY)
    later = world(End(code=1), End(code=1, seen=NOW + 1), End(code=7, seen=NOW + 1))
    after = look(before.status, later, now=NOW + 1, recovery=POLICY)
    assert (after.status.restart_budget.used, last(after).blamed, last(after).charged) == (0, "n3", False)
    assert classes(after.status) == [("Crash", 1, 1)]


def silent(name: str, age: float) -> dict[str, NodeView]:
    return {**WORLD.nodes, **nodes(name, lease_age_seconds=age)}


def powerless(age: float, **changes: Any) -> Observation:
    """n3 has no power: its pod says nothing, its peers have failed, and its Lease was renewed so many seconds ago."""
    pods = ended(End(code=1), End(code=1), None)
    return Observation(nodes={**silent("n3", age), **changes}, pods=pods, jobs=WORLD.jobs, leases=WORLD.leases)


def test_a_crash_that_turns_out_to_be_the_loss_of_a_node_is_not_charged_to_the_user() -> None:
    before = look(settled(), powerless(12.0))
    assert (last(before).cause, before.status.restart_budget.used) == ("PodFailed", 1)
    after = look(before.status, powerless(21.0), now=NOW + 9)
    record = last(after)
    assert (record.cause, record.lost, record.blamed, record.exit_code) == ("NodeNotReady", ("n3",), "", None)
    assert (len(after.status.recoveries), record.charged) == (1, False)
    assert (after.status.restart_budget.used, after.status.restart_budget.times) == (0, ())
    assert classes(after.status) == [("Node", 1, 1)]
    assert "NodeNotReady" in reasons(after)


@pytest.mark.parametrize("spare", [{}, nodes("n4")], ids=["none-to-spare", "with-a-spare-node"])
@pytest.mark.parametrize("seconds", [9, 40], ids=["within-the-batch-window", "after-it"])
def test_the_lost_node_is_planned_no_more_and_its_loss_is_one_recovery(
    spare: dict[str, NodeView], seconds: int
) -> None:
    before = look(settled(), powerless(12.0, **spare))
    after = look(before.status, powerless(12.0 + seconds, **spare), now=NOW + seconds)
    stopped = dataclasses.replace(powerless(60.0, **spare), jobs=())
    later = look(after.status, stopped, now=NOW + 48)
    assert len(later.status.recoveries) == 1
    assert classes(later.status) == [("Node", 1, 1)]
    assert later.status.current is not None
    assert later.status.current.num_nodes == (3 if spare else 2)
    assert (later.status.current.launch_time is not None) == bool(spare), "two nodes need a conversion first"
    assert "n3" in later.status.current.avoid


def test_a_node_blamed_for_the_loss_of_another_is_readmitted() -> None:
    pods = ended(End(code=1), None, None)
    dark = Observation(nodes=silent("n3", 12.0), pods=pods, jobs=WORLD.jobs, leases=WORLD.leases)
    before = look(settled(recoveries=(past("n1"),)), dark)
    assert (last(before).blamed, excluded(before)) == ("n1", ["n1"])
    after = look(before.status, dataclasses.replace(dark, nodes=silent("n3", 21.0)), now=NOW + 9)
    assert (last(after).blamed, excluded(after)) == ("", [])


def test_the_pauses_of_a_charge_that_is_revoked_leave_the_window_of_the_budget() -> None:
    crash = FailureCount(failure_class="Crash", total=1, in_a_row=1, commit_step=10)
    before = look(settled(failure_counts=(crash,), recoveries=(past("", age=20),)), powerless(12.0)).status
    assert [(item.total, item.in_a_row, item.retry_time) for item in before.failure_counts] == [(2, 2, NOW + 10)]
    after = look(before, powerless(21.0), now=NOW + 9).status
    counts = {item.failure_class: item for item in after.failure_counts}
    assert (counts["Crash"].total, counts["Crash"].in_a_row, counts["Crash"].retry_time) == (1, 1, None)
    assert after.restart_budget.times == ()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"n3": nodes("n3")["n3"]}, id="the-node-is-healthy"),
        pytest.param({"n3": nodes("n3")["n3"], "n9": nodes("n9", ready="Unknown")["n9"]}, id="another-node-is-lost"),
    ],
)
def test_a_crash_stays_a_crash(changes: dict[str, NodeView]) -> None:
    before = look(settled(), powerless(12.0))
    after = look(before.status, powerless(21.0, **changes), now=NOW + 9)
    assert (last(after).cause, after.status.restart_budget.used, last(after).charged) == ("PodFailed", 1, True)


def test_a_node_that_is_lost_long_after_a_crash_has_not_caused_it() -> None:
    before = look(settled(), powerless(12.0))
    after = look(before.status, powerless(21.0), now=NOW + 90)
    assert (after.status.recoveries[0].cause, after.status.recoveries[0].charged) == ("PodFailed", True)


def test_a_loss_that_is_merged_with_a_crash_takes_the_charge_back() -> None:
    """The node of the reshard pod is lost: the two failures are one recovery, which has the cause of the graver one."""
    before = look(settled(), world(None, None, End(code=1)))
    stopped = Observation(nodes=WORLD.nodes)
    planned = look(before.status, stopped, now=NOW + 1).status
    assert planned.current is not None
    current = dataclasses.replace(planned.current, launch_time=None)
    *older, record = planned.recoveries
    waiting = dataclasses.replace(
        planned, current=current, recoveries=(*older, dataclasses.replace(record, launch_time=None))
    )
    pod = PodView(name="gpt-a2-reshard", uid="r", attempt=2, role="reshard", node="n2", phase="Running")
    dark = {name: node for name, node in nodes("n1", "n2", "n3").items() if name != "n2"}
    after = look(waiting, Observation(nodes=dark, pods=(pod,)), now=NOW + 5)
    assert (len(after.status.recoveries), last(after).cause, last(after).blamed) == (1, "NodeNotReady", "")
    assert (after.status.restart_budget.used, classes(after.status)) == (0, [("Node", 1, 1)])
