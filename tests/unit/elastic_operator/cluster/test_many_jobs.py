"""With many jobs, what concerns one is looked at first, and progress alone wakes nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.controller import FEW_JOBS, SECONDS_PER_JOB, TICK_SECONDS, JobController
from elastic_operator.observed.observation import Key
from elastic_operator.observed.timeouts import Timeouts
from reshard.contract import LeaseKey


class Resting(JobController):
    """Tasks that look at nothing."""

    def __init__(self, count: int) -> None:
        nodes, renewals = NodeCache(), RenewalCache()
        reader = ClusterReader(None, nodes, renewals, ClusterStore(nodes, renewals), ())  # type: ignore[arg-type]
        super().__init__(reader, None, None, Timeouts())  # type: ignore[arg-type]
        self.keys = [("ns", str(number)) for number in range(count)]
        for key in self.keys:
            self.wake(key)
            self._nodes[key] = frozenset({f"node-{key[1]}"})
        self.rest()

    async def _run(self, key: Key) -> None:
        await asyncio.Event().wait()

    def rest(self) -> None:
        for waker in self._wakers.values():
            waker.clear()

    def awake(self) -> set[Key]:
        return {key for key, waker in self._wakers.items() if waker.is_set()}


def lease(**notes: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "gpt-a1", "namespace": "ns", "annotations": {LeaseKey[key]: notes[key] for key in notes}}
    }


@pytest.mark.parametrize("count", [FEW_JOBS, FEW_JOBS + 1])
def test_a_changed_node_wakes_its_jobs_at_once_and_in_a_crowd_the_others_later(count: int) -> None:
    async def run() -> tuple[set[Key], set[Key], set[Key]]:
        controller = Resting(count)
        controller.wake_node("node-3")
        controller.wake_all()
        controller.wake_all()
        first = controller.awake()
        await asyncio.sleep(SECONDS_PER_JOB * count + 0.05)
        second = controller.awake()
        controller.rest()
        await asyncio.sleep(SECONDS_PER_JOB * count + 0.05)
        third = controller.awake()
        await controller.stop()
        return first, second, third

    everybody = {("ns", str(number)) for number in range(count)}
    first, second, third = asyncio.run(run())
    assert first == (everybody if count == FEW_JOBS else {("ns", "3")})
    assert second == everybody
    assert third == set(), "two wishes are one"


@pytest.mark.parametrize(
    ("count", "news", "awake"),
    [
        (FEW_JOBS, {"PHASE": "Training", "STEP": "2"}, True),
        (FEW_JOBS + 1, {"PHASE": "Training", "STEP": "2"}, False),
        (FEW_JOBS + 1, {"PHASE": "Drained", "STEP": "1"}, True),
        (FEW_JOBS + 1, {"PHASE": "Training", "STEP": "1", "COMMIT": "{}"}, True),
    ],
)
def test_in_a_crowd_one_more_step_wakes_nobody_and_everything_else_does(
    count: int, news: dict[str, str], awake: bool
) -> None:
    async def run() -> set[Key]:
        controller = Resting(count)
        controller.lease_changed(("ns", "1"), lease(PHASE="Training", STEP="1"))
        assert controller.awake() == {("ns", "1")}, "the first one is news"
        controller.rest()
        controller.lease_changed(("ns", "1"), lease(**news))
        found = controller.awake()
        await controller.stop()
        return found

    assert asyncio.run(run()) == ({("ns", "1")} if awake else set())


def test_in_a_crowd_looks_that_can_wait_are_made_together() -> None:
    async def run() -> None:
        controller = Resting(FEW_JOBS + 1)
        assert controller._align_to_tick(1.0) == 1.0
        for seconds in (5.0, 7.3, 30.0):
            assert seconds <= controller._align_to_tick(seconds) < seconds + TICK_SECONDS
        few = Resting(3)
        assert few._align_to_tick(30.0) == 30.0
        await controller.stop()
        await few.stop()

    asyncio.run(run())
