"""A write that met a conflict is done later; it is never taken for done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.cluster.writer import ClusterWriter, ConflictError
from elastic_operator.reconcile.actions import Action, DeleteJob, DeletePod, RequestDrain, RevokeAttempt
from tests.unit.elastic_operator.api_in_memory import Api
from tests.unit.elastic_operator.crowd import of_resource

NAME = "job-0"
OF_ATTEMPT = ("rolebindings", "roles", "serviceaccounts", "services", "leases")


def with_writer(api: Api, work: Callable[[ClusterWriter], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with api.client() as client:
            nodes, renewals = NodeCache(), RenewalCache()
            reader = ClusterReader(client, nodes, renewals, ClusterStore(nodes, renewals), ())
            await work(ClusterWriter(client, reader))

    asyncio.run(run())


def api_with(*plurals: str) -> Api:
    api = Api()
    for plural in plurals:
        meta = {"name": f"{NAME}-a1", "namespace": "ns", "ownerReferences": of_resource(NAME)}
        api.put(plural, {"metadata": meta}, uid="uid-1")
    return api


@pytest.mark.parametrize("plural", OF_ATTEMPT)
def test_an_attempt_is_fenced_completely_although_a_delete_meets_a_conflict(plural: str) -> None:
    api = api_with(*OF_ATTEMPT)
    api.conflicts = {("DELETE", plural)}
    revoke = RevokeAttempt(name=f"{NAME}-a1", owner=f"uid-{NAME}")

    async def work(writer: ClusterWriter) -> None:
        with pytest.raises(ConflictError):
            await writer.act("ns", NAME, revoke)
        # The Lease is deleted last: while it is there, the next pass revokes the attempt again.
        assert f"{NAME}-a1" in api.names("leases")
        await writer.act("ns", NAME, revoke)

    with_writer(api, work)
    assert api.objects == {}


@pytest.mark.parametrize(
    ("request_", "action"),
    [
        (("DELETE", "jobs"), DeleteJob(name=f"{NAME}-a1", uid="uid-1")),
        (("DELETE", "pods"), DeletePod(name=f"{NAME}-a1", uid="uid-1", grace_seconds=2)),
        (("PATCH", "leases"), RequestDrain(lease=f"{NAME}-a1", uid="uid-1")),
    ],
    ids=["delete-job", "delete-pod", "request-drain"],
)
def test_a_conflict_makes_the_operator_read_again_at_once(request_: tuple[str, str], action: Action) -> None:
    api = api_with(request_[1])
    api.conflicts = {request_}

    async def work(writer: ClusterWriter) -> None:
        with pytest.raises(ConflictError):
            await writer.act("ns", NAME, action)

    with_writer(api, work)
    assert api.deleted == []


def test_the_pod_group_of_an_attempt_goes_with_it_and_only_where_it_has_one() -> None:
    api = api_with("podgroups", "leases")

    async def work(writer: ClusterWriter) -> None:
        await writer.act("ns", NAME, RevokeAttempt(name=f"{NAME}-a1", owner=f"uid-{NAME}"))
        assert api.names("podgroups") == {f"{NAME}-a1"}
        gang = "scheduling.k8s.io/v1alpha2"
        await writer.act("ns", NAME, RevokeAttempt(name=f"{NAME}-a1", owner=f"uid-{NAME}", gang=gang))

    with_writer(api, work)
    assert api.objects == {}
