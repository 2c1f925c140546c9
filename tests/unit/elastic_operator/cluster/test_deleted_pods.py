"""Pods that failed and were deleted: what the watches tell goes in, evidence for the next passes comes out."""

from __future__ import annotations

import time
from typing import Any

import pytest

from elastic_operator.cluster import store as store_module
from elastic_operator.cluster.caches import KEPT_SECONDS, DeletedPods
from elastic_operator.observed.observation import PodView
from elastic_operator.reconcile.failures.reassessment import PEER_SECONDS
from tests.unit.elastic_operator.crowd import GPU, Crowd, labels, of_job
from tests.unit.elastic_operator.observed.test_ownership import UID, Cluster

KEY = ("ns", "job-0")


def pod(crowd: Crowd, *, exit_code: int | None, phase: str = "Running", owner: str = "job-0-a1") -> dict[str, Any]:
    state = {"terminated": {"exitCode": exit_code}} if exit_code is not None else {"running": {}}
    return {
        "metadata": {
            "namespace": "ns",
            "name": "job-0-a1-0",
            "uid": "p",
            "labels": labels(crowd, 0),
            "ownerReferences": of_job(owner),
            "resourceVersion": "9",
        },
        "spec": {"nodeName": "n0", "containers": [{"name": "train"}]},
        "status": {"phase": phase, "containerStatuses": [{"name": "train", "state": state}]},
    }


def tell_end(crowd: Crowd, item: dict[str, Any]) -> None:
    crowd.tell("pods", item, "MODIFIED")
    crowd.tell("pods", item, "DELETED")


@pytest.mark.parametrize(
    ("exit_code", "phase", "kept"),
    [(139, "Running", [139]), (1, "Failed", [1]), (0, "Succeeded", []), (None, "Running", [])],
)
def test_a_pod_that_had_failed_is_evidence_after_its_deletion(
    exit_code: int | None, phase: str, kept: list[int]
) -> None:
    crowd = Crowd(1)
    tell_end(crowd, pod(crowd, exit_code=exit_code, phase=phase))
    world = crowd.store.observe(KEY, GPU)
    assert world.pods == ()
    assert [item.exit_code for item in world.deleted_pods] == kept
    assert [item.exit_code for item in world.workers_ever(1)] == kept
    assert all(item.failed_at is not None for item in world.deleted_pods)
    assert world.workers_ever(2) == ()


def test_a_deleted_pod_of_another_owner_is_no_evidence() -> None:
    crowd = Crowd(1)
    tell_end(crowd, pod(crowd, exit_code=139, owner="somebody-elses"))
    assert crowd.store.deleted_pods(KEY)
    assert crowd.store.observe(KEY, GPU).deleted_pods == ()


def test_a_fresh_read_adds_the_pods_that_it_no_longer_finds() -> None:
    crowd, cluster = Crowd(1), Cluster()
    owner = [{"kind": "ElasticTrainingJob", "name": "job-0", "uid": UID, "controller": True}]
    cluster.put("jobs", "job-0-a1", owner, meta={"uid": "job-0-a1"}, spec={})
    ended = pod(crowd, exit_code=139)
    informer = next(item for item in cluster.reader._store.informers if item.source.path.endswith("/pods"))
    cluster.reader._store.listener = crowd
    for change in ("ADDED", "DELETED"):
        informer.apply(change, ended)
    cluster.api.put("pods", ended)
    assert [(item.uid, item.has_failed) for item in cluster.look().workers_ever(1)] == [("p", True)]
    cluster.api.objects.clear()
    cluster.put("jobs", "job-0-a1", owner, meta={"uid": "job-0-a1"}, spec={})
    world = cluster.look()
    assert (world.workers(1), [item.exit_code for item in world.workers_ever(1)]) == ((), [139])
    cluster.close()


def test_a_deleted_pod_is_forgotten_once_no_failure_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEPT_SECONDS > PEER_SECONDS
    crowd = Crowd(1)
    tell_end(crowd, pod(crowd, exit_code=139))
    later = time.monotonic() + KEPT_SECONDS + 1
    monkeypatch.setattr(store_module.time, "monotonic", lambda: later)
    assert crowd.store.observe(KEY, GPU).deleted_pods == ()


def test_deleted_pods_of_all_jobs_are_dropped_when_they_are_old() -> None:
    deleted = DeletedPods()
    for number in range(100):
        view = PodView(name=f"p{number}", uid=f"u{number}", attempt=1, role="worker", exit_code=1)
        deleted.keep(("ns", f"job-{number % 10}"), view, float(number))
    assert [view.name for view in deleted.get(("ns", "job-9"), 99.0)] == ["p89", "p99"]
    assert deleted.get(("ns", "job-9"), 99.0 + KEPT_SECONDS + 1) == ()
    assert not deleted._pods
    assert not deleted._deletions


def test_a_pod_that_is_dropped_twice_is_kept_from_the_second_time_on() -> None:
    pods = DeletedPods()
    failed = PodView(name="p", uid="p", attempt=1, role="worker", phase="Failed")
    pods.keep(KEY, failed, 0.0)
    pods.keep(KEY, failed, 10.0)
    assert pods.get(KEY, 10.0 + KEPT_SECONDS) == (failed,)
    assert pods.get(KEY, 10.1 + KEPT_SECONDS) == ()
