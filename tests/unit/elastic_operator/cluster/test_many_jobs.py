"""With many jobs, what concerns one is looked at first, and progress alone wakes nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.cluster.work_queue import FEW_JOBS, WorkQueue
from elastic_operator.controller import JobController
from elastic_operator.observed.observation import Key
from elastic_operator.observed.timeouts import Timeouts
from reshard.contract import LeaseKey
from tests.unit.elastic_operator.crowd import Crowd

KEY = ("ns", "1")


class RecordingQueue(WorkQueue):
    """A queue that runs nothing."""

    def __init__(self, num_jobs: int) -> None:
        self.added: list[Key | str] = []
        self._num_jobs = num_jobs

    def __len__(self) -> int:
        return self._num_jobs

    def add(self, key: Key) -> None:
        self.added.append(key)

    def add_all(self) -> None:
        self.added.append("all")


def controller_of(num_jobs: int) -> tuple[JobController, RecordingQueue]:
    nodes, renewals = NodeCache(), RenewalCache()
    reader = ClusterReader(None, nodes, renewals, ClusterStore(nodes, renewals), ())  # type: ignore[arg-type]
    controller, queue = JobController(reader, None, None, Timeouts()), RecordingQueue(num_jobs)  # type: ignore[arg-type]
    controller.queue = queue
    return controller, queue


def lease(**notes: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "gpt-a1", "namespace": "ns", "annotations": {LeaseKey[key]: notes[key] for key in notes}}
    }


def test_a_changed_node_wakes_the_jobs_on_it_before_all_others() -> None:
    crowd = Crowd(3)
    queue = RecordingQueue(3)
    for key in crowd.keys:
        asyncio.run(crowd.controller.reconcile(key))
    crowd.controller.queue = queue
    crowd.controller.node_changed("n1")
    assert queue.added == [("ns", "job-1"), "all"]


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
    controller, queue = controller_of(count)
    controller.lease_changed(KEY, lease(PHASE="Training", STEP="1"))
    assert queue.added == [KEY], "the first one is news"
    controller.lease_changed(KEY, lease(**news))
    assert queue.added == ([KEY, KEY] if awake else [KEY])
