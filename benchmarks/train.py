"""One rank of a real training run for the benchmarks: makes a checkpoint of a given size, or loads one.

Started by torchrun, see `benchmarks.checkpoints`. Not a module of the product: it imports torch.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn

WIDTH = 1024


def build(parameters: float) -> nn.Sequential:
    """Blocks of two linear layers, about 8.4 million parameters each, in a model of about `parameters`."""
    torch.manual_seed(1)
    count = max(1, round(parameters / (8 * WIDTH * WIDTH)))
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(count)]
    return nn.Sequential(*blocks)


def counters() -> dict[str, int]:
    """Read the kernel's counters of this process, in bytes: `rchar` by read calls, `read_bytes` from disks, ..."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def deepspeed_save(options: argparse.Namespace) -> None:
    """One step under ZeRO, then `save_checkpoint`."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = build(options.parameters)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    engine.step()
    engine.save_checkpoint(options.folder, tag="step-00000001")


def fsdp(options: argparse.Namespace) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model sharded by FSDP2 and its optimizer."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    model = build(options.parameters)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def dcp_save(options: argparse.Namespace) -> None:
    """One step under FSDP2, then DCP's `save`."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    model, optimizer = fsdp(options)
    model(torch.ones(1, WIDTH)).square().mean().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{options.folder}/step-00000001")


def dcp_load(options: argparse.Namespace) -> None:
    """DCP's `load`, resharding as it reads; prints the bytes of all ranks."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    model, optimizer = fsdp(options)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    before = counters()["rchar"]
    load({"model": model_state, "optim": optimizer_state}, checkpoint_id=options.folder)
    count = torch.tensor([counters()["rchar"] - before])
    torch.distributed.all_reduce(count)
    if torch.distributed.get_rank() == 0:
        Path(options.report).write_text(json.dumps({"bytes_read": int(count)}), encoding="utf-8")


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("deepspeed_save", "dcp_save", "dcp_load"))
    parser.add_argument("folder")
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--report", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    globals()[options.action](options)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
