"""What the watches tell is enough to see that nothing is to be done: jobs at rest cost no requests, however many."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from elastic_operator.api.serialization import to_wire
from elastic_operator.controller import STORE_PASSES_SECONDS
from tests.unit.elastic_operator.counting_nodes import count_walks
from tests.unit.elastic_operator.crowd import GPU, SPEC, Crowd, labels, node, of_job


def look_at_all(crowd: Crowd, times: int = 1) -> int:
    async def run() -> None:
        for _ in range(times):
            for key in crowd.keys:
                await crowd.controller.reconcile(key)

    asyncio.run(run())
    return len(crowd.reader.asked)


@pytest.mark.parametrize("num_jobs", [5, 60])
def test_jobs_at_rest_are_looked_at_without_a_request_and_without_a_walk_over_the_nodes(num_jobs: int) -> None:
    crowd = Crowd(num_jobs, num_nodes=2 * num_jobs)
    pool = crowd.nodes.pool(GPU)
    nodes = count_walks(pool)
    assert look_at_all(crowd, times=3) == 0
    assert crowd.nodes.pool(GPU) is pool
    assert nodes.walks <= 1


def test_all_jobs_share_one_view_of_the_nodes() -> None:
    crowd = Crowd(10)
    assert len({id(crowd.store.observe(key, GPU).nodes) for key in crowd.keys}) == 1


def test_what_is_to_be_done_is_decided_from_a_fresh_look() -> None:
    crowd = Crowd(10)
    pod = crowd.store.observe(crowd.keys[3], GPU).pods[0]
    meta = {"namespace": "ns", "name": pod.name, "labels": labels(crowd, 3), "uid": pod.uid}
    meta["ownerReferences"] = of_job("job-3-a1")
    crowd.tell("pods", {"metadata": meta, "spec": {"nodeName": "n3"}, "status": {"phase": "Failed"}}, "MODIFIED")
    assert crowd.woken == [crowd.keys[3]]
    look_at_all(crowd)
    assert crowd.reader.asked == [crowd.keys[3]]


def test_a_node_that_is_not_ready_is_worth_a_second_opinion() -> None:
    crowd = Crowd(4)
    crowd.tell("nodes", node("n2", ready="Unknown"), "MODIFIED")
    look_at_all(crowd)
    assert crowd.reader.asked == [crowd.keys[2]]


@pytest.mark.parametrize("plural", ["nodes", "jobs", "leases", "pods"])
def test_while_a_watch_is_cut_nothing_is_believed(plural: str) -> None:
    crowd = Crowd(3)
    crowd.informer(plural).is_live = False
    assert look_at_all(crowd) == 3


def test_a_deleted_job_is_asked_for() -> None:
    crowd = Crowd(3)
    crowd.store.drop_record(("ns", "job-1"), "uid-job-1")
    assert crowd.woken == [("ns", "job-1")]
    look_at_all(crowd)
    assert crowd.reader.asked == [("ns", "job-1")]


def test_an_object_that_says_nothing_new_wakes_nobody() -> None:
    crowd = Crowd(2)
    crowd.tell("nodes", node("n0"), "MODIFIED")
    pod = crowd.store.observe(crowd.keys[0], GPU).pods[0]
    item = {"metadata": {"namespace": "ns", "name": pod.name, "labels": labels(crowd, 0), "uid": pod.uid}}
    item["metadata"]["ownerReferences"] = of_job("job-0-a1")
    crowd.tell("pods", {**item, "status": {"phase": "Running"}, "spec": {"nodeName": "n0"}}, "MODIFIED")
    crowd.woken.clear()
    for noise in ("1", "2"):
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True", "lastProbeTime": noise}]}
        crowd.tell("pods", {**item, "status": status, "spec": {"nodeName": "n0"}}, "MODIFIED")
    assert crowd.woken == []


def test_a_resource_that_is_listed_again_wakes_nobody_unless_it_has_changed() -> None:
    crowd = Crowd(2)
    record = crowd.store._records[crowd.keys[0]]
    assert record is not None
    meta = {"namespace": "ns", "name": "job-0", "uid": "uid-job-0", "generation": 1}
    resource = {"metadata": meta, "spec": SPEC, "status": to_wire(record.status)}
    crowd.store.put_record(resource)
    assert crowd.woken == []
    crowd.store.put_record({**resource, "metadata": {**meta, "generation": 2}})
    assert crowd.woken == [crowd.keys[0]]


def test_no_job_is_looked_at_from_memory_alone_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(20)
    assert look_at_all(crowd) == 0
    begin = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: begin + 0.75 * STORE_PASSES_SECONDS)
    some = look_at_all(crowd)
    assert 0 < some < 20, "not all at the same time"
    monkeypatch.setattr(time, "monotonic", lambda: begin + STORE_PASSES_SECONDS + 1)
    crowd.reader.asked.clear()
    assert look_at_all(crowd) >= 20 - some


def test_a_job_that_is_not_there_is_forgotten_with_its_task() -> None:
    crowd = Crowd(1)
    key = crowd.keys[0]
    crowd.store.drop_record(key, "uid-job-0")
    crowd.tell_job(key)  # the answer to a last write, which comes after the watch has told that the job is gone
    crowd.informer("jobs").is_live = False
    assert asyncio.run(crowd.controller.reconcile(key)) is None
    assert crowd.store.last_record(key) is None


def test_a_job_that_comes_while_its_predecessor_is_missed_is_looked_at() -> None:
    crowd = Crowd(1)
    key = crowd.keys[0]
    crowd.informer("jobs").is_live = False

    async def missed(namespace: str, name: str) -> None:
        crowd.tell_job((namespace, name), generation=2)

    crowd.reader.training_job = missed  # type: ignore[method-assign]
    assert asyncio.run(crowd.controller.reconcile(key)) == 0.0
    assert crowd.store.last_record(key) is not None


def test_what_belongs_to_no_known_job_wakes_nobody() -> None:
    crowd = Crowd(1)
    pod = crowd.store.observe(crowd.keys[0], GPU).pods[0]
    crowd.store.forget(crowd.keys[0])
    meta = {"namespace": "ns", "name": pod.name, "labels": labels(crowd, 0), "uid": pod.uid}
    crowd.tell("pods", {"metadata": meta, "spec": {"nodeName": "n0"}, "status": {"phase": "Failed"}}, "MODIFIED")
    assert crowd.woken == []
    crowd.tell_job(crowd.keys[0])
    assert crowd.woken == [crowd.keys[0]]


def starting(name: str, namespace: str = "ns", **status: object) -> dict[str, Any]:
    """A resource that is about to start from `old/run` in the claim `ckpt`."""
    meta = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "generation": 1, "resourceVersion": "9"}
    spec = {**SPEC, "checkpoint": {"claimName": "ckpt", "path": name, "startFrom": "old/run"}}
    return {"metadata": meta, "spec": spec, "status": status}


def readers(crowd: Crowd, name: str = "old") -> set[tuple[str, str, str]]:
    """Name, claim and folder of the jobs that are about to start from a folder of this one."""
    starts = crowd.store.pending_starts(("ns", name))
    assert starts is not None
    return {(start.job, start.claim, start.folder) for start in starts}


def test_nobody_knows_what_jobs_start_from_before_all_of_them_have_been_listed() -> None:
    crowd = Crowd(1)
    crowd.store.put_record(starting("first"))
    assert crowd.store.pending_starts(("ns", "old")) is None
    broken = {"metadata": starting("x")["metadata"]}
    crowd.store.put_pending_starts([starting("second"), starting("third", namespace="other"), broken])
    assert readers(crowd) == {("first", "ckpt", "old/run"), ("second", "ckpt", "old/run")}
    assert readers(crowd, "second") == {("first", "ckpt", "old/run")}
    crowd.store.put_record(starting("first", startedFrom={"source": "/checkpoint/old/run", "step": 3}))
    crowd.store.forget(("ns", "second"))
    assert readers(crowd) == set()


CONVERTING: dict[str, object] = {
    "phase": "Resharding",
    "attempt": 1,
    "current": {
        "topology": {"dp": 1},
        "numNodes": 1,
        "gpusPerNode": 8,
        "resume": {"uri": "/checkpoint/first/a1/step-start", "source": "/checkpoint/old/run", "external": True},
    },
}


def rejected(name: str, **status: object) -> dict[str, Any]:
    """The same resource with an edit that the operator rejects."""
    resource = starting(name, **status)
    resource["metadata"] |= {"generation": 2, "resourceVersion": "10"}
    return {**resource, "spec": {**resource["spec"], "nodes": {"min": 9, "max": 1}}}


def unreadable(name: str) -> dict[str, Any]:
    meta = {**starting(name)["metadata"], "resourceVersion": "10"}
    return {"metadata": meta, "spec": None, "status": {}}


def recreated(name: str) -> dict[str, Any]:
    resource = unreadable(name)
    return {**resource, "metadata": {**resource["metadata"], "uid": "other"}}


BEGUN = {"startedFrom": {"source": "/checkpoint/old/run", "step": 3}}


@pytest.mark.parametrize(
    ("change", "is_reader"),
    [
        (rejected("first", **CONVERTING), True),
        (rejected("first"), True),
        (unreadable("first"), True),
        (rejected("first", **BEGUN), False),
        (rejected("first", phase="Failed"), False),
        (recreated("first"), False),
    ],
    ids=["rejected-while-converting", "rejected-before", "unreadable", "has-started", "has-failed", "another-job"],
)
def test_a_rejected_edit_does_not_end_the_protection_of_what_a_job_starts_from(
    change: dict[str, Any], is_reader: bool
) -> None:
    crowd = Crowd(1)
    crowd.store.put_pending_starts([])
    crowd.store.put_record(starting("first", **CONVERTING))
    crowd.store.put_record(change)
    assert readers(crowd) == ({("first", "ckpt", "old/run")} if is_reader else set())


def test_an_operator_that_starts_after_the_rejected_edit_knows_what_the_job_starts_from() -> None:
    crowd = Crowd(1)
    crowd.store.put_pending_starts([rejected("first", **CONVERTING)])
    assert readers(crowd) == {("first", "ckpt", "old/run")}
    crowd.store.forget(("ns", "first"))
    assert readers(crowd) == set()
