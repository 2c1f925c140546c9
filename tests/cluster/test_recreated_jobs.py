"""A job that is deleted at any moment and created again under the same name, on a real API server.

Etcd and kube-apiserver run alone; the rest of the cluster is played, with the claims of the real trainer and resharder
on a real folder. The job that was created again either runs or refuses with a named condition, no two attempts publish,
and no commit disappears.
"""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_operator.observed.pod_diagnosis import NAME_TAKEN, PREDECESSOR_RUNS
from tests.cluster.fault_harness import apiserver_with_kind, harnessed
from tests.cluster.recovery_lane import LaneError, OperatorInProcess
from tests.cluster.recreated_job import (
    REFUSED,
    RESUMED,
    RESUMED_IN_PLACE,
    TAKEN_OVER,
    RecreatedCluster,
    RecreatedJobLane,
    draw,
)
from tests.randomness import seeds

pytestmark = [pytest.mark.cluster, pytest.mark.own_api_server, pytest.mark.timeout(1800)]

NUM_LANES = 10
NUM_DELETIONS = 100
MAX_FAILURES = 3


@pytest.fixture(scope="module")
def api() -> Iterator[tuple[Path, str]]:
    with apiserver_with_kind() as server:
        yield server


async def _recreate(config: Path, token: str) -> tuple[int, collections.Counter[str], list[str]]:
    """Return the number of deletions, how the jobs came to rest, and what went wrong."""
    outcomes: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    pending = list(seeds(NUM_DELETIONS))
    num_wanted, num_deletions = len(pending), 0

    async def use_lanes() -> None:
        nonlocal num_deletions
        while num_deletions < num_wanted and len(failures) < MAX_FAILURES:
            cluster = harness.cluster(RecreatedCluster)
            lane = RecreatedJobLane(harness.proxy, cluster, harness.start)
            seed = -1
            try:
                async with lane.run():
                    while num_deletions < num_wanted:
                        seed = pending.pop(0)
                        deletions, holds = draw(random.Random(seed))
                        num_deletions += len(deletions)
                        await lane.recreate(deletions, holds=holds)
            except LaneError as error:
                failures.append("\n    ".join([f"seed {seed}: {error}", *lane.view.log]))
            outcomes.update(lane.outcomes)

    async with harnessed(config, lambda address: OperatorInProcess(address, token), "again") as harness:
        await asyncio.gather(*(use_lanes() for _ in range(NUM_LANES)))
    return num_deletions, outcomes, failures


def test_a_job_deleted_at_any_moment_and_created_again_runs_or_refuses_and_no_commit_is_lost(
    api: tuple[Path, str],
) -> None:
    num_deletions, outcomes, failures = asyncio.run(_recreate(*api))
    print(f"{num_deletions} deletions: {dict(outcomes)}")
    assert not failures, "\n".join(failures)
    assert num_deletions >= NUM_DELETIONS
    expected = {REFUSED, RESUMED, RESUMED_IN_PLACE, TAKEN_OVER, f"waited: {NAME_TAKEN}", f"waited: {PREDECESSOR_RUNS}"}
    assert expected <= set(outcomes)
