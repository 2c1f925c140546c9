"""The elastic examples on a GPU: ended in the middle, and resumed with the losses of an undisturbed run."""

import re

import pytest

from elastic_trainer.retention import find_commits
from reshard.commits.commit import read_commit
from tests.engine.stack_run import Pods
from tests.gpu.gpu_ranks import GPU

FP32, BF16 = {"rel": 1e-4, "abs": 0}, {"rel": 5e-3, "abs": 0}
STEPS = 12
STACKS = {
    "deepspeed": ("deepspeed_loop/elastic.py", "dp=1,zero=2", "--steps", str(STEPS)),
    "deepspeed-bf16": ("deepspeed_loop/elastic.py", "dp=1,zero=1", "--steps", str(STEPS), "--bf16"),
    "fsdp2": ("fsdp2/elastic.py", "dp=1,zero=3", "--steps", str(STEPS)),
    "fsdp2-bf16": ("fsdp2/elastic.py", "dp=1,zero=3", "--steps", str(STEPS), "--bf16"),
    "trainer-deepspeed": ("huggingface_trainer/elastic.py", "dp=1,zero=1", "--steps", str(STEPS)),
    "trainer-fsdp2": (
        *("huggingface_trainer/elastic.py", "dp=1,zero=3", "--steps", str(STEPS)),
        *("--backend", "fsdp2"),
    ),
    "accelerate-deepspeed": ("accelerate/elastic.py", "dp=1,zero=1", "--samples", str(4 * STEPS)),
    "accelerate-fsdp2": ("accelerate/elastic.py", "dp=1,zero=3", "--samples", str(4 * STEPS), "--backend", "fsdp2"),
}
_LOSS = re.compile(r"step (\d+) loss (\S+)")


def train(root, stack, *more, **extra):
    script, topology, *arguments = STACKS[stack]
    root.mkdir(exist_ok=True)
    output = () if stack.startswith(("deepspeed", "fsdp2")) else ("--output", str(root / "output"))
    with Pods(
        *(script, root, topology, *arguments, *output, "--save-every", "3", *more), folder=root, **GPU, **extra
    ) as pods:
        assert set(pods.wait()) == {0}, pods.text[-4000:]
        return {int(step): float(loss) for step, loss in _LOSS.findall(pods.text)}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("stack", STACKS)
def test_it_goes_on_from_a_commit_with_the_same_losses(stack, asynchronous, tmp_path):
    (tmp_path / "node").mkdir()
    extra = {
        "ETJ_ASYNC_SAVES": "true",
        "ETJ_STAGING": str(tmp_path / "node"),
        "ETJ_STAGING_BYTES": str(1 << 30),
        "ETJ_MAILBOX": str(tmp_path / "mailbox.json"),
    }
    quiet = train(tmp_path / "quiet", stack, **(extra if asynchronous else {}))
    assert sorted(quiet) == list(range(1, STEPS + 1))
    commits = {step: folder for _, step, folder in find_commits(tmp_path / "quiet")}
    assert read_commit(commits[6]).step == 6
    resumed = train(tmp_path / "again", stack, ETJ_ATTEMPT="2", ETJ_RESUME=str(commits[6]))
    tolerance = BF16 if stack.endswith("bf16") else FP32
    assert resumed == pytest.approx({step: quiet[step] for step in range(7, STEPS + 1)}, **tolerance)
