"""Two jobs that are planned in the same second do not count on the same nodes."""

from __future__ import annotations

import dataclasses
import time

import pytest

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import Current, Status
from elastic_operator.cluster.contention.reservations import RESERVATION_SECONDS, Reservations, is_contested
from elastic_operator.observed.capacity import Capacity, NodeCapacity
from elastic_operator.observed.observation import Observation
from tests.unit.elastic_operator.reconcile.test_decide_phases import BIG, GPU, workers

ONE, TWO = ("default", "one"), ("default", "two")


def launched(age: float = 0.0, num_nodes: int = 3) -> Status:
    current = Current(topology=BIG, num_nodes=num_nodes, gpus_per_node=2, launch_time=Time(time.time() - age))
    return Status(attempt=1, current=current)


@pytest.mark.parametrize(
    ("num_placed", "age", "resource", "promised"),
    [
        pytest.param(0, 0, GPU, 3, id="no-pods-yet"),
        pytest.param(2, 0, GPU, 1, id="two-are-placed"),
        pytest.param(3, 0, GPU, 0, id="all-are-placed"),
        pytest.param(0, RESERVATION_SECONDS + 1, GPU, 0, id="too-old"),
        pytest.param(0, 0, "other.example/gpu", 0, id="another-kind"),
    ],
)
def test_pods_without_nodes_are_promised_some_for_a_while(
    num_placed: int, age: float, resource: str, promised: int
) -> None:
    pods = [dataclasses.replace(pod, node=pod.node if i < num_placed else None) for i, pod in enumerate(workers())]
    reservations = Reservations()
    reservations.update(ONE, GPU, launched(age), Observation(pods=tuple(pods)))
    assert reservations.count_pods_of_others(TWO, resource) == promised
    assert reservations.count_pods_of_others(ONE, resource) == 0


def test_what_has_stopped_or_gone_is_promised_nothing() -> None:
    reservations = Reservations()
    reservations.update(ONE, GPU, launched(), Observation())
    reservations.update(ONE, GPU, Status(attempt=1), Observation())
    assert reservations.count_pods_of_others(TWO, GPU) == 0
    reservations.update(ONE, GPU, launched(), Observation())
    reservations.forget(ONE)
    assert reservations.count_pods_of_others(TWO, GPU) == 0


@pytest.mark.parametrize(
    ("before", "num_free", "promised", "held_back"),
    [
        pytest.param(Status(), 3, 0, False, id="nobody-else"),
        pytest.param(Status(), 5, 2, False, id="enough-for-all"),
        pytest.param(Status(), 4, 2, True, id="one-too-few"),
        pytest.param(launched(), 4, 2, False, id="launched-already"),
    ],
)
def test_a_new_plan_is_held_back_where_others_may_take_its_nodes(
    before: Status, num_free: int, promised: int, held_back: bool
) -> None:
    free = Capacity(nodes=tuple(NodeCapacity(name=f"n{i}", free=2) for i in range(num_free)))
    assert is_contested(before, launched(), free, promised) is held_back
