"""Write the optimizer files of ZeRO-1 and ZeRO-2: flat groups in equal partitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.formats.deepspeed import autoep, flat, muon, names
from reshard.formats.deepspeed.contents import find_partition
from reshard.formats.deepspeed.fields import Kind, convert_fields, read_base_state
from reshard.formats.deepspeed.writing.carried_objects import Template, make_fragment_address, make_zero_stage_enum
from reshard.formats.deepspeed.writing.target import File, Target
from reshard.formats.pt.objects import StatefulDict, Tensor, new_tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A parameter group as the ranks of one part of the experts hold it.

    Attributes:
        group: names on those ranks, in the optimizer's order.
        names: the same in the order of the flat buffer.
        whole: for each of `names` its name in the whole model.
        num_partitions: of the flat buffer.
    """

    group: tuple[str, ...]
    names: tuple[str, ...]
    whole: tuple[str, ...]
    num_partitions: int


def list_buffers(target: Target, pp: int, part: int) -> list[Buffer]:
    """Return the parameter groups of a stage as the ranks of one part of the experts hold them."""
    buffers = []
    for group in target.stages[pp].groups:
        local = target.local_names(group, part)
        count, _ = find_partition(group, target.source.experts, target.topology, 0)
        names = tuple(local)
        if target.round_robin:
            names = tuple(names[at] for at in flat.round_robin(len(names), count))
        whole = tuple(local[name] for name in names)
        buffers.append(Buffer(group=tuple(local), names=names, whole=whole, num_partitions=count))
    return buffers


def write_optimizer(target: Target, pp: int, tp: int, dp: int, buffers: list[Buffer]) -> None:
    """Write `[bf16_]zero_pp_rank_*_mp_rank_*_optim_states.pt` of one rank."""
    stage = target.stages[pp]
    mp_like, dp_like = target.like(pp, tp), target.like_dp(dp)
    like = target.source.optimizer_file(mp_like, dp_like)
    template = Template(like, target.budget)
    state = convert_fields(target.kind, target.source, mp_like, dp_like)
    layouts = [_make_flat_group(target, buffer, tp) for buffer in buffers]
    experts = target.source.experts
    own_partitions = [find_partition(buffer.whole, experts, target.topology, dp, tp)[1] for buffer in buffers]
    partitions: list[dict[str, Tensor]] = []
    base_state_: dict[int, dict[str, Any]] = {}
    groups = [target.param_group(group, [at]) for at, group in enumerate(stage.ids)]
    whole = [muon.has_whole_momentum(target.kind, group, target.source.zero_config) for group in groups]
    for at, (group, layout, own) in enumerate(zip(stage.ids, layouts, own_partitions, strict=True)):
        group_template = target.group_template(group, tp)
        partitions.append(_make_states(target, group_template.dtypes, layout, own, whole=whole[at]))
        if group_template.order:
            base_state_[at] = group_template.state(partitions[-1])
    spans_of = [layout.spans(own) for layout, own in zip(layouts, own_partitions, strict=True)]
    replaced: dict[str, Any] = {
        "base_optimizer_state": template.copy_except(
            read_base_state(target.source, mp_like, dp_like), {"state": base_state_, "param_groups": groups}
        ),
        "single_partition_of_fp32_groups": [own["fp32"] for own in partitions],
        "group_paddings": [
            _compute_stated_padding(target, layout, own) for layout, own in zip(layouts, own_partitions, strict=True)
        ],
        "partition_count": [buffer.num_partitions for buffer in buffers],
        "param_slice_mappings": [
            _make_mappings(buffer, spans) for buffer, spans in zip(buffers, spans_of, strict=True)
        ],
    }
    if "universal_checkpoint_info" in state:  # AutoTP saves it here too
        replaced["universal_checkpoint_info"] = target.universal_info()
    if "param_alignment_paddings" in state:
        replaced["param_alignment_paddings"] = [list(layout.param_paddings) for layout in layouts]
    if "zero_stage" in state:
        replaced["zero_stage"] = make_zero_stage_enum(target.topology.zero)
    value = build_optimizer_file(target, template, like.value, template.copy_except(state, replaced))
    if experts is not None:
        optimized = [name for buffer in buffers for name in buffer.names]
        families = autoep.list_partitions(optimized, target.topology, dp, tp)
        value = target.fold(value, dp, tp, "zero_optimizer_state", param_families=families)
    file = target.add_file(names.optimizer_file(target.prefix, dp, pp * target.topology.tp + tp), value)
    for at, (buffer, spans) in enumerate(zip(buffers, spans_of, strict=True)):
        tensors, momentum = muon.split_states(partitions[at], whole=whole[at])
        file.add_gaps(tensors.values(), layouts[at].gaps(own_partitions[at]))
        if momentum:
            _add_momentum(target, file, buffer, layouts[at], momentum, pp=pp, tp=tp, own=own_partitions[at])
        for span in spans:
            name = buffer.whole[span.index]
            if target.is_stacked(name):
                file.add_experts_span(target.params[name], tensors, span, autoep.find_part(target.topology, dp, tp)[0])
            else:
                file.add_span(target.params[name], tensors, span, tp, target.copy_of(name, pp))


