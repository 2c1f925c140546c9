"""The work to judge an attempt grows with the number of its pods, not with its square."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest

from elastic_operator.observed.node_pool import NodePool
from elastic_operator.observed.observation import NodeView, Observation, PodView
from elastic_operator.observed.signal_kinds import Kind
from elastic_operator.observed.signals import Signal, detect_attempt_signals, judge
from elastic_operator.observed.timeouts import Timeouts

GPU = "nvidia.com/gpu"
READS: collections.Counter[str] = collections.Counter()


class CountedPod(PodView):
    def __getattribute__(self, name: str) -> Any:
        READS["pod"] += 1
        return super().__getattribute__(name)


class CountedSignal(Signal):
    def __getattribute__(self, name: str) -> Any:
        READS["signal"] += 1
        return super().__getattribute__(name)


def detect(count: int) -> int:
    names = [f"n{index:04d}" for index in range(count)]
    nodes = {name: NodeView(name=name, allocatable={GPU: 8}, capacity={GPU: 8}) for name in names}
    pods = tuple(
        CountedPod(name=f"p-{name}", uid=name, attempt=1, role="worker", node=name, phase="Running", requests={GPU: 8})
        for name in names
    )
    READS.clear()
    found = detect_attempt_signals(
        Observation(nodes=NodePool(GPU, nodes), pods=pods),
        attempt=1,
        resource=GPU,
        tolerated={},
        launch_time=0.0,
        job_seen=False,
        started=True,
        limits=Timeouts(),
        now=100.0,
    )
    assert found == []
    return READS["pod"]


def judge_deleted_pods(count: int) -> int:
    signals = [
        CountedSignal(kind=Kind.POD_DELETED, node=f"n{index}", pod=f"p{index}", since=1.0, message="deleted")
        for index in range(count)
    ]
    READS.clear()
    verdict = judge(signals, {}, now=100.0)
    assert verdict.failure is not None
    assert verdict.lost_nodes == ()
    return READS["signal"]


@pytest.mark.parametrize("reads", [detect, judge_deleted_pods], ids=lambda function: function.__name__)
def test_twice_as_many_pods_are_at_most_a_little_more_than_twice_the_work(reads: Callable[[int], int]) -> None:
    assert reads(400) <= 2.5 * reads(200)
