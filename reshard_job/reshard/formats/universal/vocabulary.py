"""How many rows a vocabulary has in the files.

Stages 1 and 2 fill up with zeros to what the model needs and fail if there are too many; stage 3 takes the rows as they
are, and silently shifts everything behind them if they are too few (stage3.py, `load_hp_checkpoint_state`, 0.19.8).
"""

from __future__ import annotations

import dataclasses

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.logical import Param
from reshard.formats.universal.blueprint import Blueprint
from reshard.formats.universal.source import is_vocabulary
from reshard.topology import Topology


def param_in_files(param: Param, blueprint: Blueprint, target: Topology) -> Param:
    """The parameter with the rows that its atoms get.

    All rows that the target's model has, where that is known: then the folder is right for every stage, and padding
    rows keep their values where the source has as many. Else the true rows, as DeepSpeed's own converter does.

    Raises:
        UnsupportedError: stage 3 needs the number of rows, and it is not known.
    """
    known = blueprint.patterns.vocabulary_rows
    if known is None or not param.shape or not is_vocabulary(blueprint.patterns, param.name):
        return param
    true, stated = known
    if blueprint.patterns.vocabulary_multiple is not None:
        padded = blueprint.patterns.padded_rows(target.tp)
    elif true == stated:
        padded = true
    else:
        padded = blueprint.padded if target.tp == blueprint.tp else None
    if padded is None and target.zero == 3:
        raise UnsupportedError(
            f"{param.name}: with how many rows the vocabulary of {true} is padded at tp={target.tp} is not known,"
            " and DeepSpeed's ZeRO-3 loads universal checkpoints wrongly without those rows",
            path=str(blueprint.model.path),
            hint="save with vocab_multiple in universal_checkpoint_info (rows are padded to a multiple of it times tp),"
            " or choose --to zero=1",
        )
    rows = padded or true
    return dataclasses.replace(param, shape=(rows, *param.shape[1:]), rows=true if rows > true else None)
