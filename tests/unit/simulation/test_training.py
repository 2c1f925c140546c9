"""Progress of an attempt: steps of 10 s, a save of 5 s after every third of them."""

from __future__ import annotations

import pytest

from simulation.training import Training

TRAINING = Training(begin=100.0, first=7, step_seconds=10.0, interval_seconds=25.0, save_seconds=5.0)


@pytest.mark.parametrize(
    ("seconds", "steps", "committed", "saving", "step_time"),
    [
        pytest.param(0, 7, None, 0, None, id="begins"),
        pytest.param(9.9, 7, None, 0, None, id="first step"),
        pytest.param(10, 8, None, 0, 110, id="first step done"),
        pytest.param(30, 10, None, 0, 130, id="saves"),
        pytest.param(34.9, 10, None, 0, 130, id="still saves"),
        pytest.param(35, 10, 10, 5, 130, id="committed"),
        pytest.param(45, 11, 10, 5, 145, id="next step"),
        pytest.param(70, 13, 13, 10, 165, id="second commit"),
    ],
)
def test_progress(seconds: float, steps: int, committed: int | None, saving: float, step_time: float | None) -> None:
    progress = TRAINING.progress(100 + seconds)
    assert (progress.steps, progress.committed, progress.saving_seconds) == (steps, committed, saving)
    assert progress.step_time == step_time


@pytest.mark.parametrize(
    ("seconds", "end", "steps", "saving"),
    [
        pytest.param(3, 15, 8, 5, id="finishes its step and saves"),
        pytest.param(10, 15, 8, 5, id="between steps"),
        pytest.param(32, 35, 10, 5, id="already saves"),
        pytest.param(35, 35, 10, 5, id="has just saved"),
        pytest.param(36, 50, 11, 10, id="after a save"),
    ],
)
def test_a_drain_commits_every_step(seconds: float, end: float, steps: int, saving: float) -> None:
    at, progress = TRAINING.drain(100 + seconds)
    assert at == pytest.approx(100 + end)
    assert (progress.steps, progress.committed, progress.saving_seconds) == (steps, steps, saving)
