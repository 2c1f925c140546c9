"""Make and parse file names of a native checkpoint (deepspeed/runtime/engine.py, runtime/pipe/module.py, 0.19.8).

The model-parallel rank in a name is `pp * tp_degree + tp`, with at least two digits; the data-parallel rank has no
padding.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

NAME = "deepspeed"
"""Name of the format."""

_OPTIMIZER = re.compile(r"^(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MODEL = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_MODEL_ZERO3 = re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_LAYER = re.compile(r"^layer_(\d+)(-model_(\d+))?-model_states\.pt$")
_EXPERT = re.compile(r"^layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_OTHER_EXPERT = re.compile(r"^expert_\d+_mp_rank_\d+_model_states\.pt$")
_EXPERT_OPTIMIZER = re.compile(r"^expp_rank_\d+_mp_rank_\d+_optim_states\.pt$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """A parsed file name.

    Attributes:
        kind: `optimizer`, `model`, `layer`, `expert`, `expert_optimizer` for the optimizer files of experts at ZeRO-0
            and before DeepSpeed 0.19, or `other` for experts in forms that are not read.
        dp: data-parallel rank, -1 where the name has none.
        mp: model-parallel rank; of a layer file the tensor-parallel rank.
        layer: pipeline layer, or layer of experts; -1 where the name has none.
        expert: number of an expert in its layer, -1 where the name has none.
        prefix: `bf16_` or empty.
        model_axis: a layer file's name has a `-model_` part.
    """

    kind: str
    dp: int = -1
    mp: int = 0
    layer: int = -1
    expert: int = -1
    prefix: str = ""
    model_axis: bool = False


def parse(name: str) -> FileName | None:
    """Parse a file name; return None if it is not one of DeepSpeed's."""
    if match := _OPTIMIZER.match(name):
        return FileName(kind="optimizer", dp=int(match[2]), mp=int(match[3]), prefix=match[1] or "")
    if match := _MODEL.match(name):
        return FileName(kind="model", mp=int(match[1]))
    if match := _MODEL_ZERO3.match(name):
        return FileName(kind="model", dp=int(match[1]), mp=int(match[2]))
    if match := _LAYER.match(name):
        return FileName(kind="layer", layer=int(match[1]), mp=int(match[3] or 0), model_axis=match[2] is not None)
    if match := _EXPERT.match(name):
        return FileName(kind="expert", layer=int(match[1]), expert=int(match[2]), mp=int(match[3]))
    if _EXPERT_OPTIMIZER.match(name):
        return FileName(kind="expert_optimizer")
    if _OTHER_EXPERT.match(name):
        return FileName(kind="other")
    return None


def optimizer_file(prefix: str, dp: int, mp: int) -> str:
    """Return `[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt`."""
    return f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"


def model_file(mp: int, *, dp: int | None = None) -> str:
    """Return `mp_rank_MM_model_states.pt`; with `dp` ZeRO-3's `zero_pp_rank_D_mp_rank_MM_model_states.pt`."""
    return f"{'' if dp is None else f'zero_pp_rank_{dp}_'}mp_rank_{mp:02d}_model_states.pt"


def expert_file(layer: int, expert: int, mp: int = 0) -> str:
    """Return `layer_L_expert_E_mp_rank_MM_model_states.pt`; each stage of a pipeline counts its layers from 0."""
    return f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"


def layer_file(layer: int, tp: int, *, model_axis: bool) -> str:
    """Return `layer_LL[-model_TT]-model_states.pt`; `model_axis` if the process topology has an axis `model`."""
    return f"layer_{layer:02d}{f'-model_{tp:02d}' if model_axis else ''}-model_states.pt"


def has_checkpoint(folder: Path) -> bool:
    """Return whether a folder has at least one model file of a native checkpoint."""
    try:
        return any((parsed := parse(item.name)) and parsed.kind == "model" for item in folder.iterdir())
    except OSError:
        return False
