"""Lay out the optimizer of ZeRO-0 in the model file: states in the shape of their parameter's shard, or flat groups."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.formats.deepspeed.fields import Kind, convert_fields, read_base_state
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.unpartitioned import FLAT_MASTERS, make_view
from reshard.formats.deepspeed.writing.carried_objects import Template
from reshard.formats.deepspeed.writing.target import Target
from reshard.formats.pt.objects import Tensor, new_tensor

_Group = tuple[list[dict[str, Tensor]], list[tuple[Param, str, Tensor]]]
"""States of each entry of the optimizer as they are saved, and the tensors in them: parameter, state and tensor."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The entry `optimizer` of a model file.

    Attributes:
        value: what is saved.
        tensors: parameter, state and tensor of every tensor in `value` whose bytes come from the source.
    """

    value: dict[str, Any]
    tensors: tuple[tuple[Param, str, Tensor], ...]


def lay_out_optimizer(target: Target, pp: int, tp: int) -> Optimizer:
    """Lay out the optimizer of one model-parallel rank."""
    mp = target.like(pp, tp)
    template = Template(target.source.optimizer_file(mp, 0), target.budget)
    stage = target.stages[pp]
    tensors: list[tuple[Param, str, Tensor]] = []
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    masters: list[list[Tensor]] = []
    number = 0
    for id_, names in zip(stage.ids, stage.groups, strict=True):
        like = target.group_template(id_, tp)
        dtypes = {key: type_ for key, type_ in like.dtypes.items() if key != "fp32" or target.kind is not Kind.PLAIN}
        saved, group_tensors = (_make_flat_states if target.kind is Kind.FUSED else _make_separate_states)(
            target, dtypes, names, tp
        )
        tensors += group_tensors
        if target.kind is not Kind.PLAIN:
            masters.append([dataclasses.replace(own["fp32"], requires_grad=True) for own in saved])
        if like.order:
            states |= {number + at: like.state(own) for at, own in enumerate(saved)}
        groups.append(target.param_group(id_, list(range(number, number + len(saved)))))
        number += len(saved)
    inner = template.copy_except(read_base_state(target.source, mp, 0), {"state": states, "param_groups": groups})
    if target.kind is Kind.PLAIN:
        return Optimizer(value=inner, tensors=tuple(tensors))
    own_masters = {FLAT_MASTERS: [own for (own,) in masters]} if target.kind is Kind.FUSED else {"fp32_groups": masters}
    fields = convert_fields(target.kind, target.source, mp, 0)
    value = template.copy_except(fields, {"optimizer_state_dict": inner, **own_masters})
    return Optimizer(value=value, tensors=tuple(tensors))


def _make_separate_states(target: Target, dtypes: Mapping[str, str], names: Sequence[str], tp: int) -> _Group:
    """Make states for every parameter of a group."""
    saved = [{key: new_tensor(dtype, target.shard(name, tp)) for key, dtype in dtypes.items()} for name in names]
    return saved, [
        (target.params[name], key, tensor)
        for name, own in zip(names, saved, strict=True)
        for key, tensor in own.items()
    ]


def _make_flat_states(target: Target, dtypes: Mapping[str, str], names: Sequence[str], tp: int) -> _Group:
    """Make states for a flat group, which has the shards of all its parameters one after the other."""
    shapes = [target.shard(name, tp) for name in names]
    starts = [0, *itertools.accumulate(map(math.prod, shapes))]
    whole = {key: new_tensor(dtype, (starts[-1],)) for key, dtype in dtypes.items()}
    return [whole], [
        (target.params[name], key, make_view(tensor, start, shape))
        for name, start, shape in zip(names, starts, shapes, strict=False)
        for key, tensor in whole.items()
    ]
