"""Files of ZeRO-3: every rank has a model file without weights, and its slots of every parameter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard.formats.deepspeed import flat, names
from reshard.formats.deepspeed.fields import base_state, fields_for
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.rows import Place
from reshard.formats.deepspeed.slots import Run, runs_of
from reshard.formats.deepspeed.writing.carried_objects import Template, zero_stage_enum
from reshard.formats.deepspeed.writing.model_files import frozen_names
from reshard.formats.deepspeed.writing.optimizer_files import optimizer_file_value
from reshard.formats.deepspeed.writing.rank_copies import Twins
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
    ]
)
"""Entries of a rank's files that are not copied from the source."""


def write_zero3(target: Target, tp: int) -> None:
    """Both files of every data-parallel rank: all model files, then all optimizer files."""
    cut = sub_groups(target, tp)
    _write_models(target, tp, [group for found in cut for group in found])
    _write_optimizers(target, tp, cut)


def sub_groups(target: Target, tp: int) -> list[list[tuple[str, ...]]]:
    """Names by parameter group and sub-group; where a group is cut depends on dp."""
    size = int(target.source.zero_config.get("sub_group_size") or _SUB_GROUP_SIZE)
    return [
        [
            group[start:stop]
            for start, stop in flat.zero3_sub_groups(target.elements(group, tp), target.topology.dp, size)
        ]
        for group in target.stages[0].groups
    ]


def _write_models(target: Target, tp: int, sub_groups: list[tuple[str, ...]]) -> None:
    twins: Twins[dict[str, Any]] = Twins(target)
    files: list[tuple[File, dict[str, Any]]] = []
    for dp in range(target.topology.dp):
        like = target.source.models[target.like(0, tp), target.like_dp(dp) if target.source.topology.zero == 3 else 0]

        def make(like: PtFile = like, dp: int = dp) -> tuple[dict[str, Any], dict[str, Any]]:
            found = _model_value(target, like, tp, dp, sub_groups)
            return found, found

        copied = [item for key, item in like.value.items() if key not in _FROM_TARGET]
        file, value = twins.add(names.model_file(tp, dp=dp), (tp == dp == 0, *like.value, *copied), make)
        files.append((file, value))
        for name in like.value.get("buffer_names") or ():
            if name in target.weights:
                file.add_weight(target.weights[name], value["module"][name], tp, dp)
    for name in files[0][1]["frozen_param_fragments"] or ():
        held = [(file, value["frozen_param_fragments"][name]) for file, value in files]
        (slot,), _ = flat.zero3_slots(target.elements((name,), tp), target.topology.dp)
        _add_slots(target, tp, "weight", target.weights[name], _Held(held[0][1].dtype, _runs(held, tp)), slot)


def _model_value(target: Target, like: PtFile, tp: int, dp: int, sub_groups: list[tuple[str, ...]]) -> dict[str, Any]:
    template = Template(like, target.budget)
    frozen = {name: _fragment(target, name, tp) for name in _frozen(target, like.value)}
    replaced: dict[str, Any] = {
        **target.common(like.value, first=tp == dp == 0),
        **target.config(template, like.value),
        "module": _module(target, like.value, template, tp),
        "param_shapes": [target.shapes(names_, tp) for names_ in sub_groups],
        "frozen_param_shapes": StatefulDict((name, Size(target.shard(name, tp))) for name in frozen),
        "frozen_param_fragments": StatefulDict(frozen),
    }
    if not frozen and like.value.get("frozen_param_shapes") is None:  # as in `model_files`: {} would not be the same
        replaced |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
    return template.copy_except(like.value, replaced)


def _frozen(target: Target, like: Mapping[str, Any]) -> tuple[str, ...]:
    """Parameters that are not optimized."""
    if target.source.topology.zero == 3:
        return tuple(like.get("frozen_param_fragments") or ())
    return frozen_names(target, like)


def _module(target: Target, like: Mapping[str, Any], template: Template, tp: int) -> StatefulDict:
    """ZeRO-3 stores whole buffers, and an empty tensor for every parameter."""
    buffers = set(like.get("buffer_names") or ())
    module = StatefulDict(
        (name, new_tensor(tensor.dtype, target.shard(name, tp) if name in buffers else (0,)))
        for name, tensor in like["module"].items()
    )
    module.state = template.copy(like["module"].state)
    return module


class _Held(NamedTuple):
    """Tensors of one type that the ranks have one each of, and where they lie."""

    dtype: str
    runs: tuple[Run, ...]


