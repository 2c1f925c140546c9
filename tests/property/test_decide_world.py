"""Decisions against a model of the cluster: any order of losses, returns, failures and operator crashes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_operator.api.status import Phase
from tests.property.cluster_model import (
    EXTERNAL_STEP,
    NODES,
    START,
    STEPS,
    World,
)
from tests.randomness import examples

OPERATE = st.tuples(st.just("operate"), st.one_of(st.none(), st.integers(0, 12)))
HAPPENINGS = st.lists(
    st.one_of(
        OPERATE,
        OPERATE,
        st.tuples(st.just("tick"), st.sampled_from([1.0, 2.0, 7.0])),
        st.tuples(st.just("tick"), st.just(1.0)),
        st.tuples(st.just("kill"), st.sampled_from(NODES)),
        st.tuples(st.just("silence"), st.sampled_from(NODES)),
        st.tuples(st.just("tick"), st.just(20.0)),
        st.tuples(st.just("heal"), st.sampled_from(NODES)),
        st.tuples(st.just("fail_pod"), st.integers(0, 5)),
        st.tuples(st.just("preempt"), st.integers(0, 2), st.sampled_from([1.0, 4.0, 30.0])),
        st.tuples(st.just("stick"), st.integers(0, 5)),
        st.tuples(st.just("release")),
        st.tuples(st.just("room"), st.booleans()),
        st.tuples(st.just("image"), st.booleans()),
        st.tuples(st.just("damage")),
        st.tuples(st.just("suspend"), st.booleans()),
    ),
    max_size=60,
)


def settle(world: World, until: str, passes: int = 900) -> None:
    for _ in range(passes):
        if world.phase == until:
            return
        world.tick()
        world.operate()
    raise AssertionError(f"did not become {until}: {json.dumps(world.status, indent=1)[:3000]}")


def complete(world: World, happenings: list[tuple[Any, ...]]) -> None:
    """Let everything happen, put everything right again, and wait for the end of the training."""
    for name, *arguments in happenings:
        getattr(world, name)(*arguments)
    for node in NODES:
        world.heal(node)
    world.release()
    world.room(True)
    world.image(True)
    world.suspend(False)
    if world.phase != Phase.COMPLETE:
        settle(world, Phase.COMPLETE)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(HAPPENINGS)
def test_any_order_of_events_and_crashes_ends_complete(happenings: list[tuple[Any, ...]]) -> None:
    complete(World(), happenings)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(HAPPENINGS)
def test_a_job_that_starts_from_a_checkpoint_of_others_ends_complete(happenings: list[tuple[Any, ...]]) -> None:
    world = World("old/global_step10")
    complete(world, happenings)
    started = world.status["startedFrom"]
    assert (started["source"], started["step"]) == ("/checkpoint/old/global_step10", EXTERNAL_STEP)
    assert world.status["progress"]["step"] >= STEPS


INFRASTRUCTURE = st.lists(
    st.one_of(
        OPERATE,
        st.tuples(st.just("tick"), st.sampled_from([1.0, 7.0, 20.0])),
        st.tuples(st.sampled_from(["kill", "silence", "heal"]), st.sampled_from(NODES)),
        st.tuples(st.just("preempt"), st.integers(0, 5), st.sampled_from([0.0, 4.0])),
    ),
    max_size=60,
)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(INFRASTRUCTURE)
def test_failures_of_the_infrastructure_never_spend_the_restart_budget(happenings: list[tuple[Any, ...]]) -> None:
    world = World()
    world.spec["recovery"]["restartBudget"] = {"limit": 0, "windowSeconds": 3600}
    complete(world, happenings)
    assert world.status["restartBudget"]["used"] == 0


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(HAPPENINGS)
def test_a_suspended_job_comes_to_rest(happenings: list[tuple[Any, ...]]) -> None:
    world = World()
    for name, *arguments in happenings:
        getattr(world, name)(*arguments)
    if world.phase == Phase.COMPLETE:
        return
    world.release()
    world.suspend(True)
    for _ in range(200):
        world.tick()
        world.operate()
    assert world.phase in (Phase.SUSPENDED, Phase.COMPLETE)
    assert not any(world.runs(pod) for pod in world.pods.values())


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


@pytest.mark.parametrize("num_silent", [1, 2, 3])
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
