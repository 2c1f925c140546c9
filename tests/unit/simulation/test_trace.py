"""Failures come from the seed alone, and in the published mix."""

from __future__ import annotations

import collections

import pytest

from simulation.assumptions import GPUS_PER_NODE, REFERENCE_GPUS, Assumptions
from simulation.trace import CAUSES, Effect, Failure, failures_per_node_second, make_trace

NODES = REFERENCE_GPUS // GPUS_PER_NODE
ASSUMPTIONS = Assumptions()


def trace(seed: int = 1, num_nodes: int = NODES, num_spares: int = 0, **changes: float) -> tuple[Failure, ...]:
    return make_trace(Assumptions(**changes), num_nodes=num_nodes, num_spares=num_spares, seed=seed)


def test_the_mix_is_the_published_one() -> None:
    counts = {cause.name: cause.count for cause in CAUSES}
    assert sum(counts.values()) == 466
    assert sum(cause.count for cause in CAUSES if cause.effect is not Effect.PLANNED) == 419
    assert (counts["faulty GPU"], counts["GPU HBM3 memory"], counts["software bug"]) == (148, 72, 54)
    assert (counts["network switch or cable"], counts["host maintenance"], counts["silent data corruption"]) == (
        35,
        32,
        6,
    )
    assert failures_per_node_second() * NODES * 3 * 3600 == pytest.approx(1.08, abs=0.01)


def test_the_same_seed_gives_the_same_failures_and_another_seed_others() -> None:
    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


def test_many_failures_have_the_stated_rates() -> None:
    drawn = trace(days=54 * 40)
    counts = collections.Counter(failure.cause for failure in drawn)
    for cause in CAUSES:
        # Five standard deviations of a Poisson count.
        expected = cause.count * 40
        assert abs(counts[cause.name] - expected) < 5 * expected**0.5, cause.name
    hardware = [failure.repair_seconds for failure in drawn if failure.cause == "faulty GPU"]
    mean = (
        ASSUMPTIONS.reset_fraction * ASSUMPTIONS.reset_hours
        + (1 - ASSUMPTIONS.reset_fraction) * ASSUMPTIONS.replace_hours
    )
    assert sum(hardware) / len(hardware) / 3600 == pytest.approx(mean, rel=0.1)


def test_the_rate_grows_with_the_cluster() -> None:
    small, large = (len(trace(num_nodes=NODES // part, days=54 * 40)) for part in (16, 1))
    assert large / small == pytest.approx(16, rel=0.1)


def test_a_switch_takes_its_rack_and_a_cable_one_node() -> None:
    network = [failure for failure in trace(days=540, rack_nodes=4) if failure.effect is Effect.NETWORK]
    sizes = collections.Counter(len(failure.nodes) for failure in network)
    assert set(sizes) == {1, 4}
    assert sizes[4] / len(network) == pytest.approx(ASSUMPTIONS.switch_fraction, abs=0.15)
    for failure in network:
        if len(failure.nodes) == 4:
            assert failure.nodes[0] % 4 == 0
            assert failure.nodes == tuple(range(failure.nodes[0], failure.nodes[0] + 4))


def test_spares_have_failures_of_their_own_and_change_none_of_the_others() -> None:
    without, with_spares = trace(), trace(num_spares=32)
    assert [failure for failure in with_spares if failure.nodes[0] < NODES] == list(without)
    spare = [failure for failure in trace(num_spares=NODES) if failure.nodes[0] >= NODES]
    assert spare
    assert {failure.effect for failure in spare} == {Effect.DEVICE, Effect.HOST, Effect.NETWORK}


def test_healthy_hardware_needs_no_repair() -> None:
    for failure in trace():
        assert (failure.repair_seconds == 0) == (failure.effect in (Effect.CRASH, Effect.HANG))
