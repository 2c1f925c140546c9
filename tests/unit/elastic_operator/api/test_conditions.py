"""Conditions are for programs: the same words for the same state, all on the operations page, of one generation."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from elastic_operator.api.conditions import Type
from elastic_operator.api.spec import SpecError
from elastic_operator.api.status import Phase, Resume, Status
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.observed.observation import Observation
from elastic_operator.observed.signal_kinds import Kind
from elastic_operator.observed.timeouts import Timeouts
from elastic_operator.reconcile.actions import Decision
from elastic_operator.reconcile.decide import decide, refuse
from reshard.contract import ExitCode, TrainerPhase
from tests.pages import ROOT, rows, section
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    NOW,
    WORLD,
    after_loss,
    lease,
    lost_node,
    nodes,
    prepared,
    settled,
    spec,
    training,
    worker_job,
    workers,
)

JOB = JobRef(name="gpt", namespace="ns", uid="uid", generation=7)
NODES = nodes("n1", "n2", "n3")
GONE = Observation(nodes=NODES)
STOPPED = tuple(dataclasses.replace(pod, phase="Failed", exit_code=1) for pod in workers())
UNSUPPORTED = prepared(ok=False, exit_code=int(ExitCode.UNSUPPORTED), message="no")
BUDGET: dict[str, Any] = {"recovery": {"restartBudget": {"limit": 0, "windowSeconds": 60}}}


def running() -> Status:
    """A job that has trained for a while, from nothing."""
    status = settled()
    assert status.current is not None
    resume = Resume(reason="there is no commit yet: training starts from nothing")
    return dataclasses.replace(status, current=dataclasses.replace(status.current, resume=resume))


def look(status: Status, world: Observation = WORLD, *, now: float = NOW, **changes: Any) -> Decision:
    return decide(JOB, spec(**changes), status, world, limits=Timeouts(), now=now)


def world(**changes: Any) -> Observation:
    return dataclasses.replace(WORLD, **changes)


def with_node(**changes: Any) -> Observation:
    return world(nodes={**NODES, "n2": dataclasses.replace(NODES["n2"], **changes)})


def suspended() -> Status:
    drained = world(leases=training(PHASE=TrainerPhase.DRAINED))
    stopping = look(look(running(), suspend=True).status, drained, suspend=True).status
    return look(stopping, GONE, suspend=True).status


# What happens, and the type and reason of conditions that tell of it; all others of the phases are False.
STORIES: list[Any] = [
    pytest.param(look(Status(), GONE), {"Planned": "TopologyChosen"}, {"Resumed": "NoCommit"}, id="first-launch"),
    pytest.param(look(Status(), Observation()), {}, {"Planned": "NoFeasibleTopology"}, id="no-nodes"),
    pytest.param(look(running()), {"Running": "Training"}, {}, id="training"),
    pytest.param(
        look(running(), lost_node()), {"Resharding": "NodeNotReady", "Resumed": "FromCommit"}, {}, id="node-lost"
    ),
    pytest.param(
        look(running(), with_node(unschedulable=True, cordoned_since=NOW - 11)),
        {"Draining": "NodeCordoned"}, {}, id="cordon",
    ),
    pytest.param(
        look(running(), with_node(unhealthy=("a",), unhealthy_since=NOW - 11)),
        {"Draining": "NodeUnhealthy"}, {}, id="monitor",
    ),
    pytest.param(look(running(), suspend=True), {"Draining": "Suspended"}, {}, id="suspending"),
    pytest.param(look(running(), nodes={"min": 1, "max": 2}), {"Draining": "SpecChanged"}, {}, id="spec-edited"),
    pytest.param(look(suspended(), GONE, suspend=True), {"Suspended": "Suspended"}, {}, id="suspended"),
    pytest.param(look(after_loss(), prepared()), {}, {"ReshardFailed": "Resharded"}, id="converted"),
    pytest.param(
        look(after_loss(), prepared(ok=False, exit_code=int(ExitCode.STORAGE_FULL), message="full")),
        {"ReshardFailed": "StorageFull", "Resharding": "ReshardRetry"}, {}, id="volume-full",
    ),
    pytest.param(
        look(after_loss(), UNSUPPORTED),
        {"ReshardFailed": "Unsupported"}, {"Planned": "ReshardFailed"}, id="conversion-not-supported",
    ),
    pytest.param(
        look(after_loss(), prepared(ok=False, exit_code=77, message="?")),
        {"ReshardFailed": "NoReport", "Resharding": "ReshardRetry"}, {}, id="no-report",
    ),
    pytest.param(
        look(running(), world(jobs=(worker_job(complete=True),), pods=workers(phase="Succeeded"))),
        {"Complete": "TrainingComplete"}, {}, id="complete",
    ),
    pytest.param(look(running(), world(pods=STOPPED), **BUDGET), {"Failed": "RestartBudgetExceeded"}, {}, id="budget"),
    pytest.param(
        look(after_loss(), UNSUPPORTED, reshard={"onFailure": "Fail"}),
        {"Failed": "ReshardFailed"}, {}, id="conversion-fails-the-job",
    ),
    pytest.param(look(running(), world(leases=lease(age=60, PHASE="Training"))), {}, {}, id="rank-0-silent"),
    pytest.param(
        refuse(JOB, SpecError(["spec.nodes: min is 4, above max 3"]), Status(), limits=Timeouts(), now=NOW),
        {}, {"SpecValid": "InvalidSpec"}, id="invalid-spec",
    ),
]  # fmt: skip


def listed() -> dict[str, set[str]]:
    """Reasons of the operations page, by type; `the cause` stands for what that page lists as signals and causes."""
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    table = {name: set(re.findall(r"\b[A-Z][A-Za-z]+\b", text)) for name, text in rows(section(page, "Conditions"))}
    table["Resharding"] |= {str(kind) for kind in Kind} | table["Draining"]
    return table


def found(decision: Decision, status: str) -> dict[str, str]:
    return {item.type: item.reason for item in decision.status.conditions if item.status == status}


@pytest.mark.parametrize(("decision", "true", "false"), STORIES)
def test_the_state_is_told_by_type_and_reason(decision: Decision, true: dict[str, str], false: dict[str, str]) -> None:
    told = found(decision, "True")
    assert true.items() <= told.items()
    assert false.items() <= found(decision, "False").items()
    of_phases = {"Running", "Draining", "Resharding", "Suspended", "Complete", "Failed"}
    assert of_phases & told.keys() == of_phases & true.keys()


@pytest.mark.parametrize(("decision", "true", "false"), STORIES)
def test_every_reason_is_one_word_and_on_the_operations_page(
    decision: Decision, true: dict[str, str], false: dict[str, str]
) -> None:
    reasons = listed()
    for item in decision.status.conditions:
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]*", item.reason), item
        assert item.message, item
        allowed = reasons[item.type] | ({str(phase) for phase in Phase} if item.status == "False" else set())
        assert item.reason in allowed, f"{item.type} {item.status} {item.reason}: not in {sorted(allowed)}"


@pytest.mark.parametrize(("decision", "true", "false"), STORIES)
def test_every_condition_names_the_generation_it_is_about(
    decision: Decision, true: dict[str, str], false: dict[str, str]
) -> None:
    assert {item.observed_generation for item in decision.status.conditions} == {7}
    assert decision.status.observed_generation == 7
    assert [item.type for item in decision.status.conditions] == [
        item.value for item in Type if item.value in {*found(decision, "True"), *found(decision, "False")}
    ]


def test_a_condition_that_stays_keeps_its_time_and_takes_the_new_generation() -> None:
    first = look(running()).status
    again = decide(dataclasses.replace(JOB, generation=8), spec(), first, WORLD, limits=Timeouts(), now=NOW + 5).status
    assert {item.last_transition_time for item in again.conditions} == {NOW}
    assert {item.observed_generation for item in again.conditions} == {8}


@pytest.mark.parametrize(
    ("status", "world", "changes", "text"),
    [
        pytest.param(running(), WORLD, {}, "3/3", id="all-of-max"),
        pytest.param(running(), world(pods=workers(count=2)), {}, "2/3", id="one-pod-is-not-there"),
        pytest.param(running(), world(pods=workers(phase="Pending")), {}, "0/3", id="none-runs-yet"),
        pytest.param(running(), WORLD, {"nodes": {"min": 1, "max": 8, "preferred": 3}}, "3/3", id="of-preferred"),
        pytest.param(running(), WORLD, {"nodes": {"min": 1, "max": 8}}, "3/8", id="fewer-than-wanted"),
        pytest.param(Status(), Observation(), {}, "0/3", id="waiting"),
        pytest.param(after_loss(), prepared(pods=workers()), {}, "0/3", id="old-pods-do-not-count"),
    ],
)
def test_nodes_are_shown_as_running_of_wanted(
    status: Status, world: Observation, changes: dict[str, Any], text: str
) -> None:
    assert look(status, world, **changes).status.nodes_text == text


@pytest.mark.parametrize(("ettr", "text"), [(None, ""), (0.97312, "97.3%"), (1.0, "100.0%"), (0.0, "0.0%")])
def test_the_effective_training_time_is_shown_in_percent(ettr: float | None, text: str) -> None:
    status = dataclasses.replace(running(), goodput={} if ettr is None else {"ettr": ettr})
    assert look(status).status.ettr_text == text
