"""Real FSDP2 and plain torch runs that save and load with torch.distributed.checkpoint, for the DCP tests.

`python dcp_ranks.py TASK` with a JSON task: runs, done one after the other, each in as many forked processes as it has
ranks (torch is imported once). One JSON line per run goes to the task's results: the global mean loss of every step.
"""

import functools
import hashlib
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from dcp_net import SIZES, Net
from forked import fork
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastic_trainer.stacks.description import write_description

BATCH = 12


class Velocity(torch.optim.Optimizer):
    """An optimizer of our own, with a state of an uncommon name and few options."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-1, "weight_decay": 0.0})

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    if not state:
                        state["velocity"] = torch.zeros_like(weight)
                    state["velocity"].mul_(0.9).add_(weight.grad)
                    weight.data.mul_(1 - group["weight_decay"] * group["lr"]).sub_(group["lr"] * state["velocity"])


def make_model(run):
    if run["model"] == "net":
        return Net(*SIZES[run["size"]])
    import reshard_rank  # the model of the DeepSpeed tests

    return reshard_rank.FlatModel(reshard_rank.SIZES[run["size"]])


def parameter_groups(run, model):
    if run["model"] == "net":
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    import reshard_rank

    if run.get("single_group"):
        return [{"params": list(model.parameters()), "weight_decay": 0.1}]
    return reshard_rank.parameter_groups(model, weight_decay=0.1)


def batch_of(run, step):
    """Tokens and labels of the whole batch."""
    if run["model"] == "net":
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, SIZES[run["size"]][0], (BATCH, 9), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    import reshard_rank

    samples = [reshard_rank.batch(reshard_rank.SIZES[run["size"]], step, sample) for sample in range(BATCH)]
    return tuple(torch.cat(part) for part in zip(*samples, strict=True))


def build(run):
    """Model, optimizer, schedule, and this rank's part of the batch."""
    dp, tp = run["dp"], run["tp"]
    model = make_model(run)
    for name in run.get("frozen", ()):
        model.get_parameter(name).requires_grad_(False)
    rank = 0
    if run["sharded"]:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        rank = mesh["dp"].get_local_rank()
        if tp > 1:
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh["dp"])
    groups = parameter_groups(run, model)
    if run["optimizer"] == "velocity":
        optimizer = Velocity(groups)
    elif run["optimizer"] == "sgd":
        optimizer = torch.optim.SGD(groups, lr=1e-1, momentum=0.9, foreach=False)
    else:
        optimizer = torch.optim.AdamW(groups, lr=run["lr"], betas=(0.9, 0.95), foreach=False)
    schedule = None
    if run["style"] in ("nested", "titan"):  # a converter from another framework knows of no schedule
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, schedule, slice(rank * BATCH // dp, (rank + 1) * BATCH // dp)


def state_of(run, model, optimizer, schedule):
    """The state dict in one of three styles that people use, and its parts for model and optimizer."""
    flat = StateDictOptions(flatten_optimizer_state_dict="nested" not in run["style"])
    weights, states = get_state_dict(model, optimizer, options=flat)
    if schedule is None:
        return {"model": weights, "optim": states}, weights, states
    if run["style"] == "nested":
        app = {"model": weights, "optimizer": states, "schedule": schedule.state_dict()}
        return {"app": app}, weights, states
    rest = {"lr_scheduler": schedule.state_dict(), "train_state": {"tokens": 7, "rng": torch.arange(9.0)}}
    return {**weights, "optimizer": states, **rest}, weights, states


def load(run, model, optimizer, schedule):
    state, weights, states = state_of(run, model, optimizer, schedule)
    dcp.load(state, checkpoint_id=run["load"], no_dist=not run["sharded"])
    if run["style"] == "titan":
        weights = {name: state[name] for name in weights}
        assert torch.equal(state["train_state"]["rng"], torch.arange(9.0)) and state["train_state"]["tokens"] == 7
    flat = StateDictOptions(flatten_optimizer_state_dict="nested" not in run["style"])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=flat)
    if schedule is not None:
        schedule.load_state_dict(state["app"]["schedule"] if run["style"] == "nested" else state["lr_scheduler"])


def train(run):
    model, optimizer, schedule, own = build(run)
    losses = []
    if "describe" in run and int(os.environ["RANK"]) == 0:
        write_description(run["describe"], model, None if run.get("single_group") else optimizer)
    first = run.get("first", 0)
    if "load" in run:
        load(run, model, optimizer, schedule)
    for step in range(first, first + run["steps"]):
        if step == run.get("save_at"):
            save(run, model, optimizer, schedule)
        tokens, labels = batch_of(run, step)
        loss = model(tokens[own], labels[own])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        total = loss.detach().double()
        if run["sharded"]:
            torch.distributed.all_reduce(total)
            total /= run["dp"] * run["tp"]
        losses.append(float(total))
    if run.get("save_at") == first + run["steps"]:
        save(run, model, optimizer, schedule)
    return losses


def save(run, model, optimizer, schedule):
    state, weights, _ = state_of(run, model, optimizer, schedule)
    dcp.save(state, checkpoint_id=run["save"], no_dist=not run["sharded"])
    if "weights" in run and int(os.environ["RANK"]) == 0:
        torch.save({name: whole(value) for name, value in weights.items()}, run["weights"])
    elif "weights" in run:
        [whole(value) for value in weights.values()]
    if "truth" in run:
        found = {f"model/{name}": summary(value) for name, value in weights.items()}
        nested = get_state_dict(model, optimizer)[1]["state"]
        found |= {f"{kind}/{name}": summary(value) for name, own in nested.items() for kind, value in own.items()}
        if int(os.environ["RANK"]) == 0:
            Path(run["truth"]).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def summary(tensor):
    content = whole(tensor).detach().contiguous().numpy().tobytes()
    return {"shape": list(tensor.shape), "sha256": hashlib.sha256(content).hexdigest()}


def rank_main(run, rank, world, store, results):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if run["sharded"]:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    losses = train(run)
    if rank == 0:
        with open(results, "a") as stream:
            stream.write(json.dumps({"name": run["name"], "losses": losses}) + "\n")
    if run["sharded"]:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main():
    """Do the runs of the task in argv."""
    task = json.loads(sys.argv[1])
    defaults = {
        "model": "net",
        "size": "small",
        "optimizer": "adamw",
        "lr": 1e-2,
        "style": "flat",
        "dp": 1,
        "tp": 1,
        "sharded": True,
    }
    for given in task["runs"]:
        run = {**defaults, **given}
        world = run["dp"] * run["tp"]
        with tempfile.TemporaryDirectory() as scratch:
            store = f"{scratch}/store"
            ranks = [functools.partial(rank_main, run, rank, world, store, task["results"]) for rank in range(world)]
            children = [fork(rank) for rank in ranks]
            if failed := [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]:
                sys.exit(f"{run['name']}: ranks {failed} of {world} failed")


if __name__ == "__main__":
    main()
