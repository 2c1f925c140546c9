"""The optimizer of ZeRO-0, written into the model file: every state in the shape of its parameter's shard."""

from __future__ import annotations

import dataclasses
from typing import Any

from reshard.formats.deepspeed.fields import Kind, base_state, fields_for
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.target import Target
from reshard.formats.deepspeed.template import Template
from reshard.formats.pt.objects import Tensor, new_tensor


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
        masters.append([])
        for at, name in enumerate(names):
            keys = [key for key in like.dtypes if key != "fp32" or target.kind is Kind.UNFUSED]
            own = {key: new_tensor(like.dtypes[key], target.shard(name, tp)) for key in keys}
            tensors += [(target.params[name], key, tensor) for key, tensor in own.items()]
            if target.kind is Kind.UNFUSED:
                masters[-1].append(dataclasses.replace(own["fp32"], requires_grad=True))
            if like.order:
                states[number + at] = like.state(own)
        groups.append(target.param_group(id_, list(range(number, number + len(names)))))
        number += len(names)
    inner = template.copy_except(base_state(target.source, mp, 0), {"state": states, "param_groups": groups})
    if target.kind is Kind.PLAIN:
        return Optimizer(value=inner, tensors=tuple(tensors))
    fields = fields_for(target.kind, target.source, mp, 0)
    value = template.copy_except(fields, {"optimizer_state_dict": inner, "fp32_groups": masters})
    return Optimizer(value=value, tensors=tuple(tensors))
