"""Refuse universal checkpoints that DeepSpeed 0.19.8 cannot load, or loads wrongly without an error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.flat import zero3_sub_groups
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.muon import is_muon
from reshard.formats.pt.objects import Tensor
from reshard.formats.universal.blueprint import Blueprint, Group
from reshard.formats.universal.hints import IS_EXPERT
from reshard.formats.universal.names import MASTER, STEP
from reshard.topology import Topology

_STAGE3_STATES = {MASTER, "exp_avg", "exp_avg_sq"}
"""The states that stage 3 loads (stage3.py, `load_hp_checkpoint_state_from_checkpoint_dir_stage3`)."""

_NATIVE_EXPERT = ".deepspeed_moe.experts.deepspeed_experts."
"""Part of the names of DeepSpeed's own experts, which each rank counts from 0 (deepspeed/moe/experts.py)."""

_SUB_GROUP_SIZE = 10**9  # DeepSpeed's default for zero_optimization.sub_group_size


def refuse(blueprint: Blueprint, target: Topology, misfits: tuple[str, ...] = ()) -> None:
    """Refuse targets that DeepSpeed cannot load, or from which training would continue with wrong numbers.

    `misfits` says why no known family tells how the model is split.

    Raises:
        UnsupportedError: the message gives the reason.
    """
    where = str(blueprint.model.path)
    if target.zero == 0:
        raise UnsupportedError(
            f"{target}: DeepSpeed loads universal checkpoints in the ZeRO stages 1, 2 and 3 only", path=where
        )
    if target.ep > 1 and (experts := _list_experts(blueprint)):
        raise UnsupportedError(
            f"{target}: each rank would load the experts of the first one, as each calls its own {experts[0]}",
            path=where,
            hint="choose --format deepspeed, or ep=1",
        )
    if target.tp > 1 and any(hints is not None and IS_EXPERT in hints for hints in blueprint.hints.values()):
        raise UnsupportedError(
            f"{target}: DeepSpeed converts no AutoEP with tensor parallelism to universal checkpoints, and loading one"
            " at tp > 1 was not tried",
            path=where,
            hint="choose --format deepspeed, or tp=1",
        )
    if any(is_muon(group.settings) for group in blueprint.groups):
        raise UnsupportedError(
            f"{target}: universal checkpoints have no place for the momentum of DeepSpeed's Muon",
            path=where,
            hint="choose --format deepspeed",
        )
    for number, group in enumerate(blueprint.groups):
        if more := [key for key in group.scalars if key != STEP]:
            raise UnsupportedError(
                f"group {number} of the optimizer has {', '.join(more)}, one number for all its parameters: universal"
                " checkpoints have a place for step only",
                path=where,
                hint="choose --format deepspeed",
            )
    if target.tp > 1:
        _refuse_cut(blueprint, target, where, misfits)
    if target.zero == 3 and (problems := stage3_problems(blueprint)):
        raise UnsupportedError(
            "DeepSpeed's ZeRO-3 would load this universal checkpoint wrongly",
            path=where,
            problems=problems,
            hint="choose --format deepspeed, which every stage loads right, or load it in stage 1 or 2 (--to zero=1)",
        )


def _list_experts(blueprint: Blueprint) -> list[str]:
    return [name for name in blueprint.params if _NATIVE_EXPERT in name]


def _refuse_cut(blueprint: Blueprint, target: Topology, where: str, misfits: tuple[str, ...]) -> None:
    if not blueprint.cut_is_known:
        some = ", ".join(list(blueprint.params)[:5])
        raise UnsupportedError(
            f"{target}: it is not said how tensor parallelism cuts {some}, ... (Megatron-DeepSpeed leaves out"
            " row-parallel parameters at tp=1)",
            path=where,
            problems=misfits,
            hint="say it with --patterns FILE, or save with client_state={'universal_checkpoint_info': ...}, and all"
            " patterns filled in at tp=1 too",
        )
    for param in blueprint.params.values():
        if not param.rule.vocabulary:
            param.rule.shard_shape(param.name, param.shape, target.tp)


def stage3_problems(blueprint: Blueprint) -> list[str]:
    """List what stage 3 would load wrongly; stages 1 and 2 load all of it correctly."""
    groups = blueprint.groups
    problems = []
    if len(groups) > 1 and isinstance(groups[0].scalars.get(STEP), Tensor):
        problems.append(
            f"the optimizer has {len(groups)} parameter groups: they would share one tensor step, and each would count"
            " its steps onto it"
        )
    if len({_read_step(group) for group in groups}) > 1:
        problems.append("parameter groups have done different numbers of steps, and would get that of group 0")
    for number, group in enumerate(groups):
        if set(group.dtypes) != _STAGE3_STATES:
            states = ", ".join(state for state in group.dtypes if state != MASTER) or "none"
            problems.append(f"group {number} has the states {states}; only exp_avg and exp_avg_sq would be loaded")
    return problems


def _read_step(group: Group) -> Any:
    step = group.scalars.get(STEP)
    return step.storage.data if isinstance(step, Tensor) else step


def list_warnings(blueprint: Blueprint, target: Topology, params: Mapping[str, Param]) -> tuple[str, ...]:
    """List the settings that the run which loads the folder needs."""
    notes = []
    if target.zero < 3 and (problems := stage3_problems(blueprint)):
        notes.append(f"load it in ZeRO stage 1 or 2: stage 3 would load it wrongly ({'; '.join(problems)})")
    if not blueprint.cut_is_known:
        notes.append("it loads at tp=1 only: it is not said how tensor parallelism cuts the parameters")
    if _list_experts(blueprint):
        notes.append("it loads at ep=1 only: each rank would load the experts of the first one")
    zero = _read_zero_config(blueprint)
    if zero.get("round_robin_gradients"):
        notes.append("turn round_robin_gradients off in the run that loads it: DeepSpeed loads other values with it")
    if target.zero == 3 and (needed := _compute_sub_group(blueprint, target, params, zero)):
        notes.append(
            f"set zero_optimization.sub_group_size to at least {needed} in the run that loads it: the sub-groups of"
            " ZeRO-3 would share one tensor step"
        )
    return tuple(notes)


def _read_zero_config(blueprint: Blueprint) -> Mapping[str, Any]:
    config = blueprint.model.value.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return zero if isinstance(zero, Mapping) else {}


def _compute_sub_group(
    blueprint: Blueprint, target: Topology, params: Mapping[str, Param], zero: Mapping[str, Any]
) -> int:
    """Return the elements per rank of the largest group that the configured size (or the default) cuts; else 0."""
    size = zero.get("sub_group_size")
    size = size if isinstance(size, int) and size > 0 else _SUB_GROUP_SIZE
    needed = 0
    for group in blueprint.groups:
        elements = [math.prod(params[name].shape) for name in group.names]
        if len(zero3_sub_groups(elements, target.dp, size)) > 1:
            needed = max(needed, sum(-(-count // target.dp) for count in elements))
    return needed
