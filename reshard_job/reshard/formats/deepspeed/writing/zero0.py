"""The optimizer of ZeRO-0, written into the model file: every state in the shape of its parameter's shard, or flat."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.formats.deepspeed.fields import Kind, base_state, fields_for
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.unpartitioned import FLAT_MASTERS, view
from reshard.formats.deepspeed.writing.carried_objects import Template
from reshard.formats.deepspeed.writing.target import Target
from reshard.formats.pt.objects import Tensor, new_tensor

_Group = tuple[list[dict[str, Tensor]], list[tuple[Param, str, Tensor]]]
"""States as they are saved, of each number of the optimizer, and what is in them: parameter, state and tensor."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """A model file's `optimizer`.

    Attributes:
        value: what is saved.
        tensors: parameter, state and tensor of everything in it that is to be filled.
    """

    value: dict[str, Any]
    tensors: tuple[tuple[Param, str, Tensor], ...]


def unpartitioned_optimizer(target: Target, pp: int, tp: int) -> Optimizer:
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
        saved, parts = (_flat if target.kind is Kind.FUSED else _apart)(target, dtypes, names, tp)
        tensors += parts
        if target.kind is not Kind.PLAIN:
            masters.append([dataclasses.replace(own["fp32"], requires_grad=True) for own in saved])
        if like.order:
            states |= {number + at: like.state(own) for at, own in enumerate(saved)}
        groups.append(target.param_group(id_, list(range(number, number + len(saved)))))
        number += len(saved)
    inner = template.copy_except(base_state(target.source, mp, 0), {"state": states, "param_groups": groups})
    if target.kind is Kind.PLAIN:
        return Optimizer(value=inner, tensors=tuple(tensors))
    own_masters = {FLAT_MASTERS: [own for (own,) in masters]} if target.kind is Kind.FUSED else {"fp32_groups": masters}
    fields = fields_for(target.kind, target.source, mp, 0)
    value = template.copy_except(fields, {"optimizer_state_dict": inner, **own_masters})
    return Optimizer(value=value, tensors=tuple(tensors))


def _apart(target: Target, dtypes: Mapping[str, str], names: Sequence[str], tp: int) -> _Group:
    """Every parameter has states of its own."""
    saved = [{key: new_tensor(dtype, target.shard(name, tp)) for key, dtype in dtypes.items()} for name in names]
    return saved, [
        (target.params[name], key, tensor)
        for name, own in zip(names, saved, strict=True)
        for key, tensor in own.items()
    ]


def _flat(target: Target, dtypes: Mapping[str, str], names: Sequence[str], tp: int) -> _Group:
    """A group is one parameter: all of its shards one behind the other."""
    shapes = [target.shard(name, tp) for name in names]
    starts = [0, *itertools.accumulate(map(math.prod, shapes))]
    whole = {key: new_tensor(dtype, (starts[-1],)) for key, dtype in dtypes.items()}
    return [whole], [
        (target.params[name], key, view(tensor, start, shape))
        for name, start, shape in zip(names, starts, shapes, strict=False)
        for key, tensor in whole.items()
    ]
