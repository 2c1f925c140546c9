"""A small cluster through hand-made and drawn failures, with the real decisions."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_operator.api.status import Recovery
from elastic_operator.observed.signal_kinds import Kind
from elastic_operator.reconcile.progress import update_goodput
from simulation import durations
from simulation.assumptions import Assumptions
from simulation.attempt import START
from simulation.policies import POLICIES, Policy
from simulation.run import TRAINED, Result, simulate
from simulation.trace import Effect, Failure

GPUS = 128
HOUR = 3600.0
DAY = 24 * HOUR
WAIT, SHRINK, GROW, _, SPARES, _ = POLICIES
ASSUMPTIONS = Assumptions(days=4, parameters=8e9, global_samples=256)
"""A smaller model, so that steps of a small cluster take seconds."""


def run(policy: Policy, *failures: Failure, assumptions: Assumptions = ASSUMPTIONS, polls: bool = False) -> Result:
    return simulate(policy, GPUS, assumptions, seed=1, failures=failures, follow_requeues=polls)


def failure(effect: Effect, *nodes: int, day: float = 1.0, repair_hours: float = 6.0) -> Failure:
    seconds = 0.0 if effect in (Effect.CRASH, Effect.HANG) else repair_hours * HOUR
    return Failure(time=day * DAY, cause="test", effect=effect, nodes=nodes, repair_seconds=seconds)


def parts(result: Result) -> float:
    account = result.account
    return (
        account.productive_seconds
        + account.lost_seconds
        + account.saving_seconds
        + account.down_seconds
        + account.waiting_seconds
    )


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_second_and_every_gpu_hour_is_accounted_for(policy: Policy) -> None:
    result = simulate(policy, GPUS, dataclasses.replace(ASSUMPTIONS, days=150), seed=3)
    assert sum(result.account.hits.values()) > 5
    assert parts(result) == pytest.approx(result.seconds)
    paid = (GPUS + result.num_spare_gpus) * result.seconds / HOUR
    hours = result.gpu_hours()
    assert sum(hours.values()) == pytest.approx(paid)
    if policy.global_samples is None:  # another batch may need less time for a sample
        assert all(value > -1e-6 * paid for value in hours.values()), hours
    assert result.lost_gpu_hours == pytest.approx(paid - hours[TRAINED])


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = (simulate(GROW, GPUS, dataclasses.replace(ASSUMPTIONS, days=60), seed=2) for _ in range(2))
    assert first.account == second.account
    assert first.status == second.status
    assert simulate(GROW, GPUS, dataclasses.replace(ASSUMPTIONS, days=60), seed=4).account != first.account


def test_without_failures_only_the_start_and_the_saves_cost_time() -> None:
    result = run(WAIT)
    account = result.account
    assert (account.attempts, account.waiting_seconds) == (1, 0)
    assert account.lost_seconds < 20  # the step that the end cuts off
    assert account.down_seconds < 600
    idle = account.down_seconds + account.saving_seconds
    assert result.ettr == pytest.approx(1 - idle / result.seconds, abs=0.0001)
    assert result.progress == pytest.approx(result.ettr, abs=0.002)


def last_recovery(result: Result) -> Recovery:
    return result.status.recoveries[-1]


@pytest.mark.parametrize(
    ("effect", "nodes", "cause", "from_failure_to_detection"),
    [
        pytest.param(Effect.DEVICE, (3,), Kind.POD_FAILED, (4.2, 7), id="device"),
        pytest.param(Effect.CRASH, (3,), Kind.POD_FAILED, (4.2, 7), id="crash"),
        pytest.param(Effect.HANG, (3,), Kind.POD_FAILED, (600, 603), id="hang"),
        pytest.param(Effect.HOST, (3,), Kind.NODE_LEASE_STALE, (39, 43), id="host"),
        pytest.param(Effect.HOST, (0,), Kind.NODE_LEASE_STALE, (20, 43), id="host-of-rank-0"),
        pytest.param(Effect.NETWORK, (4, 5), Kind.NODE_LEASE_STALE, (39, 43), id="rack"),
    ],
)
def test_the_operator_detects_a_failure_as_in_a_cluster(
    effect: Effect, nodes: tuple[int, ...], cause: Kind, from_failure_to_detection: tuple[float, float]
) -> None:
    result = run(SHRINK, failure(effect, *nodes))
    recovery = last_recovery(result)
    least, most = from_failure_to_detection
    assert recovery.cause == cause
    assert recovery.detect_time is not None
    assert least <= recovery.detect_time - 1_800_000_000 - DAY <= most
    assert result.account.attempts == 2
    assert 0 < result.account.lost_seconds <= 2 * HOUR
    if effect in (Effect.CRASH, Effect.HANG):
        assert recovery.to == recovery.from_
        assert recovery.conversion is None
    else:
        assert recovery.to != recovery.from_
        assert recovery.conversion is not None
        assert recovery.conversion.seconds == pytest.approx(durations.reshard_seconds(GPUS, ASSUMPTIONS), abs=0.1)


def test_a_planned_maintenance_loses_no_step() -> None:
    result = run(SHRINK, failure(Effect.PLANNED, 3))
    assert last_recovery(result).cause == Kind.NODE_CORDONED
    assert last_recovery(result).lost_steps == 0
    assert result.account.lost_seconds < 60  # nothing but the part of a second between save and exit


def test_the_policies_do_what_their_names_say() -> None:
    lost = failure(Effect.DEVICE, 3, repair_hours=12)
    wait, shrink, grow, spares = (run(policy, lost) for policy in (WAIT, SHRINK, GROW, SPARES))
    assert 11.5 * HOUR < wait.account.waiting_seconds < 12 * HOUR
    assert [shrink.account.attempts, grow.account.attempts, spares.account.attempts] == [2, 3, 2]
    assert shrink.account.waiting_seconds == grow.account.waiting_seconds == spares.account.waiting_seconds == 0
    assert last_recovery(shrink).to != last_recovery(shrink).from_
    assert last_recovery(grow).cause == "CapacityReturned"
    assert last_recovery(spares).to == last_recovery(spares).from_
    assert wait.progress < shrink.progress < grow.progress < spares.progress


def test_a_lost_node_that_returns_before_anybody_noticed_still_ends_the_attempt() -> None:
    result = run(GROW, failure(Effect.HOST, 3, repair_hours=10 / HOUR))
    assert last_recovery(result).cause == Kind.POD_FAILED
    assert result.account.attempts == 2


def test_passes_that_are_left_out_decide_nothing() -> None:
    failures = [
        failure(Effect.HOST, 3, day=0.5 / 24, repair_hours=0.5),
        failure(Effect.DEVICE, 0, day=0.6 / 24, repair_hours=0.7),
        failure(Effect.PLANNED, 5, day=2 / 24, repair_hours=0.5),
        failure(Effect.CRASH, 9, day=3 / 24),
        failure(Effect.NETWORK, 0, 1, day=3.2 / 24, repair_hours=0.5),
    ]
    short = dataclasses.replace(ASSUMPTIONS, days=4.5 / 24)
    few, all_of_them = (run(GROW, *failures, assumptions=short, polls=polls) for polls in (False, True))
    assert all_of_them.decisions > 10 * few.decisions
    assert [item.cause for item in few.status.recoveries] == [item.cause for item in all_of_them.status.recoveries]
    assert [item.to for item in few.status.recoveries] == [item.to for item in all_of_them.status.recoveries]
    assert few.account.attempts == all_of_them.account.attempts
    assert few.ettr == pytest.approx(all_of_them.ettr, abs=0.005)
    assert few.account.down_seconds == pytest.approx(all_of_them.account.down_seconds, rel=0.1)


def test_the_operators_own_goodput_agrees_with_the_account() -> None:
    result = run(GROW, failure(Effect.HOST, 3, day=1, repair_hours=2), failure(Effect.CRASH, 7, day=2))
    account, status = result.account, result.status
    assert status.progress is not None
    # The last pass was long before the end.
    status = dataclasses.replace(status, progress=dataclasses.replace(status.progress, step=account.steps))
    measured = update_goodput(status, START + result.seconds).goodput
    # The operator counts saves as training, and begins at the first step.
    trained = (account.productive_seconds + account.saving_seconds) / result.seconds
    assert measured["failures"] == 2
    assert measured["ettr"] == pytest.approx(trained, abs=0.002)
