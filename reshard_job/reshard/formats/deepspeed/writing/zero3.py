"""Write the files of ZeRO-3: every rank has a model file without weights, and slots of all parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard.formats.deepspeed import autoep, flat, names
from reshard.formats.deepspeed.contents import find_partition
from reshard.formats.deepspeed.fields import convert_fields, read_base_state
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.rows import Place
from reshard.formats.deepspeed.slots import RankRange, group_ranks
from reshard.formats.deepspeed.writing.carried_objects import Template, make_zero_stage_enum
from reshard.formats.deepspeed.writing.model_files import list_frozen_names
from reshard.formats.deepspeed.writing.optimizer_files import build_optimizer_file
from reshard.formats.deepspeed.writing.rank_copies import RankCopies
from reshard.formats.deepspeed.writing.target import File, Target
from reshard.formats.pt.objects import ITEM_BYTES, Size, StatefulDict, Tensor, new_tensor
from reshard.formats.pt.reader import PtFile

_SUB_GROUP_SIZE = 10**9
"""DeepSpeed's default for `zero_optimization.sub_group_size`."""

_FROM_TARGET = frozenset(
    [
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "optimizer_state_dict",
        "fp32_flat_groups",
        "state",
        "param_groups",
        "ds_zero_partition_groups",
        *autoep.KEYS,
        "universal_checkpoint_info",
    ]
)
"""Entries of a rank's files that are not copied from the source."""

_RankPartitions = tuple[File, list[dict[str, Tensor]]]
"""File of a rank, and the partitions in it by sub-group and state."""


def write_zero3(target: Target) -> None:
    """Write both files of every rank: for each tensor-parallel rank all model files, then all optimizer files.

    Experts are partitioned over all ranks that hold the same part of them, other parameters over the data-parallel
    ranks of one tensor-parallel rank.
    """
    topology = target.topology
    experts: dict[tuple[str, ...], dict[int, tuple[File, dict[str, Tensor]]]] = {}  # sub-group -> rank -> partitions
    for tp in range(topology.tp):
        cut = list_sub_groups(target, tp)
        every = [names_ for group in cut for names_ in group]
        _write_models(target, tp, every)
        files = _write_optimizers(target, tp, cut)
        for at, names_ in enumerate(every):
            own = [(file, partitions[at]) for file, partitions in files]
            if any(map(target.is_stacked, names_)):
                experts.setdefault(names_, {}).update({dp * topology.tp + tp: item for dp, item in enumerate(own)})
            else:
                _add_sub_group(target, Place(topology.tp, tp, 0, 0, 0), names_, own)
    for names_, by_rank in experts.items():
        for part in range(topology.ep):
            own = [by_rank[rank] for rank in autoep.list_holders(topology, part)]
            _add_sub_group(target, Place(topology.ep, part, 0, 0, 0), names_, own)


def list_sub_groups(target: Target, tp: int) -> list[list[tuple[str, ...]]]:
    """Return the names by parameter group and sub-group; the cut depends on dp."""
    size = int(target.source.zero_config.get("sub_group_size") or _SUB_GROUP_SIZE)
    return [
        [
            group[start:stop]
            for start, stop in flat.zero3_sub_groups(target.elements(group, tp), _count_partitions(target, group), size)
        ]
        for group in target.stages[0].groups
    ]


def _count_partitions(target: Target, names_: tuple[str, ...]) -> int:
    """Return over how many ranks the parameters of a group are partitioned; experts over those that hold them."""
    return find_partition(names_, target.source.experts, target.topology, 0)[0]


