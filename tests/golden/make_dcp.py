"""Make the tiny DCP checkpoints beside this file again, with real torch: `python -m tests.golden.make_dcp`.

Each folder has what `torch.distributed.checkpoint.save` wrote, untouched, and what the full tensors were at that moment
(`truth.json`: shapes and SHA-256).
"""

import shutil
import sys
from pathlib import Path

from tests.engine.dcp_run import launch

HERE = Path(__file__).parent / "dcp-2.13"
CASES = {
    "fsdp2-flat": {"dp": 2, "style": "flat"},
    "single-nested": {"dp": 1, "style": "nested", "sharded": False, "optimizer": "sgd"},
    "tp2-fsdp2-titan": {"dp": 2, "tp": 2, "style": "titan", "optimizer": "velocity"},
}


def main() -> None:
    """Make all, or those named on the command line."""
    for name in sys.argv[1:] or CASES:
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run = {"name": name, "size": "tiny", "steps": 2, "save_at": 2, "save": str(folder / "step-00000002")}
        launch([{**run, **CASES[name], "truth": str(folder / "truth.json")}])


if __name__ == "__main__":
    main()
