"""Files of ZeRO-3: every rank has a model file without weights, and its slots of every parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from reshard.formats.deepspeed import flat, names
from reshard.formats.deepspeed.fields import base_state, fields_for
from reshard.formats.deepspeed.optimizer_files import optimizer_file_value
from reshard.formats.deepspeed.target import Target
from reshard.formats.deepspeed.template import Template, zero_stage_enum
from reshard.formats.pt.objects import Size, StatefulDict, Tensor, new_tensor

_SUB_GROUP_SIZE = 10**9
"""DeepSpeed's default for `zero_optimization.sub_group_size`."""


def write_zero3(target: Target, tp: int, dp: int) -> None:
    """Both files of one rank."""
    sub_groups = _sub_groups(target, tp)
    _write_model(target, tp, dp, [group for found in sub_groups for group in found])
    _write_optimizer(target, tp, dp, sub_groups)


def _sub_groups(target: Target, tp: int) -> list[list[tuple[str, ...]]]:
    """Names by parameter group and sub-group; where a group is cut depends on dp."""
    size = int(target.source.zero_config.get("sub_group_size") or _SUB_GROUP_SIZE)
    return [
        [
            group[start:stop]
            for start, stop in flat.zero3_sub_groups(target.elements(group, tp), target.topology.dp, size)
        ]
        for group in target.stages[0].groups
    ]


def _write_model(target: Target, tp: int, dp: int, sub_groups: list[tuple[str, ...]]) -> None:
    like = target.source.models[target.like(0, tp), target.like_dp(dp) if target.source.topology.zero == 3 else 0]
    template = Template(like, target.budget)
    frozen = {name: _fragment(target, name, tp, dp) for name in _frozen(target, like.value)}
    replaced: dict[str, Any] = {
        **target.common(like.value, first=tp == dp == 0),
        **target.config(template, like.value),
        "module": _module(target, like.value, template, tp),
        "param_shapes": [target.shapes(names_, tp) for names_ in sub_groups],
        "frozen_param_shapes": StatefulDict((name, Size(target.shard(name, tp))) for name in frozen),
        "frozen_param_fragments": StatefulDict(frozen),
    }
    value = template.copy_except(like.value, replaced)
    file = target.add_file(names.model_file(tp, dp=dp), value)
    for name in like.value.get("buffer_names") or ():
        if name in target.weights:
            file.add_weight(target.weights[name], value["module"][name], tp, dp)
    for name, tensor in frozen.items():
        spans, _ = flat.zero3_spans([math.prod(target.shard(name, tp))], target.topology.dp, dp)
        for span in spans:
            file.add_span(target.weights[name], {"weight": tensor}, span, tp, 0)


def _frozen(target: Target, like: Mapping[str, Any]) -> tuple[str, ...]:
    """Parameters that are not optimized."""
    if target.source.topology.zero == 3:
        return tuple(like.get("frozen_param_fragments") or ())
    buffers = set(like.get("buffer_names") or ())
    return tuple(name for name in target.weights if name not in buffers)


def _module(target: Target, like: Mapping[str, Any], template: Template, tp: int) -> StatefulDict:
    """ZeRO-3 stores whole buffers, and an empty tensor for every parameter."""
    buffers = set(like.get("buffer_names") or ())
    module = StatefulDict(
        (name, new_tensor(tensor.dtype, target.shard(name, tp) if name in buffers else (0,)))
        for name, tensor in like["module"].items()
    )
    module.state = template.copy(like["module"].state)
    return module


def _fragment(target: Target, name: str, tp: int, dp: int) -> Tensor:
    _, length = flat.zero3_spans([math.prod(target.shard(name, tp))], target.topology.dp, dp)
    return new_tensor(_frozen_type(target, name), (length,))


def _frozen_type(target: Target, name: str) -> str:
    """Type of a frozen parameter, from the checkpoint that the files are modelled on."""
    like = target.source.models[0, 0].value
    tensor = (like.get("frozen_param_fragments") or {}).get(name) or like["module"][name]
    return str(tensor.dtype)


def _write_optimizer(target: Target, tp: int, dp: int, sub_groups: list[list[tuple[str, ...]]]) -> None:
    mp_like, dp_like = target.like(0, tp), target.like_dp(dp)
    like = target.source.optimizer_file(mp_like, dp_like)
    template = Template(like, target.budget)
    state = fields_for(target.kind, target.source, mp_like, dp_like)
    inner = base_state(target.source, mp_like, dp_like)
    partitions: list[dict[str, Tensor]] = []
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    spans_of: list[tuple[tuple[str, ...], tuple[flat.Span, ...]]] = []
    for group, found in enumerate(sub_groups):
        first = len(partitions)
        for names_ in found:
            own_states = target.group_template(group, tp)
            spans, length = flat.zero3_spans(target.elements(names_, tp), target.topology.dp, dp)
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
    value = optimizer_file_value(target, template, like.value, template.copy_except(state, replaced))
    file = target.add_file(names.optimizer_file(target.prefix, dp, tp), value)
    for (names_, spans), own in zip(spans_of, partitions, strict=True):
        for span in spans:
            file.add_span(target.params[names_[span.index]], own, span, tp, 0)
