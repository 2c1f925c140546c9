"""Faults at every request of three recoveries, on a real API server: all converge, and nothing happens twice.

Etcd and kube-apiserver run alone; `played_cluster` plays controllers, kubelets and trainer. First the requests of
undisturbed recoveries are recorded. Then each recovery is repeated with one fault at one of these requests: a kill
before and after every request, a stale answer to every list, one of the other faults at every write, and one at every
third event of a watch. In a soak (`make soak`) every write and every event meets every fault.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import dataclasses
import hashlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.apiserver import apiserver
from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.credentials import read_kubeconfig
from elastic_operator.client.resources import JOB, LEASE, POD, TRAINING_JOB
from elastic_operator.cluster.informer import Informer
from elastic_operator.cluster.shutdown import cancel_tasks
from elastic_operator.cluster.watch_stream import WatchedCollection
from testbed.errors import CannotRunHereError
from testbed.kubectl import Kubectl
from tests.cluster.fault_proxy import KILLS, WATCH_FAULTS, WRITE_FAULTS, WRITES, Fault, FaultProxy, Point, Rule
from tests.cluster.played_cluster import PlayedCluster
from tests.cluster.recovery_lane import SCENARIOS, Lane, LaneError, OperatorInProcess, OperatorProcess, Scenario
from tests.randomness import SOAKING

pytestmark = [pytest.mark.cluster, pytest.mark.own_api_server, pytest.mark.timeout(1800)]  # minutes of processor time

ROOT = Path(__file__).parents[2]
NUM_LANES = 12
NUM_RECORDED = 2
"""Undisturbed recoveries of each kind; the last one counts. In the first ones the operator does some things once."""

MAX_TRIES = 2
"""A request that did not come in so many recoveries is not a part of every recovery, and is given up."""

MAX_MISSED = 0.2
"""Largest share of faults whose request did not come."""

MAX_FAILURES = 10
NUM_KILLED_PROCESSES = 9

Start = Callable[[str], OperatorInProcess | OperatorProcess]
Counts = dict[str, collections.Counter[tuple[str, str]]]


@dataclasses.dataclass(slots=True)
class Results:
    """What was injected.

    Attributes:
        pending: faults that were not injected yet, by scenario, with the number of recoveries that lacked the request.
        missed: faults that were given up, because their request did not come.
        failures: recoveries that did not converge, or where something happened twice, each with its requests.
    """

    pending: dict[str, collections.deque[tuple[Rule, int]]]
    num_injected: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    missed: list[tuple[str, Rule]] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.failures) >= MAX_FAILURES or not any(self.pending.values())


def all_faults(verb: str) -> tuple[Fault, ...]:
    """Return the faults that a request with this verb can meet."""
    if verb == "watch":
        return WATCH_FAULTS
    if verb == "list":
        return (*KILLS, Fault.STALE_LIST)
    return (*KILLS, *WRITE_FAULTS) if verb in WRITES else KILLS


def some_faults(verb: str, turn: int) -> tuple[Fault, ...]:
    """Return every kill and the stale list, and of the other faults one in turn; of those of watches every third."""
    others = [fault for fault in all_faults(verb) if fault not in (*KILLS, Fault.STALE_LIST)]
    if verb == "watch":
        return (WATCH_FAULTS[turn // 3 % len(WATCH_FAULTS)],) if turn % 3 == 0 else ()
    chosen = [others[turn % len(others)]] if others else []
    return (*(fault for fault in all_faults(verb) if fault not in others), *chosen)


def make_rules(recorded: Mapping[tuple[str, str], int]) -> Iterator[Rule]:
    """Return the faults for the requests of one recovery, in an order in which different ones follow each other."""
    points = [Point(*key, number) for key, count in sorted(recorded.items()) for number in range(count)]
    rules = [
        Rule(point, fault)
        for turn, point in enumerate(points)
        for fault in (all_faults(point.verb) if SOAKING else some_faults(point.verb, turn))
    ]
    yield from sorted(rules, key=lambda rule: hashlib.sha256(str(rule).encode()).hexdigest())


def make_kills(recorded: Mapping[tuple[str, str], int]) -> Iterator[Rule]:
    """Return kills around writes: all in a soak, else a few."""
    rules = [rule for rule in make_rules(recorded) if rule.point.verb in WRITES and rule.fault in KILLS]
    yield from rules if SOAKING else rules[: NUM_KILLED_PROCESSES // len(SCENARIOS)]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """An API server with the kind; its administrator's kubeconfig, and the token of the operator's account."""
    with contextlib.ExitStack() as stack:
        try:
            config = stack.enter_context(apiserver())
        except CannotRunHereError as error:
            pytest.skip(str(error))
        kubectl = Kubectl(config)
        kubectl("apply", "--server-side", "-f", str(ROOT / "crds/elastictrainingjobs.yaml"))
        kubectl.wait_established("elastictrainingjobs.elastictraining.dev")
        kubectl("create", "namespace", "home")
        kubectl("create", "serviceaccount", "operator", "-n", "home")
        kubectl(
            "create", "clusterrolebinding", "operator", "--clusterrole=cluster-admin", "--serviceaccount=home:operator"
        )
        yield config, kubectl("create", "token", "operator", "-n", "home", "--duration=24h").strip()


class Harness:
    """The proxy, and the lanes behind it."""

    def __init__(self, client: KubernetesClient, proxy: FaultProxy, start: Start, name: str) -> None:
        self._client = client
        self._proxy = proxy
        self._start = start
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
        self._num_lanes += 1
        cluster = PlayedCluster(self._client, f"{self._name}-{self._num_lanes}")
        self._clusters[cluster.namespace] = cluster
        return Lane(self._proxy, cluster, self._start)


async def record(lane: Lane) -> Counts:
    """Return the requests of an undisturbed recovery, by scenario, verb and resource."""
    recorded: Counts = {}
    for _ in range(NUM_RECORDED):
        for scenario in SCENARIOS:
            await lane.recover(scenario, None)
            recorded[scenario.name] = lane.view.counts.copy()
    return recorded


async def inject(harness: Harness, results: Results) -> None:
    """Let one lane after the other go through recoveries with faults, until all are injected."""
    while not results.is_done:
        lane, scenario, rule = harness.lane(), SCENARIOS[0], None
        try:
            async with lane.run():
                while not results.is_done:
                    for scenario in SCENARIOS:
                        queue = results.pending[scenario.name]
                        rule, tries = queue.popleft() if queue else (None, 0)
                        await lane.recover(scenario, rule)
                        if rule is not None:
                            _count(results, scenario, rule, tries + 1, is_hit=lane.view.hit)
        except LaneError as error:
            # The lane is spoilt; the next one goes on with the other faults.
            results.failures.append("\n    ".join([f"{scenario.name}: {rule}: {error}", *lane.view.log]))


def _count(results: Results, scenario: Scenario, rule: Rule, tries: int, *, is_hit: bool) -> None:
    if is_hit:
        results.num_injected[rule.fault] += 1
    elif tries < MAX_TRIES:
        results.pending[scenario.name].append((rule, tries))
    else:
        results.missed.append((scenario.name, rule))


async def run(
    config: Path, start: Start, name: str, choose: Callable[[Mapping[tuple[str, str], int]], Iterator[Rule]], lanes: int
) -> Results:
    """Record undisturbed recoveries, then inject the faults that `choose` returns for their requests."""
    credentials = read_kubeconfig([config], None, {})
    client = KubernetesClient(credentials, max_connections=0)
    cluster = yaml.safe_load(config.read_text())["clusters"][0]["cluster"]
    trust = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
    try:
        async with FaultProxy(credentials.server, trust).serve() as proxy:
            harness = Harness(client, proxy, start, name)
            async with harness.informed():
                lane = harness.lane()
                async with lane.run():
                    recorded = await record(lane)
                pending = {key: collections.deque((rule, 0) for rule in choose(recorded[key])) for key in recorded}
                results = Results(pending)
                await asyncio.gather(*(inject(harness, results) for _ in range(lanes)))
    finally:
        await client.close()
    for key, counts in recorded.items():
        print(f"{key}: {counts.total()} requests and events of watches: {dict(counts)}")
    return results


def check(results: Results) -> None:
    """Check that all recoveries converged, and that the faults were injected."""
    print(f"{results.num_injected.total()} faults: {dict(results.num_injected)}")
    print(f"{len(results.missed)} whose request did not come:", *results.missed, sep="\n  ")
    assert not results.failures, "\n".join(results.failures)
    # An event is counted up only by an operator that has posted it before: a kill in between makes it a new one.
    firsts = [rule.point for _, rule in results.missed if rule.point.number == 0 and rule.point.resource != "events"]
    assert not firsts, "requests of every recovery did not come"
    assert len(results.missed) <= MAX_MISSED * results.num_injected.total()


def test_every_recovery_converges_with_a_fault_at_any_request_and_nothing_happens_twice(api: tuple[Path, str]) -> None:
    config, token = api
    check(asyncio.run(run(config, lambda address: OperatorInProcess(address, token), "lane", make_rules, NUM_LANES)))


def test_an_operator_process_killed_around_its_writes_converges_and_does_nothing_twice(
    api: tuple[Path, str], tmp_path: Path
) -> None:
    config, token = api
    check(asyncio.run(run(config, lambda url: OperatorProcess(url, token, tmp_path), "process", make_kills, lanes=3)))
