"""A universal folder in the words of a native checkpoint, so that native files can be laid out from it alone.

What DeepSpeed's converter leaves beside the atoms says almost everything that native files hold besides tensors: the
model files are copies, and the optimizer file is that of rank 0 without its partitions. What is put together here is
what the run that saved would have written, without the bytes of its tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed import autoep, pipeline
from reshard.formats.deepspeed.contents import DeepSpeedContents as NativeSource
from reshard.formats.deepspeed.experts import Experts, find_experts
from reshard.formats.deepspeed.fields import clipping_of, is_wide, scaling_of
from reshard.formats.deepspeed.logical import Model, Param, Stage, canonical_groups, layer_of, make_param, tied_key
from reshard.formats.deepspeed.pipeline import PipelineInfo
from reshard.formats.deepspeed.reading.opening import zero_stage
from reshard.formats.deepspeed.reading.reader import DeepSpeedExtra as NativeExtra
from reshard.formats.deepspeed.tensor_parallel import patterns
from reshard.formats.deepspeed.tensor_parallel.patterns import Patterns
from reshard.formats.deepspeed.tensor_parallel.rules import Rule
from reshard.formats.deepspeed.writing.carried_objects import Template, zero_stage_enum
from reshard.formats.pt.objects import StatefulDict, Tensor, new_tensor
from reshard.formats.pt.reader import PtFile
from reshard.formats.universal.names import MADE_FOR, MASTER, WEIGHTS
from reshard.formats.universal.reader import GroupState, UniversalExtra
from reshard.formats.universal.source import Shape, UniversalContents, is_vocabulary
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
"""Of an optimizer's state at the stages 1 and 2 (stage_1_and_2.py, `state_dict`)."""

_LIKE = "or name a native checkpoint of the same model with --like"


def native_extra(extra: UniversalExtra) -> NativeExtra:
    """What a native checkpoint says besides its tensors.

    Raises:
        UnsupportedError: naming the fact that the folder does not tell.
    """
    source = extra.source
    info = pipeline.parse(extra.commit_model.get("pipeline", source.model.value.get("pipeline_layout")))
    weights = weights_of(extra, info)
    told = _patterns(extra)
    experts = _experts(source, weights)
    params = {
        name: _param(source, name, shapes, told)
        if experts is None or name not in experts.stacked
        else Param(name=name, shape=extra.params[name].shape, rule=Rule(dim=0))
        for name, shapes in source.shapes.items()
    }
    others = {name: _param(source, name, (param.shape,), told) for name, param in extra.weights.items()}
    stages = tuple(Stage(groups=groups, ids=tuple(range(len(groups)))) for groups in source.stages)
    native = _source(extra, weights, params | others, experts)
    return NativeExtra(
        source=native,
        model=Model(
            params=params,
            stages=stages,
            groups=canonical_groups(stages, len(source.groups), str(source.folder), info),
            patterns=told,
            pipeline=info,
            tied_layers={at: key for at, names in (weights.layers or {}).items() if (key := _tied(names)) is not None},
            round_robin=False,
        ),
        weights=others,
        commit_model=extra.commit_model,
        element_bytes=2 if native.half_type else 4,
        aliases=source.aliases,
    )


def weights_of(extra: UniversalExtra, info: PipelineInfo | None) -> Weights:
    """Names and types of the module's weights.

    Raises:
        UnsupportedError: they are not told.
    """
    source = extra.source
    if source.own_weights is not None:
        return source.own_weights
    module = source.model.value.get("module")
    if isinstance(module, Mapping):
        state = getattr(module, "state", None)
        experts = _autoep_files(source)
        names = (name for found in experts.values() for name in found)
        dtypes = {str(name): tensor.dtype for name, tensor in module.items()}
        return Weights(
            dtypes=dtypes | dict.fromkeys(names, _configured_type(source)),
            experts=experts,
            attributes={} if state is None else {MODULE: state},
        )
    if source.made_for is not None:
        raise UnsupportedError(
            "is a universal checkpoint of an earlier reshard, which does not say of which types the weights are",
            path=str(source.folder),
            hint=f"convert again from the native checkpoint, {_LIKE}",
        )
    return _pipeline_weights(extra, info)


