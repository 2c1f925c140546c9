"""File names of a universal checkpoint (deepspeed/checkpoint/ds_to_universal.py, 0.19.8)."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import UnsupportedError

NAME = "universal"
ZERO = "zero"
"""Folder of the folders of parameters, which are called as the parameters are."""

OPTIMIZER_FILE = f"{ZERO}/optimizer_state.pt"
MADE_FOR = "reshard_topology"
"""Our own key in the optimizer file: what the folder was laid out for. DeepSpeed takes no notice of it."""

WEIGHTS = "reshard_weights"
"""Our own key there: types of the module's weights, and which native files some of them have."""

STEP = "step"
MASTER = "fp32"
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""One content: stages 1 and 2 look for the first name, stage 3 for the second (engine.py, `_get_ckpt_name`)."""

_SUFFIX = ".pt"
_MAX_NAME_BYTES = 255


def atom_file(name: str, state: str) -> str:
    """`zero/NAME/STATE.pt`."""
    return f"{ZERO}/{name}/{state}{_SUFFIX}"


def state_of(file_name: str) -> str | None:
    """State that a file in a parameter's folder holds, or None if DeepSpeed takes no notice of the file."""
    return file_name.removesuffix(_SUFFIX) if file_name.endswith(_SUFFIX) else None


def check_names(names: Iterable[str], root: str) -> None:
    """Every name can be a folder's: DeepSpeed joins it to a path as it is.

    Raises:
        UnsupportedError: naming those that cannot.
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
