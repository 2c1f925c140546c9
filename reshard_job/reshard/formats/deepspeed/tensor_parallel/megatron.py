"""Read and make the arguments that Megatron-DeepSpeed saves with a checkpoint (`args`, an `argparse.Namespace`).

Before a run goes on from a native checkpoint, Megatron-DeepSpeed compares the degrees and the padded vocabulary there
with its own (megatron/checkpointing.py, `check_checkpoint_args`), and it pads the vocabulary to a multiple of
`make_vocab_size_divisible_by` times tp (megatron/tokenizer/tokenizer.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from reshard.formats.pt.objects import Global, Inert
from reshard.topology import Topology

KEY = "args"
_CLASS = Global("argparse", "Namespace")
_TP, _PP, _PADDED = "tensor_model_parallel_size", "pipeline_model_parallel_size", "padded_vocab_size"
_DIVISOR = "make_vocab_size_divisible_by"


def add_vocabulary_multiple(info: Any, file: Mapping[str, Any]) -> Any:
    """Return `universal_checkpoint_info` with the `vocab_multiple` that Megatron's arguments state.

    They must explain the padded size at the source's tp; otherwise the description stays as it is.

    Args:
        info: as saved.
        file: content of the model file of rank 0.
    """
    stated = _read_state(file.get(KEY))
    if not isinstance(info, Mapping) or "vocab_multiple" in info or stated is None:
        return info
    true, padded = info.get("original_vocab_size"), info.get(_PADDED)
    divisor, tp = stated.get(_DIVISOR), stated[_TP]
    if not all(isinstance(number, int) and number > 0 for number in (true, padded, divisor, tp)):
        return info
    is_explained = padded == stated.get(_PADDED) == math.ceil(true / (divisor * tp)) * divisor * tp
    return {**info, "vocab_multiple": divisor} if is_explained else info


def replace_arguments(value: Any, after: Topology, padded_rows: int | None) -> Any:
    """Return saved arguments for another topology; arguments that are not Megatron's stay as they are.

    Args:
        value: `args` of a source's file.
        after: topology of the target.
        padded_rows: of the vocabulary in the target; None if they are not stated.
    """
    stated = _read_state(value)
    if stated is None:
        return value
    replaced: dict[str, Any] = {
        _TP: after.tp,
        _PP: after.pp,
        "model_parallel_size": after.tp,
        "data_parallel_size": after.dp // after.cp,
        "world_size": after.world_size,
        **({} if padded_rows is None else {_PADDED: padded_rows}),
    }
    state = {key: replaced.get(key, item) for key, item in stated.items()}
    return dataclasses.replace(value, state=state)


def _read_state(value: Any) -> Mapping[str, Any] | None:
    """Return the attributes of Megatron's arguments; None for other objects."""
    if not isinstance(value, Inert) or value.target != _CLASS or not isinstance(value.state, Mapping):
        return None
    return value.state if {_TP, _PP} <= value.state.keys() else None