def _write_models(target: Target, tp: int, sub_groups: list[tuple[str, ...]]) -> None:
    rank_copies: RankCopies[dict[str, Any]] = RankCopies(target, are_adjacent=True)
    files: list[tuple[File, dict[str, Any]]] = []
    for dp in range(target.topology.dp):
        like = target.source.models[target.like(0, tp), target.like_dp(dp) if target.source.topology.zero == 3 else 0]

        def make(like: PtFile = like, dp: int = dp) -> tuple[dict[str, Any], dict[str, Any]]:
            value = _build_model(target, like, tp, dp, sub_groups)
            return value, value

        copied = [item for key, item in like.value.items() if key not in _FROM_TARGET]
        own = dp if target.source.experts is not None else None  # descriptions of experts differ between ranks
        file, value = rank_copies.add(names.model_file(tp, dp=dp), (tp == dp == 0, own, *like.value, *copied), make)
        files.append((file, value))
        for name in like.value.get("buffer_names") or ():
            if name in target.weights:
                file.add_weight(target.weights[name], value["module"][name], tp, dp)
    for name in files[0][1]["frozen_param_fragments"] or ():
        fragments = [(file, value["frozen_param_fragments"][name]) for file, value in files]
        (slot,), _ = flat.zero3_slots(target.elements((name,), tp), target.topology.dp)
        rank_tensors = _RankTensors(fragments[0][1].dtype, _locate(fragments, tp))
        place = Place(target.topology.tp, tp, 0, 0, 0)
        _add_slots(target, place, "weight", target.weights[name], rank_tensors, slot)


def _build_model(target: Target, like: PtFile, tp: int, dp: int, sub_groups: list[tuple[str, ...]]) -> dict[str, Any]:
    template = Template(like, target.budget)
    frozen = {name: _make_fragment(target, name, tp) for name in _list_frozen(target, like.value)}
    replaced: dict[str, Any] = {
        **target.common(like.value, first=tp == dp == 0, dp=dp, tp=tp),
        **target.arguments(template, like.value),
        **target.config(template, like.value),
        "module": _make_module(target, like.value, template, tp),
        "param_shapes": [target.shapes(names_, tp) for names_ in sub_groups],
        "frozen_param_shapes": StatefulDict((name, Size(target.shard(name, tp))) for name in frozen),
        "frozen_param_fragments": StatefulDict(frozen),
    }
    if not frozen and like.value.get("frozen_param_shapes") is None:  # DeepSpeed treats {} otherwise, see `model_files`
        replaced |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
    value = template.copy_except(like.value, replaced)
    return target.fold(value, dp, tp, "dense", param_families=autoep.list_families(value["module"]))


