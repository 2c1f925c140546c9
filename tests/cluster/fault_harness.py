"""A lone API server for the operator, the fault proxy before it, and the lanes behind the proxy."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml

from benchmarks.apiserver import CRD
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.credentials import read_kubeconfig
from elastic_operator.client.resources import JOB, LEASE, POD, TRAINING_JOB
from elastic_operator.cluster.informer import Informer
from elastic_operator.cluster.shutdown import cancel_tasks
from elastic_operator.cluster.watch_stream import WatchedCollection
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.own_api_server import own_api_server
from tests.cluster.played_cluster import PlayedCluster
from tests.cluster.recovery_lane import Lane, OperatorInProcess, OperatorProcess

ROOT = Path(__file__).parents[2]

Start = Callable[[str], OperatorInProcess | OperatorProcess]
_Cluster = TypeVar("_Cluster", bound=PlayedCluster)


@contextlib.contextmanager
def apiserver_with_kind(crd: Path = CRD) -> Iterator[tuple[Path, str]]:
    """An API server with the kind; its administrator's kubeconfig, and the token of the operator's account."""
    with own_api_server(crd=crd) as kubectl:
        kubectl("create", "namespace", "home")
        kubectl("create", "serviceaccount", "operator", "-n", "home")
        kubectl(
            "create", "clusterrolebinding", "operator", "--clusterrole=cluster-admin", "--serviceaccount=home:operator"
        )
        yield kubectl.kubeconfig, kubectl("create", "token", "operator", "-n", "home", "--duration=24h").strip()


class Harness:
    """The proxy, and the lanes behind it."""

    def __init__(self, client: KubernetesClient, proxy: FaultProxy, start: Start, name: str) -> None:
        self._client = client
        self.proxy = proxy
        self.start = start
        self._name = name
        self._clusters: dict[str, PlayedCluster] = {}
        self._num_lanes = 0

    @contextlib.asynccontextmanager
    async def informed(self) -> AsyncIterator[None]:
        """Tell the clusters what the API server reports."""

        def follow(plural: str) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
            def put(item: Any) -> None:
                if cluster := self._clusters.get(item["metadata"]["namespace"]):
                    cluster.put(plural, item)

            def drop(key: tuple[str, str]) -> None:
                if cluster := self._clusters.get(key[0]):
                    cluster.drop(plural, key[1])

            return put, drop

        kinds = (TRAINING_JOB, JOB, POD, LEASE)
        informers = [Informer(WatchedCollection(kind=kind), *follow(kind.plural)) for kind in kinds]
        tasks = [asyncio.create_task(informer.follow(self._client)) for informer in informers]
        await asyncio.gather(*(informer.has_synced.wait() for informer in informers))
        try:
            yield
        finally:
            await cancel_tasks(tasks)

    def lane(self) -> Lane:
        """Return a new lane."""
        return Lane(self.proxy, self.cluster(PlayedCluster), self.start)

    def cluster(self, made: Callable[[KubernetesClient, str], _Cluster]) -> _Cluster:
        """Return the cluster of a new lane."""
        self._num_lanes += 1
        cluster = made(self._client, f"{self._name}-{self._num_lanes}")
        self._clusters[cluster.namespace] = cluster
        return cluster


@contextlib.asynccontextmanager
async def harnessed(config: Path, start: Start, name: str) -> AsyncIterator[Harness]:
    """Put the proxy before the API server."""
    credentials = read_kubeconfig([config], None, {})
    client = KubernetesClient(credentials, max_connections=0)
    cluster = yaml.safe_load(config.read_text())["clusters"][0]["cluster"]
    trust = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
    try:
        async with FaultProxy(credentials.server, trust).serve() as proxy:
            harness = Harness(client, proxy, start, name)
            async with harness.informed():
                yield harness
    finally:
        await client.close()
        await asyncio.sleep(0.25)  # its TLS connections take some turns of the loop to close
