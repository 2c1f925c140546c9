"""Folders that the plain Trainer and Accelerate saved: converted as one unit, resumed at other numbers of ranks."""

import functools
import os
import re
import shutil

import pytest

from reshard.api import index_of, reshard
from reshard.execution.verify import read_digests
from tests.engine.rank_client import common_environment
from tests.engine.stack_run import EXAMPLES, Pods
from tests.randomness import SOAKING

pytestmark = pytest.mark.engine

STEPS, SAVED, MICRO, GLOBAL, ROWS = 6, 3, 2, 12, 96
FP32 = {"rel": 1e-5, "abs": 0}
_LINE = re.compile(r"step (\d+) loss (\S+) rate (\S+)")
slow = pytest.mark.skipif(not SOAKING, reason="one resume per stack suffices for every change; make test-all does more")


def train(root, script, ranks, *args, zero=2, **extra):
    """Train with a plain script, which resumes from the last checkpoint in its output; return (loss, rate) by step."""
    root.mkdir(exist_ok=True)
    lengths = ("--save-every", str(SAVED), "--samples", str(ROWS), "--zero", str(zero))
    batch = ("--micro-batch", str(MICRO), "--accumulation", str(GLOBAL // ranks // MICRO))
    with Pods(
        *(script, root, f"dp={ranks},zero={zero}", *lengths, *batch, *args),
        *("--output", str(root / "output")),
        folder=root,
        **extra,
    ) as pods:
        pods.finish()
        return {int(step): (float(loss), float(rate)) for step, loss, rate in _LINE.findall(pods.text)}


def losses(lines):
    return {step: loss for step, (loss, _) in lines.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of the Trainer at two ranks, and the losses of the run that went on from there without a stop."""

    @functools.cache
    def run(zero):
        root = tmp_path_factory.mktemp("saved")
        lines = train(root, "huggingface_trainer/plain.py", 2, "--steps", str(STEPS), zero=zero)
        assert sorted(lines) == list(range(1, STEPS + 1))
        return root / "output" / f"checkpoint-{SAVED}", lines

    return run


@pytest.mark.parametrize(
    ("zero", "ranks"),
    [pytest.param(2, 1, marks=slow), (2, 3), pytest.param(3, 1, marks=slow), pytest.param(3, 3, marks=slow)],
)
def test_the_unmodified_trainer_resumes_from_a_converted_folder(saved, tmp_path, zero, ranks):
    source, quiet = saved(zero)
    target = tmp_path / "output" / source.name
    reshard(source, target, f"dp={ranks}")
    assert (target / "latest").read_text() == f"global_step{SAVED}"
    assert not list(target.glob("rng_state*"))
    again = train(tmp_path, "huggingface_trainer/plain.py", ranks, "--steps", str(STEPS), zero=zero)
    assert sorted(again) == list(range(SAVED + 1, STEPS + 1))
    assert losses(again) == pytest.approx({step: quiet[step][0] for step in again}, **FP32)
    assert {step: rate for step, (_, rate) in again.items()} == {step: quiet[step][1] for step in again}


@pytest.mark.soak_only
@slow
def test_at_the_same_ranks_dropout_goes_on_from_a_folder_of_another_zero_stage(tmp_path):
    args = ("--steps", str(STEPS), "--dropout", "0.2")
    quiet = train(tmp_path / "first", "huggingface_trainer/plain.py", 2, *args, zero=2)
    name = f"output/checkpoint-{SAVED}"
    reshard(tmp_path / "first" / name, tmp_path / "second" / name, "dp=2,zero=1")
    again = train(tmp_path / "second", "huggingface_trainer/plain.py", 2, *args, zero=1)
    assert losses(again) == pytest.approx({step: quiet[step][0] for step in again}, **FP32)


SCALED = """\
    from elastic_trainer.stacks.accelerate import scale_schedule
    fresh = scheduler.state_dict()
    step = resume(accelerator, options.output)
    if step:
        scheduler.load_state_dict(scale_schedule(fresh, scheduler.state_dict(), ranks_then=2, ranks_now=ranks))
"""
"""What docs/trainers.md tells users to do about the schedule."""


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A state of Accelerate at two ranks, and the lines of the run that went on from there without a stop."""
    root = tmp_path_factory.mktemp("state")
    return root / "output" / f"step-{SAVED}", train(root, "accelerate/plain.py", 2, "--epochs", "1")


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=slow)])
def test_accelerate_resumes_from_a_converted_state_with_a_scaled_schedule(state, tmp_path, ranks):
    source, quiet = state
    plain = (EXAMPLES / "accelerate" / "plain.py").read_text()
    (tmp_path / "examples.py").write_text(plain.replace("    step = resume(accelerator, options.output)\n", SCALED))
    assert "scale_schedule" in (tmp_path / "examples.py").read_text()
    reshard(source, tmp_path / "output" / source.name, f"dp={ranks}")
    paths = os.pathsep.join([str(EXAMPLES / "accelerate"), *filter(None, [common_environment().get("PYTHONPATH")])])
    again = train(tmp_path, tmp_path / "examples.py", ranks, "--epochs", "1", PYTHONPATH=paths)
    assert sorted(again) == [step for step in quiet if step > SAVED]
    assert losses(again) == pytest.approx({step: quiet[step][0] for step in again}, **FP32)
    assert {step: rate for step, (_, rate) in again.items()} == pytest.approx({step: quiet[step][1] for step in again})


