"""The training stacks whose folders are known: how to tell them, and which of their files belong to single ranks.

Sources: transformers 5.23 (`Trainer._save_checkpoint`, `_save_rng_state`, `_load_rng_state`), accelerate 1.15
(`Accelerator.save_state`, `checkpointing.py`), Lightning 2.6 (`DeepSpeedStrategy.save_checkpoint`, whose tag is the
word `checkpoint`; Lightning keeps its own state inside DeepSpeed's files). accelerate's `fsdp_utils.py`
(`save_fsdp_model`, `save_fsdp_optimizer`), which the Trainer calls, too.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A training stack.

    Attributes:
        name: name for people.
        format: format of the checkpoint inside.
        tag: pattern of the name of the checkpoint's folder, which the format's own file names; None if `parts` are.
        parts: folders that hold one checkpoint together, the weights first; all but the first may be missing.
        mark: file that every folder of this stack holds; empty if the tag tells enough.
        rank_file: pattern of the files that hold the random state of one rank each; None if there are none.
        without_rank_files: what the stack does without them.
        per_rank_files: pattern of files whose content counts steps once for each rank; None if there are none.
    """

    name: str
    format: str
    tag: re.Pattern[str] | None = None
    parts: tuple[str, ...] = ()
    mark: str = ""
    rank_file: re.Pattern[str] | None = None
    without_rank_files: str = ""
    per_rank_files: re.Pattern[str] | None = None


STACKS = (
    Stack(
        name="Hugging Face's Trainer",
        format="deepspeed",
        tag=re.compile(r"global_step\d+", re.ASCII),
        mark="trainer_state.json",
        rank_file=re.compile(r"rng_state(_\d+)?\.pth", re.ASCII),
        without_rank_files="the Trainer then goes on with the random numbers that its argument `seed` gives every rank",
    ),
    Stack(
        name="Accelerate",
        format="deepspeed",
        tag=re.compile(r"pytorch_model", re.ASCII),
        rank_file=re.compile(r"random_states_\d+\.pkl", re.ASCII),
        without_rank_files="Accelerate then leaves the random numbers of each rank as the script has seeded them",
        per_rank_files=re.compile(r"scheduler(_\d+)?\.bin", re.ASCII),
    ),
    Stack(name="Lightning", format="deepspeed", tag=re.compile(r"checkpoint", re.ASCII)),
    Stack(
        name="Accelerate's FSDP",
        format="dcp",
        parts=("pytorch_model_fsdp_0", "optimizer_0"),
        rank_file=re.compile(r"rng_state(_\d+)?\.pth|random_states_\d+\.pkl", re.ASCII),
        without_rank_files="Accelerate and the Trainer then leave the random numbers of each rank as they are seeded",
        per_rank_files=re.compile(r"scheduler(_\d+)?\.bin", re.ASCII),
    ),
)
"""In the order in which they are asked about a folder."""


_BY_NAME = {stack.name: stack for stack in STACKS}


def stack_of(name: str) -> Stack:
    """Return the stack called `name`.

    Raises:
        KeyError: this version does not know it.
    """
    return _BY_NAME[name]
