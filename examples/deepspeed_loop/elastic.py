"""Train a small language model with DeepSpeed's engine, in a training loop of its own: plain.py, made elastic.

    torchrun --nproc-per-node 2 examples/deepspeed_loop/elastic.py --steps 20

In an ElasticTrainingJob it goes on from the commit that the operator names, at any number of ranks.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import deepspeed
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from elastic_trainer.stacks.deepspeed import initialize

SEED = 1234
SEQUENCE = 32
CONFIG = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 20}},
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
}


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


class LanguageModel(nn.Module):
    """Two transformer layers over bytes."""

    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.randn(SEQUENCE, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a micro batch: [B, S], [B, S] -> []."""
        mask = nn.Transformer.generate_square_subsequent_mask(SEQUENCE, tokens.device, self.place.dtype)
        hidden = self.layers(self.embed(tokens) + self.place, mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())


def log(step: int, losses: list[Tensor]) -> None:
    """Print the mean loss over micro batches and ranks."""
    mean = torch.stack(losses).mean()
    distributed.all_reduce(mean)
    if distributed.get_rank() == 0:
        print(f"step {step} loss {float(mean) / distributed.get_world_size():.7f}", flush=True)


def main() -> None:
    """Train until --steps steps are done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(SEED)
    model = LanguageModel(dropout=options.dropout)
    dataset = Windows()
    config = CONFIG | {"bf16": {"enabled": options.bf16}}
    engine, run = initialize(model=model, model_parameters=model.parameters(), config=config)
    accumulation = engine.gradient_accumulation_steps()
    loader = DataLoader(
        dataset,
        batch_size=engine.train_micro_batch_size_per_gpu(),
        sampler=DistributedSampler(dataset, seed=SEED, drop_last=True),
        num_workers=1,
    )
    # The loader's sampler gives way to one that keeps the order of samples at any number of ranks.
    batches = run.batches(loader)
    for step in run.steps(options.steps):
        losses = []
        for _ in range(accumulation):
            tokens, labels = (part.to(engine.device) for part in next(batches))
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        log(step + 1, losses)
        if (step + 1) % options.save_every == 0:
            run.save()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
