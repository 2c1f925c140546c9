"""Compute which parameters each pipeline stage of the target holds, and in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.logical import Model, Stage, find_tied_layer, parse_layer, parse_tied_key
from reshard.formats.deepspeed.pipeline import stage_bounds
from reshard.formats.pt.objects import Tensor
from reshard.topology import Topology


def assign_stages(
    source: DeepSpeedContents, model: Model, target: Topology
) -> tuple[tuple[Stage, ...], tuple[int, ...]]:
    """Distribute the parameter groups over the stages of the target; groups that are empty on a stage are dropped.

    Returns:
        The stages, and their bounds: the first layer of each stage, and the number of layers as the last element. The
        bounds are empty if the stages are the source's, and at pp=1.

    Raises:
        UnsupportedError: it is not known which layers each stage gets.
    """
    if not source.pipeline and target.pp > 1:
        raise UnsupportedError(
            f"{target}: the checkpoint was written without a PipelineModule, its parameters belong to no layer",
            path=str(source.folder),
            hint="train with a PipelineModule at pp=1 too, as its names do not depend on pp, and if it has experts save"
            " pipeline_layout; or name a checkpoint of the pipeline with --like, and a map to its names with --names",
        )
    if target.pp == 1:
        return (_select_layers(model, None),), ()
    if target.pp == source.topology.pp and _has_source_stages(source, model, target):
        return model.stages, ()
    info = model.pipeline
    if info is None:
        raise UnsupportedError(
            f"{target}: which layers each stage gets is not known",
            path=str(source.folder),
            hint="save with client_state={'pipeline_layout': {num_layers, partition_method, tied}}, "
            "or in COMMIT.json as model.pipeline",
        )
    ties = {key for name in model.params if (key := parse_tied_key(name))}
    if unknown := sorted(ties - set(info.tied or ())):
        raise UnsupportedError(
            f"{target}: the layers at which the tied modules {unknown} stand are not known",
            path=str(source.folder),
            hint="name them in pipeline_layout: tied={key: [layers]}",
        )
    bounds = stage_bounds(info, target.pp, _count_layer_elements(source, model, info.num_layers, target))
    stages = tuple(_select_layers(model, range(bounds[pp], bounds[pp + 1])) for pp in range(target.pp))
    if empty := [pp for pp, stage in enumerate(stages) if not stage.groups]:
        at = empty[0]
        raise UnsupportedError(
            f"{target}: stage {at} would hold no parameters (layers {bounds[at]} to {bounds[at + 1]})",
            path=str(source.folder),
            hint="choose a smaller pp",
        )
    if source.experts is not None:
        _refuse_stage_without_experts(source, stages, bounds, target)
    return stages, bounds


def _refuse_stage_without_experts(
    source: DeepSpeedContents, stages: Sequence[Stage], bounds: tuple[int, ...], target: Topology
) -> None:
    """Refuse a stage without a layer of experts, with which DeepSpeed 0.19.8 does not start.

    The ranks of stages with experts make process groups of experts (deepspeed/moe/layer.py, `_create_process_groups`),
    and wait there for those of all stages.

    Raises:
        UnsupportedError: the message names the stage.
    """
    for at, stage in enumerate(stages):
        if not any(source.is_expert(name) for group in stage.groups for name in group):
            raise UnsupportedError(
                f"{target}: stage {at} would hold no experts (layers {bounds[at]} to {bounds[at + 1]}), and DeepSpeed"
                " then waits for its ranks without an end",
                path=str(source.folder),
                hint="choose a smaller pp, so that each stage has a layer of experts",
            )


def _count_layer_elements(source: DeepSpeedContents, model: Model, num_layers: int, topology: Topology) -> list[int]:
    """Count the trainable elements of a rank in each layer; a tied module counts at all its layers.

    A rank has one of `ep` parts of each layer of experts, all of one size.
    """
    counts, of_experts = [0] * num_layers, [0] * num_layers
    tied = model.pipeline.tied if model.pipeline is not None and model.pipeline.tied is not None else {}
    for param in model.params.values():
        elements = math.prod(param.rule.shard_shape(param.name, param.shape, topology.tp))
        layer = parse_layer(param.name)
        for at in tied.get(parse_tied_key(param.name) or "", ()) if layer is None else (layer,):
            if not 0 <= at < num_layers:
                raise UnsupportedError(f"{param.name} is in layer {at} of a pipeline of {num_layers} layers")
            (of_experts if source.is_expert(param.name) else counts)[at] += elements
    return [dense + experts // topology.ep for dense, experts in zip(counts, of_experts, strict=True)]


def _has_source_stages(source: DeepSpeedContents, model: Model, target: Topology) -> bool:
    """Return whether the source's stages hold at the same pp; tp and ep can change the balance of `parameters`."""
    info, own = model.pipeline, source.topology
    same = (target.tp, target.ep) == (own.tp, own.ep)
    if same or (info is not None and info.partition_method != "parameters"):
        return True
    if info is None or not info.parts:
        return False
    counts = _count_layer_elements(source, model, info.num_layers, target)
    return stage_bounds(info, target.pp, counts) == info.parts


def _select_layers(model: Model, layers: range | None) -> Stage:
    """Restrict the groups to some layers; None selects all layers, in canonical order."""
    if layers is None:
        return Stage(groups=model.groups, ids=tuple(range(len(model.groups))))
    groups: list[tuple[str, ...]] = []
    ids: list[int] = []
    for at, names in enumerate(model.groups):
        own = [name for name in names if is_inside(model, name, layers)]
        tied = [name for name in own if parse_tied_key(name)]
        if len(tied) > 1:  # a stage registers tied modules in the order of its layers
            ranked = iter(sorted(tied, key=lambda name: find_tied_layer(name, model.pipeline, layers)))
            own = [next(ranked) if parse_tied_key(name) else name for name in own]
        if own:
            groups.append(tuple(own))
            ids.append(at)
    return Stage(groups=tuple(groups), ids=tuple(ids))


def is_inside(model: Model, name: str, layers: range) -> bool:
    """Return whether a parameter or buffer belongs to one of the layers.

    Raises:
        UnsupportedError: it belongs to no layer of the pipeline.
    """
    layer = parse_layer(name)
    if layer is not None:
        return layer in layers
    if (key := parse_tied_key(name)) is None:
        raise UnsupportedError(f"{name} belongs to no layer of the pipeline")
    tied = (model.pipeline.tied if model.pipeline is not None else None) or {}
    return any(at in layers for at in tied.get(key, ()))


def merge_modules(model: Model, modules: Sequence[Mapping[str, Tensor]], layers: range | None) -> dict[str, Tensor]:
    """Return the tensors that `module` has on a stage with some layers, in the order in which DeepSpeed registers them.

    Args:
        model: of the source.
        modules: of all stages of the source.
        layers: of the stage; None if it has all.
    """
    found: dict[str, Tensor] = {}
    for module in modules:
        for name, tensor in module.items():
            if layers is None or is_inside(model, name, layers):
                found.setdefault(name, tensor)

    def position(name: str) -> tuple[bool, int]:
        layer = parse_layer(name)
        return layer is not None, find_tied_layer(name, model.pipeline, layers) if layer is None else layer

    return {name: found[name] for name in sorted(found, key=position)}
