"""What a universal checkpoint says besides tensors, from a native or a universal checkpoint of the same model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed import pipeline
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.fields import require_settings
from reshard.formats.deepspeed.logical import Model, Param, layer_weights, param_groups
from reshard.formats.deepspeed.reading.groups import group_holder, group_state
from reshard.formats.deepspeed.reading.reader import DeepSpeedExtra as NativeExtra
from reshard.formats.deepspeed.tensor_parallel.patterns import Patterns
from reshard.formats.deepspeed.writing.carried_objects import Template
from reshard.formats.pt.reader import PtFile
from reshard.formats.universal.hints import IS_EXPERT, Hints, for_param, for_stack, says_unknown
from reshard.formats.universal.names import MASTER
from reshard.formats.universal.native import weights_of
from reshard.formats.universal.reader import UniversalExtra
from reshard.formats.universal.weights import MODULE, Weights
from reshard.tensors.layout import Index

_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""What the optimizer's state says for all groups together, where its kind has it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One parameter group, with objects as they go into files.

    Attributes:
        names: of its parameters, in the optimizer's order.
        dtypes: states that are tensors, `fp32` first, and their types.
        scalars: states that are one number.
        settings: `lr`, `betas`, ..., without `params`.
    """

    names: tuple[str, ...]
    dtypes: Mapping[str, str]
    scalars: Mapping[str, Any]
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What is not tensors.

    Attributes:
        model: model file of rank 0, for everything that travels unchanged.
        params: optimized parameters with their whole shapes.
        hints: parameter -> what its atoms have to say about tensor parallelism.
        weights: what is not optimized, with whole shapes.
        buffers: those of `weights` that are no parameters.
        groups: the optimizer's.
        scaling: what the optimizer says for all groups together.
        patterns: `universal_checkpoint_info`.
        tp: degree that the checkpoint was laid out for.
        cut_is_known: somebody said how tensor parallelism cuts every parameter.
        aliases: second name of a tied weight -> its first.
        commit_model: `Commit.model`.
        weights_of_module: names and types of the module's weights; None where they are not known.
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
    """What the checkpoint behind an index says, or None if its format does not say it.

    Raises:
        UnsupportedError: it does not say enough.
    """
    if isinstance(index.extra, NativeExtra):
        return _of_native(index.extra)
    if isinstance(index.extra, UniversalExtra):
        return _of_universal(index.extra)
    return None


def _of_native(extra: NativeExtra) -> Blueprint:
    source, model = extra.source, extra.model
    require_settings(source)
    tp = source.topology.tp
    known = model.patterns.declared and (tp > 1 or model.patterns.tells_rows)
    stacks = {} if source.experts is None else {name: for_stack(n) for name, n in source.experts.stacked.items()}
    state, template = source.optimizer(0, 0), Template(source.optimizer_file(0, 0))
    return Blueprint(
        model=source.models[0, 0],
        params=model.params,
        hints={name: for_param(param, cut_is_known=known) for name, param in model.params.items()} | stacks,
        weights=extra.weights,
        buffers=_buffers(source.models.values(), extra.weights),
        groups=tuple(_native_group(extra, number) for number in range(len(model.groups))),
        scaling={key: template.copy(state[key]) for key in _SCALING if key in state},
        patterns=model.patterns,
        tp=tp,
        cut_is_known=known,
        aliases=extra.aliases,
        commit_model=extra.commit_model,
        weights_of_module=_native_weights(source, model),
    )


def _native_weights(source: DeepSpeedContents, model: Model) -> Weights:
    """Names and types of the module's weights, and which files of a native checkpoint hold some of them."""
    experts = {at: tuple(file.value) for at, file in source.expert_files.items()}
    dtypes = {name: tensor.dtype for file in source.expert_files.values() for name, tensor in file.value.items()}
    if not source.pipeline:
        file = source.models[0, 0]
        module = file.value["module"]
        return Weights(
            dtypes={name: tensor.dtype for name, tensor in module.items()} | dtypes,
            experts=experts,
            attributes=_attributes({MODULE: module}, file),
        )
    layers: dict[int, tuple[str, ...]] = {}
    attributes: dict[int, Any] = {}
    for layer in sorted({layer for layer, _ in source.layers}):
        found = layer_weights(source, model, layer)
        layers[layer] = tuple(found)
        dtypes |= {name: shards[0].dtype for name, shards in found.items()}
        attributes |= _attributes({layer: source.layers[layer, 0].value}, source.layers[layer, 0])
    return Weights(dtypes=dtypes, layers=layers, attributes=attributes, model_axis=source.model_axis)


def _attributes(found: Mapping[int, Any], file: PtFile) -> dict[int, Any]:
    states = {at: getattr(value, "state", None) for at, value in found.items()}
    return {at: Template(file).copy(state) for at, state in states.items() if state is not None}


def _buffers(models: Iterable[PtFile], weights: Mapping[str, Param]) -> tuple[str, ...]:
    """Names of buffers, of all pipeline stages."""
    named = (name for file in models for name in file.value.get("buffer_names") or ())
    return tuple(dict.fromkeys(name for name in named if name in weights))


def _native_group(extra: NativeExtra, number: int) -> Group:
    mp, at = group_holder(extra.source, extra.model, number)
    state = group_state(extra.source, mp, at)
    template = Template(extra.source.optimizer_file(mp, 0))
    settings = param_groups(extra.source, mp)[at]
    tensors = {key: state.flat[key].dtype for key in state.order if key in state.flat}
    return Group(
        names=extra.model.groups[number],
        dtypes={MASTER: "float32", **tensors},
        scalars={key: template.copy(state.scalars[key]) for key in state.order if key in state.scalars},
        settings={key: template.copy(value) for key, value in settings.items() if key != "params"},
    )


def _of_universal(extra: UniversalExtra) -> Blueprint:
    source = extra.source
    patterns = source.patterns
    if source.made_for is not None and not source.told:
        known = not any(says_unknown(hints) for hints in extra.hints.values() if hints is not None)
    else:
        known = patterns.declared and (source.tp > 1 or patterns.tells_rows)
    template = Template(source.optimizer)
    return Blueprint(
        model=source.model,
        params=extra.params,
        hints={name: _known_hints(extra, name, cut_is_known=known) for name in extra.hints},
        weights=extra.weights,
        buffers=_buffers([source.model], extra.weights),
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
        weights_of_module=_universal_weights(extra),
    )


def _universal_weights(extra: UniversalExtra) -> Weights | None:
    """The same, as far as the folder tells."""
    info = pipeline.parse(extra.commit_model.get("pipeline", extra.source.model.value.get("pipeline_layout")))
    try:
        found = weights_of(extra, info)
    except UnsupportedError:
        return None  # only a native target needs them
    file = extra.source.model if extra.source.own_weights is None else extra.source.optimizer
    return dataclasses.replace(found, attributes=Template(file).copy(dict(found.attributes)))


def _known_hints(extra: UniversalExtra, name: str, *, cut_is_known: bool) -> Hints:
    """What the atoms say, where they say something that can be relied on."""
    found, source = extra.hints[name], extra.source
    if found is not None and ((cut_is_known and not source.told) or IS_EXPERT in found):
        return found
    rule, _ = source.patterns.resolve(name, source.shapes[name])
    return for_param(dataclasses.replace(extra.params[name], rule=rule), cut_is_known=cut_is_known)
