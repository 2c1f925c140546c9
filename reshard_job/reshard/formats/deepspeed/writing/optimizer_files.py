"""Write the optimizer files of ZeRO-1 and ZeRO-2: flat groups in equal partitions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from reshard.formats.deepspeed import autoep, flat, muon, names
from reshard.formats.deepspeed.contents import find_partition
from reshard.formats.deepspeed.fields import Kind, convert_fields, read_base_state
from reshard.formats.deepspeed.writing.carried_objects import Template, make_fragment_address, make_zero_stage_enum
from reshard.formats.deepspeed.writing.rank_copies import RankCopies
from reshard.formats.deepspeed.writing.target import File, GroupTemplate, Target
from reshard.formats.pt.objects import StatefulDict, Tensor, new_tensor

_FROM_TARGET = frozenset(
    [
        "optimizer_state_dict",
        "base_optimizer_state",
        "single_partition_of_fp32_groups",
        "state",
        "param_groups",
        "group_paddings",
        "partition_count",
        "param_slice_mappings",
        "universal_checkpoint_info",
        "param_alignment_paddings",
        "zero_stage",
    ]
)
"""Entries of a rank's file that are not copied from the source."""


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Partition:
    """Partition of a parameter group that one rank holds.

    Attributes:
        buffer: the group.
        layout: of the flat buffer.
        own: number of the rank's partition.
        spans: of the parameters in the partition.
        template: states of the group.
        is_whole: Muon keeps the momentum of whole parameters.
        lengths: elements of each state.
        stated_padding: padding that the rank's file states.
    """

    buffer: Buffer
    layout: flat.FlatGroup
    own: int
    spans: tuple[flat.Span, ...]
    template: GroupTemplate
    is_whole: bool
    lengths: tuple[tuple[str, int], ...]
    stated_padding: int

    @property
    def facts(self) -> Hashable:
        """Return what tells the file of this rank from the files of others in the stage, without the template."""
        places = tuple((self.buffer.names[span.index], span.offset, span.stop - span.start) for span in self.spans)
        return self.lengths, self.stated_padding, places, self.layout.num_elements, self.buffer.num_partitions


def write_optimizers(
    target: Target, pp: int, tp: int, buffers: Sequence[list[Buffer]], rank_copies: RankCopies[list[dict[str, Tensor]]]
) -> None:
    """Write `[bf16_]zero_pp_rank_*_mp_rank_*_optim_states.pt` of all data-parallel ranks of a model-parallel rank.

    Args:
        target: the target.
        pp: stage.
        tp: tensor-parallel rank.
        buffers: parameter groups of the stage as the ranks of each part of the experts hold them.
        rank_copies: adds the files of the stage.
    """
    make_layout = functools.cache(lambda part: [_make_flat_group(target, buffer, tp) for buffer in buffers[part]])
    groups = [target.param_group(group, [at]) for at, group in enumerate(target.stages[pp].ids)]
    whole = [muon.has_whole_momentum(target.kind, group, target.source.zero_config) for group in groups]
    for dp in range(target.topology.dp):
        part = autoep.find_part(target.topology, dp, tp)[0]
        partitions = [
            _find_partition(target, pp, at, (dp, tp), buffer, layout, is_whole=is_whole)
            for at, (buffer, layout, is_whole) in enumerate(zip(buffers[part], make_layout(part), whole, strict=True))
        ]
        mp_like, dp_like = target.like(pp, tp), target.like_dp(dp)

        def make(
            likes: tuple[int, int] = (mp_like, dp_like),
            rank: tuple[int, int] = (dp, tp),
            own: list[_Partition] = partitions,
        ) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
            return _build_file(target, likes, rank, own, groups)

        keys, sources = _list_copied(target, mp_like, dp_like)
        facts = keys, tuple(partition.facts for partition in partitions), (dp, tp) if target.is_folded else None
        name = names.optimizer_file(target.prefix, dp, pp * target.topology.tp + tp)
        sources += [partition.template for partition in partitions]
        file, tensors = rank_copies.add(name, sources, make, facts)
        for partition, states in zip(partitions, tensors, strict=True):
            _add_partition(target, file, partition, states, pp=pp, tp=tp, part=part)


def _find_partition(  # noqa: PLR0917
    target: Target, pp: int, at: int, rank: tuple[int, int], buffer: Buffer, layout: flat.FlatGroup, *, is_whole: bool
) -> _Partition:
    """Return what a rank (data-parallel, tensor-parallel) holds of the group at a position of its stage."""
    dp, tp = rank
    own = find_partition(buffer.whole, target.source.experts, target.topology, dp, tp)[1]
    template = target.group_template(target.stages[pp].ids[at], tp)
    return _Partition(
        buffer=buffer,
        layout=layout,
        own=own,
        spans=layout.spans(own),
        template=template,
        is_whole=is_whole,
        lengths=_count_elements(target, template, layout, own, whole=is_whole),
        stated_padding=_compute_stated_padding(target, layout, own),
    )


