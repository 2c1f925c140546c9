"""Collect what a universal checkpoint says besides tensors, from a native or a universal checkpoint of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.fields import require_settings
from reshard.formats.deepspeed.logical import Model, Param, read_layer_weights, read_param_groups
from reshard.formats.deepspeed.reading.groups import find_group_holder, read_group_state
from reshard.formats.deepspeed.reading.reader import DeepSpeedExtra as NativeExtra
from reshard.formats.deepspeed.tensor_parallel.patterns import Patterns
from reshard.formats.deepspeed.writing.carried_objects import Template
from reshard.formats.deepspeed.writing.stages import merge_modules
from reshard.formats.pt.objects import StatefulDict
from reshard.formats.pt.reader import PtFile
from reshard.formats.universal.hints import IS_EXPERT, Hints, for_param, for_stack, is_cut_unknown
from reshard.formats.universal.module_weights import find_module_weights
from reshard.formats.universal.names import MASTER
from reshard.formats.universal.native import UniversalExtra
from reshard.formats.universal.weights import MODULE, Weights
from reshard.tensors.layout import Index

_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""Keys of the optimizer's state that hold for all groups together; not every kind of optimizer saves them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One parameter group; its objects can be pickled into files as they are.

    Attributes:
        names: of its parameters, in the optimizer's order.
        dtypes: state that is a tensor -> its type; `fp32` comes first.
        scalars: states that are one number.
        settings: `lr`, `betas`, ..., without `params`.
    """

    names: tuple[str, ...]
    dtypes: Mapping[str, str]
    scalars: Mapping[str, Any]
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Content of a universal checkpoint besides its tensors.

    Attributes:
        model: model file of rank 0; what no attribute here replaces is copied from it.
        params: optimized parameters with their whole shapes.
        hints: parameter -> how its atoms must describe its cut over tensor-parallel ranks.
        weights: frozen parameters and buffers with their whole shapes.
        buffers: names of those `weights` that are buffers.
        groups: the optimizer's parameter groups.
        scaling: loss scaling and gradient clipping, which all groups share.
        patterns: `universal_checkpoint_info`.
        tp: degree that the checkpoint was laid out for.
        cut_is_known: the checkpoint or a pattern file states how tensor parallelism cuts every parameter.
        aliases: second name of a tied weight -> its first.
        commit_model: `Commit.model`.
        weights_of_module: names and types of the module's weights; None if they are not known.
    """

    model: PtFile
    params: Mapping[str, Param]
    hints: Mapping[str, Hints]
    weights: Mapping[str, Param]
    buffers: tuple[str, ...]
    groups: tuple[Group, ...]
    scaling: Mapping[str, Any]
    patterns: Patterns
    tp: int
    cut_is_known: bool
    aliases: Mapping[str, str]
    commit_model: Mapping[str, Any]
    weights_of_module: Weights | None


def blueprint_of(index: Index) -> Blueprint | None:
    """Collect the blueprint of the checkpoint behind an index; None for a format that is not DeepSpeed's.

    Raises:
        UnsupportedError: the checkpoint lacks facts that a universal checkpoint needs.
    """
    if isinstance(index.extra, NativeExtra):
        return _read_native(index.extra)
    if isinstance(index.extra, UniversalExtra):
        return _read_universal(index.extra)
    return None


def _read_native(extra: NativeExtra) -> Blueprint:
    source, model = extra.source, extra.model
    require_settings(source)
    if source.experts is not None and source.topology.zero == 3:
        raise UnsupportedError(
            "has AutoEP's experts at ZeRO stage 3, which say nothing about files of experts for a universal checkpoint",
            path=str(source.folder),
            hint="convert it to zero=1 first, and that result to --format universal",
        )
    tp = source.topology.tp
    known = model.patterns.declared and (tp > 1 or model.patterns.tells_rows)
    stacks = {} if source.experts is None else {name: for_stack(n) for name, n in source.experts.stacked.items()}
    state, template = source.optimizer(0, 0), Template(source.optimizer_file(0, 0))
    return Blueprint(
        model=source.models[0, 0],
        params=model.params,
        hints={name: for_param(param, cut_is_known=known) for name, param in model.params.items()} | stacks,
        weights=extra.weights,
        buffers=_list_buffers(source.models.values(), extra.weights),
        groups=tuple(_read_native_group(extra, number) for number in range(len(model.groups))),
        scaling={key: template.copy(state[key]) for key in _SCALING if key in state},
        patterns=model.patterns,
        tp=tp,
        cut_is_known=known,
        aliases=extra.aliases,
        commit_model=extra.commit_model,
        weights_of_module=_read_native_weights(source, model),
    )


def _read_native_weights(source: DeepSpeedContents, model: Model) -> Weights:
    """Collect names and types of the module's weights, and the names in each layer file and each expert's file."""
    experts = {at: tuple(file.value) for at, file in source.expert_files.items()}
    dtypes = {name: tensor.dtype for file in source.expert_files.values() for name, tensor in file.value.items()}
    if source.has_modules:
        file = source.models[0, 0]
        module = file.value["module"]
        if source.pipeline:
            stages = (source.models[pp * source.topology.tp, 0] for pp in range(source.topology.pp))
            merged = StatefulDict(merge_modules(model, [stage.value["module"] for stage in stages], None))
            merged.state = module.state
            module = merged
        return Weights(
            dtypes={name: tensor.dtype for name, tensor in module.items()} | dtypes,
            experts=experts,
            attributes=_copy_attributes({MODULE: module}, file),
        )
    layers: dict[int, tuple[str, ...]] = {}
    attributes: dict[int, Any] = {}
    for layer in sorted({layer for layer, _ in source.layers}):
        shards_by_name = read_layer_weights(source, model, layer)
        layers[layer] = tuple(shards_by_name)
        dtypes |= {name: shards[0].dtype for name, shards in shards_by_name.items()}
        attributes |= _copy_attributes({layer: source.layers[layer, 0].value}, source.layers[layer, 0])
    return Weights(dtypes=dtypes, layers=layers, attributes=attributes, model_axis=source.model_axis)


def _copy_attributes(modules: Mapping[int, Any], file: PtFile) -> dict[int, Any]:
    states = {at: getattr(module, "state", None) for at, module in modules.items()}
    return {at: Template(file).copy(state) for at, state in states.items() if state is not None}


def _list_buffers(models: Iterable[PtFile], weights: Mapping[str, Param]) -> tuple[str, ...]:
    """Return the names of the buffers of all pipeline stages."""
    named = (name for file in models for name in file.value.get("buffer_names") or ())
    return tuple(dict.fromkeys(name for name in named if name in weights))


def _read_native_group(extra: NativeExtra, number: int) -> Group:
    mp, at = find_group_holder(extra.source, extra.model, number)
    state = read_group_state(extra.source, mp, at)
    template = Template(extra.source.optimizer_file(mp, 0))
    settings = read_param_groups(extra.source, mp)[at]
    tensors = {key: state.flat[key].dtype for key in state.order if key in state.flat}
    return Group(
        names=extra.model.groups[number],
        dtypes={MASTER: "float32", **tensors},
        scalars={key: template.copy(state.scalars[key]) for key in state.order if key in state.scalars},
        settings={key: template.copy(value) for key, value in settings.items() if key != "params"},
    )


def _read_universal(extra: UniversalExtra) -> Blueprint:
    source = extra.source
    patterns = source.patterns
    if source.made_for is not None and not source.has_pattern_file:
        known = not any(is_cut_unknown(hints) for hints in extra.hints.values() if hints is not None)
    else:
        known = patterns.declared and (source.tp > 1 or patterns.tells_rows)
    template = Template(source.optimizer)
    return Blueprint(
        model=source.model,
        params=extra.params,
        hints={name: _find_hints(extra, name, cut_is_known=known) for name in extra.hints},
        weights=extra.weights,
        buffers=_list_buffers([source.model], extra.weights),
        groups=tuple(
            Group(
                names=names,
                dtypes=state.dtypes,
                scalars={key: Template(file).copy(value) for key, (value, file) in state.scalars.items()},
                settings={key: template.copy(value) for key, value in settings.items() if key != "params"},
            )
            for names, state, settings in zip(source.groups, extra.groups, source.settings, strict=True)
        ),
        scaling={key: template.copy(value) for key, value in source.optimizer.value.items() if key in _SCALING},
        patterns=patterns,
        tp=extra.tp,
        cut_is_known=known,
        aliases=source.aliases,
        commit_model=extra.commit_model,
        weights_of_module=_read_universal_weights(extra),
    )


def _read_universal_weights(extra: UniversalExtra) -> Weights | None:
    """Return names and types of the module's weights, or None if the universal checkpoint does not say them."""
    info = extra.pipeline_info()
    try:
        weights = find_module_weights(extra.source, extra.weights, info)
    except UnsupportedError:
        return None  # only a native target needs them
    file = extra.source.model if extra.source.own_weights is None else extra.source.optimizer
    return dataclasses.replace(weights, attributes=Template(file).copy(dict(weights.attributes)))


def _find_hints(extra: UniversalExtra, name: str, *, cut_is_known: bool) -> Hints:
    """Return the hints of the atoms if they are reliable; otherwise make hints from the patterns."""
    hints, source = extra.hints[name], extra.source
    if hints is not None and ((cut_is_known and not source.has_pattern_file) or IS_EXPERT in hints):
        return hints
    rule, _ = source.patterns.resolve(name, source.shapes[name])
    return for_param(dataclasses.replace(extra.params[name], rule=rule), cut_is_known=cut_is_known)
