"""One rank that trains on a stream of numbers, of which every replica takes its turn. Argument: number of steps.

Prints the samples of every step.
"""

import sys

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from elastic_trainer.stacks.fsdp2 import attach, start


class Turns(IterableDataset):
    """The numbers of one replica: its own, and every dp-th after it."""

    def __init__(self, replica, dp):
        self.replica, self.dp, self.done = replica, dp, 0

    def __iter__(self):
        while self.done < 100:
            self.done += 1
            yield self.replica + (self.done - 1) * self.dp

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


distributed.init_process_group("gloo")
run, mesh = start(global_batch=12, micro_batch=2)
model = fully_shard(nn.Linear(1, 1), mesh=mesh["dp"])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
attach(run, model, optimizer)
stream = run.stream(StatefulDataLoader(Turns(run.replica, run.plan.dp), batch_size=run.plan.micro_batch))
sys.stdout.write(f"start {stream.start.how}\n")  # one write: the ranks share the file
for step in run.steps(int(sys.argv[1])):
    samples = [next(stream) for _ in range(run.plan.accumulation_steps)]
    model(torch.cat(samples).float()[:, None]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    gathered = [None] * run.plan.dp
    distributed.all_gather_object(gathered, torch.cat(samples).tolist())
    if distributed.get_rank() == 0:
        print(f"samples {step} {sorted(row for rows in gathered for row in rows)}", flush=True)
    run.save()
distributed.destroy_process_group()
