"""Which node a failure of several pods is put down to: pods go in, a node, an exit code and an action come out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_operator.api.status import Phase
from elastic_operator.observed.observation import Observation, PodView
from tests.unit.elastic_operator.reconcile.test_budgets import POLICY
from tests.unit.elastic_operator.reconcile.test_decide_phases import NOW, WORLD, look, nodes, settled, workers


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """The end of one pod: its exit code, when the operator first saw it, and when it saw the pod's deletion."""

    code: int | None
    seen: float | None = NOW
    deleted: float | None = None
    reason: str = ""


def ended(*ends: End | None, running: str = "Running") -> tuple[PodView, ...]:
    """The pods of attempt 1, pod i on node n(i+1); None for one that runs."""
    return tuple(
        pod
        if end is None
        else dataclasses.replace(
            pod, phase="Failed", exit_code=end.code, failed_at=end.seen, exit_reason=end.reason,
            deleted_at=None if end.deleted is None else end.deleted + 5, deletion_grace_seconds=5,
        )
        for pod, end in zip(workers(count=len(ends), phase=running), ends, strict=True)
    )  # fmt: skip


def world(*ends: End | None) -> Observation:
    names = [f"n{index + 1}" for index in range(max(3, len(ends)))]
    return dataclasses.replace(WORLD, nodes=nodes(*names), pods=ended(*ends))


def codes(*numbers: int | None) -> Observation:
    """All pods are seen to have failed at once, with these codes."""
    return world(*(End(code=number) for number in numbers))


@pytest.mark.parametrize(
    ("observed", "blamed", "code"),
    [
        pytest.param(world(End(code=1), End(code=1, seen=NOW - 5), End(code=1)), "n2", 1, id="first-seen"),
        pytest.param(world(End(code=1, seen=NOW - 1), End(code=1), End(code=1)), "", 1, id="seen-within-a-moment"),
        pytest.param(codes(1, 1, 1), "", 1, id="alike"),
        pytest.param(codes(1, 1, 139), "n3", 139, id="died-of-a-signal"),
        pytest.param(codes(139, 1), "n1", 139, id="died-of-a-signal-on-two-nodes"),
        pytest.param(codes(139, 1, 135), "", 139, id="two-died-of-signals"),
        pytest.param(codes(139, 139, 139), "", 139, id="all-died-of-a-signal"),
        pytest.param(codes(1, 137, 1), "n2", 137, id="killed-by-nobody-known"),
        pytest.param(codes(1, 42, 1), "n2", 42, id="a-code-of-its-own"),
        pytest.param(codes(1, 42, 7, 1, 1), "", 42, id="two-codes-of-their-own"),
        pytest.param(codes(1, 42), "", 1, id="two-codes-on-two-nodes"),
        pytest.param(codes(1, 42, 7), "", 1, id="three-codes-on-three-nodes"),
        pytest.param(codes(1, 143, 143), "n1", 1, id="peers-ended-by-their-launchers"),
        pytest.param(codes(143, 1), "", 143, id="ended-by-its-launcher-or-first"),
        pytest.param(codes(1, 1, 143), "", 1, id="one-ended-by-its-launcher"),
        pytest.param(codes(134, 134, 1), "n3", 1, id="peers-aborted-by-their-watchdogs"),
        pytest.param(codes(134, 1, 1), "n1", 134, id="one-aborted"),
        pytest.param(codes(255, 1), "", 255, id="no-signal-has-this-number"),
        pytest.param(
            world(End(code=137, deleted=NOW - 1), End(code=1, seen=NOW), End(code=143, deleted=NOW - 1)), "n2", 1,
            id="pods-that-had-to-stop",
        ),
        pytest.param(
            world(End(code=1, deleted=NOW - 1), End(code=1), End(code=139, deleted=NOW - 1)), "n3", 139,
            id="no-stop-causes-this-signal",
        ),
        pytest.param(
            world(End(code=1, seen=NOW - 4, deleted=NOW - 3), None, End(code=1)), "n1", 1,
            id="failed-before-its-deletion",
        ),
        pytest.param(world(End(code=143, deleted=NOW - 1), None, None), "", 143, id="deleted-by-somebody"),
        pytest.param(world(End(code=1, seen=None), End(code=1, seen=None), None), "", 1, id="never-dated"),
    ],
)  # fmt: skip
def test_the_node_whose_pod_failed_first_or_differently_is_blamed(
    observed: Observation, blamed: str, code: int
) -> None:
    recovery = look(settled(), observed).status.recoveries[-1]
    assert (recovery.cause, recovery.blamed, recovery.exit_code) == ("PodFailed", blamed, code)


@pytest.mark.parametrize(
    ("observed", "is_failed", "charged"),
    [
        pytest.param(codes(1, 1, 42), True, 0, id="together"),
        pytest.param(world(End(code=1, seen=NOW - 9), End(code=1), End(code=42)), True, 0, id="after-others"),
        pytest.param(codes(1, 42), True, 0, id="on-one-of-two-nodes"),
        pytest.param(
            world(End(code=1), End(code=1), End(code=42, deleted=NOW - 1)), True, 0, id="while-it-was-stopped"
        ),
        pytest.param(codes(1, 1, 7), False, 0, id="the-first-is-ignored"),
        pytest.param(world(End(code=1, seen=NOW - 9), None, End(code=7)), False, 1, id="a-later-one"),
    ],
)
def test_a_rule_that_fails_the_job_applies_to_every_pod_that_failed_by_itself(
    observed: Observation, is_failed: bool, charged: int
) -> None:
    status = look(settled(), observed, recovery=POLICY).status
    assert (status.phase == Phase.FAILED, status.restart_budget.used) == (is_failed, charged)


def test_a_rule_about_all_other_codes_fails_no_job_for_the_pods_that_failed_as_a_consequence() -> None:
    rule = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [42]}}
    policy: dict[str, Any] = {"podFailurePolicy": {"rules": [rule]}}
    assert look(settled(), codes(1, 42, 1), recovery=policy).status.phase != Phase.FAILED
    assert look(settled(), codes(1, 43, 1), recovery=policy).status.phase == Phase.FAILED
