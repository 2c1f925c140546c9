"""Optimizer files of ZeRO-1 and ZeRO-2: flat groups in equal partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.formats.deepspeed import flat, names
from reshard.formats.deepspeed.fields import Kind, base_state, fields_for
from reshard.formats.deepspeed.target import Target
from reshard.formats.deepspeed.template import Template, fragment_address, zero_stage_enum
from reshard.formats.pt.objects import StatefulDict, Tensor, new_tensor


def buffer_order(target: Target, group: tuple[str, ...]) -> tuple[str, ...]:
    """Names of a group in the order of its flat buffer."""
    if not target.round_robin:
        return group
    return tuple(group[at] for at in flat.round_robin(len(group), target.topology.dp))


def write_optimizer(target: Target, pp: int, tp: int, dp: int, buffers: list[tuple[str, ...]]) -> None:
    """`[bf16_]zero_pp_rank_*_mp_rank_*_optim_states.pt` of one rank."""
    stage = target.stages[pp]
    mp_like, dp_like = target.like(pp, tp), target.like_dp(dp)
    like = target.source.optimizer_file(mp_like, dp_like)
    template = Template(like)
    state = fields_for(target.kind, target.source, mp_like, dp_like)
    layouts = [_flat_group(target, group, tp) for group in buffers]
    partitions: list[dict[str, Tensor]] = []
    base_state_: dict[int, dict[str, Any]] = {}
    for at, (group, layout) in enumerate(zip(stage.ids, layouts, strict=True)):
        found = target.group_template(group, tp)
        lean = layout.partition - (0 if target.kind is Kind.BF16 else layout.padding(dp))
        partitions.append(
            {
                key: new_tensor(dtype, (lean if key == "fp32" else layout.partition,))
                for key, dtype in found.dtypes.items()
            }
        )
        if found.order:
            base_state_[at] = found.state(partitions[-1])
    groups = [target.param_group(group, [at]) for at, group in enumerate(stage.ids)]
    replaced: dict[str, Any] = {
        "base_optimizer_state": template.copy_except(
            base_state(target.source, mp_like, dp_like), {"state": base_state_, "param_groups": groups}
        ),
        "single_partition_of_fp32_groups": [own["fp32"] for own in partitions],
        "group_paddings": [_stated_padding(target, layout, dp) for layout in layouts],
        "partition_count": [target.topology.dp] * len(layouts),
        "param_slice_mappings": [
            _mappings(group, buffer, layout.spans(dp))
            for group, buffer, layout in zip(stage.groups, buffers, layouts, strict=True)
        ],
    }
    if "universal_checkpoint_info" in state:  # AutoTP's
        told = target.extra.model.patterns
        replaced["universal_checkpoint_info"] = told.info_at(target.topology.tp, target.source.topology.tp)
    if "param_alignment_paddings" in state:
        replaced["param_alignment_paddings"] = [list(layout.param_paddings) for layout in layouts]
    if "zero_stage" in state:
        replaced["zero_stage"] = zero_stage_enum(target.topology.zero)
    value = optimizer_file_value(target, template, like.value, template.copy_except(state, replaced))
    file = target.add_file(names.optimizer_file(target.prefix, dp, pp * target.topology.tp + tp), value)
    for buffer, layout, own in zip(buffers, layouts, partitions, strict=True):
        for span in layout.spans(dp):
            name = buffer[span.index]
            file.add_span(target.params[name], own, span, tp, target.copy_of(name, pp))


def optimizer_file_value(
    target: Target, template: Template, like: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole of an optimizer file around its `optimizer_state_dict`."""
    if target.source.topology.zero:
        outer = like
    else:  # a model file
        outer = {"optimizer_state_dict": None, **{key: like[key] for key in ("ds_config", "ds_version") if key in like}}
    return template.copy_except(outer, {**target.config(template, like), "optimizer_state_dict": state})


def _stated_padding(target: Target, layout: flat.FlatGroup, dp: int) -> int:
    """BF16_Optimizer states all padding on the last rank, even where it reaches over several ranks."""
    if target.kind is not Kind.BF16:
        return layout.padding(dp)
    return layout.partition * layout.dp - layout.used if dp == layout.dp - 1 else 0


def _flat_group(target: Target, buffer: tuple[str, ...], tp: int) -> flat.FlatGroup:
    enabled = bool(target.source.zero_config.get("parameter_alignment")) and target.kind is Kind.ZERO12
    return flat.FlatGroup(
        num_elements=target.elements(buffer, tp),
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
