"""The goodput ledger on timelines worked out by hand. Times are seconds since the start of the job."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_operator.api.serialization import Time
from elastic_operator.api.status import MAX_RECOVERIES, Recovery
from elastic_operator.reconcile.goodput import SUSPENDED, account, measure_parts, suggest_interval_seconds, to_status


def recovery(signal: float, first_step: float | None, **fields: Any) -> Recovery:
    times = {"signal_time": Time(signal), "first_step_time": None if first_step is None else Time(first_step)}
    return Recovery(cause=fields.pop("cause", "NodeLost"), **times, **fields)


def test_a_job_without_a_loss_has_all_of_its_time():
    result = account([], start=0, now=1000, first_step=0, step=100)
    assert (result.ettr, result.up_seconds, result.down_seconds) == (1.0, 1000.0, 0.0)
    assert result.mtbf_seconds is None
    assert result.mttr_seconds is None


def test_one_loss_costs_the_outage_and_the_steps_done_again():
    # Up 900 s of 1000 s at 10 s a step: 90 steps were done, 10 of them twice. 800 s of training count.
    lost = recovery(500, 600, lost_steps=10, last_step=50, commit_step=40)
    result = account([lost], start=0, now=1000, first_step=0, step=80)
    assert result.down_seconds == 100
    assert result.up_seconds == 900
    assert result.lost_seconds == pytest.approx(100)
    assert result.ettr == pytest.approx(0.8)
    assert (result.failures, result.mtbf_seconds, result.mttr_seconds) == (1, 900, 100)


def test_a_planned_change_is_down_time_but_no_failure():
    result = account([recovery(500, 550, planned=True)], start=0, now=1000, first_step=0, step=95)
    assert result.down_seconds == 50
    assert result.failures == 0
    assert result.mtbf_seconds is None


def test_an_open_recovery_is_down_until_now():
    result = account([recovery(900, None)], start=0, now=1000, first_step=0, step=90)
    assert result.down_seconds == 100


def test_suspended_time_counts_neither_way():
    # Drain asked for at 100, stopped at 110, resumed at 510, first step at 520: 20 s down, 400 s paused.
    paused = recovery(100, 520, cause=SUSPENDED, planned=True, stop_time=Time(110), plan_time=Time(510))
    result = account([paused], start=0, now=1000, first_step=0, step=58)
    assert (result.paused_seconds, result.down_seconds, result.up_seconds) == (400, 20, 580)


def test_a_loss_during_a_recovery_is_counted_once():
    first, second = recovery(100, None), recovery(150, 200)
    assert account([first, second], start=0, now=1000, first_step=0, step=90).down_seconds == 100


def test_when_old_recoveries_were_dropped_the_window_begins_at_the_oldest_that_is_left():
    kept = [recovery(1000 + 100 * i, 1010 + 100 * i, lost_steps=5, commit_step=500) for i in range(MAX_RECOVERIES)]
    result = account(kept, start=0, now=2000, first_step=0, step=590)
    assert result.window_seconds == 1000
    assert result.down_seconds == 10 * MAX_RECOVERIES
    # The steps that the oldest one lost were trained before the window.
    assert result.lost_steps == 5 * (MAX_RECOVERIES - 1)
    assert result.failures == MAX_RECOVERIES - 1


def test_parts_are_the_critical_path_of_a_failure():
    failure = recovery(
        0,
        43,
        detect_time=Time(6),
        plan_time=Time(6.5),
        stop_time=Time(8),
        reshard_end_time=Time(16.5),
        launch_time=Time(17),
        schedule_time=Time(20),
    )
    assert measure_parts(failure) == {
        "detect": 6,
        "plan": 0.5,
        "reshard": 10,
        "stop": 0,
        "launch": 0.5,
        "schedule": 3,
        "load": 23,
    }


def test_stop_comes_before_the_plan_in_a_drain():
    drained = recovery(0, 50, detect_time=Time(0), stop_time=Time(30), plan_time=Time(31), launch_time=Time(32))
    assert measure_parts(drained) == {"detect": 0, "stop": 30, "plan": 1, "launch": 1, "load": 18}


def test_parts_without_any_time_are_empty():
    assert measure_parts(Recovery(cause="NodeLost")) == {}


def test_mean_parts_add_up_to_the_mean_time_to_recover():
    items = [
        recovery(0, 10, detect_time=Time(4)),
        recovery(100, 130, detect_time=Time(110), plan_time=Time(112)),
        recovery(200, None, detect_time=Time(201)),
    ]
    result = account(items, start=0, now=300, first_step=0, step=10)
    assert result.mttr_seconds == 20
    assert sum(result.parts_seconds.values()) == pytest.approx(20)
    assert result.parts_seconds["detect"] == 7


def test_the_suggested_interval_is_near_youngs_for_rare_failures():
    # 10 s to save, a failure a day: Young says sqrt(2 * 10 * 86400) = 1314.5 s.
    suggested = suggest_interval_seconds(10, 86400)
    assert suggested == pytest.approx(math.sqrt(2 * 10 * 86400), rel=0.01)


def test_the_suggested_interval_minimises_dalys_expected_time():
    # Expected time to do one second of work with interval t, save d, mean time between failures m, no restart cost.
    save, mtbf = 30.0, 3600.0

    def expected(interval: float) -> float:
        return mtbf * (math.exp((interval + save) / mtbf) - 1) / interval

    best = suggest_interval_seconds(save, mtbf)
    assert expected(best) <= min(expected(best * 0.95), expected(best * 1.05))


def test_saving_that_takes_longer_than_failures_allow_is_done_once_per_failure():
    assert suggest_interval_seconds(100, 40) == 40


def test_the_status_has_what_is_known_and_nothing_else():
    quiet = to_status(account([], start=0, now=1000, first_step=0, step=100), save_seconds=10)
    assert quiet == {"ettr": 1.0, "windowSeconds": 1000, "lostSteps": 0, "lostSeconds": 0, "failures": 0}
    lossy = account([recovery(500, 600, lost_steps=10)], start=0, now=1000, first_step=0, step=80)
    assert to_status(lossy, save_seconds=2) == {
        "ettr": 0.8,
        "windowSeconds": 1000,
        "lostSteps": 10,
        "lostSeconds": 100,
        "failures": 1,
        "mtbfSeconds": 900,
        "mttrSeconds": 100,
        "partsSeconds": {"load": 100},
        "suggestedIntervalSeconds": 59,
    }


moments = st.lists(st.floats(0, 1e6), min_size=7, max_size=7).map(sorted)


@st.composite
def timelines(draw: st.DrawFn) -> list[Recovery]:
    result = []
    for base in range(draw(st.integers(0, MAX_RECOVERIES))):
        times = [Time(base * 1e6 + moment) for moment in draw(moments)]
        names = ("signal_time", "detect_time", "plan_time", "stop_time", "launch_time", "schedule_time")
        fields = {name: time if draw(st.booleans()) else None for name, time in zip(names, times, strict=False)}
        result.append(
            Recovery(
                cause=draw(st.sampled_from(["NodeLost", SUSPENDED])),
                planned=draw(st.booleans()),
                lost_steps=draw(st.integers(0, 100)),
                first_step_time=times[-1] if draw(st.booleans()) else None,
                **fields,
            )
        )
    return result


@settings(deadline=None)
@given(timelines(), st.floats(0, 2e7), st.integers(0, 10_000))
def test_no_timeline_breaks_the_ledger(recoveries, now, step):
    result = account(recoveries, start=0.0, now=now, first_step=0, step=step)
    assert result.ettr is None or -1e-9 <= result.ettr <= 1 + 1e-9
    assert result.up_seconds >= 0
    assert result.down_seconds >= 0
    assert result.lost_seconds <= result.up_seconds
    for item in recoveries:
        assert all(seconds >= 0 for seconds in measure_parts(item).values())
