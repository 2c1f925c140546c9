"""The training losses that the status keeps: few, spread over the samples of the job, over all attempts."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from elastic_operator.api.status import MAX_LOSSES, LossPoint, Status
from elastic_operator.reconcile.progress import add_loss
from tests.unit.elastic_operator.reconcile.test_decide_phases import NOW, WORLD, lease, look, settled, training


def curve(*steps: tuple[int, int]) -> tuple[LossPoint, ...]:
    """Report a loss for each pair of attempt and step, 20 samples a step; return the points that are kept."""
    found: tuple[LossPoint, ...] = ()
    for attempt, step in steps:
        found = add_loss(found, LossPoint(attempt=attempt, step=step, samples=20 * step, loss=1 / step))
    return found


def test_a_long_training_keeps_points_that_are_spread_over_it() -> None:
    for count in (10, 64, 65, 1000, 20_000):
        found = [item.step for item in curve(*((1, step) for step in range(1, count + 1)))]
        assert found[0] == 1
        assert min(count, MAX_LOSSES // 2) <= len(found) <= MAX_LOSSES
        gaps = [after - before for before, after in itertools.pairwise([*found, count])]
        assert max(gaps) <= max(1, count // 12)


def test_each_attempt_is_on_the_curve_from_its_first_reported_step() -> None:
    found = curve(*((1, step) for step in range(1, 31)), (2, 21), *((2, step) for step in range(22, 40)))
    assert [(item.attempt, item.step) for item in found][29:31] == [(1, 30), (2, 21)]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 10**6)), max_size=300))
def test_whatever_is_reported_the_curve_is_short_in_order_and_ends_near_the_last_report(
    steps: list[tuple[int, int]],
) -> None:
    steps.sort(key=lambda item: item[0])
    found = curve(*steps)
    assert len(found) <= MAX_LOSSES
    remaining = iter(steps)
    assert all((item.attempt, item.step) in remaining for item in found), "in the order in which they were reported"
    for _, own in itertools.groupby(found, key=lambda item: item.attempt):
        assert all(before.step < after.step for before, after in itertools.pairwise(own))
    if steps:
        assert found[-1].attempt == steps[-1][0]


def test_a_report_of_a_step_adds_its_loss_and_one_without_a_step_or_a_loss_adds_none() -> None:
    reported = dataclasses.replace(WORLD, leases=training(LOSS="2.5", SAMPLES="240"))
    status = look(settled(), reported).status
    assert status.losses == (LossPoint(attempt=1, step=12, samples=240, loss=2.5),)
    assert look(status, reported, now=NOW + 60).status.losses == status.losses
    for notes in ({"STEP": "13"}, {"STEP": "13", "LOSS": "nan"}, {"LOSS": "2.0"}):
        later = dataclasses.replace(WORLD, leases=lease(PHASE="Training", **notes))
        assert look(status, later, now=NOW + 60).status.losses == status.losses


def test_a_status_of_an_earlier_release_begins_a_curve() -> None:
    assert Status().losses == ()
