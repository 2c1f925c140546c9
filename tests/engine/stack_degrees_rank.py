"""One rank that trains through the DeepSpeed stack: a pipeline with tensor parallelism by hand, or AutoTP.

Arguments: `pipeline` or `autotp`, number of steps. Prints the loss of every step.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt_deepspeed"))

import deepspeed
import torch
from model import GptConfig, build, parameter_groups, pipeline_description, universal_checkpoint_info
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic_trainer import Session
from elastic_trainer.stacks.deepspeed import initialize

MICRO, GLOBAL = 1, 12
CONFIG = {
    "train_batch_size": GLOBAL,
    "train_micro_batch_size_per_gpu": MICRO,
    "zero_optimization": {"stage": 1},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 4}},
    "steps_per_print": 10**9,
}
AUTOTP = {
    "layer_specs": [
        {"patterns": [r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*down\.weight$"], "partition_type": "row"},
    ],
    "use_default_specs": False,
}
PIPELINE = GptConfig(layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61, padded_vocabulary=64, sequence=16)


def rows(length):
    """Tokens and labels, each [ROWS, length]."""
    torch.manual_seed(3)
    tokens = torch.randint(0, 61, (240, length + 1))
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=MICRO, shuffle=True)


class Cut(nn.Module):
    """Layers that AutoTP cuts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(61, 24)
        self.up, self.down = nn.Linear(24, 46), nn.Linear(46, 24)

    def forward(self, tokens, labels):
        hidden = self.embed(tokens)
        hidden = hidden + self.down(nn.functional.silu(self.up(hidden)))
        logits = hidden @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train_pipeline(num_steps):
    topology = Session.from_env().topology
    model = build(PIPELINE, topology)
    description = pipeline_description(PIPELINE, model)
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95), eps=1e-6)
    engine, run = initialize(
        model=model,
        optimizer=optimizer,
        config=CONFIG,
        client_state={
            "universal_checkpoint_info": universal_checkpoint_info(PIPELINE),
            "pipeline_layout": description["pipeline"],
        },
        commit_model=description,
    )
    batches = run.batches(rows(PIPELINE.sequence))
    for step in run.steps(num_steps):
        loss = engine.train_batch(data_iter=batches)
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1} loss {float(loss):.7f}", flush=True)


def train_autotp(num_steps):
    model = Cut()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6)
    config = {**CONFIG, "tensor_parallel": {"autotp_size": 1, "partition_config": AUTOTP}}
    engine, run = initialize(model=model, optimizer=optimizer, config=config)
    batches = run.batches(rows(8))
    for step in run.steps(num_steps):
        total = 0.0
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(*next(batches))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        mean = torch.tensor(total / engine.gradient_accumulation_steps())
        torch.distributed.all_reduce(mean)
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1} loss {float(mean) / torch.distributed.get_world_size():.7f}", flush=True)


deepspeed.init_distributed(dist_backend="gloo", verbose=False)
(train_pipeline if sys.argv[1] == "pipeline" else train_autotp)(int(sys.argv[2]))
