"""Index the optimizer's states as boxes of logical tensors: flat groups, slots of ZeRO-3, whole states of ZeRO-0."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed import autoep, flat, muon
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.fields import Kind, detect_kind
from reshard.formats.deepspeed.logical import Model, read_param_groups, read_param_shapes
from reshard.formats.deepspeed.rows import Place, Rows, add_span
from reshard.formats.deepspeed.slots import locate_tensor
from reshard.formats.deepspeed.states import read_group_states
from reshard.formats.deepspeed.unpartitioned import read_param_states
from reshard.formats.pt.objects import Inert, Tensor
from reshard.formats.pt.reader import PtFile

_RankTensors = tuple[PtFile, Mapping[str, Tensor]]
"""File of a rank, and the partitions of one sub-group in it by state."""


def add_unpartitioned(rows: Rows, source: DeepSpeedContents, model: Model, files: Mapping[str, int]) -> None:
    """Add the states of ZeRO-0, each of which has the shape of its parameter's shard.

    Raises:
        CorruptSourceError: a state has another shape.
    """
    topology = source.topology
    copies = _map_stages(model)
    for (mp, _), file in source.models.items():
        pp, tp = divmod(mp, topology.tp)
        states = read_param_states(source.optimizer(mp, 0), file.path, source.named[mp])
        for group, own in zip(source.named[mp], states, strict=True):
            for name, state in zip(group, own, strict=True):
                for key, tensor in state.tensors.items():
                    if tensor.shape != group[name]:
                        raise CorruptSourceError(
                            f"{key} of {name} has the shape {tensor.shape}, expected {group[name]}", path=file.path
                        )
                    place = Place(topology.tp, tp, copies[name].index(pp), files[file.path], tensor.file_offset)
                    rows.add_shard(key, model.params[name], place, dtype=tensor.dtype, strides=tensor.stride)


def add_partitions(
    rows: Rows, source: DeepSpeedContents, model: Model, files: Mapping[str, int], element_bytes: int
) -> None:
    """Add the flat groups of ZeRO-1/2, which are cut into equal partitions.

    Positions follow from the order in `param_shapes`, which is that of the buffer. `param_slice_mappings` is wrong with
    `round_robin_gradients`, and is compared otherwise.

    Raises:
        CorruptSourceError: a partition has another length than the parameters need, or files contradict each other.
        UnsupportedError: Muon's momentum is in a form that is not converted.
    """
    topology = source.topology
    copies = _map_stages(model)
    kind = detect_kind(source.optimizer(0, 0))
    aligned = bool(source.zero_config.get("parameter_alignment")) and kind is Kind.ZERO12
    alignment = flat.param_alignment(element_bytes, aligned)
    make_layout = functools.cache(functools.partial(flat.FlatGroup, param_alignment=alignment))
    read_buffers = functools.cache(functools.partial(_read_buffers, source))
    for (mp, dp), file in source.optimizers.items():
        pp, tp = divmod(mp, topology.tp)
        buffers = read_buffers(mp)
        states = read_group_states(source, mp, dp)
        groups = read_param_groups(source, mp)
        whole_groups = {
            at for at, group in enumerate(groups) if muon.has_whole_momentum(kind, group, source.zero_config)
        }
        if len(states) != len(buffers):
            raise CorruptSourceError(f"{len(states)} groups, param_shapes has {len(buffers)}", path=file.path)
        for at, (state, (names, counts)) in enumerate(zip(states, buffers, strict=True)):
            num_partitions, own = source.partition(names, dp, tp)
            layout = make_layout(num_elements=counts, dp=num_partitions)
            spans = layout.spans(own)
            unpadded = layout.partition - layout.padding(own)
            partitioned, whole = muon.split_states(state.flat, whole=at in whole_groups)
            muon.check_momentum(at, whole, layout, own, file.path)
            for key, tensor in partitioned.items():
                if tensor.num_elements not in (unpadded, layout.partition):
                    if key == muon.MOMENTUM and not groups:
                        muon.refuse_elastic(file.path)
                    # Beside a sound master, a state of another length is one that the optimizer makes so.
                    is_sound = partitioned["fp32"].num_elements in (unpadded, layout.partition)
                    raise (UnsupportedError if is_sound else CorruptSourceError)(
                        f"group {at}: partition {key!r} has {tensor.num_elements} elements, expected {unpadded}"
                        f" or with padding {layout.partition}",
                        path=file.path,
                    )
            if not model.round_robin:
                _compare_mappings(source.optimizer(mp, dp), at, names, spans, file.path)
            for span in spans:
                param = model.params[source.whole_name(names[span.index], dp)]
                place = Place(topology.tp, tp, copies[param.name].index(pp), files[file.path], 0)
                if source.experts is not None and param.name in source.experts.stacked:
                    place = place._replace(tp=topology.ep, rank=autoep.find_part(topology, dp, tp)[0])
                add_span(rows, param, partitioned, span, place)
            for span in muon.locate_momentum(layout, own) if whole else ():
                param = model.params[source.whole_name(names[span.index], dp)]
                if source.experts is not None and param.name in source.experts.stacked:
                    muon.refuse_experts(param.name, file.path)
                stages = copies[param.name]
                copy = stages.index(pp) + muon.count_earlier_copies(layout, own, span.index) * len(stages)
                add_span(rows, param, whole, span, Place(topology.tp, tp, copy, files[file.path], 0))


def _read_buffers(source: DeepSpeedContents, mp: int) -> list[tuple[list[str], tuple[int, ...]]]:
    """Read names and numbers of elements of the parameters in each flat group of a model-parallel rank."""
    groups = read_param_shapes(source, mp)
    return [(list(group), tuple(math.prod(shape) for shape in group.values())) for group in groups]


def add_zero3(rows: Rows, source: DeepSpeedContents, model: Model, files: Mapping[str, int]) -> None:
    """Add the states of ZeRO-3, where every parameter has a slot in each rank's sub-group.

    Experts are partitioned over all ranks that hold the same part of them, other parameters over the data-parallel
    ranks of one tensor-parallel rank.

    Raises:
        CorruptSourceError: a rank has another number of sub-groups, or a sub-group another length.
    """
    topology = source.topology
    experts: dict[int, dict[int, _RankTensors]] = {}  # sub-group -> rank -> its partitions
    for mp in range(topology.tp * topology.pp):
        shapes = read_param_shapes(source, mp)
        own = [source.optimizers[mp, dp] for dp in range(topology.dp)]
        states = [read_group_states(source, mp, dp) for dp in range(topology.dp)]
        for file, rank_states in zip(own, states, strict=True):
            if len(rank_states) != len(shapes):
                count = len(rank_states)
                raise CorruptSourceError(f"{count} sub-groups, param_shapes has {len(shapes)}", path=file.path)
        _check_partition_groups(source, mp, [tuple(group) for group in shapes])
        for at, group in enumerate(shapes):
            rank_tensors = [(file, state[at].flat) for file, state in zip(own, states, strict=True)]
            source.partition(tuple(group), 0)  # refuses experts among other parameters
            if any(map(source.is_stacked, group)):
                experts.setdefault(at, {}).update({dp * topology.tp + mp: item for dp, item in enumerate(rank_tensors)})
            else:
                _add_sub_group(rows, model, group, at, rank_tensors, files, Place(topology.tp, mp, 0, 0, 0))
    for at, by_rank in experts.items():
        group = read_param_shapes(source, 0)[at]
        for part in range(topology.ep):
            rank_tensors = [by_rank[rank] for rank in autoep.list_holders(topology, part)]
            _add_sub_group(rows, model, group, at, rank_tensors, files, Place(topology.ep, part, 0, 0, 0))


def _add_sub_group(  # noqa: PLR0917
    rows: Rows,
    model: Model,
    group: Mapping[str, tuple[int, ...]],
    at: int,
    rank_tensors: Sequence[_RankTensors],
    files: Mapping[str, int],
    place: Place,
) -> None:
    """Add the slots of a sub-group's parameters, of which each of the ranks holds a part.

    Raises:
        CorruptSourceError: a rank's partition has another length or type.
    """
    slots, length = flat.zero3_slots([math.prod(shape) for shape in group.values()], len(rank_tensors))
    keys = dict.fromkeys(key for _, tensors in rank_tensors for key in tensors)
    what = f"sub-group {at}: partition"
    located = {key: locate_tensor(rank_tensors, key, files, length=length, what=f"{what} {key!r}") for key in keys}
    for name, slot in zip(group, slots, strict=True):
        for key, (dtype, ranges) in located.items():
            rows.add_slots(key, model.params[name], place, ranges, dtype=dtype, offset=slot.offset, size=slot.size)


def _check_partition_groups(source: DeepSpeedContents, mp: int, groups: Sequence[tuple[str, ...]]) -> None:
    """Compare what each rank says about its partitions with the layout of experts.

    Raises:
        CorruptSourceError: a rank has partitions of other ranks.
    """
    if source.experts is None:
        return
    for dp in range(source.topology.dp):
        expected = autoep.make_partition_groups(groups, source.experts.stacked, source.topology, dp, mp)
        stated = source.optimizer(mp, dp).get("ds_zero_partition_groups")
        if stated != expected:
            raise CorruptSourceError(
                f"ds_zero_partition_groups is {stated!r:.300}, expected {expected!r:.300}",
                path=source.optimizers[mp, dp].path,
            )


def _map_stages(model: Model) -> dict[str, list[int]]:
    """Map each parameter to the stages that hold it; tied parameters are on several."""
    stages: dict[str, list[int]] = {}
    for pp, stage in enumerate(model.stages):
        for name in (name for group in stage.groups for name in group):
            stages.setdefault(name, []).append(pp)
    return stages


def _compare_mappings(
    state: Mapping[str, Any], at: int, names: list[str], spans: tuple[flat.Span, ...], path: str
) -> None:
    mappings = state.get("param_slice_mappings")
    if not isinstance(mappings, list) or len(mappings) <= at or not isinstance(mappings[at], Mapping):
        return
    stated = {
        name: (address.state.get("start"), address.state.get("numel"))
        for name, address in mappings[at].items()
        if isinstance(address, Inert) and isinstance(address.state, Mapping)
    }
    expected = {names[span.index]: (span.offset, span.stop - span.start) for span in spans}
    if len(stated) == len(mappings[at]) and stated != expected:
        wrong = sorted(name for name in stated.keys() | expected.keys() if stated.get(name) != expected.get(name))
        raise CorruptSourceError(
            f"group {at}: param_slice_mappings and param_shapes disagree about {', '.join(wrong[:5])}", path=path
        )
