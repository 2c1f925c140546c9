"""One rank of a real DeepSpeed run that loads universal checkpoints. Started by `reshard_run.launch`.

Like `reshard_rank`, whose models and steps it uses, with `checkpoint.load_universal` and one parameter group or two.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt_deepspeed"))
sys.path.insert(0, str(Path(__file__).parent))

import deepspeed
import torch
from model import build, pipeline_description, universal_checkpoint_info
from reshard_rank import (
    PIPELINES,
    SIZES,
    config_of,
    flat_model,
    flat_step,
    groups_of,
    make_moe_pipeline,
    optimizer_of,
    pipeline_step,
)

from reshard.topology import Topology


def make_engine(run, config, topology):
    if run["model"] == "moe-pipeline":
        model, client = make_moe_pipeline(config, topology)
    elif run["model"] == "pipeline":
        model = build(config, topology)
        info = {**universal_checkpoint_info(config), "original_vocab_size": config.vocabulary}
        client = {"universal_checkpoint_info": info, "pipeline_layout": pipeline_description(config, model)["pipeline"]}
    else:
        model, client = flat_model(run, config, topology), {"note": {"a": (1, 2.5, None)}}
    groups = list(model.parameters()) if run.get("one_group") else groups_of(run, model)
    optimizer = None if run["model"] == "autoep" else optimizer_of(run, groups)
    settings = {**config_of(run, topology), "checkpoint": {"load_universal": bool(run.get("load"))}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine, client


def main():
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for run in task["runs"]:
        topology = Topology.parse(run["topology"])
        config = SIZES[run.get("size", "small")]
        step_once = pipeline_step if run["model"] in PIPELINES else flat_step
        engine, client = make_engine(run, config, topology)
        if run.get("load"):
            folder = Path(run["load"])
            _, state = engine.load_checkpoint(str(folder.parent), tag=None if run.get("untagged") else folder.name)
            assert run.get("foreign") or "note" not in client or state["note"] == client["note"]
            if run.get("clone_steps"):  # what DeepSpeed's stage 3 should do
                for own in engine.optimizer.optimizer.state.values():
                    own["step"] = own["step"].clone()
        losses = []
        for _ in range(run["steps"]):
            losses.append(step_once(engine, config, topology, rank))
            if run.get("save") and engine.global_steps == run["save_at"]:
                folder = Path(run["save"])
                engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state=dict(client))
        engine.destroy()
        if rank == 0:
            with open(task["results"], "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"name": run["name"], "losses": losses}) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
