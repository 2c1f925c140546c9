"""Claims and volumes are read with few requests, and what the operator may not read restricts nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.cluster import volume_reader
from elastic_operator.cluster.caches import NodeCache, RenewalCache
from elastic_operator.cluster.reader import ClusterReader
from elastic_operator.cluster.store import ClusterStore
from elastic_operator.cluster.volume_reader import VolumeReader
from elastic_operator.observed.placement.volumes import ClaimView
from elastic_operator.reconcile.record import Record, read_record
from tests.unit.elastic_operator.api_in_memory import Api
from tests.unit.elastic_operator.crowd import GPU, SPEC

CLAIM_NAME = str(SPEC["checkpoint"]["claimName"])
TERM = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}


def record(name: str = "gpt", claim: str = CLAIM_NAME) -> Record:
    spec = {**SPEC, "checkpoint": {**SPEC["checkpoint"], "claimName": claim}}
    return read_record(
        {"metadata": {"namespace": "ns", "name": name, "uid": f"uid-{name}", "generation": 1}, "spec": spec}
    )


class CountingApi(Api):
    """Lists what is read by name."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    async def _answer(self, request: Any) -> Any:
        parts = request.path.rsplit("/", 2)
        self.read.append("/".join(parts[1:]))
        return await super()._answer(request)


def api_with_claim(terms: Any = (TERM,), phase: str = "Bound", **spec: Any) -> CountingApi:
    api = CountingApi()
    claim = {"volumeName": "pv", "accessModes": ["ReadWriteMany"], **spec}
    api.put("persistentvolumeclaims", {"metadata": {"name": CLAIM_NAME}, "spec": claim, "status": {"phase": phase}})
    required = {"nodeAffinity": {"required": {"nodeSelectorTerms": list(terms)}}}
    api.put("persistentvolumes", {"metadata": {"name": "pv", "namespace": ""}, "spec": required})
    topologies = [{"matchLabelExpressions": [{"key": "zone", "values": ["b"]}]}]
    fast = {"volumeBindingMode": "WaitForFirstConsumer", "provisioner": "p", "allowedTopologies": topologies}
    api.put("storageclasses", {"metadata": {"name": "fast", "namespace": ""}, **fast})
    return api


