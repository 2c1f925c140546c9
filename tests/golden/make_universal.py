"""Make the tiny universal checkpoints beside this file again: `python -m tests.golden.make_universal`.

Each is what DeepSpeed's own converter makes of the native checkpoint of the same name in `deepspeed-0.19.8`, untouched.
"""

import contextlib
import io
import shutil
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from tests.golden.files import STEP, golden

HERE = Path(__file__).parent / "universal-0.19.8"
CASES = ("autoep-dp2-ep2", "pipeline-tp2-pp2", "zero2-dp3", "zero3-dp3")


def main() -> None:
    """Make all, or those named on the command line."""
    from deepspeed.checkpoint import ds_to_universal

    for name in sys.argv[1:] or CASES:
        target = HERE / name / STEP
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
            options = Namespace(
                input_folder=str(shutil.copytree(golden(name), Path(scratch) / STEP)),
                output_folder=str(target),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,  # of the plain models, which say nothing about tensor parallelism
            )
            tuples_of_parts(Path(options.input_folder))
            ds_to_universal.main(options)
        (target.parent / "latest_universal").unlink()


def tuples_of_parts(folder: Path) -> None:
    """The native checkpoint has the sizes of fused parts as a list, which DeepSpeed's converter does not take."""
    import torch

    for path in folder.glob("mp_rank_*"):
        content = torch.load(path, weights_only=False)
        for entry in content.get("universal_checkpoint_info", {}).get("parameter_with_sub_params", ()):
            entry["shape"] = tuple(tuple(size) if isinstance(size, list) else size for size in entry["shape"])
            torch.save(content, path)


if __name__ == "__main__":
    main()
