"""Make the golden state of Accelerate with FSDP2: `python -m tests.golden.make_accelerate` (two ranks on the CPU).

Accelerate saves model and optimizer in two DCP folders, and schedule and random states beside them.
"""

import functools
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import DistributedType, PartialState

ENGINE = Path(__file__).parents[1] / "engine"
sys.path.insert(0, str(ENGINE))

from dcp_net import SIZES, Net  # noqa: E402
from forked import fork  # noqa: E402

TARGET = Path(__file__).parent / "accelerate-1.15" / "fsdp2"
RANKS, STEPS = 2, 2


def save(rank: int, store: str) -> None:
    """Train two steps on one rank, and save the state."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}  # accelerate asks for them, and nobody listens
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    state = PartialState(cpu=True)
    state.distributed_type = DistributedType.MULTI_GPU  # accelerate 1.15 ignores FSDP on CPUs, where torch has it
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = Net(*SIZES["tiny"])
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, SIZES["tiny"][0], (4, 6), generator=generator)
        accelerator.backward(model(tokens[:, :-1], tokens[:, 1:]))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state(str(TARGET))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    """Fork the ranks."""
    TARGET.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        children = [fork(functools.partial(save, rank, f"{scratch}/store")) for rank in range(RANKS)]
        if failed := [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]:
            sys.exit(f"ranks {failed} failed")


if __name__ == "__main__":
    main()
