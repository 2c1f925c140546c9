"""The demo's judgement of the loss curves must be able to fail."""

from pathlib import Path

from demo.curves import Point, compare, read_points


def run(attempt: int, steps: range, error: float = 0.0) -> list[Point]:
    return [
        Point(attempt=attempt, step=s, samples=s * 8, loss=(5.0 - s * 0.1) * (1 + error), time=float(s)) for s in steps
    ]


REFERENCE = run(1, range(1, 11))


def test_equal_curves_agree_repeated_steps_included() -> None:
    result = compare(
        {1: run(1, range(1, 7)), 2: run(2, range(5, 11))}, REFERENCE, relative_tolerance=1e-4, num_steps=10
    )
    assert result.ok
    assert result.num_compared == {1: 6, 2: 6}


def test_a_small_shift_after_the_change_is_found() -> None:
    result = compare(
        {1: run(1, range(1, 7)), 2: run(2, range(5, 11), error=2e-4)}, REFERENCE, relative_tolerance=1e-4, num_steps=10
    )
    assert not result.ok
    assert len(result.disagreements) == 6
    assert "attempt 2, step 5" in str(result.disagreements[0])


def test_a_step_that_nobody_did_is_missing() -> None:
    result = compare(
        {1: run(1, range(1, 4)), 2: run(2, range(5, 11))}, REFERENCE, relative_tolerance=1e-4, num_steps=10
    )
    assert result.missing == (4,)
    assert not result.ok


def test_a_loss_that_is_not_a_number_never_agrees() -> None:
    nan = [Point(attempt=1, step=1, samples=8, loss=float("nan"), time=0.0)]
    assert not compare({1: nan}, REFERENCE, relative_tolerance=1e-4, num_steps=1).ok


def test_a_sample_that_the_reference_never_saw_never_agrees() -> None:
    stray = [Point(attempt=1, step=1, samples=9, loss=4.9, time=0.0)]
    assert not compare({1: stray}, REFERENCE, relative_tolerance=1e-4, num_steps=1).ok


def test_an_empty_run_is_not_a_success() -> None:
    assert not compare({}, REFERENCE, relative_tolerance=1e-4, num_steps=0).ok


def test_the_half_written_last_line_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    line = '{"step": 1, "samples": 8, "loss": 4.9, "attempt": 2, "time": 1.5}\n'
    (tmp_path / "loss-a2.jsonl").write_text(line + line[:20])
    assert [point.loss for point in read_points(tmp_path)[2]] == [4.9]
