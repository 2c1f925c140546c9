"""Command line and arguments of both scripts."""

from __future__ import annotations

import argparse
import atexit
import sys
from typing import Any

import torch
import torch.distributed
from tiny_llama import SEED
from transformers import TrainerCallback, TrainingArguments


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("deepspeed", "fsdp2"), default="deepspeed")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps in all, over all attempts")
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage of the DeepSpeed backend")
    parser.add_argument("--micro-batch", type=int, default=2, help="samples per device and micro step")
    parser.add_argument("--accumulation", type=int, default=2, help="micro steps per optimizer step")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--samples", type=int, default=2048, help="rows of the dataset")
    parser.add_argument("--output", default="output", help="folder of the Trainer's own files")
    return parser.parse_args()


def arguments(options: argparse.Namespace) -> Any:
    """Arguments of the Trainer: DeepSpeed or FSDP2, on GPUs where there are some, and otherwise on the CPU."""
    backends: dict[str, dict[str, Any]] = {
        "deepspeed": {
            "deepspeed": {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "zero_optimization": {"stage": options.zero},
            }
        },
        "fsdp2": {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "state_dict_type": "SHARDED_STATE_DICT",
            },
        },
    }
    has_gpu = torch.cuda.is_available()  # CUDA or ROCm
    args = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=1e-3,
        warmup_steps=4,
        logging_steps=1,
        save_steps=options.save_every,
        seed=SEED,
        report_to=[],
        use_cpu=not has_gpu,
        disable_tqdm=True,
        **backends[options.backend],
    )
    if options.backend == "fsdp2" and not has_gpu:
        _let_accelerate_shard_on_cpu()
    atexit.register(_end_process_group)
    return args


def _end_process_group() -> None:
    """End the process group, which the Trainer leaves open, when its threads have put the last tensors back.

    A gloo thread that holds a tensor when the interpreter ends ends the process with SIGABRT.
    """
    if torch.distributed.is_initialized() and getattr(sys, "last_type", None) is None:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


class LossLog(TrainerCallback):  # type: ignore[misc]
    """Prints loss and learning rate of every step in full precision."""

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']!r} rate {logs['learning_rate']!r}", flush=True)


def _let_accelerate_shard_on_cpu() -> None:
    """Let accelerate take the CPUs for devices that it shards models on.

    accelerate 1.15 ignores FSDP on CPUs and replicates the model instead, although torch's `fully_shard` works there.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if PartialState._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
