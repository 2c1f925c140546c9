"""One rank that trains `megatron_gpt` with DeepSpeed's pipeline engine. Started by `reshard_run.launch`."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import deepspeed
import megatron_gpt
import torch
from model import parameter_groups
from reshard_rank import batch

from reshard.topology import Topology

GLOBAL_BATCH = 4
OPTIONS = ("swiglu", "untied")


def make_engine(run, topology):
    options = {name: bool(run.get(name)) for name in OPTIONS}
    if run.get("size") == "tiny":
        megatron_gpt.shrink()
    model = megatron_gpt.build(topology, **options)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": GLOBAL_BATCH // topology.dp,
        "zero_optimization": {"stage": topology.zero},
        "bf16": {"enabled": bool(run.get("bf16"))},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 4}},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": bool(run.get("universal"))},
    }
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-2, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, megatron_gpt.client_state(topology, model, **options)


def check_arguments(state, client):
    """Compare what Megatron-DeepSpeed compares before it trains on (megatron/checkpointing.py)."""
    saved, own = vars(state["args"]), vars(client["args"])
    assert saved == own, (saved, own)


def main():
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for run in task["runs"]:
        topology = Topology.parse(run["topology"])
        engine, client = make_engine(run, topology)
        if run.get("load"):
            folder = Path(run["load"])
            path, state = engine.load_checkpoint(str(folder.parent), tag=folder.name)
            assert path is not None, folder
            if not run.get("universal"):
                check_arguments(state, client)
        losses = []
        for _ in range(run["steps"]):
            replica, micro = topology.coordinate(rank).dp, GLOBAL_BATCH // topology.dp
            batches = (batch(megatron_gpt.CONFIG, engine.global_steps, replica * micro + at) for at in range(micro))
            losses.append(float(engine.train_batch(data_iter=batches)))
            if run.get("save") and engine.global_steps == run["save_at"]:
                folder = Path(run["save"])
                kept = {key: value for key, value in client.items() if key not in run.get("without", ())}
                engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state=kept)
        if rank == 0:
            with open(task["results"], "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"name": run["name"], "losses": losses}) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
