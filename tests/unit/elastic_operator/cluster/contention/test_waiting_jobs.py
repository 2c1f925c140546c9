"""Which of the jobs that wait for nodes takes them first."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest

from elastic_operator.api.serialization import Time
from elastic_operator.api.spec import SpecError, parse_spec
from elastic_operator.api.status import Current, Phase, Recovery, Status
from elastic_operator.cluster.contention.reservations import RESERVATION_SECONDS
from elastic_operator.cluster.contention.waiting_jobs import (
    PriorityClasses,
    YieldTimes,
    is_waiting,
    read_priority_classes,
    select_ahead,
)
from elastic_operator.controller import NodesReservedError
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.reconcile.record import Record
from tests.unit.elastic_operator.crowd import GPU, SPEC, Crowd
from tests.unit.elastic_operator.reconcile.test_decide_phases import BIG

CLASSES = PriorityClasses(values={"low": -5, "high": 10}, default=1)
WAITING = Status(phase=Phase.WAITING, attempt=3)


def wire(priority: str = "", resource: str = GPU, **changes: Any) -> dict[str, Any]:
    pod = {**SPEC["template"]["spec"], **({"priorityClassName": priority} if priority else {})}  # type: ignore[index]
    return {**SPEC, "accelerator": {"resource": resource, "perNode": [8]}, "template": {"spec": pod}, **changes}


def job(name: str, priority: str = "", *, created_at: float = 100.0, **changes: Any) -> Record:
    found = Record(
        job=JobRef(name=name, namespace="ns", uid=name, created_at=created_at),
        status=changes.pop("status", WAITING),
        spec=parse_spec(wire(priority, changes.pop("resource", GPU), suspend=changes.pop("suspend", False))),
    )
    return dataclasses.replace(found, **changes)


@pytest.mark.parametrize(
    ("others", "ahead"),
    [
        pytest.param([job("a", "high"), job("b", "low")], ["a"], id="the higher priority"),
        pytest.param([job("a", created_at=99), job("b", created_at=101)], ["a"], id="the older of the same priority"),
        pytest.param([job("a"), job("x")], ["a"], id="the name, of the same second"),
        pytest.param([job("a", "high"), job("b", "high", created_at=1)], ["b", "a"], id="the first one first"),
        pytest.param([job("a", "none", created_at=1)], [], id="a class that does not exist is 0, below the default"),
        pytest.param([job("a", "high", resource="other.example/gpu")], [], id="another kind of accelerator"),
    ],
)
def test_waiting_jobs_take_nodes_by_priority_and_then_by_age(others: list[Record], ahead: list[str]) -> None:
    assert [item.job.name for item in select_ahead(job("me"), others, CLASSES)] == ahead


SUSPENDED = Recovery(cause="Suspended", planned=True, from_attempt=1)
CRASHED = Recovery(cause="PodFailed", from_attempt=1)
PLANNED = Current(topology=BIG, num_nodes=3, gpus_per_node=2, plan_time=Time(1.0))


@pytest.mark.parametrize(
    ("record", "waits"),
    [
        pytest.param(job("a"), True, id="too few nodes"),
        pytest.param(job("a", status=Status()), True, id="new"),
        pytest.param(job("a", status=Status(attempt=1, pauses=(SUSPENDED,))), True, id="resumed"),
        pytest.param(job("a", status=Status(attempt=1, recoveries=(CRASHED,))), False, id="recovers from a failure"),
        pytest.param(job("a", status=Status(attempt=1, current=PLANNED)), False, id="has a plan"),
        pytest.param(job("a", status=Status(phase=Phase.COMPLETE)), False, id="has ended"),
        pytest.param(job("a", suspend=True), False, id="is to be suspended"),
        pytest.param(job("a", deleting=True), False, id="is being deleted"),
        pytest.param(job("a", is_managed_elsewhere=True), False, id="another controller's"),
        pytest.param(job("a", spec=SpecError(["x"])), False, id="its spec is invalid"),
    ],
)
def test_who_waits(record: Record, waits: bool) -> None:
    assert is_waiting(record) == waits


def test_priority_classes_are_read_strictly() -> None:
    found = read_priority_classes(
        [
            {"metadata": {"name": "a"}, "value": 7},
            {"metadata": {"name": "b"}, "value": 3, "globalDefault": True},
            {"metadata": {"name": "c"}, "value": "9"},
        ]
    )
    assert found == PriorityClasses(values={"a": 7, "b": 3}, default=3)


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Crowd:
    """One free node, and two new jobs that want it; the older one has the lower priority."""

    async def no_dry_run(record: Record) -> Record:
        return record

    async def keep_nothing(resource: Any) -> None:
        del resource

    found = Crowd(1, num_nodes=2)
    monkeypatch.setattr(found.controller._diagnostics, "dry_run_pods", no_dry_run)
    monkeypatch.setattr(found.controller, "_keep_spec", keep_nothing)
    monkeypatch.setattr(found.controller, "wake", found.wake)
    found.reader._priorities, found.reader._priorities_time = CLASSES, float("inf")
    for number, name in enumerate(("low", "high")):
        resource = found.tell_job(("ns", name), spec=wire(name), status=Status())
        resource["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:0{number}Z"
        found.store.put_record(resource, listed=True)
        found.reader.there["ns", name] = resource
        found.controller._store_until["ns", name] = 0.0
    return found


def look(crowd: Crowd, name: str) -> int:
    """One pass; return the number of the attempt that it planned, 0 if it planned none."""
    try:
        asyncio.run(crowd.controller.reconcile(("ns", name)))
    except NodesReservedError:
        return 0
    return crowd.writer.written[-1][1].attempt


def test_the_job_of_higher_priority_gets_the_node_although_the_other_one_is_looked_at_first(crowd: Crowd) -> None:
    assert [look(crowd, name) for name in ("low", "high", "low")] == [0, 1, 0]


def test_a_job_that_is_ahead_and_takes_nothing_does_not_block_the_others(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd.woken.clear()
    assert look(crowd, "low") == 0
    assert crowd.woken == [("ns", "high")]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + RESERVATION_SECONDS)
    crowd.controller._store_until["ns", "low"] = 0.0
    assert look(crowd, "low") == 1


def test_a_small_job_takes_what_is_too_little_for_the_jobs_ahead(crowd: Crowd) -> None:
    large = wire("high", nodes={"min": 2, "max": 2})
    crowd.tell_job(("ns", "high"), spec=large, generation=2, version="9")
    assert look(crowd, "low") == 1


def test_a_job_that_has_yielded_long_ago_yields_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    yields = YieldTimes()
    key = ("ns", "low")

    def ask_for(seconds: int) -> list[bool]:
        answers = []
        for _ in range(seconds):
            answers.append(yields.is_over(key))
            now[0] += 1.0
        return answers

    first = ask_for(20)
    assert first == [False] * 15 + [True] * 5, "jobs ahead may be unable to take the nodes"
    now[0] += 3600.0
    assert ask_for(20) == first, "others may be ahead by now, and other nodes free"