def _pipeline_weights(extra: UniversalExtra, info: PipelineInfo | None) -> Weights:
    """Those of a PipelineModule, whose layer files DeepSpeed's converter leaves behind.

    A layer without weights may be a function, which has no file, or a module, which must have one: DeepSpeed does not
    look at a file too many.
    """
    source = extra.source
    where = str(source.folder)
    tied = {key for name in source.shapes if (key := tied_key(name)) is not None}
    if info is None or tied - set(info.tied or ()):
        lacks = "how many layers the pipeline has" if info is None else "at which layers the tied modules stand"
        raise UnsupportedError(
            f"does not say {lacks}: native checkpoints have a file for each layer",
            path=where,
            hint="save with client_state={'pipeline_layout': {num_layers, partition_method, tied}},"
            f" or write it into COMMIT.json as model.pipeline, {_LIKE}",
        )
    buffers = {str(name) for file in source.models for name in file.value.get("buffer_names") or ()}
    if lost := sorted(buffers - extra.weights.keys()):
        raise UnsupportedError(
            f"{len(lost)} buffers of the pipeline, such as {lost[0]}, are in none of its files: DeepSpeed's converter"
            " leaves the layers' files behind",
            path=where,
            hint="convert from the native checkpoint",
        )
    names = (*source.shapes, *extra.weights)
    layers = {
        at: tuple(
            name for name in names if layer_of(name) == at or at in (info.tied or {}).get(tied_key(name) or "", ())
        )
        for at in range(info.num_layers)
    }
    return Weights(dtypes=dict.fromkeys(names, _configured_type(source)), layers=layers, model_axis=source.tp > 1)


def _autoep_files(source: UniversalContents) -> dict[tuple[int, int], tuple[str, ...]]:
    """Names in each expert's file: slices of the stacks, as DeepSpeed's own converter puts them together."""
    layers = autoep.layers_of(source.model.value)
    if not layers:
        return {}
    counts, prefixes, _ = autoep.stacked_names(layers, str(source.folder))
    return {
        (layer, expert): tuple(f"{prefix}.{weight}.{expert}" for weight in autoep.WEIGHTS)
        for layer, prefix in prefixes.items()
        for expert in range(counts[f"{prefix}.{autoep.WEIGHTS[0]}"])
    }


def _configured_type(source: UniversalContents) -> str:
    """The type that DeepSpeed turns a module into (runtime/config.py, `get_bfloat16_config`, `get_float16_config`)."""
    found = source.model.value.get("ds_config")
    config = found if isinstance(found, Mapping) else {}
    for keys, dtype in ((("bf16", "bfloat16"), "bfloat16"), (("fp16",), "float16")):
        if any(isinstance(config.get(key), Mapping) and config[key].get("enabled") for key in keys):
            return dtype
    return "float32"


def _patterns(extra: UniversalExtra) -> Patterns:
    """`universal_checkpoint_info` as true for the model files: folders of ours have those of one rank."""
    found = extra.source.patterns
    if not found.declared or extra.source.tp == extra.tp:
        return found
    return patterns.parse(found.info_at(extra.source.tp, extra.tp))


def _param(source: UniversalContents, name: str, shapes: tuple[Shape, ...], told: Patterns) -> Param:
    """The parameter with the rule for its shards; a vocabulary has all the rows that it had in the run."""
    rows = told.vocabulary_rows
    if rows is not None and len(shapes) == 1 and shapes[0] and is_vocabulary(told, name):
        shapes = ((rows[1], *shapes[0][1:]),)
    return make_param(name, shapes, told, source.tp)


def _tied(names: tuple[str, ...]) -> str | None:
    return tied_key(names[0]) if names else None


def _experts(source: UniversalContents, weights: Weights) -> Experts | None:
    where = str(source.folder)
    if layers := autoep.layers_of(source.model.value):
        return Experts(stacked=autoep.stacked_names(layers, where)[0])
    if not weights.experts:
        return None
    return find_experts(weights.experts, source.shapes, where)[0]


def _source(
    extra: UniversalExtra, weights: Weights, params: Mapping[str, Param], experts: Experts | None
) -> NativeSource:
    """The files that a native checkpoint would have had, one for all data-parallel ranks."""
    source = extra.source
    optimizer = _optimizer(extra, weights)
    ranks = [(mp, 0) for mp in range(len(source.models))]
    stage = zero_stage(optimizer.value["optimizer_state_dict"])
    return NativeSource(
        folder=source.folder,
        topology=Topology(tp=source.tp, pp=len(source.stages), zero=stage),
        prefix="",
        pipeline=weights.layers is not None,
        model_axis=weights.model_axis,
        models={rank: _model(file, source, weights, params) for rank, file in zip(ranks, source.models, strict=True)},
        optimizers=dict.fromkeys(ranks, optimizer),
        layers={
            (at, tp): _file(source.optimizer, _layer(source, weights, params, at, tp))
            for at in weights.layers or ()
            for tp in range(source.tp)
        },
        named={},
        expert_files={
            at: _file(source.model, _expert(weights, params, names)) for at, names in weights.experts.items()
        },
        experts=experts,
    )