@pytest.mark.soak_only
@slow
def test_without_that_the_learning_rate_differs_as_the_note_says(state, tmp_path):
    source, quiet = state
    reshard(source, tmp_path / "output" / source.name, "dp=1")
    again = train(tmp_path, "accelerate/plain.py", 1, "--epochs", "1")
    assert again[SAVED + 1][0] == pytest.approx(quiet[SAVED + 1][0], **FP32)
    assert again[SAVED + 1][1] != pytest.approx(quiet[SAVED + 1][1], rel=1e-3)


@slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_trainer_resumes_from_a_folder_of_fsdp_as_it_is(tmp_path, ranks):
    args = ("--steps", str(STEPS), "--backend", "fsdp2")
    quiet = train(tmp_path / "first", "huggingface_trainer/plain.py", 2, *args, zero=3)
    name = f"output/checkpoint-{SAVED}"
    shutil.copytree(tmp_path / "first" / name, tmp_path / "second" / name)
    again = train(tmp_path / "second", "huggingface_trainer/plain.py", ranks, *args, zero=3)
    assert losses(again) == pytest.approx({step: quiet[step][0] for step in again}, **FP32)
    index = index_of(tmp_path / "first" / name)
    assert (index.step, {tensor.key.state for tensor in index.tensors}) == (SAVED, {"weight", "exp_avg", "exp_avg_sq"})


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=slow)])
def test_the_trainer_resumes_from_a_converted_folder_of_fsdp(tmp_path, ranks):
    args = ("--steps", str(STEPS), "--backend", "fsdp2")
    quiet = train(tmp_path / "first", "huggingface_trainer/plain.py", 2, *args, zero=3)
    name = f"output/checkpoint-{SAVED}"
    source, target = tmp_path / "first" / name, tmp_path / "second" / name
    report = reshard(source, target, f"dp={ranks}")
    assert report.witness["not_witnessed"] == 0
    assert read_digests(index_of(target)) == read_digests(index_of(source))
    kept = {path.name for path in source.iterdir()} - {f"rng_state_{rank}.pth" for rank in range(2)}
    assert {path.name for path in target.iterdir()} == {*kept, "COMMIT.json"}
    assert len(list((target / "optimizer_0").glob("*.distcp"))) == ranks
    again = train(tmp_path / "second", "huggingface_trainer/plain.py", ranks, *args, zero=3)
    assert sorted(again) == list(range(SAVED + 1, STEPS + 1))
    assert losses(again) == pytest.approx({step: quiet[step][0] for step in again}, **FP32)
    assert {step: rate for step, (_, rate) in again.items()} == {step: quiet[step][1] for step in again}


@slow
def test_accelerate_resumes_from_a_converted_state_of_fsdp(tmp_path):
    args = ("--epochs", "1", "--backend", "fsdp2")
    quiet = train(tmp_path / "first", "accelerate/plain.py", 2, *args, zero=3)
    name = f"output/step-{SAVED}"
    reshard(tmp_path / "first" / name, tmp_path / "second" / name, "dp=1")
    plain = (EXAMPLES / "accelerate" / "plain.py").read_text()
    (tmp_path / "scaled.py").write_text(plain.replace("    step = resume(accelerator, options.output)\n", SCALED))
    paths = os.pathsep.join([str(EXAMPLES / "accelerate"), *filter(None, [common_environment().get("PYTHONPATH")])])
    again = train(tmp_path / "second", tmp_path / "scaled.py", 1, *args, zero=3, PYTHONPATH=paths)
    assert sorted(again) == [step for step in quiet if step > SAVED]
    assert losses(again) == pytest.approx({step: quiet[step][0] for step in again}, **FP32)
