"""Run DeepSpeed's own loader of universal checkpoints without ranks. Started by the test, never collected.

Reads a JSON list of tasks from argv (folder, name, shard shape, tensor-parallel rank and degree), prints a JSON list:
for each state the SHA-256 of what the rank gets, or the error.
"""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state
from deepspeed.utils.tensor_fragment import fragment_address


def load(task):
    param = torch.nn.Parameter(torch.zeros(task["shape"]))
    master = torch.zeros(param.numel())
    param._hp_mapping = SimpleNamespace(
        lp_fragment_address=fragment_address(numel=param.numel(), start=0), get_hp_fragment=lambda: master
    )
    try:
        load_hp_checkpoint_state(param, str(Path(task["folder"]) / "zero" / task["name"]), task["rank"], task["tp"])
    except (AssertionError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    found = {"fp32": master, **param._hp_mapping.optim_fragment}
    return {state: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for state, tensor in found.items()}


print(json.dumps([load(task) for task in json.loads(sys.argv[1])]))
