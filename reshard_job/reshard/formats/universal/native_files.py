"""Build the files of a native checkpoint, without the bytes of their tensors, from the files of a universal one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.experts import Experts
from reshard.formats.deepspeed.fields import has_fp32_gradients, read_clipping, read_scaling
from reshard.formats.deepspeed.logical import Param, parse_tied_key
from reshard.formats.deepspeed.reading.opening import read_zero_stage
from reshard.formats.deepspeed.writing.carried_objects import Template, make_zero_stage_enum
from reshard.formats.pt.objects import StatefulDict, Tensor, new_tensor
from reshard.formats.pt.reader import PtFile
from reshard.formats.universal.groups import GroupState
from reshard.formats.universal.names import MADE_FOR, MASTER, WEIGHTS
from reshard.formats.universal.source import Shape, UniversalContents
from reshard.formats.universal.weights import MODULE, Weights
from reshard.topology import Topology

_ORDER = (
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "clip_grad",
    "base_optimizer_state",
    "single_partition_of_fp32_groups",
    "zero_stage",
    "group_paddings",
    "param_alignment_paddings",
    "partition_count",
    "ds_version",
    "param_slice_mappings",
)
"""Order of the fields of an optimizer's state in stages 1 and 2 (stage_1_and_2.py, `state_dict`)."""


def build_native_contents(
    source: UniversalContents,
    groups: Sequence[GroupState],
    weights: Weights,
    params: Mapping[str, Param],
    experts: Experts | None,
) -> DeepSpeedContents:
    """Build the contents of the native checkpoint; one optimizer file stands for all data-parallel ranks.

    Args:
        source: the universal checkpoint.
        groups: states of each parameter group.
        weights: names and types of the module's weights.
        params: optimized parameters, frozen parameters and buffers by name.
        experts: the model's experts, or None.
    """
    optimizer = _build_optimizer_file(source, groups, weights)
    ranks = [(mp, 0) for mp in range(len(source.models))]
    stage = read_zero_stage(optimizer.value["optimizer_state_dict"])
    return DeepSpeedContents(
        folder=source.folder,
        topology=Topology(tp=source.tp, pp=len(source.stages), zero=stage),
        prefix="",
        pipeline=weights.layers is not None,
        model_axis=weights.model_axis,
        models={
            rank: _build_model_file(file, source, weights, params)
            for rank, file in zip(ranks, source.models, strict=True)
        },
        optimizers=dict.fromkeys(ranks, optimizer),
        layers={
            (at, tp): _replace_value(source.optimizer, _build_layer(source, weights, params, at, tp))
            for at in weights.layers or ()
            for tp in range(source.tp)
        },
        named={},
        expert_files={
            key: _replace_value(source.model, _build_expert(weights, params, names))
            for key, names in weights.experts.items()
        },
        experts=experts,
    )


def _replace_value(like: PtFile, value: Any) -> PtFile:
    return dataclasses.replace(like, value=value)


def _build_model_file(file: PtFile, source: UniversalContents, weights: Weights, params: Mapping[str, Param]) -> PtFile:
    """Return a model file with its `module`, which model files that reshard wrote lack."""
    if source.own_weights is None or weights.layers is not None:
        return file
    in_expert_files = {name for names in weights.experts.values() for name in names}
    module = StatefulDict(
        (name, new_tensor(dtype, params[source.aliases.get(name, name)].shape))
        for name, dtype in weights.dtypes.items()
        if name not in in_expert_files
    )
    module.state = _copy_attributes(source, weights, MODULE)
    return _replace_value(file, {**file.value, "module": module})


def _build_layer(
    source: UniversalContents, weights: Weights, params: Mapping[str, Param], layer: int, tp: int
) -> StatefulDict:
    """Build the value of a tensor-parallel rank's layer file; its names are those inside of the layer."""
    value = StatefulDict()
    for name in (weights.layers or {})[layer]:
        prefix = f"{layer}." if (key := parse_tied_key(name)) is None else f"tied_modules.{key}."
        shape = params[name].rule.shard_shape(name, params[name].shape, source.tp, tp)
        value[name.removeprefix(prefix)] = new_tensor(weights.dtypes[name], shape)
    value.state = _copy_attributes(source, weights, layer)
    return value


def _copy_attributes(source: UniversalContents, weights: Weights, at: int) -> Any:
    """Copy the attributes of a state dict with their bytes, because they come from another file than the new one."""
    return Template(source.optimizer).copy(weights.attributes.get(at))


def _build_expert(weights: Weights, params: Mapping[str, Param], names: tuple[str, ...]) -> dict[str, Tensor]:
    """Build the value of an expert's file: its own weights, or its slices of stacks (AutoEP)."""
    return {
        name: new_tensor(
            weights.dtypes[name], params[name].shape if name in params else _find_slice_shape(params, name)
        )
        for name in names
    }


def _find_slice_shape(params: Mapping[str, Param], name: str) -> Shape:
    return params[name.rpartition(".")[0]].shape[1:]


def _build_optimizer_file(source: UniversalContents, groups: Sequence[GroupState], weights: Weights) -> PtFile:
    """Build the optimizer file of a rank, with empty partitions."""
    model, saved = source.model.value, source.optimizer.value
    outer = {key: model[key] for key in ("ds_config", "ds_version") if key in model}
    state = {key: value for key, value in saved.items() if key not in ("param_groups", MADE_FOR, WEIGHTS)}
    if source.made_for is None and read_zero_stage(state) == 3:  # DeepSpeed's converter copies rank 0's state as it is
        return _replace_value(source.optimizer, {"optimizer_state_dict": state, **outer})
    if source.made_for is not None:
        config = model.get("ds_config")
        state = _make_stage1_fields(saved, config if isinstance(config, Mapping) else {}, weights)
    inner = {
        "state": {at: _make_group_states(group) for at, group in enumerate(groups)},
        "param_groups": list(source.settings),
    }
    state |= {
        "base_optimizer_state": inner,
        "single_partition_of_fp32_groups": [new_tensor("float32", (0,)) for _ in groups],
        "param_slice_mappings": None,
    }
    return _replace_value(source.optimizer, {"optimizer_state_dict": _sort_fields(state), **outer})


def _sort_fields(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in dict.fromkeys((*_ORDER, *state)) if key in state}


def _make_stage1_fields(saved: Mapping[str, Any], config: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """Return the fields that the optimizer of stage 1 saves; the writer derives those of other stages from them."""
    clip, version = read_clipping(saved, config), {"ds_version": saved.get("ds_version")}
    layout = {"group_paddings": None, "partition_count": None}
    if has_fp32_gradients(config) and "bfloat16" in weights.dtypes.values():  # BF16_Optimizer
        return {**clip, **layout, **version}
    stage = {"zero_stage": make_zero_stage_enum(1), "param_alignment_paddings": None}
    return {**read_scaling(saved), **clip, **stage, **layout, **version}


def _make_group_states(group: GroupState) -> dict[str, Any]:
    """Return a group's states: numbers copied from the files that hold them, and empty tensors for the others."""
    numbers = {key: Template(file).copy(value) for key, (value, file) in group.scalars.items()}
    return {**numbers, **{key: new_tensor(dtype, (0,)) for key, dtype in group.dtypes.items() if key != MASTER}}
