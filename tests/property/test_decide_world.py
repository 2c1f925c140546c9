"""Decisions against a model of the cluster: any order of losses, partitions, returns, failures and operator crashes.

Each scenario plays random traces until the job ends; `cluster_model.invariants` says what must hold meanwhile. The five
scenarios play 120 traces in `make test` and 12,500 in `make test-all`. A trace that finds a defect stays in `KEPT`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from elastic_operator.api.serialization import format_time
from elastic_operator.api.status import Phase
from tests.property.cluster_model.cluster import EXTERNAL_STEP, NODES, START, STEPS
from tests.property.cluster_model.traces import (
    FAULTS,
    INFRASTRUCTURE,
    PREDECESSOR_FAULTS,
    QUEUE_FAULTS,
    REFUSALS,
    Choices,
    Trace,
    happen,
    play,
    play_many,
)
from tests.property.cluster_model.world import Setup, World

TRACES = 20
SOAK_TRACES = 2500
SIZES = {"max_nodes": (1, 2, 3, 3), "steps": (30, 10_000, 10_000)}
EFFECTS = {
    "a commit is converted",
    "a conversion fails",
    "a node is avoided",
    "a released commit is removed",
    "a replaced attempt makes a step",
    "an attempt is launched beside processes of a lost node",
    "an attempt that is cut off publishes late",
    "the operator dies",
}

KEPT = {
    "a pod that was preempted is gone before the operator looks, and nothing is charged": Trace(
        setup=Setup(max_nodes=3, steps=30, budget=0),
        events=[
            ("operate", None),
            ("cordon", "n1", True),
            ("isolate_attempt", 40.0),
            ("preempt", 0, 1.0),
            ("tick", 2.0),
        ],
    ),
    "a pod does not end on a node that is back after its successor was launched": Trace(
        setup=Setup(max_nodes=1, steps=10_000),
        events=[
            ("operate", 11),
            ("tick", 1.0),
            ("cut", "trainer", "n1"),
            ("proceed", 40.0),
            ("stick", 5),
            ("isolate_attempt", 40.0),
            ("heal", "n1"),
            ("tick", 2.0),
        ],
    ),
    "a replaced attempt restores when its successor's retention has removed its commit": Trace(
        setup=Setup(max_nodes=2, steps=10_000),
        events=[
            ("proceed", 40.0),
            ("fail_pod", 2, 1),
            ("proceed", 5.0),
            ("isolate_attempt",),
            ("proceed", 15.0),
            ("proceed", 15.0),
        ],
    ),
}
"""Traces that once broke an invariant, with a name that says what happens in them."""


def settle(world: World, until: str, passes: int = 900) -> None:
    for _ in range(passes):
        if world.phase == until:
            return
        world.tick()
        world.operate()
    raise AssertionError(f"did not become {until}: {json.dumps(world.status, indent=1)[:3000]}")


def play_scenario(
    setups: Mapping[str, Sequence[Any]],
    faults: Choices = FAULTS,
    *,
    traces: int = TRACES,
    ends: Collection[str] = ("TrainingComplete",),
    effects: Collection[str] = EFFECTS,
) -> None:
    """Play traces; check that the jobs end in all these ways and no other, and that the traces reach what is rare."""
    covered = play_many({**SIZES, **setups}, faults, traces, soak=SOAK_TRACES)
    assert [name for name in (*faults, *ends, *effects) if not covered[name]] == [], f"not reached: {covered}"
    assert {name for name in covered if name[0].isupper() and " " not in name} == set(ends)


@pytest.mark.slow
def test_any_order_of_events_and_crashes_ends_complete() -> None:
    setups = {"external": ("", "", "old/global_step10"), "sidecar": ("", "before", "after")}
    play_scenario(setups, effects=EFFECTS | {"a sidecar outlives its pod's container"})


@pytest.mark.slow
def test_a_job_whose_commits_are_refused_asks_the_user_and_ends_complete_once_he_answers() -> None:
    rare = {
        "a job stops to ask the user",
        "a sound commit is refused",
        "the user says from where the job goes on",
    }
    play_scenario({"external": ("", "", "old/global_step10")}, REFUSALS, effects=rare)


@pytest.mark.slow
def test_a_job_with_a_budget_and_a_deadline_ends_complete_or_in_a_named_condition() -> None:
    setups = {
        "budget": (0, 1, 3),
        "retries": (0,),
        "on_failure": ("Fail",),
        "deadline": (None, None, None, 40, 300),
        "fatal_code": (None, 43),
    }
    ends = ("TrainingComplete", "RestartBudgetExceeded", "DeadlineExceeded", "PodFailurePolicy", "ReshardFailed")
    play_scenario(setups, traces=60, ends=ends)


@pytest.mark.slow
def test_a_job_in_a_queue_ends_complete_whatever_its_quota_does() -> None:
    rare = {"an admission is partial", "a larger admission replaces another", "Kueue asks for its quota back"}
    play_scenario({"quota": (1, 2, 3)}, QUEUE_FAULTS, effects=EFFECTS | rare)


@pytest.mark.slow
def test_a_job_whose_predecessor_still_runs_ends_complete_or_without_its_folder() -> None:
    setups = {"predecessor": ("gpt", "elsewhere", "elsewhere"), "take_over": ("Begin", "Resume", "Never")}
    rare = {
        "a launch waits for a predecessor's pods",
        "a predecessor has the name of an object",
        "a job goes on from the commit of its predecessor",
    }
    play_scenario(setups, PREDECESSOR_FAULTS, ends=("TrainingComplete", "CheckpointNotOwned"), effects=rare)


@pytest.mark.soak_only
@pytest.mark.slow
def test_a_dcp_job_ends_complete_whether_it_loads_or_converts() -> None:
    setups = {
        "external": ("", "", "", "old/step-10"),
        "format": ("DCP",),
        "mode": ("Auto", "Auto", "Load", "Materialize"),
        "num_bytes": (0, 10**9, 10**12),
        "retries": (1, 100),
    }
    ends = ("TrainingComplete", "ReshardFailed")  # without a copy of the checkpoint of others, there is no start
    play_scenario(setups, traces=110, ends=ends, effects=EFFECTS | {"a commit is loaded in another topology"})


@pytest.mark.parametrize(("num_bytes", "modes"), [(0, ["Load", "Load"]), (10**12, ["Load", "Reshard"])])
def test_a_dcp_job_shrinks_at_once_and_converts_to_grow_only_where_that_pays(num_bytes: int, modes: list[str]) -> None:
    world = World(setup=Setup(format="DCP", num_bytes=num_bytes, steps=1000))
    for second in range(160):
        world.tick()
        world.operate()
        if second == 10:
            world.kill("n2")
        if second == 60:
            world.heal("n2")
    recoveries = world.status["recoveries"]
    assert [item["cause"] for item in recoveries] == ["NodeNotReady", "CapacityReturned"]
    assert [item["startMode"] for item in recoveries] == modes
    assert ["conversion" in item for item in recoveries] == [mode == "Reshard" for mode in modes]
    assert world.phase == Phase.RUNNING


@pytest.mark.parametrize("sidecar", ["before", "after"])
def test_a_container_that_never_ends_holds_nothing_up(sidecar: str) -> None:
    world = World(setup=Setup(sidecar=sidecar, steps=60))
    moments: dict[str, float] = {}
    for second in range(200):
        world.tick()
        world.operate()
        moments.setdefault(world.phase, world.now - START)
        if second == 10:
            world.fail_pod(1, 7)
        if second == 40:
            world.kill("n2")
    failure, loss = world.status["recoveries"][:2]
    assert (failure["cause"], failure["exitCode"], loss["cause"]) == ("PodFailed", 7, "NodeNotReady")
    assert failure["detectTime"] == format_time(START + 12), "at the next look"
    assert loss["conversion"]["verified"]
    assert moments[Phase.COMPLETE] < 150
    assert not world.pods


@pytest.mark.parametrize("name", KEPT)
def test_a_trace_that_once_broke_an_invariant_keeps_it(name: str) -> None:
    play(KEPT[name])


@pytest.mark.slow
def test_failures_of_the_infrastructure_never_spend_the_restart_budget() -> None:
    def check(trace: Trace) -> World:
        world = play(trace)
        assert world.status["restartBudget"]["used"] == 0
        return world

    covered = play_many({**SIZES, "budget": (0,)}, INFRASTRUCTURE, 16, check=check)
    assert not covered["RestartBudgetExceeded"]


@pytest.mark.slow
def test_a_job_that_starts_from_a_checkpoint_of_others_ends_complete() -> None:
    def check(trace: Trace) -> World:
        world = play(trace)
        started = world.status["startedFrom"]
        assert (started["source"], started["step"]) == ("/checkpoint/old/global_step10", EXTERNAL_STEP)
        assert world.status["progress"]["step"] >= STEPS
        return world

    play_many({"external": ("old/global_step10",)}, FAULTS, 10, check=check)


@pytest.mark.slow
def test_a_suspended_job_comes_to_rest() -> None:
    def check(trace: Trace) -> World:
        world = World(setup=trace.setup)
        happen(world, trace.events)
        if world.phase == Phase.COMPLETE:
            return world
        world.repair()
        world.suspend(True)
        world.proceed(200.0)
        assert world.phase in (Phase.SUSPENDED, Phase.COMPLETE)
        assert not any(world.runs(pod) for pod in world.pods.values())
        return world

    play_many(SIZES, FAULTS, 10, check=check)


def test_a_second_pass_over_an_unchanged_world_does_nothing() -> None:
    world = World()
    for _ in range(40):
        world.operate()
        world.operate()  # Takes note of the identity of what the first one created.
        before = copy.deepcopy((world.status, world.objects, world.pods))
        world.operate()
        assert (world.status, world.objects, world.pods) == before
        world.tick()
        if world.now == START + 12:
            world.kill("n2")


def test_a_pod_that_does_not_end_on_a_ready_node_is_left_there_and_the_job_goes_on_elsewhere() -> None:
    world = World()
    world.steps = 1000
    moments: dict[str, float] = {}
    for second in range(300):
        world.tick()
        world.operate()
        if second == 10:
            world.stick(0)
            world.fail_pod(1)
            begin = world.now
        if second > 10 and world.phase == Phase.RUNNING:
            moments.setdefault(world.status["nodesText"], world.now - begin)
        if second == 200:
            assert world.status["excludedNodes"][0]["reason"] == "PodStuckTerminating"
            assert [pod["metadata"]["uid"] in world.stuck for pod in world.pods.values()].count(True) == 1
            world.release()
    assert moments["2/3"] <= 120
    assert 190 < moments["3/3"] < 300, "it grows back a while after the pod has gone"


def test_losing_a_node_reshards_and_resumes_on_the_rest_and_grows_back() -> None:
    world = World()
    world.steps = 1000
    topologies: list[str] = []
    for second in range(160):
        world.tick()
        world.operate()
        if world.phase == Phase.RUNNING and world.status["topologyText"] not in topologies[-1:]:
            topologies.append(world.status["topologyText"])
        if second == 10:
            world.kill("n2")
        if second == 60:
            world.heal("n2")
    assert topologies[0] == topologies[-1] != topologies[1]
    causes = [recovery["cause"] for recovery in world.status["recoveries"]]
    assert causes == ["NodeNotReady", "CapacityReturned"]


@pytest.mark.parametrize(("grace", "planned"), [(10.0, True), (1.0, False)])
def test_a_preempted_pod_costs_a_step_or_budget_only_if_its_grace_period_is_too_short(
    grace: float, planned: bool
) -> None:
    world = World()
    world.steps = 1000
    for second in range(60):
        if second == 20:
            world.preempt(1, grace)
        world.tick()
        if second != 21:  # the operator is late by a second
            world.operate()
    recovery, *others = world.status["recoveries"]
    assert [item["cause"] for item in others] in ([], ["CapacityReturned"])
    assert recovery["planned"] is planned
    assert (recovery["lostSteps"] == 0) is planned
    assert world.status["restartBudget"].get("used", 0) == 0, "a preemption spends no budget of the program"
    assert world.phase in (Phase.RUNNING, Phase.STARTING)


@pytest.mark.parametrize("trouble", ["room", "image"])
def test_a_conversion_that_cannot_start_holds_the_job_up_only_while_its_old_topology_does_not_fit(trouble: str) -> None:
    world = World()
    world.steps = 1000
    world.spec["reshard"]["backoffLimit"] = 1
    reasons = set()
    for second in range(700):
        world.tick()
        world.operate()
        if second == 10:
            getattr(world, trouble)(False)
            world.kill("n2")
        if second > 20:
            reasons.add(world.status["reason"])
        if second == 400:
            assert world.phase in (Phase.RESHARDING, Phase.WAITING)
            world.heal("n2")
    assert {"room": "Unschedulable", "image": "ContainerCannotStart"}[trouble] in reasons
    assert world.phase == Phase.RUNNING
    assert world.status["nodesText"] == "3/3"


def test_a_node_that_the_scheduler_refuses_costs_the_job_one_node_and_is_tried_again_now_and_then() -> None:
    world = World()
    world.steps = 100_000
    world.block("n2", True)
    moments: dict[str, float] = {}
    attempts: list[int] = []
    for second in range(0, 8000, 5):
        world.tick(5.0)
        world.operate()
        if second == 3000:
            attempts.append(world.status["attempt"])
            world.block("n2", False)
        if world.phase == Phase.RUNNING:
            moments.setdefault(world.status["nodesText"], world.now - START)
    assert moments["2/3"] <= 120
    assert attempts[0] <= 4, "the smaller attempt, one try to grow after half an hour, and back"
    assert moments["3/3"] > 3000
    assert world.status["restartBudget"].get("used", 0) == 0
    assert world.phase == Phase.RUNNING


def test_a_job_whose_smallest_size_the_scheduler_does_not_place_runs_soon_after_it_can_be_placed() -> None:
    world = World()
    world.spec["nodes"]["min"] = 3
    world.block("n2", True)
    num_held: list[int] = []
    for _ in range(0, 6000, 5):
        world.tick(5.0)
        world.operate()
        num_held.append(sum(pod["status"]["phase"] == "Running" for pod in world.pods.values()))
    assert max(num_held) == 2
    assert num_held.count(0) > 0.3 * len(num_held), "others may use the accelerators meanwhile"
    assert world.status["attempt"] < 16
    assert world.phase != Phase.FAILED
    world.block("n2", False)
    settle(world, Phase.RUNNING, 700)
    assert world.status["nodesText"] == "3/3"


@pytest.mark.parametrize("num_silent", [1, 2])
def test_nodes_whose_lease_alone_is_stale_are_left_and_used_again_once_it_is_renewed(num_silent: int) -> None:
    world = World()
    world.steps = 1000
    world.spec["nodes"]["min"] = 2
    for second in range(200):
        if second == 10:
            for name in NODES[3 - num_silent :]:
                world.silence(name)
        if second == 100:
            assert world.phase == (Phase.RUNNING if num_silent == 1 else Phase.WAITING)
            for name in NODES[3 - num_silent :]:
                world.heal(name)
        world.tick()
        world.operate()
    assert world.phase == Phase.RUNNING
    assert world.status["nodesText"] == "3/3"


def test_the_silence_of_all_kubelets_is_held_against_no_training() -> None:
    world = World()
    world.steps = 1000
    for second in range(300):
        if second == 10:
            for name in NODES:
                world.silence(name)
        world.tick()
        world.operate()
    assert (world.phase, world.status["attempt"]) == (Phase.RUNNING, 1)
    for name in NODES:
        world.heal(name)
    settle(world, Phase.RUNNING)
    assert world.status["attempt"] == 1
