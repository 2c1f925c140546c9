"""What a pass reads is no older than what woke it, and its parts fit together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from elastic_operator.client.api_errors import ApiError
from elastic_operator.cluster import reader as module
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.reader import ClusterReader, StaleListError
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.observed.observation import Observation
from elastic_operator.reconcile.record import read_record
from reshard.contract import Label, LeaseKey, TrainerPhase
from tests.unit.elastic_operator.crowd import GPU, SPEC, of_job, of_resource

NAME = "job-0"
META = {"namespace": "ns", "name": NAME, "uid": f"uid-{NAME}", "generation": 1}
RECORD = read_record({"metadata": META, "spec": SPEC, "status": {}})


class Lists:
    """An API server that answers lists; each kind has a version."""

    def __init__(self) -> None:
        self.versions = {"pods": 7, "jobs": 7, "leases": 7}
        self.items: dict[str, list[dict[str, Any]]] = {"pods": [], "jobs": [], "leases": []}
        self.before_pods: Any = None
        self.before_jobs: Any = None

    async def pages(self, path: str, params: Mapping[str, str], **_: Any) -> Any:
        plural = path.rsplit("/", 1)[-1]
        if plural == "pods" and "labelSelector" in params and self.before_pods is not None:
            await asyncio.sleep(0.1)
            self.before_pods()
        if plural == "jobs" and self.before_jobs is not None:
            await asyncio.sleep(0.1)
            self.before_jobs()
        yield list(self.items.get(plural, [])), str(self.versions.get(plural, 7))

    async def get(self, kind: Any, name: str, *, namespace: str = "") -> Any:
        raise ApiError(404, kind.path(namespace, name), {})

    async def list_objects(self, kind: Any, *, namespace: str = "", labels: str = "", fields: str = "") -> Any:
        async for items, _ in self.pages(kind.path(namespace), {"labelSelector": labels} if labels else {}):
            for item in items:
                yield item


def reader_of(lists: Lists) -> tuple[ClusterReader, ClusterStore]:
    nodes, renewals = NodeCache(), RenewalCache()
    store = ClusterStore(nodes, renewals)
    for informer in store.informers:
        informer.has_listed = True
    return ClusterReader(lists, nodes, renewals, store, ()), store  # type: ignore[arg-type]


def observe(reader: ClusterReader) -> Observation:
    return asyncio.run(reader.observe(RECORD, GPU, fresh=True))


def have_watched(store: ClusterStore, version: str) -> None:
    for informer in store.informers:
        informer.is_live, informer.version = True, version


@pytest.mark.parametrize("plural", ["pods", "jobs", "leases"])
def test_a_list_that_is_older_than_the_watch_of_its_kind_is_not_used(plural: str) -> None:
    lists = Lists()
    reader, store = reader_of(lists)
    have_watched(store, "7")
    observe(reader)
    lists.versions[plural] = 6
    with pytest.raises(StaleListError, match=f"{plural}.*version 7.*version 6"):
        observe(reader)
    lists.versions[plural] = 8
    observe(reader)


def test_a_job_that_fails_during_a_read_is_not_seen_without_the_pod_whose_exit_code_says_why() -> None:
    lists = Lists()
    reader, _ = reader_of(lists)
    name = f"{NAME}-a1"
    meta = {"namespace": "ns", "creationTimestamp": "2026-11-01T10:00:00Z", "labels": {str(Label.JOB): NAME}}
    job = {"metadata": {**meta, "name": name, "uid": "u", "ownerReferences": of_resource(NAME)}, "spec": {}}
    pod = {"metadata": {**meta, "name": "p", "uid": "p", "ownerReferences": of_job(name, "u")}, "spec": {}}
    lists.items |= {"jobs": [job], "pods": [{**pod, "status": {"phase": "Running"}}]}

    def fail() -> None:
        failed = {"conditions": [{"type": "FailureTarget", "status": "True"}]}
        lists.items |= {"jobs": [{**job, "status": failed}], "pods": [{**pod, "status": {"phase": "Failed"}}]}

    lists.before_jobs = fail
    world = observe(reader)
    assert [item.failed for item in world.jobs] == [True]
    assert [item.phase for item in world.pods] == ["Failed"]


def test_the_last_check_before_a_launch_uses_no_old_list() -> None:
    lists = Lists()
    reader, store = reader_of(lists)
    have_watched(store, "7")
    lists.versions["pods"] = 6
    with pytest.raises(StaleListError):
        asyncio.run(reader.own_pods(JobRef(name=NAME, namespace="ns", uid=f"uid-{NAME}", generation=1), ()))


def test_a_restored_api_server_whose_versions_began_anew_is_believed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lists = Lists()
    reader, store = reader_of(lists)
    have_watched(store, "1000")
    with pytest.raises(StaleListError):
        observe(reader)
    monkeypatch.setattr(module, "STALE_LIST_SECONDS", 0.0)
    observe(reader)


@pytest.mark.parametrize("watched", ["", "opaque"], ids=["nothing-yet", "no-number"])
def test_without_a_version_to_compare_every_list_is_used(watched: str) -> None:
    reader, store = reader_of(Lists())
    have_watched(store, watched)
    observe(reader)


def test_an_interrupted_watch_still_tells_what_is_old() -> None:
    reader, store = reader_of(Lists())
    have_watched(store, "8")
    for informer in store.informers:
        informer.is_live = False
    with pytest.raises(StaleListError):
        observe(reader)


def test_a_pod_that_has_ended_is_never_seen_with_the_lease_of_before_its_end() -> None:
    """Rank 0 writes that it has drained, and then exits: whoever sees its exit must see what it wrote."""
    lists = Lists()
    reader, _ = reader_of(lists)
    marks = {str(Label.JOB): NAME, str(Label.ATTEMPT): "1", str(Label.ROLE): "worker"}
    meta = {"namespace": "ns", "labels": marks, "uid": f"uid-{NAME}-a1", "name": f"{NAME}-a1"}
    lists.items["jobs"] = [{"metadata": {**meta, "ownerReferences": of_resource(NAME)}}]
    pod = {
        "metadata": {**meta, "name": "p", "uid": "p", "ownerReferences": of_job(f"{NAME}-a1", meta["uid"])},
        "status": {"phase": "Running"},
    }
    lease = {"metadata": {**meta, "uid": "l", "ownerReferences": of_resource(NAME), "annotations": {}}}
    lists.items |= {"pods": [pod], "leases": [lease]}

    def drain() -> None:
        notes = {str(LeaseKey.PHASE): str(TrainerPhase.DRAINED)}
        lists.items["leases"] = [{"metadata": {**lease["metadata"], "annotations": notes}}]
        lists.items["pods"] = [{**pod, "status": {"phase": "Failed"}}]

    lists.before_pods = drain
    world = observe(reader)
    assert [item.phase for item in world.workers(1)] == ["Failed"]
    assert world.leases[1].phase == TrainerPhase.DRAINED


def test_a_shortage_of_devices_is_dated_when_it_is_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = Lists()
    nodes, renewals = NodeCache(), RenewalCache()
    store = ClusterStore(nodes, renewals)
    for informer in store.informers:
        informer.has_listed = True
    reader = ClusterReader(lists, nodes, renewals, store, ())  # type: ignore[arg-type]
    ready = [{"type": "Ready", "status": "True"}]
    status = {"conditions": ready, "allocatable": {GPU: "2"}, "capacity": {GPU: "2"}}
    nodes.update({"metadata": {"name": "n1"}, "spec": {}, "status": status}, 1000.0)
    lists.items["pods"] = [running_pod("mine", "j", "2", {Label.JOB: NAME, Label.ATTEMPT: "1", Label.ROLE: "worker"})]
    record = read_record({"metadata": META, "spec": SPEC, "status": {"attempt": 1, "jobUids": ["j"]}})

    def read(now: float) -> Mapping[str, float]:
        monkeypatch.setattr(module.time, "time", lambda: now)
        return asyncio.run(reader.observe(record, GPU, fresh=True)).short_since

    assert read(2000.0) == {}
    lists.items["pods"].append(running_pod("other", "x", "1", {}))
    assert read(3000.0) == {"n1": 3000.0}
    assert read(3005.0) == {"n1": 3000.0}


def running_pod(name: str, owner: str, gpus: str, labels: Mapping[str, str]) -> dict[str, Any]:
    reference = {"kind": "Job", "name": f"{NAME}-a1", "uid": owner, "controller": True}
    meta = {"namespace": "ns", "name": name, "uid": name, "labels": dict(labels), "ownerReferences": [reference]}
    container = {"name": "train", "resources": {"limits": {GPU: gpus}, "requests": {GPU: gpus}}}
    return {"metadata": meta, "spec": {"nodeName": "n1", "containers": [container]}, "status": {"phase": "Running"}}
