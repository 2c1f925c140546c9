"""Counters against a model of the cluster that knows the truth, for node losses and suspensions in any order."""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.api.status import MAX_RECOVERIES, Phase
from elastic_operator.api.status_reader import read_status
from elastic_operator.metrics import definitions
from elastic_operator.metrics.counters import increments
from elastic_operator.metrics.definitions import MetricDefinition
from tests.property.cluster_model.cluster import NODES, STEPS
from tests.property.cluster_model.traces import finish, happen
from tests.property.cluster_model.world import World
from tests.property.test_decide_world import settle
from tests.randomness import examples


class CountingWorld(World):
    """World that adds up the increments of every written status."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: collections.Counter[str] = collections.Counter()
        self.observed: collections.Counter[str] = collections.Counter()

    def operate(self, crash_after: int | None = None) -> None:
        before = copy.deepcopy(self.status)
        super().operate(crash_after)
        if before != self.status:
            for sample in increments(read_status(before).status, read_status(self.status).status):
                self.counted[sample.definition.name] += int(sample.value)
                self.observed[sample.definition.name] += 1

    def total(self, family: MetricDefinition) -> int:
        table = self.observed if family.type == definitions.Type.HISTOGRAM else self.counted
        return table[family.name]


def happenings(operate: Any) -> Any:
    passes = st.tuples(st.just("operate"), operate)
    return st.lists(
        st.one_of(
            passes,
            passes,
            st.tuples(st.just("tick"), st.sampled_from([1.0, 2.0, 7.0, 16.0])),
            st.tuples(st.just("tick"), st.just(1.0)),
            st.tuples(st.just("kill"), st.sampled_from(NODES)),
            st.tuples(st.just("heal"), st.sampled_from(NODES)),
            st.tuples(st.just("fail_pod"), st.integers(0, 5)),
            st.tuples(st.just("damage")),
            st.tuples(st.just("suspend"), st.booleans()),
        ),
        max_size=60,
    )


def completed(events: list[tuple[Any, ...]]) -> CountingWorld:
    world = CountingWorld()
    happen(world, events)
    finish(world)
    return world


@pytest.mark.slow
@settings(max_examples=examples(15, soak=300))
@given(happenings(st.none()))
def test_every_step_that_was_made_again_is_counted_once(events: list[tuple[Any, ...]]) -> None:
    world = completed(events)
    assert world.total(definitions.LOST_STEPS) == world.made_steps - STEPS


@pytest.mark.slow
@settings(max_examples=examples(15, soak=300))
@given(happenings(st.one_of(st.none(), st.integers(0, 12))))
def test_every_recovery_is_counted_once_at_its_begin_and_once_at_its_end(events: list[tuple[Any, ...]]) -> None:
    world = completed(events)
    started = world.total(definitions.RECOVERIES_STARTED)
    assert started == world.total(definitions.RECOVERIES_ENDED)
    status = read_status(world.status).status
    if len(status.changes) < MAX_RECOVERIES:
        assert started == len(status.recoveries)
    assert world.total(definitions.FINISHED) == 1
    # A pod of a stopped attempt may make steps after the operator has looked for the last time.
    assert world.total(definitions.LOST_STEPS) <= world.made_steps - STEPS
    assert 1 <= world.total(definitions.ATTEMPTS) <= world.total(definitions.QUEUE_SECONDS) <= world.status["attempt"]


def train(world: CountingWorld, seconds: int) -> None:
    for _ in range(seconds):
        world.tick()
        world.operate()


def lose_a_node(world: CountingWorld) -> None:
    """Train for a while, lose n3, and stop where the next attempt is planned and its reshard pod has not run."""
    train(world, 9)
    world.kill("n3")
    while world.phase != Phase.RESHARDING:
        world.tick()
        world.operate()


def rest(world: CountingWorld) -> None:
    """Long enough for a pod on a lost node to be removed by force, and then for a long time."""
    train(world, 90)
    world.tick(1000)
    world.operate()


def test_steps_are_lost_once_though_the_next_attempt_is_lost_before_its_launch() -> None:
    world = CountingWorld()
    lose_a_node(world)
    lost = world.total(definitions.LOST_STEPS)
    assert lost > 0
    # The nodes of the plan go too, long after the window in which losses count as one.
    for name in ("n1", "n2"):
        world.kill(name)
    for _ in range(20):
        world.now += 1
        for name in NODES:
            world.set_ready(name, "Unknown")
    world.operate()
    assert world.total(definitions.RECOVERIES_STARTED) == 2
    for name in NODES:
        world.heal(name)
    settle(world, Phase.COMPLETE)
    assert world.total(definitions.LOST_STEPS) == lost == world.made_steps - STEPS


@pytest.mark.parametrize("again", [False, True], ids=["suspended once", "suspended again before the launch"])
def test_a_recovery_that_was_suspended_ends_with_the_next_first_step(again: bool) -> None:
    world = CountingWorld()
    lose_a_node(world)
    for _ in range(1 + again):
        world.suspend(True)
        rest(world)
        assert world.phase == Phase.SUSPENDED
        world.suspend(False)
        world.operate()
    settle(world, Phase.COMPLETE)
    status = read_status(world.status).status
    assert [item.cause for item in status.changes][:2] == ["NodeNotReady", "Suspended"]
    assert (status.recoveries[0].cause, status.pauses[0].cause) == ("NodeNotReady", "Suspended")
    assert status.pauses[0].first_step_time is not None
    # Training, and an outage of a minute, as a pod on a lost node is waited for; not the time suspended.
    assert 20 < status.goodput["windowSeconds"] < 200
    assert world.total(definitions.LOST_STEPS) == world.made_steps - STEPS


def test_a_failure_while_suspending_loses_its_steps_once_and_is_no_endless_outage() -> None:
    world = CountingWorld()
    train(world, 11)
    world.suspend(True)
    world.operate()
    world.fail_pod(0)
    rest(world)
    assert world.phase == Phase.SUSPENDED
    world.suspend(False)
    settle(world, Phase.COMPLETE)
    status = read_status(world.status).status
    assert [item.planned for item in status.changes][:2] == [False, True]
    assert status.goodput["windowSeconds"] < 200
    assert world.total(definitions.LOST_STEPS) == world.made_steps - STEPS > 0
