"""Train the same GPT as a plain module, in the loop that most trainings have, with ZeRO and sequence parallelism.

    python -m elastic_trainer.launch --nproc 2 examples/gpt_deepspeed/train_flat.py --steps 20     # a laptop, dp=2
    ETJ_TOPOLOGY=dp=4,cp=2,zero=3 python -m elastic_trainer.launch --nproc 4 examples/gpt_deepspeed/train_flat.py

cp ranks share a sample, each with a part of its sequence. The rest is as in train.py.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from flat import build_flat
from lean import deepspeed
from model import GptConfig, parameter_groups
from text import Windows, corpus
from torch import Tensor, distributed
from train import SEED, deepspeed_config, log_loss, micro_batches, parse

from elastic_trainer import Session
from reshard.topology import Topology


def train_step(engine: Any, batches: Iterable[tuple[Tensor, Tensor]], topology: Topology, rank: int) -> float:
    """One optimizer step; the mean loss of the global batch."""
    part = rank % topology.cp
    # DeepSpeed 0.19.8 sums gradients over the ranks of a sequence, but in ZeRO-3, where it averages them.
    share = 1 if topology.zero == 3 else topology.cp
    losses = []
    for tokens, labels in batches:
        loss = engine(*(whole.chunk(topology.cp, dim=1)[part] for whole in (tokens, labels)))
        engine.backward(loss / share)
        engine.step()
        losses.append(loss.detach().double())
    total = torch.stack(losses).mean()
    distributed.all_reduce(total)
    return float(total) / topology.world_size


def main() -> None:
    """Train until --steps steps are done, or until the operator asks for a drain."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    options = parse()
    session = Session.from_env()
    topology, rank = session.topology, session.settings.rank
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    session.start()
    plan = session.batch_plan(global_batch=options.global_batch, micro_batch=options.micro_batch)
    config = GptConfig(layers=options.layers)
    model, mpu = build_flat(config, topology)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95), eps=1e-6),
        config=deepspeed_config(plan, zero=topology.zero, bf16=options.bf16),
        mpu=mpu,
    )
    windows = Windows(corpus(), config.sequence)
    position = session.restore(lambda folder: engine.load_checkpoint(str(folder.parent), tag=folder.name))

    def write(folder: Path, tag: str) -> None:
        engine.save_checkpoint(str(folder), tag=tag)

    for step in range(position.step, options.steps):
        samples = session.position.samples  # counted, because an edit of the spec may change the global batch
        batches = micro_batches(windows, plan, first_sample=samples, dp_rank=topology.replica(rank))
        loss = train_step(engine, batches, topology, rank)
        time.sleep(options.step_delay)
        action = session.after_step(step=step + 1, samples=samples + plan.global_batch, loss=loss)
        if session.is_leader:
            log_loss(session, loss=loss)
        last = step + 1 == options.steps
        due = options.save_every and (step + 1) % options.save_every == 0
        if action.save or due or last:
            session.save(write, data={"seed": SEED})
        if action.stop:
            break
    try:
        session.finish()
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
