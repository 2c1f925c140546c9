"""Compute which parameters each pipeline stage of the target holds, and in which order."""

from __future__ import annotations

import math

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.logical import Model, Stage, find_tied_layer, parse_layer, parse_tied_key
from reshard.formats.deepspeed.pipeline import stage_bounds
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
            hint="train with a PipelineModule at pp=1 too, as its names do not depend on pp; or name a checkpoint of"
            " the pipeline with --like, and a map to its names with --names",
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
    bounds = stage_bounds(info, target.pp, count_layer_elements(model, info.num_layers, target.tp))
    stages = tuple(_select_layers(model, range(bounds[pp], bounds[pp + 1])) for pp in range(target.pp))
    if empty := [pp for pp, stage in enumerate(stages) if not stage.groups]:
        at = empty[0]
        raise UnsupportedError(
            f"{target}: stage {at} would hold no parameters (layers {bounds[at]} to {bounds[at + 1]})",
            path=str(source.folder),
            hint="choose a smaller pp",
        )
    return stages, bounds


def count_layer_elements(model: Model, num_layers: int, tp: int) -> list[int]:
    """Count the trainable elements of a tensor-parallel rank in each layer; a tied module counts at all its layers."""
    counts = [0] * num_layers
    tied = model.pipeline.tied if model.pipeline is not None and model.pipeline.tied is not None else {}
    for param in model.params.values():
        elements = math.prod(param.rule.shard_shape(param.name, param.shape, tp))
        layer = parse_layer(param.name)
        for at in tied.get(parse_tied_key(param.name) or "", ()) if layer is None else (layer,):
            if not 0 <= at < num_layers:
                raise UnsupportedError(f"{param.name} is in layer {at} of a pipeline of {num_layers} layers")
            counts[at] += elements
    return counts


def has_same_bounds(model: Model, num_layers: int, tp: int, bounds: tuple[int, ...], num_stages: int) -> bool:
    """Return whether the partition method yields `bounds` for the shards of a tensor-parallel degree."""
    assert model.pipeline is not None
    return stage_bounds(model.pipeline, num_stages, count_layer_elements(model, num_layers, tp)) == bounds


def _has_source_stages(source: DeepSpeedContents, model: Model, target: Topology) -> bool:
    """Return whether the source's stages hold at the same pp; another tp can change the balance of `parameters`."""
    info = model.pipeline
    if target.tp == source.topology.tp or (info is not None and info.partition_method != "parameters"):
        return True
    if info is None or not info.parts:
        return False
    return has_same_bounds(model, info.num_layers, target.tp, info.parts, target.pp)


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