def _file(like: PtFile, value: Any) -> PtFile:
    return dataclasses.replace(like, value=value)


def _model(file: PtFile, source: UniversalContents, weights: Weights, params: Mapping[str, Param]) -> PtFile:
    """A model file; one of ours gets the module that it had, but for the bytes."""
    if source.own_weights is None or weights.layers is not None:
        return file
    apart = {name for names in weights.experts.values() for name in names}
    module = StatefulDict(
        (name, new_tensor(dtype, params[source.aliases.get(name, name)].shape))
        for name, dtype in weights.dtypes.items()
        if name not in apart
    )
    module.state = _attributes(source, weights, MODULE)
    return _file(file, {**file.value, "module": module})


def _layer(
    source: UniversalContents, weights: Weights, params: Mapping[str, Param], layer: int, tp: int
) -> StatefulDict:
    """A layer's file of one tensor-parallel rank, with the names that the layer itself has."""
    found = StatefulDict()
    for name in (weights.layers or {})[layer]:
        prefix = f"{layer}." if (key := tied_key(name)) is None else f"tied_modules.{key}."
        shape = params[name].rule.shard_shape(name, params[name].shape, source.tp, tp)
        found[name.removeprefix(prefix)] = new_tensor(weights.dtypes[name], shape)
    found.state = _attributes(source, weights, layer)
    return found


def _attributes(source: UniversalContents, weights: Weights, at: int) -> Any:
    """Attributes of a state dict, with bytes in memory: the file that they are from is another one than is made."""
    return Template(source.optimizer).copy(weights.attributes.get(at))


def _expert(weights: Weights, params: Mapping[str, Param], names: tuple[str, ...]) -> dict[str, Tensor]:
    """An expert's file: its own weights, or its slices of stacks (AutoEP)."""
    return {
        name: new_tensor(weights.dtypes[name], params[name].shape if name in params else _slice(params, name))
        for name in names
    }


def _slice(params: Mapping[str, Param], name: str) -> Shape:
    return params[name.rpartition(".")[0]].shape[1:]


def _optimizer(extra: UniversalExtra, weights: Weights) -> PtFile:
    """The optimizer's file of a rank, with empty partitions."""
    source = extra.source
    model, saved = source.model.value, source.optimizer.value
    outer = {key: model[key] for key in ("ds_config", "ds_version") if key in model}
    state = {key: value for key, value in saved.items() if key not in ("param_groups", MADE_FOR, WEIGHTS)}
    if source.made_for is None and zero_stage(state) == 3:  # whole, as it was on rank 0
        return _file(source.optimizer, {"optimizer_state_dict": state, **outer})
    if source.made_for is not None:
        config = model.get("ds_config")
        state = _fields(saved, config if isinstance(config, Mapping) else {}, weights)
    inner = {
        "state": {at: _states(group) for at, group in enumerate(extra.groups)},
        "param_groups": list(source.settings),
    }
    state |= {
        "base_optimizer_state": inner,
        "single_partition_of_fp32_groups": [new_tensor("float32", (0,)) for _ in extra.groups],
        "param_slice_mappings": None,
    }
    return _file(source.optimizer, {"optimizer_state_dict": _in_order(state), **outer})


def _in_order(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in dict.fromkeys((*_ORDER, *state)) if key in state}


def _fields(saved: Mapping[str, Any], config: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """Those of the optimizer that DeepSpeed makes at stage 1; others follow from them."""
    clip, version = clipping_of(saved, config), {"ds_version": saved.get("ds_version")}
    layout = {"group_paddings": None, "partition_count": None}
    if is_wide(config) and "bfloat16" in weights.dtypes.values():  # BF16_Optimizer
        return {**clip, **layout, **version}
    stage = {"zero_stage": zero_stage_enum(1), "param_alignment_paddings": None}
    return {**scaling_of(saved), **clip, **stage, **layout, **version}


def _states(group: GroupState) -> dict[str, Any]:
    """A group's states; what is one number was read from its own file."""
    numbers = {key: Template(file).copy(value) for key, (value, file) in group.scalars.items()}
    return {**numbers, **{key: new_tensor(dtype, (0,)) for key, dtype in group.dtypes.items() if key != MASTER}}