def _make_states(
    target: Target, dtypes: Mapping[str, str], layout: flat.FlatGroup, own: int, *, whole: bool
) -> dict[str, Tensor]:
    """Make a rank's tensors for one group, by state."""
    lengths = dict.fromkeys(dtypes, layout.partition)
    lengths["fp32"] -= 0 if target.kind is Kind.BF16 else layout.padding(own)
    if whole and muon.MOMENTUM in dtypes:
        lengths[muon.MOMENTUM] = muon.count_momentum(layout, own)
        if not lengths[muon.MOMENTUM]:
            del lengths[muon.MOMENTUM]
    return {key: new_tensor(dtypes[key], (length,)) for key, length in lengths.items()}


def _add_momentum(
    target: Target, file: File, buffer: Buffer, layout: flat.FlatGroup, momentum: Mapping[str, Tensor], *,
    pp: int, tp: int, own: int,
) -> None:  # fmt: skip
    """Add Muon's momentum of every parameter that has elements in the rank's partition `own`."""
    for span in muon.locate_momentum(layout, own):
        name = buffer.whole[span.index]
        if target.is_stacked(name):
            muon.refuse_experts(name, str(target.source.folder))
        copy = target.copy_of(name, pp) + muon.count_earlier_copies(layout, own, span.index) * target.num_copies(name)
        file.add_span(target.params[name], momentum, span, tp, copy)


def build_optimizer_file(
    target: Target, template: Template, like: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the value of an optimizer file whose `optimizer_state_dict` is `state`."""
    if target.source.topology.zero:
        outer = like
    else:  # a model file
        outer = {"optimizer_state_dict": None, **{key: like[key] for key in ("ds_config", "ds_version") if key in like}}
    return template.copy_except(outer, {**target.config(template, like), "optimizer_state_dict": state})


def _compute_stated_padding(target: Target, layout: flat.FlatGroup, own: int) -> int:
    """Return the padding that a rank's file states.

    BF16_Optimizer states all padding on the last rank, even if several ranks have some.
    """
    if target.kind is not Kind.BF16:
        return layout.padding(own)
    return layout.partition * layout.dp - layout.used if own == layout.dp - 1 else 0


def _make_flat_group(target: Target, buffer: Buffer, tp: int) -> flat.FlatGroup:
    enabled = bool(target.source.zero_config.get("parameter_alignment")) and target.kind is Kind.ZERO12
    return flat.FlatGroup(
        num_elements=target.elements(buffer.whole, tp),
        dp=buffer.num_partitions,
        param_alignment=flat.param_alignment(target.extra.element_bytes, enabled),
    )


def _make_mappings(buffer: Buffer, spans: tuple[flat.Span, ...]) -> StatefulDict:
    """Make `param_slice_mappings` of a rank, in optimizer order; it is right with `round_robin_gradients` too."""
    span_by_name = {buffer.names[span.index]: span for span in spans}
    return StatefulDict(
        (name, make_fragment_address(span_by_name[name].offset, span_by_name[name].stop - span_by_name[name].start))
        for name in buffer.group
        if name in span_by_name
    )
