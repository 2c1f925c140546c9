"""Train the small GPT at whatever topology the environment names.

    python -m elastic_trainer.launch --nproc 2 examples/gpt_deepspeed/train.py --steps 20      # a laptop, dp=2
    ETJ_TOPOLOGY=tp=2,pp=1,dp=1,zero=1 python -m elastic_trainer.launch --nproc 2 examples/gpt_deepspeed/train.py

The same command line starts, resumes and goes on after a reshard: where from is said by ETJ_RESUME.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from lean import deepspeed
from model import GptConfig, build, parameter_groups, pipeline_description, universal_checkpoint_info
from text import Windows, corpus

from elastic_trainer import BatchPlan, Session, shuffled

SEED = 7


def parse() -> argparse.Namespace:
    """Command line; everything has a default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps in all, over all attempts")
    parser.add_argument(
        "--save-every", type=int, default=0, help="commit every N steps, besides the interval in seconds"
    )
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds of sleep per step, to watch it")
    parser.add_argument("--global-batch", type=int, default=20, help="used where the operator does not say")
    parser.add_argument("--micro-batch", type=int, default=2, help="used where the operator does not say")
    parser.add_argument("--layers", type=int, default=GptConfig().layers)
    parser.add_argument("--big", action="store_true", help="71 million parameters: checkpoints of 1.1 GB")
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args()


def deepspeed_config(plan: BatchPlan, *, zero: int, bf16: bool) -> dict[str, Any]:
    """What DeepSpeed needs to know. No gradient clipping: its norm is summed in another order at every topology."""
    return {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "zero_optimization": {"stage": zero},
        "gradient_clipping": 0.0,  # its default is 1.0 since DeepSpeed 0.19
        "bf16": {"enabled": bf16},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 20}},
        "steps_per_print": 10**9,
    }


def micro_batches(windows: Windows, plan: BatchPlan, *, first_sample: int, dp_rank: int) -> Iterator[Any]:
    """One step's micro batches of this replica: pairs of tokens and labels, each [B, S]."""
    for numbers in plan.micro_batches(first_sample=first_sample, dp_rank=dp_rank):
        rows = [shuffled(number, num_samples=windows.num_samples, seed=SEED) for number in numbers]
        inputs, labels = zip(*(windows.sample(row) for row in rows), strict=True)
        yield torch.stack(inputs), torch.stack(labels)


def log_loss(session: Session, *, loss: float) -> None:
    """Append the global batch's mean loss to the attempt's log, in full precision."""
    position = session.position
    record = {
        "attempt": session.settings.attempt,
        "step": position.step,
        "samples": position.samples,
        "loss": loss,
        "time": time.time(),
    }
    path = session.settings.checkpoint_root / f"loss-a{session.settings.attempt}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")


def main() -> None:
    """Train until --steps steps are done, or until the operator asks for a drain."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    options = parse()
    session = Session.from_env()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    session.start()
    plan = session.batch_plan(global_batch=options.global_batch, micro_batch=options.micro_batch)
    wide = {"hidden": 1024, "ffn": 2816} if options.big else {}
    config = GptConfig(layers=options.layers, **wide)
    model = build(config, session.topology)
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95), eps=1e-6)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=deepspeed_config(plan, zero=session.topology.zero, bf16=options.bf16),
    )
    windows = Windows(corpus(), config.sequence)
    position = session.restore(lambda folder: engine.load_checkpoint(str(folder.parent), tag=folder.name))
    description = pipeline_description(config, model)
    client_state = {
        "universal_checkpoint_info": universal_checkpoint_info(config),
        "pipeline_layout": description["pipeline"],
    }

    def write(folder: Path, tag: str) -> None:
        engine.save_checkpoint(str(folder), tag=tag, client_state=dict(client_state))

    dp_rank = session.topology.replica(session.settings.rank)
    for step in range(position.step, options.steps):
        samples = session.position.samples  # counted, because an edit of the spec may change the global batch
        batches = micro_batches(windows, plan, first_sample=samples, dp_rank=dp_rank)
        loss = float(engine.train_batch(data_iter=batches))
        time.sleep(options.step_delay)
        action = session.after_step(step=step + 1, samples=samples + plan.global_batch, loss=loss)
        if session.is_leader:
            log_loss(session, loss=loss)
        last = step + 1 == options.steps
        due = options.save_every and (step + 1) % options.save_every == 0
        if action.save or due or last:
            session.save(write, data={"seed": SEED}, model=description)
        if action.stop:
            break
    try:
        session.finish()
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
