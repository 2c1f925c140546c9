"""Every decision settles, whatever nodes look like; one that does not would be told and tried again."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_operator.api.serialization import Time
from elastic_operator.api.spec import spec_hash
from elastic_operator.api.status import FailureCount, Status
from elastic_operator.observed.observation import NodeView, Observation, Taint
from elastic_operator.reconcile import decide as module
from elastic_operator.reconcile.actions import Decision
from elastic_operator.reconcile.context import Context
from elastic_operator.reconcile.decide import UNSETTLED
from tests.randomness import examples
from tests.unit.elastic_operator.reconcile.test_decide_phases import (
    GPU,
    NOW,
    WORLD,
    after_loss,
    kinds,
    lease,
    look,
    settled,
    spec,
    worker_job,
    workers,
)

NAMES = ("n1", "n2", "n3")
TAINTS = [(), (Taint(key="node.kubernetes.io/unreachable", effect="NoExecute"),), (Taint(key="dedicated"),)]
NODE = st.builds(
    NodeView,
    name=st.just(""),
    ready=st.sampled_from(["True", "True", "True", "False", "Unknown"]),
    ready_since=st.sampled_from([None, NOW - 1000, NOW - 31, NOW - 1]),
    unschedulable=st.sampled_from([False, False, False, True]),
    taints=st.sampled_from([TAINTS[0], *TAINTS]),
    allocatable=st.sampled_from([{GPU: 2}, {GPU: 2}, {GPU: 1}, {}]),
    capacity=st.just({GPU: 2}),
    unhealthy=st.sampled_from([(), (), (), ("label a is b",)]),
    lease_age_seconds=st.sampled_from([None, 1.0, 21.0, 39.0, 41.0, 1000.0]),
)
NODES = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, NODE)).map(
    lambda nodes: {name: dataclasses.replace(node, name=name) for name, node in nodes.items()}
)
QUEUED = (
    *WORLD.pods[:1],
    *(dataclasses.replace(pod, node=None, phase="Pending", unschedulable="no node fits") for pod in WORLD.pods[1:]),
)
BACKING_OFF = dataclasses.replace(
    settled(),
    current=None,
    failure_counts=(
        FailureCount(
            failure_class="Crash", total=3, in_a_row=3, retry_time=Time(NOW + 20), spec_hash=spec_hash(spec())
        ),
    ),
)
WORLDS = st.builds(
    Observation,
    nodes=NODES,
    pods=st.sampled_from([(), WORLD.pods, WORLD.pods[:2], workers(phase="Failed"), workers(2, count=2), QUEUED]),
    jobs=st.sampled_from([(), WORLD.jobs, (worker_job(2),), (worker_job(failed=True),)]),
    leases=st.sampled_from([{}, WORLD.leases, lease(2, PHASE="Training", STEP="11")]),
    used=st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, st.sampled_from([1, 2]))),
)
STATUSES = st.sampled_from([Status(), settled(), after_loss(), BACKING_OFF])


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STATUSES, st.lists(WORLDS, min_size=1, max_size=4), st.sampled_from([1, 2, 3]), st.sampled_from([1.0, 45.0]))
def test_every_decision_settles_whatever_the_nodes_look_like(
    status: Status, worlds: list[Observation], least: int, pause: float
) -> None:
    now = NOW
    for world in worlds:
        decision = look(status, world, now=now, nodes={"min": least, "max": 3})
        assert UNSETTLED not in [event.reason for event in decision.events]
        status, now = decision.status, now + pause


@pytest.mark.parametrize("num_left", [0, 1, 2])
@pytest.mark.parametrize("age", [21.0, 40.0, 41.0, 3600.0])
def test_a_stale_lease_of_nodes_that_are_still_ready_is_answered_where_few_others_are_left(
    age: float, num_left: int
) -> None:
    nodes = {
        name: dataclasses.replace(WORLD.nodes[name], lease_age_seconds=1.0 if number < num_left else age)
        for number, name in enumerate(NAMES)
    }
    status = settled()
    for second in range(0, 600, 20):
        decision = look(status, dataclasses.replace(WORLD, nodes=nodes), now=NOW + second, nodes={"min": 3, "max": 3})
        assert UNSETTLED not in [event.reason for event in decision.events]
        status = decision.status
    assert status.attempt <= 2, "no numbers are spent on plans that cannot stand"


def test_a_decision_that_does_not_settle_is_told_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(100)

    def restless(context: Context, status: Status) -> Status:
        del context
        return dataclasses.replace(status, attempt=next(numbers))

    monkeypatch.setattr(module, "_take_step", restless)
    before = dataclasses.replace(settled(), job_uids=("j1",))
    decisions: list[Decision] = [look(before), look(before)]
    for decision in decisions:
        assert decision.status == before
        assert kinds(decision) == []
        assert [(event.reason, event.warning) for event in decision.events] == [(UNSETTLED, True)]
        assert decision.requeue_seconds == 30
