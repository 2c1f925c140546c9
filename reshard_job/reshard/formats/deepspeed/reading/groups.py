"""Read the optimizer's parameter groups in the form that all formats share: names, settings, scalars like `step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.fields import is_fused
from reshard.formats.deepspeed.logical import Model, read_param_groups
from reshard.formats.deepspeed.muon import is_muon
from reshard.formats.deepspeed.scalars import identify_scalars
from reshard.formats.deepspeed.states import GroupState, read_group_states
from reshard.formats.deepspeed.unpartitioned import ParamState, read_param_states
from reshard.formats.pt.objects import Inert, Tensor
from reshard.formats.pt.reader import PtFile, read_tensor_bytes
from reshard.tensors.layout import ParamGroup, Plain

_MAX_SCALAR_BYTES = 8
_KINDS = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4", "uint8": "<u1"}


def read_groups(source: DeepSpeedContents, model: Model) -> tuple[ParamGroup, ...]:
    """Read all parameter groups of the whole model, in canonical order.

    Settings that are neither numbers, texts nor collections of those (functions, hooks) are left out.
    """
    groups = []
    for number, names in enumerate(model.groups):
        mp, at = find_group_holder(source, model, number)
        file = source.optimizer_file(mp, 0)
        saved = read_param_groups(source, mp)
        options = {key: value for key, value in saved[at].items() if key != "params"} if at < len(saved) else {}
        scalars = read_group_state(source, mp, at).scalars
        groups.append(
            ParamGroup(
                names=names,
                options={str(key): to_plain(value, file) for key, value in options.items() if _is_plain(value)},
                scalars={
                    key: number_
                    for key, value in scalars.items()
                    if isinstance(number_ := to_plain(value, file) if _is_plain(value) else None, int | float)
                },
            )
        )
    return tuple(groups)


def has_muon(source: DeepSpeedContents) -> bool:
    """Return whether DeepSpeed's Muon optimizes some of the parameters."""
    num_mp = source.topology.tp * source.topology.pp
    return any(is_muon(group) for mp in range(num_mp) for group in read_param_groups(source, mp))


def find_group_holder(source: DeepSpeedContents, model: Model, group: int) -> tuple[int, int]:
    """Return a model-parallel rank of the first stage that holds a group of the whole model, and its position there."""
    for pp, stage in enumerate(model.stages):
        if group in stage.ids:
            return pp * source.topology.tp, stage.ids.index(group)
    raise AssertionError(f"group {group} is on no stage")


def read_group_state(source: DeepSpeedContents, mp: int, group: int) -> GroupState:
    """Return the states of a rank's parameter group, with their types, order and scalars (ZeRO-3: first sub-group).

    Raises:
        UnsupportedError: at ZeRO-0 the parameters of the group have different scalars.
    """
    if source.topology.zero == 0:
        return _read_unpartitioned(source, mp, group)
    at = group
    if source.topology.zero == 3:  # one entry per sub-group, not one per group
        at = sum(len(other["params"]) for other in read_param_groups(source, mp)[:group])
    states = read_group_states(source, mp, 0)
    return states[at]


def _read_unpartitioned(source: DeepSpeedContents, mp: int, group: int) -> GroupState:
    file = source.models[mp, 0]
    states = read_param_states(source.optimizer(mp, 0), file.path, source.named[mp])[group]
    named = list(zip(source.named[mp][group], states, strict=True))
    counting = expected = states[0]
    if _has_step_in_last_param(read_param_groups(source, mp)[group], states):
        *named, (_, counting) = [pair for pair in named if pair[1].order]
        expected = named[0][1]
    usual = identify_scalars(expected.scalars, file.path)
    for name, state in named:
        if state.order and identify_scalars(state.scalars, file.path) != usual:
            raise UnsupportedError(
                f"{name} has done another number of optimizer steps than {next(iter(source.named[mp][group]))},"
                " which stands in the same parameter group",
                path=file.path,
                hint="parameters of one group must get gradients from the same step on",
            )
    return GroupState(flat=counting.tensors, scalars=counting.scalars, order=counting.order)


def _has_step_in_last_param(group: Mapping[str, Any], states: Sequence[ParamState]) -> bool:
    """Return whether only the last parameter with a gradient counts the group's steps, as in DeepSpeed's FusedAdam.

    The others keep their first count (deepspeed/ops/adam/fused_adam.py 0.19.8: `state["step"] += 1` is after the loop).
    """
    saved = [state.scalars.get("step") for state in states if state.order]
    steps = [step for step in saved if isinstance(step, int)]
    return is_fused(group) and len(steps) == len(saved) > 1 and steps[-1] > steps[0]


def to_plain(value: Any, file: PtFile) -> Plain:
    """Convert a setting to plain Python values; tensors of one element become numbers.

    Raises:
        CorruptSourceError: the file ends before the tensor does.
    """
    if isinstance(value, Tensor):
        data = read_tensor_bytes(file.path, value, limit_bytes=_MAX_SCALAR_BYTES)
        if value.dtype == "bfloat16":
            data = b"\0\0" + data
        number: int | float = np.frombuffer(data, dtype=_KINDS.get(value.dtype, "<f4"))[0].item()
        return number
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, file) for key, item in value.items() if _is_plain(item)}
    if isinstance(value, list | tuple):
        return [to_plain(item, file) for item in value if _is_plain(item)]
    assert value is None or isinstance(value, int | float | str | bool)
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.num_elements == 1 and (value.dtype in _KINDS or value.dtype == "bfloat16")
    if isinstance(value, Inert):
        return False
    return value is None or isinstance(value, int | float | str | bool | list | tuple | Mapping)
