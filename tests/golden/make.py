"""Make the tiny checkpoints beside this file again, with real DeepSpeed: `python -m tests.golden.make`.

Each folder has what `engine.save_checkpoint` wrote, untouched, and what DeepSpeed's own accessors said at that moment
each rank's tensors were (`truth-*.json`: shapes and SHA-256).
"""

import shutil
import sys
from pathlib import Path

from tests.engine.reshard_run import launch

HERE = Path(__file__).parent / "deepspeed-0.19.8"
MEGATRON = Path(__file__).parents[1] / "engine" / "megatron_gpt_rank.py"
"""Trains a model of its own; DeepSpeed's accessors are not asked about it."""
CASES = {
    "pipeline-tp2-pp2": {"model": "pipeline", "topology": "tp=2,pp=2,dp=1,zero=1"},
    "megatron-tp2-pp2": {"model": "megatron", "topology": "tp=2,pp=2,dp=1,zero=1"},
    "pipeline-dp2": {"model": "pipeline", "topology": "tp=1,pp=1,dp=2,zero=1"},
    "zero2-dp3": {"model": "flat", "topology": "dp=3,zero=2"},
    "zero2-dp3-round-robin": {"model": "flat", "topology": "dp=3,zero=2", "zero": {"round_robin_gradients": True}},
    "zero3-dp3": {"model": "flat", "topology": "dp=3,zero=3", "zero": {"sub_group_size": 40}},
    "bf16-dp2": {"model": "flat", "topology": "dp=2,zero=1", "bf16": True},
    "bf16-optimizer-dp2": {
        "model": "flat",
        "topology": "dp=2,zero=1",
        "bf16": True,
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "zero2-dp4-cp2": {"model": "flat", "topology": "dp=4,cp=2,zero=2"},
    "elastic-dp2": {"model": "flat", "topology": "dp=2,zero=2", "zero": {"elastic_checkpoint": True}},
    "autoep-dp2-ep2": {"model": "autoep", "topology": "dp=2,ep=2,zero=1"},
    "autoep-tp2-dp2-ep2": {"model": "autoep-cut", "topology": "tp=2,dp=2,ep=2,zero=1"},
    "autoep-tp3-dp2-ep2-zero3": {
        "model": "autoep-cut",
        "topology": "tp=3,dp=2,ep=2,zero=3",
        "zero": {"sub_group_size": 60},
    },
    "experts-dp4-ep2": {"model": "moe", "topology": "dp=4,ep=2,zero=1"},
    "experts-pp2-dp2-ep2": {"model": "moe-pipeline", "topology": "pp=2,dp=2,ep=2,zero=1"},
    "muon-zero2-dp3": {"model": "flat", "topology": "dp=3,zero=2", "configured": "muon"},
    "zero0-dp2": {"model": "flat", "topology": "dp=2,zero=0"},
    "zero0-fused-bf16-dp2": {"model": "flat", "topology": "dp=2,zero=0", "bf16": True, "configured": "fused"},
    "zero0-bf16-dp2": {"model": "flat", "topology": "dp=2,zero=0", "bf16": True},
}


def main() -> None:
    """Make all, or those named on the command line."""
    for name in sys.argv[1:] or CASES:
        folder = HERE / name / "step-00000002"
        shutil.rmtree(folder.parent, ignore_errors=True)
        run = {"name": name, "size": "tiny", "steps": 2, "save_at": 2, "save": str(folder)}
        told = (
            {} if name.startswith(("muon", "zero0-fused")) else {"truth": str(folder.parent / "truth")}
        )  # no accessor
        script = (MEGATRON,) if CASES[name]["model"] == "megatron" else ()
        launch([{**run, **CASES[name], **told}], *script)
        for path in folder.parent.iterdir():
            if path.suffix == ".py" or path.name == "latest":
                path.unlink()


if __name__ == "__main__":
    main()
