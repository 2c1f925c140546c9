"""Decide how many rows a vocabulary has in the files.

Stages 1 and 2 pad the rows with zeros to what the model needs, and fail if there are too many rows. Stage 3 takes the
rows as they are. If there are too few, it shifts everything behind them without an error (stage3.py,
`load_hp_checkpoint_state`, 0.19.8).
"""

from __future__ import annotations

import dataclasses

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.logical import Param
from reshard.formats.universal.blueprint import Blueprint
from reshard.topology import Topology


def pad_vocabulary(param: Param, blueprint: Blueprint, target: Topology) -> Param:
    """Return the parameter with the number of rows that its atoms get.

    Atoms get all rows of the target's model, so that every stage can load the folder and padding rows keep their
    values. A folder of DeepSpeed's own converter has no padding rows; its atoms get some only for stage 3.

    Raises:
        UnsupportedError: stage 3 needs the number of rows, and it is not known.
    """
    stated = blueprint.patterns.vocabulary_rows
    if stated is None or not param.shape or not blueprint.patterns.is_vocabulary(param.name):
        return param
    true, padded = stated
    certain = blueprint.patterns.vocabulary_multiple is not None or true == padded or target.tp == blueprint.tp
    if target.zero == 3 and not certain:
        raise UnsupportedError(
            f"{param.name}: with how many rows the vocabulary of {true} is padded at tp={target.tp} is not known"
            f" ({padded} at tp={blueprint.tp}), and DeepSpeed's ZeRO-3 would load another number of rows wrongly",
            path=str(blueprint.model.path),
            hint="save with vocab_multiple in universal_checkpoint_info (rows are padded to a multiple of it times tp),"
            " or choose --to zero=1",
        )
    if param.rows is None and target.zero < 3:
        return param
    rows = blueprint.patterns.padded_rows(target.tp) or true
    return dataclasses.replace(param, shape=(rows, *param.shape[1:]), rows=true if rows > true else None)
