"""What Kueue says is read afresh, and each change of a Workload names the version that was read."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from elastic_operator.api.serialization import parse_time
from elastic_operator.api.spec import parse_spec
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.api_errors import ApiError
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.cluster.writer import ClusterWriter, ConflictError
from elastic_operator.manifests.attempt import JobRef
from elastic_operator.manifests.workload import workload, workload_spec
from elastic_operator.observed.queueing.workloads import QueueView
from elastic_operator.reconcile.actions import DeleteWorkload, PatchWorkload
from elastic_operator.reconcile.record import Record, read_record
from tests.unit.elastic_operator.api_in_memory import Api
from tests.unit.elastic_operator.crowd import GPU, SPEC

LABELS = {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "low"}
META = {"namespace": "ns", "name": "gpt", "uid": "uid-gpt", "generation": 1, "labels": LABELS}
RECORD = read_record({"metadata": META, "spec": SPEC, "status": {}})


def api_with_kueue(**status: Any) -> Api:
    """An API server with a Workload of the job, a flavor and a priority class."""
    api = Api()
    job = JobRef(name="gpt", namespace="ns", uid="uid-gpt", labels=LABELS)
    made = workload(job, 1, workload_spec(job, parse_spec(SPEC), least=1, most=2, priority=10))
    api.put("workloads", {**made, "status": status}, uid="w1")
    api.put("resourceflavors", {"metadata": {"name": "pool", "namespace": ""}, "spec": {"nodeLabels": {"pool": "a"}}})
    api.put("workloadpriorityclasses", {"metadata": {"name": "low", "namespace": ""}, "value": 10})
    return api


def with_client(api: Api, work: Callable[[KubernetesClient], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        async with api.client() as client:
            return await work(client)

    return asyncio.run(run())


def read(api: Api, record: Record = RECORD) -> QueueView | None:
    async def work(client: KubernetesClient) -> QueueView | None:
        nodes, renewals = NodeCache(), RenewalCache()
        store = ClusterStore(nodes, renewals)
        for informer in store.informers:
            informer.has_listed = True
        world = await ClusterReader(client, nodes, renewals, store, ()).observe(record, GPU, fresh=True)
        return world.queue

    found: QueueView | None = with_client(api, work)
    return found


ADMITTED = {
    "admission": {"podSetAssignments": [{"name": "workers", "count": 1, "flavors": {GPU: "pool"}}]},
    "conditions": [{"type": "QuotaReserved", "status": "True"}, {"type": "Admitted", "status": "True"}],
}


def test_workloads_flavors_and_the_priority_are_read() -> None:
    view = read(api_with_kueue(**ADMITTED))
    assert view is not None
    assert view.current is not None
    assert (view.current.name, view.current.assigned, view.priority, view.problem) == ("gpt-q1", 1, 10, "")
    assert view.placement(view.current).node_labels == {"pool": "a"}


def test_a_job_in_no_queue_asks_nothing() -> None:
    free = dataclasses.replace(RECORD, job=dataclasses.replace(RECORD.job, labels={}))
    assert read(api_with_kueue(), free) is None


def test_a_cluster_without_kueue_has_no_queue() -> None:
    api = Api()
    api.unserved = {"workloads"}
    assert read(api) is None


def test_a_missing_right_is_told() -> None:
    api = api_with_kueue()
    api.forbidden.add("workloads")
    view = read(api)
    assert view is not None
    assert "the operator may not read Workloads" in view.problem


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (("resourceflavors", "", "pool"), "ResourceFlavor pool: expected the flavor that is assigned"),
        (("workloadpriorityclasses", "", "low"), "WorkloadPriorityClass low, which does not exist"),
    ],
)
def test_what_a_workload_refers_to_has_to_exist(missing: tuple[str, str, str], text: str) -> None:
    api = api_with_kueue(**ADMITTED)
    del api.objects[missing]
    view = read(api)
    assert view is not None
    assert text in view.problem + view.refusal


def act(api: Api, *actions: Any) -> None:
    async def work(client: KubernetesClient) -> None:
        nodes, renewals = NodeCache(), RenewalCache()
        reader = ClusterReader(client, nodes, renewals, ClusterStore(nodes, renewals), ())
        for action in actions:
            await ClusterWriter(client, reader).act("ns", "gpt", action)

    with_client(api, work)


def test_a_patch_names_the_version_that_was_read() -> None:
    api = api_with_kueue()
    patch = PatchWorkload(
        name="gpt-q1", uid="w1", version="1", changes={"status": {"admission": None}}, subresource="status"
    )
    act(api, patch)
    ((name, body),) = api.patched
    assert (name, body["status"]) == ("gpt-q1", {"admission": None})
    assert body["metadata"] == {"uid": "w1", "resourceVersion": "1"}
    with pytest.raises(ConflictError):
        act(api, dataclasses.replace(patch, version="0"))


def test_a_patch_that_kueue_refuses_is_an_error_and_a_workload_that_is_gone_is_read_again() -> None:
    api = api_with_kueue()
    patch = PatchWorkload(name="gpt-q1", uid="w1", version="1", changes={})
    api.forbidden.add("workloads")
    with pytest.raises(ApiError):
        act(api, patch)
    api.forbidden.clear()
    act(api, DeleteWorkload(name="gpt-q1", uid="w1"))
    assert api.deleted == [("workloads", "gpt-q1")]
    with pytest.raises(ConflictError):
        act(api, patch)


def test_times_of_kueue_are_read_as_such() -> None:
    api = api_with_kueue()
    api.objects["workloads", "ns", "gpt-q1"]["metadata"]["creationTimestamp"] = "2026-11-24T08:00:00Z"
    view = read(api)
    assert view is not None
    assert view.workloads[0].created_at == parse_time("2026-11-24T08:00:00Z")