def _runs(held: list[tuple[File, Tensor]], tp: int) -> tuple[Run, ...]:
    """Where the ranks' files hold their tensors."""
    places = [file.place(tensor, tp, 0) for file, tensor in held]
    return runs_of(range(len(held)), [place.file for place in places], [place.byte_offset for place in places])


def _add_slots(target: Target, tp: int, state: str, param: Param, held: _Held, slot: flat.Slot) -> None:  # noqa: PLR0917
    place = Place(target.topology.tp, tp, 0, 0, 0)
    target.rows.add_slots(state, param, place, held.runs, dtype=held.dtype, offset=slot.offset, size=slot.size)
    num_elements, item_bytes = math.prod(target.shard(param.name, tp)), ITEM_BYTES[held.dtype]
    if not slot.size:
        return
    full = num_elements // slot.size  # ranks whose slot has no padding; the next one's has some, or is all padding
    used = num_elements % slot.size
    for run in held.runs:
        start = run.byte_offset + slot.offset * item_bytes
        if run.first <= full < run.last:
            held_bytes = (slot.size - used) * item_bytes
            target.rows.add_zeros(run.file + full - run.first, start + used * item_bytes, held_bytes)
        empty = max(run.first, full + 1)
        target.rows.add_zeros(run.file + empty - run.first, start, slot.size * item_bytes, num_files=run.last - empty)


def _fragment(target: Target, name: str, tp: int) -> Tensor:
    _, length = flat.zero3_slots(target.elements((name,), tp), target.topology.dp)
    return new_tensor(_frozen_type(target, name), (length,))


def _frozen_type(target: Target, name: str) -> str:
    """Type of a frozen parameter, from the checkpoint that the files are modelled on."""
    like = target.source.models[0, 0].value
    tensor = (like.get("frozen_param_fragments") or {}).get(name) or like["module"][name]
    return str(tensor.dtype)


def _write_optimizers(target: Target, tp: int, sub_groups: list[list[tuple[str, ...]]]) -> None:
    twins: Twins[list[dict[str, Tensor]]] = Twins(target)
    files: list[tuple[File, list[dict[str, Tensor]]]] = []
    prefix = target.prefix
    for dp in range(target.topology.dp):
        like = (target.like(0, tp), target.like_dp(dp))

        def make(like: tuple[int, int] = like) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
            return _optimizer_value(target, like, tp, sub_groups)

        files.append(twins.add(names.optimizer_file(prefix, dp, tp), _copied(target, like), make))
    for at, names_ in enumerate(itertools.chain.from_iterable(sub_groups)):
        slots, _ = flat.zero3_slots(target.elements(names_, tp), target.topology.dp)
        states = files[0][1][at]
        held = {
            state: _Held(states[state].dtype, _runs([(file, own[at][state]) for file, own in files], tp))
            for state in states
        }
        for name, slot in zip(names_, slots, strict=True):
            for state in states:
                _add_slots(target, tp, state, target.params[name], held[state], slot)


def _copied(target: Target, like: tuple[int, int]) -> tuple[Any, ...]:
    """Everything that an optimizer file takes from a rank of the source."""
    state = fields_for(target.kind, target.source, *like)
    found: list[Any] = []
    for mapping in (target.source.optimizer_file(*like).value, state, base_state(target.source, *like)):
        found += mapping
        found += [item for key, item in mapping.items() if key not in _FROM_TARGET]
    return tuple(found)


def _optimizer_value(
    target: Target, like: tuple[int, int], tp: int, sub_groups: list[list[tuple[str, ...]]]
) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """What an optimizer file holds, and its partitions by sub-group and state."""
    file = target.source.optimizer_file(*like)
    template = Template(file, target.budget)
    partitions: list[dict[str, Tensor]] = []
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group, found in enumerate(sub_groups):
        first = len(partitions)
        for names_ in found:
            own_states = target.group_template(group, tp)
            _, length = flat.zero3_slots(target.elements(names_, tp), target.topology.dp)
            own = {key: new_tensor(dtype, (length,)) for key, dtype in own_states.dtypes.items()}
            if own_states.order:
                states[len(partitions)] = own_states.state(own)
            partitions.append(own)
        groups.append(target.param_group(group, list(range(first, len(partitions)))))
    inner = template.copy_except(base_state(target.source, *like), {"state": states, "param_groups": groups})
    replaced: dict[str, Any] = {
        "zero_stage": zero_stage_enum(3),
        "partition_count": target.topology.dp,
        "optimizer_state_dict": inner,
        "fp32_flat_groups": [own["fp32"] for own in partitions],
    }
    state = template.copy_except(fields_for(target.kind, target.source, *like), replaced)
    return optimizer_file_value(target, template, file.value, state), partitions
