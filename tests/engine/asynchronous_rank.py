"""One of two ranks that saves tensors asynchronously, by torch.save or by DCP, and loads them again.

Arguments: `torch` or `dcp`, number of steps. The values of the tensors are the step.
"""

import logging
import sys

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save

from elastic_trainer import Session


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    how, steps = sys.argv[1], int(sys.argv[2])
    session = Session.from_env(asynchronous=True)
    distributed.init_process_group("gloo")
    session.start()
    rank = session.settings.rank
    state = {f"weights.{rank}": torch.zeros(300_000), f"shape.{rank}": torch.zeros(3, 5)}

    def write(folder, tag):
        if how == "dcp":
            return async_save(state, checkpoint_id=folder / tag)
        (folder / tag).mkdir(parents=True, exist_ok=True)
        return torch.save(state, folder / tag / f"rank-{rank}.pt")

    def load(folder):
        if how == "dcp":
            dcp_load(state, checkpoint_id=folder)
        else:
            state.update(torch.load(folder / f"rank-{rank}.pt"))

    position = session.restore(load)
    for tensor in state.values():
        assert bool((tensor == position.step).all()), (tensor, position)
    for step in range(position.step + 1, steps + 1):
        for tensor in state.values():
            tensor.fill_(step)
        session.after_step(step=step, samples=step, loss=0.0)
        session.save(write, format_="dcp" if how == "dcp" else "pt")
        for tensor in state.values():
            tensor.fill_(-1)  # the save has its own copy by now
    session.finish()
    distributed.destroy_process_group()


main()
