"""Each training stack loses a node, goes on with fewer ranks, and grows back, with the losses of an undisturbed run."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT
from tests.cluster.jobs import Run, committed, resumed, victim
from tests.engine.rank_client import common_environment

pytestmark = pytest.mark.cluster

_LOSS = re.compile(r"step (\d+) loss (\S+)")


STEPS = 300
"""Length of the trainings, on which their learning rates depend; the tests end them long before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """An elastic example script.

    Attributes:
        script: below examples/, with arguments.
        zero: stage of its DeepSpeed configuration; None for FSDP2, whose commits are of DCP.
        reshard_mode: `spec.reshard.mode`.
        launcher: one of LAUNCHERS.
    """

    script: tuple[str, ...]
    zero: int | None = None
    reshard_mode: str = "Auto"
    launcher: str = "ours"


LAUNCHERS = {  # as docs/trainer.md shows them
    "ours": "exec python -m elastic_trainer.launch --preload torch._dynamo",
    "torchrun": "exec torchrun",
    "accelerate": (
        "exec accelerate launch --multi_gpu --num_machines $PET_NNODES"
        " --num_processes $((PET_NNODES * PET_NPROC_PER_NODE)) --machine_rank $PET_NODE_RANK"
        " --main_process_ip $PET_MASTER_ADDR --main_process_port $PET_MASTER_PORT"
        " --mixed_precision no --dynamo_backend no"
    ),
    "deepspeed": (
        "for node in $(seq 0 $((PET_NNODES - 1)));"
        ' do echo "pod-$node slots=$PET_NPROC_PER_NODE"; done > /tmp/hosts;'
        " exec deepspeed --no_ssh --no_local_rank --hostfile /tmp/hosts --node_rank $PET_NODE_RANK"
        " --master_addr $PET_MASTER_ADDR --master_port $PET_MASTER_PORT"
    ),
}
_OWN_LOOP = ("--steps", str(STEPS), "--save-every", "10")
_TRAINER = ("huggingface_trainer/elastic.py", *_OWN_LOOP, "--output", "/tmp/output")
_ACCELERATE = ("accelerate/elastic.py", "--save-every", "10", "--epochs", "3", "--samples", str(STEPS // 3 * 24))
STACKS = {
    "deepspeed-loop": Stack(script=("deepspeed_loop/elastic.py", *_OWN_LOOP), zero=2),
    "fsdp2": Stack(script=("fsdp2/elastic.py", *_OWN_LOOP)),
    "deepspeed-loop-bf16": Stack(script=("deepspeed_loop/elastic.py", *_OWN_LOOP, "--bf16"), zero=2),
    "fsdp2-bf16": Stack(script=("fsdp2/elastic.py", *_OWN_LOOP, "--bf16")),
    "fsdp2-materialize": Stack(script=("fsdp2/elastic.py", *_OWN_LOOP), reshard_mode="Materialize"),
    "fsdp2-torchrun": Stack(script=("fsdp2/elastic.py", *_OWN_LOOP), launcher="torchrun"),
    "deepspeed-loop-deepspeed": Stack(script=("deepspeed_loop/elastic.py", *_OWN_LOOP), zero=2, launcher="deepspeed"),
    "accelerate-launch": Stack(script=(*_ACCELERATE, "--backend", "deepspeed"), zero=1, launcher="accelerate"),
    "trainer-deepspeed": Stack(script=(*_TRAINER, "--backend", "deepspeed"), zero=1),
    "trainer-fsdp2": Stack(script=(*_TRAINER, "--backend", "fsdp2")),
    "accelerate-deepspeed": Stack(script=(*_ACCELERATE, "--backend", "deepspeed"), zero=1),
    "accelerate-fsdp2": Stack(script=(*_ACCELERATE, "--backend", "fsdp2")),
}


def losses(path: Path) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in _LOSS.findall(path.read_text(encoding="utf-8"))}


def undisturbed(stack: Stack, folder: Path) -> dict[int, float]:
    """Losses of one rank on this machine that trains without a break."""
    script, *arguments = stack.script
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    environment = common_environment() | {
        "ETJ_CHECKPOINT_ROOT": str(folder / "checkpoints"), "ETJ_GLOBAL_BATCH": "24", "ETJ_MICRO_BATCH": "2",
        "ETJ_TOPOLOGY": f"dp=1,zero={3 if stack.zero is None else stack.zero}",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29711", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
    }  # fmt: skip
    with open(folder / "out.log", "w") as stream:
        subprocess.run(command, env=environment, cwd=folder, stdout=stream, stderr=stream, check=True, timeout=300)
    return losses(folder / "out.log")


@pytest.mark.soak_only  # the engine tier compares the losses of each stack, the quickstart loses a node
@pytest.mark.parametrize("name", STACKS)
def test_a_stack_loses_a_node_and_grows_back_with_the_losses_of_an_undisturbed_run(
    testbed: object, run: Run, checkpoints: Path, tmp_path: Path, name: str
) -> None:
    del testbed  # heals the nodes
    stack = STACKS[name]
    script, *arguments = stack.script
    words = [LAUNCHERS[stack.launcher], "tests/cluster/slow_steps.py", f"examples/{script}", *arguments]
    output = '"$ETJ_CHECKPOINT_ROOT/out-a$ETJ_ATTEMPT-$PET_NODE_RANK.log"'
    shell = f'mkdir -p "$ETJ_CHECKPOINT_ROOT"; exec > {output} 2>&1; {" ".join(words)}'
    checkpoint = {"claimName": "ckpt", "path": "gpt", "intervalSeconds": 1000}
    run.submit(
        ["sh", "-c", shell],
        accelerator={"resource": "amd.com/gpu", "perNode": [1]},
        nodes={"min": 1, "max": 3},
        batch={"globalSamples": 24, "microSamples": 2},
        parallelism={} if stack.zero is None else {"zeroStage": stack.zero},
        checkpoint={**checkpoint, "format": "DCP" if stack.zero is None else "DeepSpeed"},
        reshard={"mode": stack.reshard_mode},
        recovery={"scaleUpStableSeconds": 5},
    )
    before = run.until("a commit on 3 nodes", committed, 240)
    lost = victim(run)
    run.cluster.kill_node(lost)
    fewer = run.until("the attempt on 2 nodes", resumed(before["attempt"]), 240)
    fewer = run.until("a commit of its own", committed, 120)
    run.cluster.heal_node(lost)
    again = run.until("the attempt on 3 nodes", resumed(fewer["attempt"]), 240)
    again = run.until("a commit of its own", committed, 120)
    run.remove()

    assert [now["topology"]["dp"] for now in (before, fewer, again)] == [3, 2, 3]
    assert [(item["planned"], item["lostSteps"]) for item in again["recoveries"]][1:] == [(True, 0)]
    if stack.zero is None:
        mode = "Load" if stack.reshard_mode == "Auto" else "Reshard"
        assert [item["startMode"] for item in again["recoveries"]] == [mode, mode]
    assert again["restartBudget"]["used"] == 0
    found = [losses(checkpoints / "gpt" / f"out-a{now['attempt']}-0.log") for now in (before, fewer, again)]
    assert all(found)
    assert min(found[2]) == max(found[1]) + 1, "growth loses no step"
    reference = undisturbed(stack, tmp_path)
    for attempt in found:
        tolerance = 5e-3 if "--bf16" in stack.script else 1e-4
        assert attempt == pytest.approx({step: reference[step] for step in attempt}, rel=tolerance)
    assert reference[max(found[2])] < reference[1] - 0.1  # what started anew would show
