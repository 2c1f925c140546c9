"""Files of ZeRO-3: every rank has a model file without weights, and its slots of every parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from reshard.formats.deepspeed import flat, names
from reshard.formats.deepspeed.target import Target
from reshard.formats.deepspeed.template import Template, zero_stage_enum
from reshard.formats.pt.objects import Size, StatefulDict, Tensor, new_tensor

_SUB_GROUP_SIZE = 10**9
"""DeepSpeed's default for `zero_optimization.sub_group_size`."""


def write_zero3(target: Target, tp: int, dp: int) -> None:
    """Both files of one rank."""
    sub_groups = _sub_groups(target)
    _write_model(target, tp, dp, [group for found in sub_groups for group in found])
    _write_optimizer(target, tp, dp, sub_groups)


def _sub_groups(target: Target) -> list[list[tuple[str, ...]]]:
    """Names by parameter group and sub-group; where a group is cut depends on dp."""
    size = int(target.source.zero_config.get("sub_group_size") or _SUB_GROUP_SIZE)
    return [
        [group[start:stop] for start, stop in flat.zero3_sub_groups(target.elements(group), target.topology.dp, size)]
        for group in target.stages[0].groups
    ]


def _write_model(target: Target, tp: int, dp: int, sub_groups: list[tuple[str, ...]]) -> None:
    like = target.source.models[target.like(0, tp), target.like_dp(dp) if target.source.topology.zero == 3 else 0]
    template = Template(like)
    frozen = {name: _fragment(target, name, dp) for name in _frozen(target, like.value)}
    replaced: dict[str, Any] = {
        **target.common(like.value, first=tp == dp == 0),
        **target.config(template, like.value),
        "module": _module(target, like.value["module"], template, set(like.value.get("buffer_names") or ())),
        "param_shapes": [target.shapes(names_) for names_ in sub_groups],
        "frozen_param_shapes": StatefulDict((name, Size(target.shard(name))) for name in frozen),
        "frozen_param_fragments": StatefulDict(frozen),
    }
    value = template.copy_except(like.value, replaced)
    file = target.add_file(names.model_file(tp, dp=dp), value)
    for name, tensor in frozen.items():
        spans, _ = flat.zero3_spans([math.prod(target.shard(name))], target.topology.dp, dp)
        for span in spans:
            file.add_span(target.weights[name], {"weight": tensor}, span, tp, 0)


def _frozen(target: Target, like: Mapping[str, Any]) -> tuple[str, ...]:
    """Parameters that are not optimized."""
    if target.source.topology.zero == 3:
        return tuple(like.get("frozen_param_fragments") or ())
    buffers = set(like.get("buffer_names") or ())
    return tuple(name for name in target.weights if name not in buffers)


def _module(target: Target, like: StatefulDict, template: Template, buffers: set[str]) -> StatefulDict:
    """ZeRO-3 stores whole buffers, and an empty tensor for every parameter."""
    if target.source.topology.zero == 3:
        return cast(StatefulDict, template.copy(like))
    module = StatefulDict(
        (name, template.copy(tensor) if name in buffers else new_tensor(tensor.dtype, (0,)))
        for name, tensor in like.items()
    )
    module.state = template.copy(like.state)
    return module


def _state_of_zero3(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The source's `optimizer_state_dict`; of stages 1 and 2 what ZeRO-3 would have, in its order."""
    if "fp32_flat_groups" in state:
        return state
    return {
        "zero_stage": None,
        "loss_scaler": state["loss_scaler"],
        "dynamic_loss_scale": state["dynamic_loss_scale"],
        "overflow": state["overflow"],
        "partition_count": None,
        "optimizer_state_dict": state["base_optimizer_state"],
        "fp32_flat_groups": None,
    }


def _fragment(target: Target, name: str, dp: int) -> Tensor:
    _, length = flat.zero3_spans([math.prod(target.shard(name))], target.topology.dp, dp)
    return new_tensor(target.rows.dtype("weight", name) or "float32", (length,))


def _write_optimizer(target: Target, tp: int, dp: int, sub_groups: list[list[tuple[str, ...]]]) -> None:
    like = target.source.optimizers[target.like(0, tp), target.like_dp(dp)]
    template = Template(like)
    state = _state_of_zero3(like.value["optimizer_state_dict"])
    inner = state["optimizer_state_dict"]
    partitions: list[dict[str, Tensor]] = []
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    spans_of: list[tuple[tuple[str, ...], tuple[flat.Span, ...]]] = []
    for group, found in enumerate(sub_groups):
        first = len(partitions)
        for names_ in found:
            own_states = target.group_template(group, tp)
            spans, length = flat.zero3_spans(target.elements(names_), target.topology.dp, dp)
            own = {key: new_tensor(dtype, (length,)) for key, dtype in own_states.dtypes.items()}
            if own_states.order:
                states[len(partitions)] = own_states.state(own)
            partitions.append(own)
            spans_of.append((names_, spans))
        groups.append(target.param_group(group, list(range(first, len(partitions)))))
    replaced: dict[str, Any] = {
        "zero_stage": zero_stage_enum(3),
        "partition_count": target.topology.dp,
        "optimizer_state_dict": template.copy_except(inner, {"state": states, "param_groups": groups}),
        "fp32_flat_groups": [own["fp32"] for own in partitions],
    }
    outer = {**target.config(template, like.value), "optimizer_state_dict": template.copy_except(state, replaced)}
    value = template.copy_except(like.value, outer)
    file = target.add_file(names.optimizer_file(target.source.prefix, dp, tp), value)
    for (names_, spans), own in zip(spans_of, partitions, strict=True):
        for span in spans:
            file.add_span(target.params[names_[span.index]], own, span, tp, 0)
