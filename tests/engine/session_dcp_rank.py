"""A training with FSDP2, DCP and a Session, for `test_session_dcp`.

`session_dcp_rank.py TASK` with a JSON task: `steps` to end with, and the `results` file for the losses. The topology
and the commit to resume from come from the environment, as in a training pod.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from dcp_ranks import batch_of, build, load, state_of

from elastic_trainer import Session


def main(task):
    session = Session.from_env()
    torch.distributed.init_process_group("gloo")
    topology = session.topology
    run = {
        "model": "net",
        "size": "small",
        "style": "nested",
        "optimizer": "adamw",
        "lr": 1e-2,
        "sharded": True,
        "dp": topology.dp,
        "tp": topology.tp,
    }
    model, optimizer, schedule, own = build(run)
    session.start()
    position = session.restore(lambda folder: load({**run, "load": folder}, model, optimizer, schedule))
    losses = []
    for step in range(position.step, task["steps"]):
        tokens, labels = batch_of(run, step)
        loss = model(tokens[own], labels[own])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total = loss.detach().double()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / topology.world_size)
        session.after_step(step=step + 1, samples=12 * (step + 1), loss=losses[-1])
    state, _, _ = state_of(run, model, optimizer, schedule)
    folder = session.save(lambda root, tag: dcp.save(state, checkpoint_id=root / tag), format_="dcp")
    if session.is_leader:
        Path(task["results"]).write_text(json.dumps({"losses": losses, "folder": str(folder), "first": position.step}))
    session.finish()


main(json.loads(sys.argv[1]))
