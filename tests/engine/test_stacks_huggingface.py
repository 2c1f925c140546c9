"""The Hugging Face Trainer and Accelerate made elastic: killed, shrunk and grown, with the losses of a quiet run."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

from elastic_trainer.mailbox import FileMailbox
from elastic_trainer.stacks.accelerate import scale_schedule
from reshard.api import reshard
from reshard.commits.commit import read_commit
from reshard.contract import LeaseKey, TrainerExit
from tests.engine.stack_run import Pods, newest_commit
from tests.randomness import some

pytestmark = pytest.mark.engine

FP32 = {"rel": 1e-4, "abs": 0}
SAME = {"rel": 2e-7, "abs": 0}
STEPS, EPOCH_STEPS, GLOBAL_BATCH = 40, 16, 8
ROWS = EPOCH_STEPS * GLOBAL_BATCH
SCRIPTS = {
    "trainer": ("huggingface_trainer/elastic.py", "--steps", str(STEPS)),
    "accelerate": ("accelerate/elastic.py", "--epochs", "3"),
}
ZERO = {"deepspeed": "zero=1", "fsdp2": "zero=3"}
_LINE = re.compile(r"step (\d+) loss (\S+) rate (\S+)")


def start(stack, backend, root, ranks, *args, **extra):
    script, *length = SCRIPTS[stack]
    root.mkdir(exist_ok=True)
    return Pods(
        *(script, root, f"dp={ranks},{ZERO[backend]}", "--backend", backend, *length, "--samples", str(ROWS)),
        *("--output", str(root / "output"), *args),
        **{"folder": root, "ETJ_GLOBAL_BATCH": str(GLOBAL_BATCH), **extra},
    )


def records(pods):
    """(loss, learning rate) of each step."""
    return {int(step): (float(loss), float(rate)) for step, loss, rate in _LINE.findall(pods.text)}


def train(*args, **extra):
    with start(*args, **extra) as pods:
        pods.finish()
        return records(pods)


def kill_a_rank(*args, after, **extra):
    """Train until a step, and kill the last rank; return what was logged."""
    with start(*args, **extra) as pods:
        pods.wait_for_step(after)
        ranks = pods.ranks()
        ranks[max(ranks)].kill()
        assert pods.wait() == [128 + 9], pods.text[-3000:]
        return records(pods)


def assert_same(found, quiet, steps):
    assert sorted(found) == list(steps)
    for number in (0, 1):
        assert {step: found[step][number] for step in steps} == pytest.approx(
            {step: quiet[step][number] for step in steps}, **(FP32 if number == 0 else {"rel": 1e-9, "abs": 1e-12})
        )


def commit_for(ranks, backend, root, attempt):
    """Newest commit, converted where a framework cannot load it at another number of ranks."""
    commit = newest_commit(root)
    if backend == "fsdp2":
        return commit
    folder = root / f"a{attempt}" / commit.name
    reshard(commit, folder, f"dp={ranks},{ZERO[backend]}")
    return folder


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """Losses and learning rates of a run that nothing disturbs, at one rank."""

    @functools.cache
    def run(stack):
        return train(stack, "deepspeed", tmp_path_factory.mktemp("quiet"), 1)

    return run


@pytest.mark.parametrize(
    ("stack", "backend"),
    [
        ("trainer", "deepspeed"),
        pytest.param("accelerate", "fsdp2", marks=pytest.mark.soak_only),
        pytest.param("trainer", "fsdp2", marks=pytest.mark.soak_only),
        pytest.param("accelerate", "deepspeed", marks=pytest.mark.soak_only),
    ],
)
def test_it_shrinks_after_a_kill_and_grows_again_with_the_same_losses(stack, backend, quiet, tmp_path):
    reference, save = quiet(stack), ("--save-every", "3")
    found = kill_a_rank(stack, backend, tmp_path, 2, *save, after=5)
    assert_same(found, reference, range(1, max(found) + 1))
    for attempt, ranks, after in ((2, 1, 6), (3, 2, None)):
        first = read_commit(newest_commit(tmp_path)).step + 1
        resume = {
            "ETJ_ATTEMPT": str(attempt),
            "ETJ_RESUME": str(commit_for(ranks, backend, tmp_path, attempt)),
        }
        if after is None:
            found = train(stack, backend, tmp_path, ranks, *save, **resume)
        else:
            found = kill_a_rank(stack, backend, tmp_path, ranks, *save, after=first + after, **resume)
        assert_same(found, reference, range(first, max(found) + 1))
    assert max(found) == max(reference) > 2 * EPOCH_STEPS  # the third epoch has another order of the data
    if backend == "fsdp2":
        done = newest_commit(tmp_path)
        assert read_commit(done).step == max(reference)
        assert train(stack, backend, tmp_path, 1, ETJ_ATTEMPT="4", ETJ_RESUME=str(done)) == {}


@pytest.mark.soak_only
@pytest.mark.parametrize(("stack", "backend"), [("trainer", "fsdp2"), ("accelerate", "deepspeed")])
def test_dropout_goes_on_at_the_same_topology_and_is_reseeded_at_another(stack, backend, tmp_path):
    args = ("--dropout", "0.2", "--save-every", "20")
    whole = train(stack, backend, tmp_path / "whole", 2, *args)
    commit = tmp_path / "whole" / "a1" / "step-00000020"
    resume = {"ETJ_ATTEMPT": "2", "ETJ_RESUME": str(commit)}
    again = train(stack, backend, tmp_path / "again", 2, *args, **resume)
    for step in range(21, max(whole) + 1):
        assert again[step] == pytest.approx(whole[step], **SAME)
    if backend == "deepspeed":
        resume["ETJ_RESUME"] = str(tmp_path / "a2" / commit.name)
        reshard(commit, Path(resume["ETJ_RESUME"]), "dp=1,zero=1")
    one, other = (train(stack, backend, tmp_path / name, 1, *args, **resume) for name in ("one", "other"))
    assert one == other
    assert one[21][0] != pytest.approx(whole[21][0], rel=1e-6)
    assert one[21][0] == pytest.approx(whole[21][0], rel=0.05)


def accelerate_launch(environment):
    """The launcher of one pod, from the operator's variables, as docs/trainer.md shows."""
    nodes, each = int(environment["PET_NNODES"]), int(environment["PET_NPROC_PER_NODE"])
    return [
        *(str(Path(sys.executable).parent / "accelerate"), "launch", "--multi_gpu"),
        *("--num_machines", str(nodes), "--num_processes", str(nodes * each)),
        *("--machine_rank", environment["PET_NODE_RANK"]),
        *("--main_process_ip", environment["PET_MASTER_ADDR"]),
        *("--main_process_port", environment["PET_MASTER_PORT"]),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
    ]


