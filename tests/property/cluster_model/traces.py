"""Traces: a job and the events that happen to it, drawn at random, played, and followed to the end of the job."""

from __future__ import annotations

import collections
import dataclasses
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_operator.api.status import TERMINAL
from elastic_operator.reconcile.failures.refused_commits import ASKING
from tests.property.cluster_model import invariants
from tests.property.cluster_model.cluster import NODES
from tests.property.cluster_model.world import Setup, World
from tests.randomness import seeds

Event = tuple[Any, ...]
Choices = Mapping[str, Sequence[Sequence[Any]]]
"""For each event, a method of `World`, the values of each of its arguments; one of them is drawn."""

MAX_EVENTS = 40
MAX_SECONDS = 20_000.0
"""Virtual time within which a job ends once everything is right again."""

_MOSTLY, _RARELY = (True, True, False), (False, False, True)
"""Of what stops the job as long as it lasts; so it does not last long."""
_CRASHES = (*[None] * 13, *range(13))

PASSES: Choices = {
    "operate": [_CRASHES],
    "tick": [(1.0, 1.0, 2.0, 7.0, 20.0)],
    "proceed": [(5.0, 15.0, 40.0, 40.0)],
}
INFRASTRUCTURE: Choices = {
    "kill": [NODES],
    "silence": [NODES],
    "isolate": [NODES],
    "isolate_attempt": [(0.0, 40.0, 40.0)],
    "heal": [NODES],
    "preempt": [range(3), (1.0, 4.0, 30.0)],
    "outage": [(20.0, 150.0)],
    "skew": [NODES, (-130.0, 0.0, 130.0, 4000.0)],
    "plugin": [NODES, (0, 1, 2)],
    "cordon": [NODES, (True, False)],
    "taint": [NODES, ("", "NoSchedule", "NoExecute")],
}
FAULTS: Choices = {
    **INFRASTRUCTURE,
    "cut": [("kubelet", "trainer"), NODES],
    "storage": [NODES, _MOSTLY],
    "connect_operator": [_MOSTLY],
    "fail_pod": [range(6), (1, 1, 43)],
    "fail_conversion": [NODES, (1, 1, 20)],
    "stick": [range(6)],
    "release": [],
    "room": [_MOSTLY],
    "block": [NODES, (True, False)],
    "image": [_MOSTLY],
    "damage": [],
    "suspend": [_RARELY],
}
REFUSALS: Choices = {
    **FAULTS,
    "refuse": [("convert", "read", "load", "")],
    "say": [("", "Beginning", "newest", "oldest", "a99/step-00000001")],
}
QUEUE_FAULTS: Choices = {**FAULTS, "allot": [(0, 1, 1, 2, 3, 3), (0.0, 40.0)], "evict": []}
PREDECESSOR_FAULTS: Choices = {**FAULTS, "collect": []}
FREQUENT = ("isolate", "isolate_attempt", "kill", "fail_conversion", "refuse")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """A job and what happens to it, in order: names of methods of `World`, with their arguments."""

    setup: Setup
    events: Sequence[Event] = ()


def draw_trace(chance: random.Random, setups: Mapping[str, Sequence[Any]], faults: Choices) -> Trace:
    """Draw a job and up to MAX_EVENTS events, of which about half let time pass or the operator act.

    Args:
        chance: source of randomness.
        setups: values of the fields of `Setup`.
        faults: what else may happen.
    """
    setup = Setup(**{field: chance.choice(values) for field, values in setups.items()})
    names = [*faults, *(name for name in FREQUENT if name in faults)]
    events: list[Event] = []
    for _ in range(chance.randint(0, MAX_EVENTS)):
        name = chance.choice(list(PASSES) if chance.random() < 0.5 else names)
        events.append((name, *(chance.choice(values) for values in {**PASSES, **faults}[name])))
    return Trace(setup=setup, events=tuple(events))


def happen(world: World, events: Sequence[Event]) -> None:
    """Let events happen one after another, until the job ends."""
    for name, *arguments in events:
        if world.phase in TERMINAL and world.status["reason"] not in ASKING:
            return
        getattr(world, name)(*arguments)


def finish(world: World) -> str:
    """Put everything right again, and wait until the job ends; return the reason of its end.

    A job that stops to ask is answered: first with its newest commit, and in the end with Beginning.
    """
    world.repair()
    for word in ("newest", "oldest", "Beginning"):
        reason = _wait_for_end(world)
        if reason not in ASKING:
            return reason
        world.answer(word)
    return _wait_for_end(world)


def _wait_for_end(world: World) -> str:
    limit = world.now + MAX_SECONDS
    while world.phase not in TERMINAL:
        world.proceed()
        assert world.now < limit, f"the job does not end: {json.dumps(world.status, indent=1)[:4000]}"
    return invariants.check_end(world)


def play(trace: Trace) -> World:
    """Let everything happen, put everything right again, and wait until the job ends."""
    world = World(setup=trace.setup)
    happen(world, trace.events)
    world.effects[finish(world)] += 1
    world.effects.update(str(event[0]) for event in trace.events)
    return world


def play_many(
    setups: Mapping[str, Sequence[Any]],
    faults: Choices,
    count: int,
    *,
    soak: int | None = None,
    check: Callable[[Trace], World] = play,
) -> collections.Counter[str]:
    """Play random traces; count how often each event and effect happened, and each end was reached.

    Raises:
        AssertionError: a trace has failed; the message has the shortest one found that fails likewise.
    """
    covered: collections.Counter[str] = collections.Counter()
    for seed in seeds(count, soak=soak):
        trace = draw_trace(random.Random(seed), setups, faults)
        failure = _find_failure(trace, check, covered)
        if failure is not None:
            shorter = _shorten(trace, check, str(failure))
            raise AssertionError(f"{failure}\nKeep this trace (seed {seed}):\n{shorter}") from failure
    return covered


def _find_failure(
    trace: Trace, check: Callable[[Trace], World], covered: collections.Counter[str] | None = None
) -> Exception | None:
    try:
        effects = check(trace).effects
    except Exception as error:
        return error
    if covered is not None:
        covered.update(effects)
    return None


def _shorten(trace: Trace, check: Callable[[Trace], World], message: str) -> Trace:
    """Leave out one event after another as long as the trace fails with a message that begins alike."""
    start = message[:30]
    index = len(trace.events) - 1
    while index >= 0:
        shorter = dataclasses.replace(trace, events=(*trace.events[:index], *trace.events[index + 1 :]))
        failure = _find_failure(shorter, check)
        if failure is not None and str(failure).startswith(start):
            trace = shorter
        index = min(index, len(trace.events)) - 1
    return trace
