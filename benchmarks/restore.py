"""One rank of a real training run that loads a checkpoint and says what that took, for `benchmarks.virtual`.

Started by `elastic_trainer.launch`. Not a module of the product: it imports torch.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples/gpt_deepspeed"))

import torch
from lean import deepspeed
from model import GptConfig, parameter_groups
from model import build as build_gpt

from benchmarks.measure import drop_from_cache
from benchmarks.train import build, counters
from elastic_trainer import Session
from reshard.topology import Topology


def model_and_groups(kind: str, topology: Topology) -> tuple[torch.nn.Module, list[dict[str, object]]]:
    """Return the model that trained the checkpoints of `benchmarks.checkpoints`, and its parameter groups."""
    if kind == "zero3":
        model = build(100e6)
        return model, [{"params": list(model.parameters())}]
    gpt = build_gpt(GptConfig(hidden=1024, ffn=2816), topology)
    return gpt, parameter_groups(gpt, weight_decay=0.1)


def main() -> None:
    """Build the engine, load, and write `rank-N.json` into the report's folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("zero1", "zero3"), help="which of benchmarks.checkpoints")
    parser.add_argument("how", choices=("virtual", "native", "universal"))
    parser.add_argument("checkpoint", type=Path, help="folder of the step")
    parser.add_argument("report", type=Path, help="folder for what the ranks say")
    parser.add_argument("--storage", type=Path, required=True, help="folder to drop from the page cache before")
    parser.add_argument("--warm", action="store_true", help="do not drop it")
    parser.add_argument("--own-node", action="store_true", help="every rank pretends to be a node of its own")
    options = parser.parse_args()
    if options.own_node:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    session = Session.from_env()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    session.start()
    model, groups = model_and_groups(options.kind, session.topology)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": session.topology.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "checkpoint": {"load_universal": options.how == "universal"},
    }
    if options.kind == "zero1":
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 20}}
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if session.is_leader and not options.warm:
        drop_from_cache(options.storage)
    torch.distributed.barrier()

    marks = [(time.monotonic(), busy_seconds(), counters())]

    def load(folder: Path) -> None:
        marks.append((time.monotonic(), busy_seconds(), counters()))
        found, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name)
        assert found is not None, f"DeepSpeed found nothing in {folder}"

    if options.how == "virtual":
        session.restore(load)
    else:
        load(options.checkpoint)
    marks.append((time.monotonic(), busy_seconds(), counters()))
    (begin, busy_before, first), (_, _, opened), (end, busy, last) = marks
    told = {
        "seconds": end - begin,
        "processor_seconds": busy - busy_before,
        "bytes_before_framework": opened["rchar"] - first["rchar"],
        "bytes_by_framework": last["rchar"] - opened["rchar"],
        "storage_bytes": last["read_bytes"] - first["read_bytes"],
        "weights": fingerprint(engine),
    }
    (options.report / f"rank-{session.settings.rank}.json").write_text(json.dumps(told), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def busy_seconds() -> float:
    """Processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def fingerprint(engine: object) -> float:
    """Sum of this rank's master weights and their moments: equal, however they came here."""
    optimizer = engine.optimizer  # type: ignore[attr-defined]
    groups = getattr(optimizer, "fp32_partitioned_groups_flat", None) or optimizer.single_partition_of_fp32_groups
    states = [optimizer.optimizer.state[group] for group in groups]
    tensors = [*groups, *(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))]
    return float(sum(tensor.detach().double().abs().sum() for tensor in tensors))


if __name__ == "__main__":
    main()
