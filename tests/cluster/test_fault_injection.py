"""Faults at every request of three recoveries, on a real API server: all converge, and nothing happens twice.

Etcd and kube-apiserver run alone; `played_cluster` plays controllers, kubelets and trainer. First the requests of
undisturbed recoveries are recorded. Then each recovery is repeated with one fault at one of these requests: a kill
before and after every request, a stale answer to every list, one of the other faults at every write, and one at every
third event of a watch. In a soak (`make soak`) every write and every event meets every fault.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster.fault_harness import Harness, Start, apiserver_with_kind, harnessed
from tests.cluster.fault_proxy import KILLS, WATCH_FAULTS, WRITE_FAULTS, WRITES, Fault, Point, Rule
from tests.cluster.recovery_lane import SCENARIOS, Lane, LaneError, OperatorInProcess, OperatorProcess, Scenario
from tests.randomness import SOAKING

pytestmark = [pytest.mark.cluster, pytest.mark.own_api_server, pytest.mark.timeout(1800)]  # minutes of processor time

NUM_LANES = 12
NUM_RECORDED = 2
"""Undisturbed recoveries of each kind; the last one counts. In the first ones the operator does some things once."""

MAX_TRIES = 2
"""A request that did not come in so many recoveries is not a part of every recovery, and is given up."""

MAX_MISSED = 0.2
"""Largest share of faults whose request did not come."""

MAX_FAILURES = 10
NUM_KILLED_PROCESSES = 9

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
def api() -> Iterator[tuple[Path, str]]:
    with apiserver_with_kind() as server:
        yield server


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
    async with harnessed(config, start, name) as harness:
        lane = harness.lane()
        async with lane.run():
            recorded = await record(lane)
        pending = {key: collections.deque((rule, 0) for rule in choose(recorded[key])) for key in recorded}
        results = Results(pending)
        await asyncio.gather(*(inject(harness, results) for _ in range(lanes)))
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