@pytest.mark.soak_only
@pytest.mark.parametrize("stack", SCRIPTS)
def test_accelerate_launch_over_two_pods_drains_and_resumes(stack, tmp_path):
    box = tmp_path / "mailbox.json"
    two_pods = {"launcher": accelerate_launch, "nodes": 2}
    with start(stack, "fsdp2", tmp_path, 2, ETJ_MAILBOX=str(box), **two_pods) as pods:
        pods.wait_for_step(2)
        FileMailbox(box).exchange({LeaseKey.REQUEST: "drain"})
        assert pods.wait() == [1, 1], pods.text[-3000:]  # torchrun is inside, and makes 1 of every code
        assert f"exitcode  : {TrainerExit.DRAINED}" in pods.text
        last = max(records(pods))
    assert json.loads(box.read_text())[LeaseKey.PHASE] == "Drained"
    commit = newest_commit(tmp_path)
    assert read_commit(commit).step == last < STEPS
    resume = {"ETJ_ATTEMPT": "2", "ETJ_RESUME": str(commit)}
    assert min(train(stack, "fsdp2", tmp_path, 2, **resume, **two_pods)) == last + 1


@pytest.mark.soak_only
@pytest.mark.parametrize("stack", SCRIPTS)
def test_our_launcher_keeps_the_exit_codes(stack, tmp_path):
    box = tmp_path / "mailbox.json"
    with start(stack, "deepspeed", tmp_path, 1, ETJ_MAILBOX=str(box)) as pods:
        pods.wait_for_step(2)
        FileMailbox(box).exchange({LeaseKey.REQUEST: "drain"})
        assert pods.wait() == [TrainerExit.DRAINED], pods.text[-3000:]
    with start(stack, "deepspeed", tmp_path, 1, ETJ_ATTEMPT="2", ETJ_RESUME=str(tmp_path / "none")) as pods:
        assert pods.wait() == [TrainerExit.RESUME_INVALID], pods.text[-3000:]


@pytest.mark.parametrize("stack", some(SCRIPTS, every=2))
def test_an_attempt_that_does_not_fit_the_script_is_refused(stack, tmp_path):
    with start(stack, "deepspeed", tmp_path, 1, "--zero", "2") as pods:
        assert pods.wait() == [1]
        assert "the DeepSpeed configuration has ZeRO stage 2, this attempt 1" in pods.text


def cosine(optimizer, ranks):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20 * ranks)


def warmup_then_cosine(optimizer, ranks):
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4 * ranks)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16 * ranks)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, rest], milestones=[4 * ranks])


def linear(optimizer, ranks):
    return transformers.get_linear_schedule_with_warmup(optimizer, 4 * ranks, 20 * ranks)


def rates(schedule, ranks, steps):
    found = []
    for _ in range(steps):
        schedule.optimizer.step()
        for _ in range(ranks):  # as AcceleratedScheduler does
            schedule.step()
        found.append(schedule.get_last_lr()[0])
    return found


@pytest.mark.parametrize("build", [cosine, warmup_then_cosine, linear])
@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("done", [2, 9])
def test_a_schedule_goes_on_at_the_same_step_at_another_number_of_ranks(build, then, now, done):
    def new(ranks):
        return build(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3), ranks)

    source, target, whole = new(then), new(now), new(now)
    rates(source, then, done)
    state = scale_schedule(target.state_dict(), source.state_dict(), ranks_then=then, ranks_now=now)
    target.optimizer.load_state_dict(source.optimizer.state_dict())
    target.load_state_dict(state)
    expected = rates(whole, now, 16)[done:]
    assert rates(target, now, 16 - done) == pytest.approx(expected, rel=1e-6)
