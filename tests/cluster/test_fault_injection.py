"""Faults at every request of three recoveries, on a real API server: all converge, and nothing happens twice.

Etcd and kube-apiserver run alone; `played_cluster` plays controllers, kubelets and trainer. First the requests of
undisturbed recoveries are recorded: three with an operator that runs, one with an operator that starts. Then each
recovery is repeated with one fault at one of these requests. `some_faults` says which ones; in a soak (`make test-all`)
every request and every event of a watch meets every fault.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.fault_harness import Harness, Start, apiserver_with_kind, harnessed
from tests.cluster.fault_proxy import (
    KILLS,
    OPEN_FAULTS,
    READ_FAULTS,
    WATCH_FAULTS,
    WRITE_FAULTS,
    WRITES,
    Fault,
    Point,
    Rule,
)
from tests.cluster.recovery_lane import SCENARIOS, LaneError, OperatorInProcess, OperatorProcess, Scenario
from tests.randomness import SOAKING, some

pytestmark = [pytest.mark.cluster, pytest.mark.own_api_server, pytest.mark.timeout(1800)]  # minutes of processor time

NUM_LANES = 12
NUM_RECORDED = 2
"""Undisturbed recoveries of each kind and lane."""

RESTARTED = "operator restarted"

MAX_TRIES = 4
"""A request that did not come in so many recoveries is given up."""

MAX_MISSED_READS = 0.05
"""Largest share of faults of reads and watches that are given up: loaded processors join two passes into one."""

MAX_FAILURES = 10
NUM_KILLED_PROCESSES = 9
NUM_WITH_WRITES = 3
"""Recoveries whose writes are tried in `make test`."""

Counts = collections.Counter[tuple[str, str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """How many requests undisturbed recoveries of one kind make, by verb and resource.

    Attributes:
        least: in every one of them that follows the recoveries before it in `SCENARIOS`.
        most: in at least one of them.
        always: in every one of them, also where `inject` leaves recoveries out before it: less is to be removed then.
    """

    least: Counts
    most: Counts
    always: Counts


@dataclasses.dataclass(slots=True)
class Results:
    """What was injected.

    Attributes:
        recorded: undisturbed recoveries, by scenario.
        pending: faults that were not injected yet, by scenario, with the number of recoveries that lacked the request.
        missed: faults that were given up, because their request did not come.
        failures: recoveries that did not converge, or where something happened twice, each with its requests.
    """

    recorded: dict[str, Recording]
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
    if verb == "open":
        return (Fault.KILL_BEFORE, *OPEN_FAULTS)
    if verb == "list":
        return (*KILLS, Fault.STALE_LIST, *READ_FAULTS)
    return (*KILLS, *(WRITE_FAULTS if verb in WRITES else READ_FAULTS))


def some_faults(verb: str, turn: int, *, is_start: bool) -> tuple[Fault, ...]:
    """Return the faults of `make test`; which of several it is follows from the position of the request.

    Every request meets both kills, every list a stale answer, every write one of its other faults, every second read
    one of its own, and every third event of a watch. Of an operator's start, every request meets one kill and one other
    fault.
    """
    others = [fault for fault in all_faults(verb) if fault not in (*KILLS, Fault.STALE_LIST)]
    if verb == "watch":
        return (others[turn // 3 % len(others)],) if turn % 3 == 0 else ()
    if is_start:
        others += [Fault.STALE_LIST] if verb == "list" else []
        return (KILLS[turn % 2] if verb != "open" else Fault.KILL_BEFORE, others[turn % len(others)])
    kept = tuple(fault for fault in all_faults(verb) if fault not in others)
    return (*kept, others[turn % len(others)]) if verb in WRITES or turn % 2 == 0 else kept


def make_rules(scenario: str, recorded: Recording) -> Iterator[Rule]:
    """Return the faults for the requests of one recovery, in an order in which different ones follow each other.

    In `make test` it is every fourth one: which, follows from their names.
    """
    is_start = scenario == RESTARTED
    counts = recorded.most if SOAKING else recorded.least
    points = [Point(*key, number) for key, count in sorted(counts.items()) for number in range(count)]
    if is_start and not SOAKING:  # the rest is as in the other recoveries
        points = [point for point in points if point.verb in ("list", "open")]
    rules = [
        Rule(point, fault)
        for turn, point in enumerate(points)
        for fault in (all_faults(point.verb) if SOAKING else some_faults(point.verb, turn, is_start=is_start))
    ]
    yield from some(sorted(rules, key=lambda rule: hashlib.sha256(str(rule).encode()).hexdigest()), every=4)


def make_kills(scenario: str, recorded: Recording) -> Iterator[Rule]:
    """Return kills around writes: all in a soak, else a few."""
    rules = [rule for rule in make_rules(scenario, recorded) if rule.point.verb in WRITES and rule.fault in KILLS]
    yield from rules if SOAKING else rules[: NUM_KILLED_PROCESSES // NUM_WITH_WRITES]


@pytest.fixture(scope="module")
def api() -> Iterator[tuple[Path, str]]:
    with apiserver_with_kind() as server:
        yield server


async def record(harness: Harness, lanes: int) -> dict[str, Recording]:
    """Return the requests of undisturbed recoveries, which run side by side as those with faults do."""

    async def record_lane(order: Sequence[Scenario]) -> list[tuple[str, Counts, bool]]:
        lane, found = harness.lane(), []
        async with lane.run():
            # Twice the shorter order, too: what is to be removed first depends on the end of the one before.
            for number, scenarios in enumerate([*[SCENARIOS] * NUM_RECORDED, *[order] * NUM_RECORDED]):
                for scenario in scenarios:
                    await lane.recover(scenario, None)
                    if number:  # in the first ones the operator does some things once
                        found.append((scenario.name, lane.view.counts.copy(), number >= NUM_RECORDED))
        return found

    orders = itertools.islice(itertools.cycle(shorter_orders()), lanes)
    recorded: dict[str, Recording] = {}
    for found in await asyncio.gather(*map(record_lane, orders)):
        for name, counts, is_shorter in found:
            known = recorded.setdefault(name, Recording(counts, counts, counts))
            least = known.least if is_shorter else known.least & counts
            recorded[name] = Recording(least, known.most | counts, known.always & counts)
    return recorded


def shorter_orders() -> list[tuple[Scenario, ...]]:
    """Return the orders that `inject` makes by leaving recoveries out whose faults are all injected."""
    optional = [scenario for scenario in SCENARIOS if not scenario.changes_nodes]
    left_out = (names for count in range(1, len(optional) + 1) for names in itertools.combinations(optional, count))
    return [tuple(scenario for scenario in SCENARIOS if scenario not in names) for names in left_out]


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
                        if rule is None and not scenario.changes_nodes:
                            continue
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
    config: Path, start: Start, name: str, choose: Callable[[str, Recording], Iterator[Rule]], lanes: int
) -> Results:
    """Record undisturbed recoveries, then inject the faults that `choose` returns for their requests."""
    async with harnessed(config, start, name) as harness:
        recorded = await record(harness, lanes)
        pending = {key: collections.deque((rule, 0) for rule in choose(key, recorded[key])) for key in recorded}
        results = Results(recorded, pending)
        await asyncio.gather(*(inject(harness, results) for _ in range(lanes)))
    for scenario, counts in recorded.items():
        print(f"{scenario}: {counts.least.total()} to {counts.most.total()} requests and events: {dict(counts.most)}")
        print(f"  not in every order of recoveries: {dict(counts.least - counts.always)}")
    return results


def check(results: Results) -> None:
    """Check that all recoveries converged, and that the faults were injected."""
    total = results.num_injected.total()
    print(f"{total} faults: {dict(results.num_injected)}")
    print(f"{len(results.missed)} of {total + len(results.missed)} whose request did not come:")
    print(*(f"  {name}: {rule}" for name, rule in results.missed), sep="\n")
    assert not results.failures, "\n".join(results.failures)
    lacking = [rule for name, rule in results.missed if is_in_every(results.recorded[name], rule.point)]
    writes = [str(rule) for rule in lacking if rule.point.verb in WRITES]
    assert not writes, f"writes of every recovery did not come: {writes}"
    assert len(lacking) <= MAX_MISSED_READS * total


def is_in_every(recorded: Recording, point: Point) -> bool:
    """Return whether every undisturbed recovery made a request that can be repeated.

    An event is counted up only by an operator that has posted it before: a kill in between makes it a new one.
    """
    return point.resource != "events" and point.number < recorded.always[point.verb, point.resource]


def test_every_recovery_converges_with_a_fault_at_any_request_and_nothing_happens_twice(api: tuple[Path, str]) -> None:
    config, token = api
    check(asyncio.run(run(config, lambda address: OperatorInProcess(address, token), "lane", make_rules, NUM_LANES)))


def test_an_operator_process_killed_around_its_writes_converges_and_does_nothing_twice(
    api: tuple[Path, str], tmp_path: Path
) -> None:
    config, token = api
    check(asyncio.run(run(config, lambda url: OperatorProcess(url, token, tmp_path), "process", make_kills, lanes=3)))
