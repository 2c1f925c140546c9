"""Failures of a cluster, drawn from a seed. Pure: the same seed gives the same failures, whatever the policy does.

The mix is that of the 54 days of Llama 3 405B on 16,384 GPUs (Llama Team 2024, table 5, and section 3.3.4 for the
planned interruptions). The counts of the table add up to its 419; its percentage of faulty GPUs (30.1 %) does not agree
with its count (148 of 419 are 35.3 %), and the counts are used.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Iterator

from simulation.assumptions import DAY_SECONDS, GPUS_PER_NODE, REFERENCE_GPUS, Assumptions

REFERENCE_DAYS = 54


class Effect(enum.Enum):
    """What a failure does to the cluster."""

    DEVICE = "a GPU fails: the pod on it fails, and the node offers one GPU less until it is repaired"
    HOST = "a node falls silent with everything on it until it is repaired"
    NETWORK = "the nodes behind a cable or a rack switch fall silent until it is repaired"
    CRASH = "a process of the training fails; the hardware is healthy"
    HANG = "a collective hangs until a watchdog ends the processes; the hardware is healthy"
    PLANNED = "a node is cordoned, its pods may finish, and it returns after its maintenance"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One row of the mix. `count`: interruptions within REFERENCE_DAYS on REFERENCE_GPUS."""

    name: str
    count: int
    effect: Effect


CAUSES = (
    Cause(name="faulty GPU", count=148, effect=Effect.DEVICE),
    Cause(name="GPU HBM3 memory", count=72, effect=Effect.DEVICE),
    Cause(name="software bug", count=54, effect=Effect.CRASH),
    Cause(name="network switch or cable", count=35, effect=Effect.NETWORK),
    Cause(name="host maintenance", count=32, effect=Effect.HOST),
    Cause(name="GPU SRAM memory", count=19, effect=Effect.DEVICE),
    Cause(name="GPU system processor", count=17, effect=Effect.DEVICE),
    Cause(name="NIC", count=7, effect=Effect.HOST),
    Cause(name="NCCL watchdog timeout", count=7, effect=Effect.HANG),
    Cause(name="silent data corruption", count=6, effect=Effect.DEVICE),
    Cause(name="GPU thermal interface or sensor", count=6, effect=Effect.DEVICE),
    Cause(name="SSD", count=3, effect=Effect.HOST),
    Cause(name="power supply", count=3, effect=Effect.HOST),
    Cause(name="server chassis", count=2, effect=Effect.HOST),
    Cause(name="IO expansion board", count=2, effect=Effect.HOST),
    Cause(name="dependency", count=2, effect=Effect.CRASH),
    Cause(name="CPU", count=2, effect=Effect.HOST),
    Cause(name="system memory", count=2, effect=Effect.HOST),
    Cause(name="planned maintenance", count=47, effect=Effect.PLANNED),
)
MAINTENANCE = "host maintenance"
"""The only unplanned cause whose repair time is that of maintenance."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure.

    Attributes:
        time: seconds since the beginning.
        nodes: numbers of the nodes that it hits; more than one if a rack switch fails.
        repair_seconds: time until they work again; 0 if the hardware is healthy.
    """

    time: float
    cause: str
    effect: Effect
    nodes: tuple[int, ...]
    repair_seconds: float = 0.0


def failures_per_node_second() -> float:
    """Return the rate of all causes for one node."""
    return sum(cause.count for cause in CAUSES) / (REFERENCE_GPUS / GPUS_PER_NODE) / (REFERENCE_DAYS * DAY_SECONDS)


def make_trace(assumptions: Assumptions, *, num_nodes: int, num_spares: int, seed: int) -> tuple[Failure, ...]:
    """Draw all failures of a cluster in the order of their times.

    The failures of the first `num_nodes` nodes do not depend on the number of spares, so that policies with and
    without spares meet the same ones. A spare runs no training, so it has no software failures and no drains.
    """
    found = list(_draw(assumptions, range(num_nodes), random.Random(f"{seed} nodes")))
    if num_spares:
        spares = _draw(assumptions, range(num_nodes, num_nodes + num_spares), random.Random(f"{seed} spares"))
        found += [item for item in spares if item.effect in (Effect.DEVICE, Effect.HOST, Effect.NETWORK)]
    return tuple(sorted(found, key=lambda item: item.time))


def _draw(assumptions: Assumptions, nodes: range, generator: random.Random) -> Iterator[Failure]:
    weights = [cause.count for cause in CAUSES]
    rate = failures_per_node_second() * len(nodes)
    time = generator.expovariate(rate)
    while time < assumptions.seconds:
        (cause,) = generator.choices(CAUSES, weights)
        node = generator.choice(nodes)
        is_switch = generator.random() < assumptions.switch_fraction
        repair = _draw_repair(assumptions, cause, generator)
        yield Failure(
            time=time,
            cause=cause.name,
            effect=cause.effect,
            nodes=_rack(assumptions, node, nodes) if cause.effect is Effect.NETWORK and is_switch else (node,),
            repair_seconds=repair,
        )
        time += generator.expovariate(rate)


def _rack(assumptions: Assumptions, node: int, nodes: range) -> tuple[int, ...]:
    size = int(assumptions.rack_nodes)
    first = node - (node - nodes.start) % size
    return tuple(range(first, min(first + size, nodes.stop)))


def _draw_repair(assumptions: Assumptions, cause: Cause, generator: random.Random) -> float:
    # Draw the same numbers for every cause, so that a changed assumption changes no other failure.
    is_reset, draw = generator.random() < assumptions.reset_fraction, generator.expovariate(1.0)
    if cause.effect in (Effect.CRASH, Effect.HANG):
        return 0.0
    if cause.effect is Effect.PLANNED or cause.name == MAINTENANCE:
        hours = assumptions.maintenance_hours
    elif cause.effect is Effect.NETWORK:
        hours = assumptions.network_hours
    else:
        hours = assumptions.reset_hours if is_reset else assumptions.replace_hours
    return draw * hours * 3600.0