def with_reader(api: Api, work: Callable[[VolumeReader], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with api.client() as client:
            return await work(VolumeReader(client))

    return asyncio.run(run())


def read(api: Api) -> tuple[ClaimView, ...]:
    found: tuple[ClaimView, ...] = with_reader(api, lambda reader: reader.read_claims(record(), fresh=True))
    return found


def test_the_observation_of_a_job_has_its_claims_and_the_store_remembers_them() -> None:
    api = api_with_claim()

    async def work(client: KubernetesClient) -> None:
        nodes, renewals = NodeCache(), RenewalCache()
        store = ClusterStore(nodes, renewals)
        for informer in store.informers:
            informer.has_listed = True
        reader = ClusterReader(client, nodes, renewals, store, ())
        world = await reader.observe(record(), GPU, fresh=True)
        assert world.volumes == (ClaimView(name=CLAIM_NAME, terms=(TERM,)),)
        assert reader._volume_reader.known_claims(record()) == world.volumes
        assert reader._volume_reader.known_claims(record(claim="other")) == ()

    async def run() -> None:
        async with api.client() as client:
            await work(client)

    asyncio.run(run())


def test_a_claim_that_waits_for_its_first_pod_is_where_its_class_permits() -> None:
    api = api_with_claim(phase="Pending", volumeName="", storageClassName="fast")
    (view,) = read(api)
    assert view.terms == ({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]},)
    del api.objects["storageclasses", "", "fast"]
    (view,) = read(api)
    assert (view.terms, view.problem) == (None, "is not bound to a volume"), "a class that does not exist binds nothing"


def test_a_claim_that_does_not_exist_is_a_problem() -> None:
    (view,) = read(CountingApi())
    assert (view.terms, view.problem) == (None, "does not exist")


@pytest.mark.parametrize(
    ("forbidden", "expected"),
    [
        ("persistentvolumeclaims", ()),
        ("persistentvolumes", (ClaimView(name=CLAIM_NAME),)),
    ],
)
def test_without_a_right_the_claim_restricts_nothing_and_the_log_says_so_once(
    forbidden: str, expected: tuple[ClaimView, ...], caplog: pytest.LogCaptureFixture
) -> None:
    api = api_with_claim()
    api.forbidden = {forbidden}

    async def work(reader: VolumeReader) -> None:
        for _ in range(3):
            assert await reader.read_claims(record(), fresh=True) == expected

    with caplog.at_level(logging.WARNING):
        with_reader(api, work)
    (message,) = [item.message for item in caplog.records if "grant" in item.message]
    assert message.endswith(f"{forbidden} is forbidden; grant the operator get of {forbidden}")


@pytest.mark.parametrize(
    ("kind", "phase"), [("storageclasses", "Pending"), ("unserved", "Pending"), ("persistentvolumes", "Bound")]
)
def test_what_cannot_be_read_besides_the_claim_is_no_problem_of_it(kind: str, phase: str) -> None:
    api = api_with_claim(phase=phase, storageClassName="fast", volumeName="pv" if phase == "Bound" else "")
    if kind == "unserved":
        api.unserved = {"storageclasses"}
    else:
        api.forbidden = {kind}
    assert read(api) == (ClaimView(name=CLAIM_NAME),)


def test_an_error_of_the_api_server_restricts_nothing_and_ends_no_pass() -> None:
    api = api_with_claim()
    api.unserved = {"persistentvolumeclaims"}
    assert read(api) == ()


@pytest.mark.parametrize("terms", [[7], [{"matchExpressions": [{"key": "zone"}]}]])
def test_a_malformed_volume_restricts_nothing_and_is_reported(terms: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(api_with_claim(terms)) == ()
    assert f"persistentvolumeclaims ns/{CLAIM_NAME}" in caplog.text


def test_a_thousand_jobs_with_one_claim_cause_two_requests() -> None:
    api = api_with_claim()

    async def work(reader: VolumeReader) -> None:
        for number in range(1000):
            assert len(await reader.read_claims(record(f"job-{number}"), fresh=False)) == 1

    with_reader(api, work)
    assert api.read == [f"persistentvolumeclaims/{CLAIM_NAME}", "persistentvolumes/pv"]


@pytest.mark.parametrize(
    ("phase", "fresh", "age", "is_read_again"),
    [
        pytest.param("Bound", False, 30.0, False, id="a-bound-claim-of-a-running-attempt"),
        pytest.param("Bound", False, 61.0, True, id="a-bound-claim-after-a-minute"),
        pytest.param("Bound", True, 0.1, True, id="before-a-plan"),
        pytest.param("Pending", False, 0.1, True, id="a-claim-that-is-about-to-be-bound"),
    ],
)
def test_a_claim_is_read_again_when_it_may_have_changed(
    phase: str, fresh: bool, age: float, is_read_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = api_with_claim(phase=phase, storageClassName="fast", volumeName="pv" if phase == "Bound" else "")
    clock = [1000.0]
    monkeypatch.setattr(volume_reader.time, "monotonic", lambda: clock[0])

    async def work(reader: VolumeReader) -> None:
        await reader.read_claims(record(), fresh=True)
        clock[0] += age
        await reader.read_claims(record(), fresh=fresh)

    with_reader(api, work)
    assert api.read.count(f"persistentvolumeclaims/{CLAIM_NAME}") == 1 + is_read_again
    assert api.read.count("persistentvolumes/pv") == (phase == "Bound"), "the node affinity of a volume stays"


def test_a_claim_that_is_made_again_under_its_name_gets_its_own_volume_read() -> None:
    api = api_with_claim()

    async def work(reader: VolumeReader) -> None:
        await reader.read_claims(record(), fresh=True)
        api.put("persistentvolumeclaims", api.objects["persistentvolumeclaims", "ns", CLAIM_NAME], uid="another")
        api.put("persistentvolumes", {"metadata": {"name": "pv", "namespace": ""}, "spec": {}})
        reader._claims.clear()
        assert await reader.read_claims(record(), fresh=True) == (ClaimView(name=CLAIM_NAME),)

    with_reader(api, work)