def _list_frozen(target: Target, like: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the parameters that are not optimized."""
    if target.source.topology.zero == 3:
        return tuple(like.get("frozen_param_fragments") or ())
    return list_frozen_names(target, like)


def _make_module(target: Target, like: Mapping[str, Any], template: Template, tp: int) -> StatefulDict:
    """Return the module of ZeRO-3, which has whole buffers, and an empty tensor for every parameter."""
    buffers = set(like.get("buffer_names") or ())
    module = StatefulDict(
        (name, new_tensor(tensor.dtype, target.shard(name, tp) if name in buffers else (0,)))
        for name, tensor in like["module"].items()
    )
    module.state = template.copy(like["module"].state)
    return module


class _RankTensors(NamedTuple):
    """Tensors of one type, one on each rank, and where they lie."""

    dtype: str
    ranges: tuple[RankRange, ...]


def _locate(tensors: list[tuple[File, Tensor]], tp: int) -> tuple[RankRange, ...]:
    """Return where the ranks' files hold their tensors."""
    places = [file.place(tensor, tp, 0) for file, tensor in tensors]
    return group_ranks(range(len(tensors)), [place.file for place in places], [place.byte_offset for place in places])


def _add_slots(  # noqa: PLR0917
    target: Target, place: Place, state: str, param: Param, tensors: _RankTensors, slot: flat.Slot
) -> None:
    target.rows.add_slots(state, param, place, tensors.ranges, dtype=tensors.dtype, offset=slot.offset, size=slot.size)
    shard = param.rule.shard_shape(param.name, param.shape, place.tp, place.rank)
    num_elements, item_bytes = math.prod(shard), ITEM_BYTES[tensors.dtype]
    if not slot.size:
        return
    full = num_elements // slot.size  # ranks whose slots have no padding; the next slot has some or is all padding
    used = num_elements % slot.size
    for ranks in tensors.ranges:
        start = ranks.byte_offset + slot.offset * item_bytes
        if ranks.first <= full < ranks.last:
            num_bytes = (slot.size - used) * item_bytes
            target.rows.add_zeros(ranks.file + full - ranks.first, start + used * item_bytes, num_bytes)
        empty = max(ranks.first, full + 1)
        target.rows.add_zeros(
            ranks.file + empty - ranks.first, start, slot.size * item_bytes, num_files=ranks.last - empty
        )


def _make_fragment(target: Target, name: str, tp: int) -> Tensor:
    _, length = flat.zero3_slots(target.elements((name,), tp), target.topology.dp)
    return new_tensor(_find_frozen_type(target, name), (length,))


def _find_frozen_type(target: Target, name: str) -> str:
    """Return the type of a frozen parameter in the source, or in the checkpoint like the target."""
    like = target.source.models[0, 0].value
    tensor = (like.get("frozen_param_fragments") or {}).get(name) or like["module"][name]
    return str(tensor.dtype)


def _write_optimizers(target: Target, tp: int, sub_groups: list[list[tuple[str, ...]]]) -> list[_RankPartitions]:
    """Write the optimizer files of a tensor-parallel rank; return them in the order of the data-parallel ranks."""
    rank_copies: RankCopies[list[dict[str, Tensor]]] = RankCopies(target, are_adjacent=True)
    files: list[_RankPartitions] = []
    prefix = target.prefix
    for dp in range(target.topology.dp):
        like = (target.like(0, tp), target.like_dp(dp))

        def make(like: tuple[int, int] = like, dp: int = dp) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
            return _build_optimizer(target, like, tp, dp, sub_groups)

        differs = dp if target.source.experts is not None else None
        sources = (differs, *_list_copied(target, like))
        files.append(rank_copies.add(names.optimizer_file(prefix, dp, tp), sources, make))
    return files


def _add_sub_group(
    target: Target, place: Place, names_: tuple[str, ...], files: list[tuple[File, dict[str, Tensor]]]
) -> None:
    """Add the slots of a sub-group's parameters, which lie in the files of all ranks that share them."""
    slots, _ = flat.zero3_slots(target.elements(names_, place.rank), len(files))
    states = files[0][1]
    for state, tensor in states.items():
        rank_tensors = _RankTensors(tensor.dtype, _locate([(file, own[state]) for file, own in files], place.rank))
        for name, slot in zip(names_, slots, strict=True):
            _add_slots(target, place, state, target.params[name], rank_tensors, slot)


def _list_copied(target: Target, like: tuple[int, int]) -> tuple[Any, ...]:
    """Return all objects that an optimizer file copies from a rank of the source."""
    state = convert_fields(target.kind, target.source, *like)
    copied: list[Any] = []
    for mapping in (target.source.optimizer_file(*like).value, state, read_base_state(target.source, *like)):
        copied += mapping
        copied += [item for key, item in mapping.items() if key not in _FROM_TARGET]
    return tuple(copied)


def _build_optimizer(
    target: Target, like: tuple[int, int], tp: int, dp: int, sub_groups: list[list[tuple[str, ...]]]
) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """Return the value of an optimizer file, and its partitions by sub-group and state."""
    file = target.source.optimizer_file(*like)
    template = Template(file, target.budget)
    partitions: list[dict[str, Tensor]] = []
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group, group_sub_groups in enumerate(sub_groups):
        first = len(partitions)
        for names_ in group_sub_groups:
            own_states = target.group_template(group, tp)
            _, length = flat.zero3_slots(target.elements(names_, tp), _count_partitions(target, names_))
            own = {key: new_tensor(dtype, (length,)) for key, dtype in own_states.dtypes.items()}
            if own_states.order:
                states[len(partitions)] = own_states.state(own)
            partitions.append(own)
        groups.append(target.param_group(group, list(range(first, len(partitions)))))
    inner = template.copy_except(read_base_state(target.source, *like), {"state": states, "param_groups": groups})
    replaced: dict[str, Any] = {
        "zero_stage": make_zero_stage_enum(3),
        "partition_count": target.topology.dp,
        "optimizer_state_dict": inner,
        "fp32_flat_groups": [own["fp32"] for own in partitions],
    }
    if target.source.experts is not None:
        groups_ = [*itertools.chain.from_iterable(sub_groups)]
        stacked = target.source.experts.stacked
        replaced["ds_zero_partition_groups"] = autoep.make_partition_groups(groups_, stacked, target.topology, dp, tp)
    state = template.copy_except(convert_fields(target.kind, target.source, *like), replaced)
    value = build_optimizer_file(target, template, file.value, state)
    return target.fold(value, dp, tp, "zero_optimizer_state"), partitions
