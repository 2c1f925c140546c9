"""Command line, accelerator and log of both scripts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "huggingface_trainer"))

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from tiny_llama import SEED, Text, build_model
from torch import Tensor

__all__ = ["SEED", "LossLog", "Text", "build_accelerator", "build_model", "parse", "resume"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("deepspeed", "fsdp2"), default="deepspeed")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage of the DeepSpeed backend")
    parser.add_argument("--micro-batch", type=int, default=2, help="samples per device and micro step")
    parser.add_argument("--accumulation", type=int, default=2, help="micro steps per optimizer step")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--samples", type=int, default=160, help="rows of the dataset")
    parser.add_argument("--output", default="output", help="folder of plain.py's checkpoints")
    return parser.parse_args()


def build_accelerator(options: argparse.Namespace) -> Any:
    """DeepSpeed or FSDP2, on GPUs where there are some, and otherwise on the CPU."""
    has_gpu = torch.cuda.is_available()  # CUDA or ROCm
    state = PartialState(cpu=not has_gpu)  # on CPU, accelerate starts several ranks only if it is told so before
    loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED)
    if options.backend == "deepspeed":
        plugin = DeepSpeedPlugin(zero_stage=options.zero, gradient_clipping=1.0)
        return Accelerator(
            deepspeed_plugin=plugin, dataloader_config=loading, gradient_accumulation_steps=options.accumulation
        )
    if state.distributed_type == DistributedType.MULTI_CPU:
        # accelerate 1.15 ignores FSDP on CPUs and replicates the model, although torch's `fully_shard` works there.
        state.distributed_type = DistributedType.MULTI_GPU
    sharding = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    return Accelerator(
        fsdp_plugin=sharding, dataloader_config=loading, gradient_accumulation_steps=options.accumulation
    )


def resume(accelerator: Any, output: str) -> int:
    """Load the newest checkpoint of `save_state`; return the steps that are done."""
    steps = [int(path.name.removeprefix("step-")) for path in Path(output).glob("step-*")]
    if not steps:
        return 0
    accelerator.load_state(f"{output}/step-{max(steps)}")
    return max(steps)


class LossLog:
    """Prints the mean loss of every step and its learning rate in full precision."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """Remember the loss of a micro step."""
        self._losses.append(loss.detach().double())

    def write(self, step: int, rate: float) -> None:
        """Print the mean over the micro steps and ranks since the last call."""
        mean = float(self._accelerator.gather(torch.stack(self._losses).mean()).mean())
        self._losses.clear()
        self._accelerator.print(f"step {step} loss {mean!r} rate {rate!r}", flush=True)
