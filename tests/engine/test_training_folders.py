"""Folders that the plain Trainer and Accelerate saved: converted as one unit, resumed at other numbers of ranks."""

import functools
import re
import shutil

import pytest

from reshard.api import index_of, reshard
from tests.engine.stack_run import Pods
from tests.randomness import SOAKING

pytestmark = pytest.mark.engine

STEPS, SAVED, MICRO, GLOBAL, ROWS = 6, 3, 2, 12, 96
FP32 = {"rel": 1e-5, "abs": 0}
_LINE = re.compile(r"step (\d+) loss (\S+) rate (\S+)")
slow = pytest.mark.skipif(not SOAKING, reason="one resume per stack suffices for every change; make soak does more")


def train(root, script, ranks, *args, zero=2):
    """Train with a plain script, which resumes from the last checkpoint in its output; return (loss, rate) by step."""
    root.mkdir(exist_ok=True)
    lengths = ("--save-every", str(SAVED), "--samples", str(ROWS), "--zero", str(zero))
    batch = ("--micro-batch", str(MICRO), "--accumulation", str(GLOBAL // ranks // MICRO))
    with Pods(
        *(f"{script}/plain.py", root, f"dp={ranks},zero={zero}", *lengths, *batch, *args),
        *("--output", str(root / "output")),
        folder=root,
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
        lines = train(root, "huggingface_trainer", 2, "--steps", str(STEPS), zero=zero)
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
    again = train(tmp_path, "huggingface_trainer", ranks, "--steps", str(STEPS), zero=zero)
    assert sorted(again) == list(range(SAVED + 1, STEPS + 1))
    assert losses(again) == pytest.approx({step: quiet[step][0] for step in again}, **FP32)
    assert {step: rate for step, (_, rate) in again.items()} == {step: quiet[step][1] for step in again}


@slow
def test_at_the_same_ranks_dropout_goes_on_from_a_folder_of_another_zero_stage(tmp_path):
    args = ("--steps", str(STEPS), "--dropout", "0.2")
    quiet = train(tmp_path / "first", "huggingface_trainer", 2, *args, zero=2)
    name = f"output/checkpoint-{SAVED}"
    reshard(tmp_path / "first" / name, tmp_path / "second" / name, "dp=2,zero=1")
    again = train(tmp_path / "second", "huggingface_trainer", 2, *args, zero=1)
    assert losses(again) == pytest.approx({step: quiet[step][0] for step in again}, **FP32)


def test_accelerate_resumes_from_a_converted_state_and_its_schedule_needs_care(tmp_path):
    quiet = train(tmp_path / "first", "accelerate", 2, "--epochs", "1")
    name = f"output/step-{SAVED}"
    reshard(tmp_path / "first" / name, tmp_path / "second" / name, "dp=1")
    again = train(tmp_path / "second", "accelerate", 1, "--epochs", "1")
    assert sorted(again) == [step for step in quiet if step > SAVED]
    assert again[SAVED + 1][0] == pytest.approx(quiet[SAVED + 1][0], **FP32)
    # As the note of `reshard` says: scheduler.bin counts a step of two ranks twice, and the script of one rank once.
    assert again[SAVED + 1][1] != pytest.approx(quiet[SAVED + 1][1], rel=1e-3)


@slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_trainer_resumes_from_a_folder_of_fsdp_as_it_is(tmp_path, ranks):
    args = ("--steps", str(STEPS), "--backend", "fsdp2")
    quiet = train(tmp_path / "first", "huggingface_trainer", 2, *args, zero=3)
    name = f"output/checkpoint-{SAVED}"
    shutil.copytree(tmp_path / "first" / name, tmp_path / "second" / name)
    again = train(tmp_path / "second", "huggingface_trainer", ranks, *args, zero=3)
    assert losses(again) == pytest.approx({step: quiet[step][0] for step in again}, **FP32)
    index = index_of(tmp_path / "first" / name)
    assert (index.step, {tensor.key.state for tensor in index.tensors}) == (SAVED, {"weight", "exp_avg", "exp_avg_sq"})
