"""Optimizer files of ZeRO-1 and ZeRO-2: flat groups in equal partitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.formats.deepspeed import flat, muon, names
from reshard.formats.deepspeed.contents import partition_of
from reshard.formats.deepspeed.fields import Kind, base_state, fields_for
from reshard.formats.deepspeed.writing.carried_objects import Template, fragment_address, zero_stage_enum
from reshard.formats.deepspeed.writing.target import File, Target
from reshard.formats.pt.objects import StatefulDict, Tensor, new_tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A parameter group as the ranks of one part of the experts hold it.

    Attributes:
        group: names in the optimizer's order, as those ranks call the parameters.
        names: the same in the order of the flat buffer.
        whole: for each of `names` its name in the whole model.
        num_partitions: of the flat buffer.
    """

    group: tuple[str, ...]
    names: tuple[str, ...]
    whole: tuple[str, ...]
    num_partitions: int


def buffers_of(target: Target, pp: int, part: int) -> list[Buffer]:
    """The parameter groups of a stage."""
    found = []
    for group in target.stages[pp].groups:
        local = target.local_names(group, part)
        count, _ = partition_of(group, target.source.experts, target.topology, 0)
        names = tuple(local)
        if target.round_robin:
            names = tuple(names[at] for at in flat.round_robin(len(names), count))
        whole = tuple(local[name] for name in names)
        found.append(Buffer(group=tuple(local), names=names, whole=whole, num_partitions=count))
    return found


def write_optimizer(target: Target, pp: int, tp: int, dp: int, buffers: list[Buffer]) -> None:
    """`[bf16_]zero_pp_rank_*_mp_rank_*_optim_states.pt` of one rank."""
    stage = target.stages[pp]
    mp_like, dp_like = target.like(pp, tp), target.like_dp(dp)
    like = target.source.optimizer_file(mp_like, dp_like)
    template = Template(like, target.budget)
    state = fields_for(target.kind, target.source, mp_like, dp_like)
    layouts = [_flat_group(target, buffer, tp) for buffer in buffers]
    experts = target.source.experts
    own_partitions = [partition_of(buffer.whole, experts, target.topology, dp)[1] for buffer in buffers]
    partitions: list[dict[str, Tensor]] = []
    base_state_: dict[int, dict[str, Any]] = {}
    groups = [target.param_group(group, [at]) for at, group in enumerate(stage.ids)]
    whole = [muon.keeps_whole(target.kind, group, target.source.zero_config) for group in groups]
    for at, (group, layout, own) in enumerate(zip(stage.ids, layouts, own_partitions, strict=True)):
        found = target.group_template(group, tp)
        partitions.append(_own_states(target, found.dtypes, layout, own, whole=whole[at]))
        if found.order:
            base_state_[at] = found.state(partitions[-1])
    spans_of = [layout.spans(own) for layout, own in zip(layouts, own_partitions, strict=True)]
    replaced: dict[str, Any] = {
        "base_optimizer_state": template.copy_except(
            base_state(target.source, mp_like, dp_like), {"state": base_state_, "param_groups": groups}
        ),
        "single_partition_of_fp32_groups": [own["fp32"] for own in partitions],
        "group_paddings": [
            _stated_padding(target, layout, own) for layout, own in zip(layouts, own_partitions, strict=True)
        ],
        "partition_count": [buffer.num_partitions for buffer in buffers],
        "param_slice_mappings": [_mappings(buffer, spans) for buffer, spans in zip(buffers, spans_of, strict=True)],
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
    for at, (buffer, spans) in enumerate(zip(buffers, spans_of, strict=True)):
        tensors, momentum = muon.split(partitions[at], whole=whole[at])
        file.add_gaps(tensors.values(), layouts[at].gaps(own_partitions[at]))
        if momentum:
            _add_momentum(target, file, buffer, layouts[at], momentum, pp=pp, tp=tp, own=own_partitions[at])
        for span in spans:
            name = buffer.whole[span.index]
            if target.is_stacked(name):
                file.add_experts_span(target.params[name], tensors, span, dp % target.topology.ep)
            else:
                file.add_span(target.params[name], tensors, span, tp, target.copy_of(name, pp))


def _own_states(
    target: Target, dtypes: Mapping[str, str], layout: flat.FlatGroup, own: int, *, whole: bool
) -> dict[str, Tensor]:
    """A rank's tensors for one group, by state."""
    lengths = dict.fromkeys(dtypes, layout.partition)
    lengths["fp32"] -= 0 if target.kind is Kind.BF16 else layout.padding(own)
    if whole and muon.MOMENTUM in dtypes:
        lengths[muon.MOMENTUM] = muon.num_whole(layout, own)
        if not lengths[muon.MOMENTUM]:
            del lengths[muon.MOMENTUM]
    return {key: new_tensor(dtypes[key], (length,)) for key, length in lengths.items()}


def _add_momentum(
    target: Target, file: File, buffer: Buffer, layout: flat.FlatGroup, momentum: Mapping[str, Tensor], *,
    pp: int, tp: int, own: int,
) -> None:  # fmt: skip
    """Muon's, of every parameter of which the rank's partition `own` has a part."""
    for span in muon.whole_spans(layout, own):
        name = buffer.whole[span.index]
        if target.is_stacked(name):
            muon.refuse_experts(name, str(target.source.folder))
        copy = target.copy_of(name, pp) + muon.nth_copy(layout, own, span.index) * target.num_copies(name)
        file.add_span(target.params[name], momentum, span, tp, copy)


def optimizer_file_value(
    target: Target, template: Template, like: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole of an optimizer file around its `optimizer_state_dict`."""
    if target.source.topology.zero:
        outer = like
    else:  # a model file
        outer = {"optimizer_state_dict": None, **{key: like[key] for key in ("ds_config", "ds_version") if key in like}}
    return template.copy_except(outer, {**target.config(template, like), "optimizer_state_dict": state})


def _stated_padding(target: Target, layout: flat.FlatGroup, own: int) -> int:
    """BF16_Optimizer states all padding on the last rank, even where it reaches over several ranks."""
    if target.kind is not Kind.BF16:
        return layout.padding(own)
    return layout.partition * layout.dp - layout.used if own == layout.dp - 1 else 0


def _flat_group(target: Target, buffer: Buffer, tp: int) -> flat.FlatGroup:
    enabled = bool(target.source.zero_config.get("parameter_alignment")) and target.kind is Kind.ZERO12
    return flat.FlatGroup(
        num_elements=target.elements(buffer.whole, tp),
        dp=buffer.num_partitions,
        param_alignment=flat.param_alignment(target.extra.element_bytes, enabled),
    )


def _mappings(buffer: Buffer, spans: tuple[flat.Span, ...]) -> StatefulDict:
    """Positions of a rank's fragments, in optimizer order; also true under `round_robin_gradients`."""
    found = {buffer.names[span.index]: span for span in spans}
    return StatefulDict(
        (name, fragment_address(found[name].offset, found[name].stop - found[name].start))
        for name in buffer.group
        if name in found
    )
