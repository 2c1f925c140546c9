"""Train a small language model with FSDP2 and tensor parallelism: plain.py, made elastic.

    torchrun --nproc-per-node 4 examples/fsdp2/elastic.py --steps 20 --tp 2

In an ElasticTrainingJob it goes on from the commit that the operator names, at any degrees.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from elastic_trainer.stacks.fsdp2 import attach, start

SEED = 1234
SEQUENCE = 32
WIDTH = 64
HEAD = 16


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of the Python standard library's sources, byte by byte: text that is on every machine."""

    def __init__(self) -> None:
        paths = sorted((Path(sysconfig.get_path("stdlib")) / "asyncio").glob("*.py"))
        self._bytes = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // SEQUENCE

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        window = self._bytes[row * SEQUENCE : (row + 1) * SEQUENCE + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """A transformer layer; with tensor parallelism a rank has some of the heads."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        normed = self.norms[0](hidden)
        query, key, value = (
            project(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        update: Tensor = self.dropout(self.down(nn.functional.gelu(self.up(self.norms[1](hidden)))))
        return hidden + update


class LanguageModel(nn.Module):
    """Two layers over bytes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.place = nn.Parameter(torch.randn(SEQUENCE, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a micro batch: [B, S], [B, S] -> []."""
        hidden = self.embed(tokens) + self.place
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())


def shard(model: LanguageModel, mesh: DeviceMesh, *, bf16: bool) -> LanguageModel:
    """Cut the blocks' weights over the ranks of `tp`, and everything over the ranks of `dp`."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    columns = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {**columns, "out": RowwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    return model


def mean_over_ranks(losses: list[Tensor]) -> float:
    """Mean loss over ranks; the losses are shares of this rank's."""
    mean = torch.stack(losses).sum()
    distributed.all_reduce(mean)
    return float(mean) / distributed.get_world_size()


def main() -> None:
    """Train until --steps steps are done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16; weights and optimizer stay fp32")
    options = parser.parse_args()

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group()
    ranks = distributed.get_world_size()
    run, mesh = start(global_batch=options.global_batch, micro_batch=options.micro_batch, tp=options.tp)
    if distributed.get_rank() == 0:
        print(f"{ranks} ranks on {device.type}, {mesh}", flush=True)
    torch.manual_seed(SEED)
    model = shard(LanguageModel(options.dropout).to(device), mesh, bf16=options.bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
    attach(run, model, optimizer, scheduler)
    dataset, dp = Windows(), mesh["dp"]
    loader = DataLoader(
        dataset,
        batch_size=options.global_batch // dp.size(),
        sampler=DistributedSampler(dataset, dp.size(), dp.get_local_rank(), seed=SEED, drop_last=True),
        num_workers=1,
        drop_last=True,
    )
    # The loader's batch size and sampler give way to the operator's batch and an order that any dp keeps.
    for step, batch in run.steps(options.steps, loader):
        losses = []
        for tokens, labels in zip(*(part.to(device).split(options.micro_batch) for part in batch), strict=True):
            loss = model(tokens, labels) * len(tokens) / len(batch[0])
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        loss_of_step = mean_over_ranks(losses)
        run.report(loss_of_step)
        if distributed.get_rank() == 0:
            print(f"step {step + 1} loss {loss_of_step:.7f}", flush=True)
        if (step + 1) % options.save_every == 0:
            run.save()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
