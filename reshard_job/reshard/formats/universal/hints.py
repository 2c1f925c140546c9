"""Read and make the hints in an atom's file, from which DeepSpeed derives how to cut the tensor when it loads it.

Source: deepspeed/checkpoint/universal_checkpoint.py, `load_hp_checkpoint_state`, and ds_to_universal.py,
`merge_tp_slices` (0.19.8). Stage 3 ignores hints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.logical import Param
from reshard.formats.pt.objects import Global, Inert, Tensor

PARAM = "param"
VOCABULARY = "vocab_tensor"
IS_EXPERT = "is_expert_param"
NUM_EXPERTS = "ep_num_experts"
_CAT_DIM = "cat_dim"
_NUM_PARTS = "param_n_sub_params"
_PARTS = "sub_param_shape"
_TYPES: Mapping[str, type] = {
    _CAT_DIM: int,
    VOCABULARY: bool,
    _NUM_PARTS: int,
    _PARTS: Inert,
    IS_EXPERT: bool,
    NUM_EXPERTS: int,
}
_SUB_PARAM_SHAPE = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")

Hints = Mapping[str, Any]


def parse(value: Any, path: str) -> tuple[Tensor, Hints | None]:
    """Return the tensor and the hints of an atom's file; hints are None for the bare tensors of ZeRO-3.

    Raises:
        CorruptSourceError: the file is not an atom.
        UnsupportedError: the file has a hint that this version does not know and that may change its meaning.
    """
    if isinstance(value, Tensor):
        return value, None
    if not isinstance(value, Mapping) or not isinstance(value.get(PARAM), Tensor):
        raise UnsupportedError(f"is {type(value).__name__}: expected a tensor, or a dict with one as param", path=path)
    hints = {key: hint for key, hint in value.items() if key != PARAM}
    if unknown := [key for key in hints if key not in _TYPES]:
        raise UnsupportedError(
            f"says {', '.join(f'{key!r:.60}' for key in unknown[:5])} beside its tensor: expected some of"
            f" {', '.join(_TYPES)}",
            path=path,
            hint="it was written by a newer DeepSpeed than 0.19.8; convert from the native checkpoint",
        )
    wrong = [key for key, hint in hints.items() if type(hint) is not _TYPES[key]]
    if wrong or (_PARTS in hints and hints[_PARTS].target != _SUB_PARAM_SHAPE):
        raise UnsupportedError(f"says {hints!r:.200}: not what DeepSpeed writes", path=path)
    return value[PARAM], hints


def for_param(param: Param, *, cut_is_known: bool) -> dict[str, Any]:
    """Make the hints for a parameter from `param.rule`.

    Args:
        param: with the shape that it has in the file.
        cut_is_known: `param.rule` is true for every degree of tensor parallelism, not for one rank only.

    If the cut is not known, the hints make tensor-parallel loading fail. Without hints DeepSpeed would cut along dim 0.
    That is wrong for row-parallel weights, and nobody would notice, because the numbers of elements agree. The hints
    describe a view with a first dim of 1 that is cut along it: one rank gets all of it, and a second rank nothing.
    """
    rule = param.rule
    if rule.vocabulary and rule.dim is not None:
        return {_CAT_DIM: rule.dim, VOCABULARY: True}
    if not cut_is_known:
        return {_PARTS: _make_sub_param_shape(param.name, ((1,), *param.shape), 0)}
    if rule.dim is None:
        return {}
    plain = rule.repeat == rule.unit == 1
    if plain and len(rule.parts) < 2 and rule.num_parts == 1:
        return {_CAT_DIM: rule.dim}
    if plain and not rule.parts and rule.num_parts == 2 and rule.dim == 0:
        return {_CAT_DIM: 0, _NUM_PARTS: 2}
    size = param.shape[rule.dim] // (rule.repeat * rule.unit * rule.num_parts)
    parts = tuple(rule.parts) or (size,) * rule.num_parts
    repeats, unit = (() if rule.repeat == 1 else (rule.repeat,)), (() if rule.unit == 1 else (rule.unit,))
    shape = (*param.shape[: rule.dim], *repeats, parts, *unit, *param.shape[rule.dim + 1 :])
    return {_PARTS: _make_sub_param_shape(param.name, shape, rule.dim + len(repeats))}


def is_cut_unknown(hints: Hints) -> bool:
    """Return whether `for_param` made these hints for a parameter whose cut was not known."""
    sub_shape = hints.get(_PARTS)
    shape = sub_shape.state.get("shape") if sub_shape is not None and isinstance(sub_shape.state, Mapping) else None
    return isinstance(shape, tuple) and bool(shape) and shape[0] == (1,)


def for_stack(num_experts: int) -> dict[str, Any]:
    """Make the hints for a stack of experts `[experts, ...]` (AutoEP), which expert parallelism cuts along dim 0."""
    return {IS_EXPERT: True, NUM_EXPERTS: num_experts}


def _make_sub_param_shape(name: str, shape: tuple[Any, ...], dim: int) -> Inert:
    """Make a `SubparamShape`; the tuple in `shape` has the sizes of the tensors that are fused along `dim`."""
    state = {"patterns": [f"^{re.escape(name)}$"], "shape": shape, "partition_dim": dim}
    return Inert("new", _SUB_PARAM_SHAPE, (), state)