def _list_copied(target: Target, mp_like: int, dp_like: int) -> tuple[Hashable, list[Any]]:
    """Return all objects that an optimizer file copies from a rank of the source, and their keys."""
    outer = target.source.optimizer_file(mp_like, dp_like).value
    inner = convert_fields(target.kind, target.source, mp_like, dp_like)
    base = read_base_state(target.source, mp_like, dp_like)
    keys = tuple(outer), tuple(inner), tuple(base)
    return keys, [item for mapping in (outer, inner, base) for key, item in mapping.items() if key not in _FROM_TARGET]


def _build_file(
    target: Target,
    likes: tuple[int, int],
    rank: tuple[int, int],
    partitions: Sequence[_Partition],
    groups: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """Return the value of an optimizer file and the tensors of each group, by state.

    Args:
        target: the target.
        likes: model-parallel and data-parallel rank of the source whose other objects are copied.
        rank: data-parallel and tensor-parallel rank.
        partitions: that the rank holds.
        groups: `param_groups` of the optimizer.
    """
    like = target.source.optimizer_file(*likes)
    template = Template(like, target.budget)
    state = convert_fields(target.kind, target.source, *likes)
    tensors = [
        {key: new_tensor(own.template.dtypes[key], (length,)) for key, length in own.lengths} for own in partitions
    ]
    base_state = {
        at: own.template.state(states)
        for at, (own, states) in enumerate(zip(partitions, tensors, strict=True))
        if own.template.order
    }
    replaced: dict[str, Any] = {
        "base_optimizer_state": template.copy_except(
            read_base_state(target.source, *likes), {"state": base_state, "param_groups": list(groups)}
        ),
        "single_partition_of_fp32_groups": [states["fp32"] for states in tensors],
        "group_paddings": [own.stated_padding for own in partitions],
        "partition_count": [own.buffer.num_partitions for own in partitions],
        "param_slice_mappings": [_make_mappings(own.buffer, own.spans) for own in partitions],
    }
    if "universal_checkpoint_info" in state:  # AutoTP saves it here too
        replaced["universal_checkpoint_info"] = target.universal_info()
    if "param_alignment_paddings" in state:
        replaced["param_alignment_paddings"] = [list(own.layout.param_paddings) for own in partitions]
    if "zero_stage" in state:
        replaced["zero_stage"] = make_zero_stage_enum(target.topology.zero)
    value = build_optimizer_file(target, template, like.value, template.copy_except(state, replaced))
    if target.source.experts is not None:
        optimized = [name for own in partitions for name in own.buffer.names]
        families = autoep.list_partitions(optimized, target.topology, *rank)
        value = target.fold(value, *rank, "zero_optimizer_state", param_families=families)
    return value, tensors


def _add_partition(
    target: Target, file: File, partition: _Partition, states: Mapping[str, Tensor], *, pp: int, tp: int, part: int
) -> None:
    """Add the rows of a rank's partition; `part` is the part of the experts that the rank holds."""
    layout, buffer = partition.layout, partition.buffer
    tensors, momentum = muon.split_states(states, whole=partition.is_whole)
    file.add_gaps(tensors.values(), layout.gaps(partition.own))
    if momentum:
        _add_momentum(target, file, buffer, layout, momentum, pp=pp, tp=tp, own=partition.own)
    for span in partition.spans:
        name = buffer.whole[span.index]
        if target.is_stacked(name):
            file.add_experts_span(target.params[name], tensors, span, part)
        else:
            file.add_span(target.params[name], tensors, span, tp, target.copy_of(name, pp))


def _count_elements(
    target: Target, template: GroupTemplate, layout: flat.FlatGroup, own: int, *, whole: bool
) -> tuple[tuple[str, int], ...]:
    """Return the length of each of a rank's tensors for one group, by state."""
    lengths = dict.fromkeys(template.dtypes, layout.partition)
    lengths["fp32"] -= 0 if target.kind is Kind.BF16 else layout.padding(own)
    if whole and muon.MOMENTUM in lengths:
        lengths[muon.MOMENTUM] = muon.count_momentum(layout, own)
        if not lengths[muon.MOMENTUM]:
            del lengths[muon.MOMENTUM]
    return tuple(lengths.items())


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
