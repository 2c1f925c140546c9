"""Make the tiny DCP checkpoints beside this file again, with real torch: `python -m tests.golden.make_dcp`.

Each folder has what `torch.distributed.checkpoint.save` wrote, untouched, and what the full tensors were at that moment
(`truth.json`: shapes and SHA-256).
"""

import hashlib
import json
import shutil
import sys
import warnings
from pathlib import Path

from tests.engine.dcp_run import launch

HERE = Path(__file__).parent / "dcp-2.13"
CASES = {
    "fsdp2-flat": {"dp": 2, "style": "flat"},
    "single-nested": {"dp": 1, "style": "nested", "sharded": False, "optimizer": "sgd"},
    "tp2-fsdp2-titan": {"dp": 2, "tp": 2, "style": "titan", "optimizer": "velocity"},
}
TYPES = "types"


def main() -> None:
    """Make all, or those named on the command line."""
    for name in sys.argv[1:] or (*CASES, TYPES):
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if name == TYPES:
            save_types(folder)
            continue
        run = {"name": name, "size": "tiny", "steps": 2, "save_at": 2, "save": str(folder / "step-00000002")}
        launch([{**run, **CASES[name], "truth": str(folder / "truth.json")}])


def save_types(folder: Path) -> None:
    """One weight of every type that is read, of random bits."""
    import torch
    from torch.distributed import checkpoint

    from reshard.tensors.layout import ITEM_BYTES

    torch.manual_seed(11)
    warnings.simplefilter("ignore")
    bits = {dtype: torch.randint(0, 256, (5, 3 * size), dtype=torch.uint8) for dtype, size in ITEM_BYTES.items()}
    bits["bool"] %= 2
    state = {"model": {f"a_{dtype}": value.view(getattr(torch, dtype)) for dtype, value in bits.items()}}
    checkpoint.save(state, checkpoint_id=folder / "step-00000002", no_dist=True)
    truth = {
        f"model/a_{dtype}": {"shape": [5, 3], "sha256": hashlib.sha256(value.numpy().tobytes()).hexdigest()}
        for dtype, value in bits.items()
    }
    (folder / "truth.json").write_text(json.dumps(truth, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
