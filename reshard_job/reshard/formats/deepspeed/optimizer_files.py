"""Optimizer files of ZeRO-1 and ZeRO-2: flat groups in equal partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from reshard.formats.deepspeed import flat, names
from reshard.formats.deepspeed.target import Target
from reshard.formats.deepspeed.template import Template, fragment_address, zero_stage_enum
from reshard.formats.pt.objects import StatefulDict, Tensor, new_tensor

_CLIP_GRAD = 1.0
"""DeepSpeed's default for `gradient_clipping` (runtime/constants.py, GRADIENT_CLIPPING_DEFAULT)."""


def buffer_order(target: Target, group: tuple[str, ...]) -> tuple[str, ...]:
    """Names of a group in the order of its flat buffer."""
    if not target.round_robin:
        return group
    return tuple(group[at] for at in flat.round_robin(len(group), target.topology.dp))


def write_optimizer(target: Target, pp: int, tp: int, dp: int, buffers: list[tuple[str, ...]]) -> None:
    """`[bf16_]zero_pp_rank_*_mp_rank_*_optim_states.pt` of one rank."""
    stage = target.stages[pp]
    like = target.source.optimizers[target.like(pp, tp), target.like_dp(dp)]
    template = Template(like)
    state = _state_below_zero3(like.value)
    # BF16_Optimizer says no stage and keeps the padding of its master weights.
    keeps_padding = "zero_stage" not in state
    layouts = [_flat_group(target, group) for group in buffers]
    partitions: list[dict[str, Tensor]] = []
    base_state: dict[int, dict[str, Any]] = {}
    for at, (group, layout) in enumerate(zip(stage.ids, layouts, strict=True)):
        found = target.group_template(group, tp)
        lean = layout.partition - (0 if keeps_padding else layout.padding(dp))
        partitions.append(
            {
                key: new_tensor(dtype, (lean if key == "fp32" else layout.partition,))
                for key, dtype in found.dtypes.items()
            }
        )
        if found.order:
            base_state[at] = found.state(partitions[-1])
    groups = [target.param_group(group, [at]) for at, group in enumerate(stage.ids)]
    replaced: dict[str, Any] = {
        "base_optimizer_state": template.copy_except(
            state["base_optimizer_state"], {"state": base_state, "param_groups": groups}
        ),
        "single_partition_of_fp32_groups": [own["fp32"] for own in partitions],
        "group_paddings": [layout.padding(dp) for layout in layouts],
        "partition_count": [target.topology.dp] * len(layouts),
        "param_slice_mappings": [
            _mappings(group, buffer, layout.spans(dp))
            for group, buffer, layout in zip(stage.groups, buffers, layouts, strict=True)
        ],
    }
    if "param_alignment_paddings" in state:
        replaced["param_alignment_paddings"] = [list(layout.param_paddings) for layout in layouts]
    if "zero_stage" in state:
        replaced["zero_stage"] = zero_stage_enum(target.topology.zero)
    outer = {**target.config(template, like.value), "optimizer_state_dict": template.copy_except(state, replaced)}
    value = template.copy_except(like.value, outer)
    file = target.add_file(names.optimizer_file(target.source.prefix, dp, pp * target.topology.tp + tp), value)
    for buffer, layout, own in zip(buffers, layouts, partitions, strict=True):
        for span in layout.spans(dp):
            name = buffer[span.index]
            file.add_span(target.params[name], own, span, tp, target.copy_of(name, pp))


def _state_below_zero3(like: Mapping[str, Any]) -> Mapping[str, Any]:
    """The source's `optimizer_state_dict`; of ZeRO-3 what stages 1 and 2 would have, in their order."""
    state = like["optimizer_state_dict"]
    if "fp32_flat_groups" not in state:
        return cast(Mapping[str, Any], state)
    config = like.get("ds_config")
    clip = config.get("gradient_clipping", _CLIP_GRAD) if isinstance(config, Mapping) else _CLIP_GRAD
    return {
        "loss_scaler": state["loss_scaler"],
        "dynamic_loss_scale": state["dynamic_loss_scale"],
        "overflow": state["overflow"],
        "clip_grad": clip,
        "base_optimizer_state": state["optimizer_state_dict"],
        "single_partition_of_fp32_groups": None,
        "zero_stage": None,
        "group_paddings": None,
        "param_alignment_paddings": None,
        "partition_count": None,
        "ds_version": like.get("ds_version"),
        "param_slice_mappings": None,
    }


def _flat_group(target: Target, buffer: tuple[str, ...]) -> flat.FlatGroup:
    enabled = bool(target.source.zero_config.get("parameter_alignment"))
    return flat.FlatGroup(
        num_elements=target.elements(buffer),
        dp=target.topology.dp,
        param_alignment=flat.param_alignment(target.extra.element_bytes, enabled),
    )


def _mappings(group: tuple[str, ...], buffer: tuple[str, ...], spans: tuple[flat.Span, ...]) -> StatefulDict:
    """Positions of a rank's fragments, in optimizer order; also true under `round_robin_gradients`."""
    found = {buffer[span.index]: span for span in spans}
    return StatefulDict(
        (name, fragment_address(found[name].offset, found[name].stop - found[name].start))
        for name in group
        if name in found
    )
