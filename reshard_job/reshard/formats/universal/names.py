"""Make and parse file names of a universal checkpoint (deepspeed/checkpoint/ds_to_universal.py, 0.19.8)."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import UnsupportedError

NAME = "universal"
ZERO = "zero"
"""Name of the folder that has a folder for each parameter, under the parameter's name."""

OPTIMIZER_FILE = f"{ZERO}/optimizer_state.pt"
MADE_FOR = "reshard_topology"
"""Key in the optimizer file, written by reshard: the topology of the target. DeepSpeed ignores it."""

WEIGHTS = "reshard_weights"
"""Key in the optimizer file, written by reshard: types of the module's weights, and the native files of some."""

STEP = "step"
MASTER = "fp32"
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Both files are the same: stages 1 and 2 load the first name, stage 3 the second (engine.py, `_get_ckpt_name`)."""

_SUFFIX = ".pt"
_MAX_NAME_BYTES = 255


def atom_file(name: str, state: str) -> str:
    """Return `zero/NAME/STATE.pt`."""
    return f"{ZERO}/{name}/{state}{_SUFFIX}"


def state_of(file_name: str) -> str | None:
    """Return the state that a file in a parameter's folder holds, or None if DeepSpeed ignores the file."""
    return file_name.removesuffix(_SUFFIX) if file_name.endswith(_SUFFIX) else None


def check_names(names: Iterable[str], root: str) -> None:
    """Check that every name can be the name of a folder, because DeepSpeed joins names to paths as they are.

    Raises:
        UnsupportedError: some cannot; the message lists them.
    """
    wrong = [
        name
        for name in names
        if not name or name in (".", "..") or set(name) & {"/", "\\", "\0"} or len(name.encode()) > _MAX_NAME_BYTES
    ]
    if wrong:
        raise UnsupportedError(
            f"{len(wrong)} parameters have names that cannot be a folder's",
            path=root,
            problems=[f"{name!r:.200}" for name in wrong[:20]],
            hint="a universal checkpoint has a folder per parameter; choose another format, or other names (--names)",
        )
