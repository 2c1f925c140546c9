"""Work out the model behind the files: parameters with whole shapes, parameter groups, and what each stage holds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed import flat
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.experts import Experts
from reshard.formats.deepspeed.fields import read_base_state
from reshard.formats.deepspeed.pipeline import PipelineInfo
from reshard.formats.deepspeed.tensor_parallel.patterns import Patterns
from reshard.formats.deepspeed.tensor_parallel.rules import Rule
from reshard.formats.pt.objects import Tensor
from reshard.formats.pt.reader import PtFile

_LAYER_NAME = re.compile(r"^(\d+)\.")
_TIED_NAME = re.compile(r"^tied_modules\.([^.]+)\.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter of the whole model.

    Attributes:
        name: as in DeepSpeed's `param_shapes` or in the module's state dict.
        shape: of the whole tensor, `[ndim]`; of a vocabulary with its padding.
        rule: how tensor parallelism cuts it.
        rows: rows of a vocabulary that are not padding; None for all others.
    """

    name: str
    shape: tuple[int, ...]
    rule: Rule
    rows: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Parameter groups of one pipeline stage.

    Attributes:
        groups: names of each parameter group, in the optimizer's order (not the flat buffer's).
        ids: for each of them the group's position among the groups of the whole model.
    """

    groups: tuple[tuple[str, ...], ...]
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The whole model.

    Attributes:
        params: every optimized parameter by name.
        stages: `[pp]`.
        groups: names of each parameter group of the whole model, in canonical order.
        patterns: `universal_checkpoint_info`.
        pipeline: description of the pipeline's layers, or None if it is not known.
        tied_layers: layer file -> key of the tied module whose weights it holds.
        round_robin: flat buffers are in round-robin order.
    """

    params: Mapping[str, Param]
    stages: tuple[Stage, ...]
    groups: tuple[tuple[str, ...], ...]
    patterns: Patterns
    pipeline: PipelineInfo | None
    tied_layers: Mapping[int, str]
    round_robin: bool


def parse_layer(name: str) -> int | None:
    """Return the pipeline layer of a parameter; None for tied ones and for names outside of a PipelineModule."""
    match = _LAYER_NAME.match(name)
    return int(match[1]) if match else None


def parse_tied_key(name: str) -> str | None:
    """Return the key of the tied module that a parameter belongs to, or None."""
    match = _TIED_NAME.match(name)
    return match[1] if match else None


def is_layered(name: str) -> bool:
    """Return whether a name is one that a PipelineModule gives: of a layer, or of a tied module."""
    return _LAYER_NAME.match(name) is not None or _TIED_NAME.match(name) is not None


def describe_model(source: DeepSpeedContents, patterns: Patterns, pipeline: PipelineInfo | None) -> Model:
    """Work out the whole model from the shards of all ranks.

    Raises:
        CorruptSourceError: ranks contradict each other.
        UnsupportedError: the checkpoint does not say how tensor parallelism cuts its tensors.
    """
    topology = source.topology
    if topology.tp > 1 and not patterns.declared:
        unknown = [name for shapes in read_param_shapes(source, 0) for name in shapes] or [
            *source.models[0, 0].value["module"]
        ]
        raise UnsupportedError(
            f"written at tp={topology.tp} and says nothing about how tensors are cut: "
            f"{', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''}",
            path=str(source.folder),
            hint="save with client_state={'universal_checkpoint_info': ...}, as for DeepSpeed's universal checkpoints",
        )
    round_robin = bool(source.zero_config.get("round_robin_gradients")) and topology.zero in (1, 2)
    local: dict[str, list[tuple[int, ...]]] = {}
    orders: list[tuple[tuple[str, ...], ...]] = []
    for pp in range(topology.pp):
        per_rank = [read_param_shapes(source, pp * topology.tp + tp) for tp in range(topology.tp)]
        names = [[tuple(shapes) for shapes in rank] for rank in per_rank]
        if any(rank_names != names[0] for rank_names in names):
            raise CorruptSourceError(
                f"tensor-parallel ranks of stage {pp} hold different parameters", path=str(source.folder)
            )
        for name in (name for group in names[0] for name in group):
            shapes = [next(group[name] for group in rank if name in group) for rank in per_rank]
            if local.setdefault(name, shapes) != shapes:
                raise CorruptSourceError(f"{name} has another shape on stage {pp}", path=str(source.folder))
        groups = _merge_sub_groups(source, pp * topology.tp, names[0])
        orders.append(
            tuple(
                _undo_round_robin(group, source.partition(group, 0)[0] if round_robin and group else 1)
                for group in groups
            )
        )
    if source.experts is not None:
        local = _expand_experts(source.experts, topology.ep, local)
        orders = [tuple(source.experts.whole_order(group, topology.ep) for group in order) for order in orders]
    params = {name: make_param(name, shapes, patterns, topology.tp) for name, shapes in local.items()}
    if source.experts is not None:
        params |= {
            name: Param(name=name, shape=(count, *local[name][0][1:]), rule=Rule(dim=0))
            for name, count in source.experts.stacked.items()
            if name in local
        }
    ids, num_groups = _match_groups(source, [len(order) for order in orders])
    stages = tuple(Stage(groups=order, ids=stage_ids) for order, stage_ids in zip(orders, ids, strict=True))
    return Model(
        params=params,
        stages=stages,
        groups=merge_groups(stages, num_groups, str(source.folder), pipeline),
        patterns=patterns,
        pipeline=pipeline,
        tied_layers=_find_tied_layers(source, params, pipeline),
        round_robin=round_robin,
    )


def _expand_experts(
    experts: Experts, ep: int, local: Mapping[str, list[tuple[int, ...]]]
) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of all experts, from those of the experts on the first rank."""
    return {experts.whole_name(name, ep, part): shapes for name, shapes in local.items() for part in range(ep)}


def read_param_shapes(source: DeepSpeedContents, mp: int) -> list[Mapping[str, tuple[int, ...]]]:
    """Read `param_shapes` of a rank: per group (ZeRO-3: per sub-group) name -> shape of the shard, in buffer order.

    Raises:
        CorruptSourceError: `param_shapes` is missing, or has another form.
    """
    if source.named:
        return list(source.named[mp])
    return [*parse_param_shapes(source.models[mp, 0])]


def parse_param_shapes(file: PtFile) -> list[dict[str, tuple[int, ...]]]:
    """Parse `param_shapes` of a model file: per group name -> shape of the shard, in buffer order.

    Raises:
        CorruptSourceError: `param_shapes` is missing, or has another form.
    """
    value = file.value.get("param_shapes")
    if not isinstance(value, list) or not all(isinstance(group, Mapping) for group in value):
        raise UnsupportedError("has no list param_shapes", path=file.path)
    for group in value:
        for name, shape in group.items():
            if not isinstance(name, str) or not isinstance(shape, tuple) or not all(type(n) is int for n in shape):
                raise UnsupportedError(f"param_shapes: {name!r:.80} has the shape {shape!r:.80}", path=file.path)
    return [{name: tuple(shape) for name, shape in group.items()} for group in value]


def make_param(name: str, shards: Sequence[tuple[int, ...]], patterns: Patterns, tp: int) -> Param:
    """Make a parameter from its shards' shapes and the patterns' rule for it.

    Raises:
        UnsupportedError: the rule does not fit the shapes.
    """
    rule, shape = patterns.resolve(name, shards[:tp])
    rows = None
    if rule.vocabulary and (vocabulary := patterns.vocabulary_rows) is not None and shape:
        if shape[0] != vocabulary[1]:
            raise UnsupportedError(
                f"{name} has {shape[0]} rows, universal_checkpoint_info says padded_vocab_size={vocabulary[1]}"
            )
        rows = vocabulary[0] if vocabulary[0] < vocabulary[1] else None
    return Param(name=name, shape=shape, rule=rule, rows=rows)


def read_param_groups(source: DeepSpeedContents, mp: int) -> list[Mapping[str, Any]]:
    """Return the optimizer's parameter groups as a rank saved them.

    Elastic checkpoints have none: theirs are those of DeepSpeed's configuration if it was given, else empty.
    """
    if source.settings:
        return [{**settings, "params": [at]} for at, settings in enumerate(source.settings)]
    groups = read_base_state(source, mp, 0).get("param_groups")
    return [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []


def _merge_sub_groups(source: DeepSpeedContents, mp: int, names: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge the names of each group's sub-groups (ZeRO-3); `params` of a group has one entry for each of them."""
    if source.topology.zero < 3:
        return names
    counts = [len(group.get("params", ())) for group in read_param_groups(source, mp)]
    if sum(counts) != len(names):
        raise CorruptSourceError(f"{len(names)} sub-groups, the optimizer has {counts}", path=source.models[mp, 0].path)
    groups: list[tuple[str, ...]] = []
    start = 0
    for count in counts:
        groups.append(tuple(name for sub_group in names[start : start + count] for name in sub_group))
        start += count
    return groups


def _undo_round_robin(buffer: tuple[str, ...], dp: int) -> tuple[str, ...]:
    order: list[str] = [""] * len(buffer)
    for position, original in enumerate(flat.round_robin(len(buffer), dp)):
        order[original] = buffer[position]
    return tuple(order)


def _match_groups(source: DeepSpeedContents, counts: Sequence[int]) -> tuple[list[tuple[int, ...]], int]:
    """Match each stage's groups to those of the whole model, because DeepSpeed drops groups that a stage lacks.

    Returns:
        For each stage the ids of its groups, and the number of groups of the whole model.

    Raises:
        UnsupportedError: the settings of the groups do not tell them apart.
    """
    tp = source.topology.tp
    settings = [
        [_make_settings_key(group) for group in read_param_groups(source, pp * tp)] for pp in range(len(counts))
    ]
    most = max(range(len(counts)), key=lambda pp: counts[pp])
    if len(counts) == 1 or all(groups == settings[most] for groups in settings):
        return [tuple(range(count)) for count in counts], counts[most]
    ids: list[tuple[int, ...]] = []
    for pp, groups in enumerate(settings):
        matches = [[at for at, other in enumerate(settings[most]) if other == group] for group in groups]
        if any(len(candidates) != 1 for candidates in matches):
            raise UnsupportedError(
                f"cannot tell which parameter groups stage {pp} holds: it has {len(groups)}, another {counts[most]}, "
                "and their settings do not tell them apart",
                path=str(source.folder),
            )
        ids.append(tuple(candidates[0] for candidates in matches))
    return ids, counts[most]


def _make_settings_key(group: Mapping[str, Any]) -> str:
    return repr(sorted((str(key), repr(value)) for key, value in group.items() if key != "params"))


def merge_groups(
    stages: Sequence[Stage], num_groups: int, where: str, pipeline: PipelineInfo | None
) -> tuple[tuple[str, ...], ...]:
    """Return the order of names in each group of the whole model.

    A single stage keeps its order. Several stages are merged in the order in which PipelineModule registers parameters:
    tied modules first, then layers.

    Raises:
        UnsupportedError: a stage has another order; `where` is the checkpoint.
    """
    if len(stages) == 1:
        return stages[0].groups
    merged: list[tuple[str, ...]] = []
    for group in range(num_groups):
        names: dict[str, None] = {}
        for pp, stage in enumerate(stages):
            for own in (names_ for names_, id_ in zip(stage.groups, stage.ids, strict=True) if id_ == group):
                ranks = [-1 if parse_tied_key(name) else parse_layer(name) for name in own]
                if None in ranks or ranks != sorted(rank for rank in ranks if rank is not None):
                    raise UnsupportedError(
                        f"stage {pp} orders the parameters of group {group} otherwise than tied modules, then layers",
                        path=where,
                        hint="pass parameters to the optimizer in the order of model.parameters()",
                    )
                names.update(dict.fromkeys(own))
        tied = sorted(
            (name for name in names if parse_tied_key(name)), key=lambda name: find_tied_layer(name, pipeline)
        )
        layered = sorted((name for name in names if not parse_tied_key(name)), key=lambda name: parse_layer(name) or 0)
        merged.append((*tied, *layered))
    return tuple(merged)


def find_tied_layer(name: str, pipeline: PipelineInfo | None, layers: Iterable[int] | None = None) -> int:
    """Return the first of `layers` (default: all) that uses a tied parameter's module; 0 if not known."""
    if pipeline is None or pipeline.tied is None:
        return 0
    inside = None if layers is None else set(layers)
    at = pipeline.tied.get(parse_tied_key(name) or "", ())
    return min((layer for layer in at if inside is None or layer in inside), default=0)


def _find_tied_layers(
    source: DeepSpeedContents, params: Mapping[str, Param], pipeline: PipelineInfo | None
) -> dict[int, str]:
    """Find the layer files that hold a tied module: layer -> key of the module.

    No parameter has the name of such a layer.
    """
    owned = {parse_layer(name) for name in params}
    tied: dict[str, dict[str, Param]] = {}
    for name, param in params.items():
        if (key := parse_tied_key(name)) is not None:
            tied.setdefault(key, {})[name.removeprefix(f"tied_modules.{key}.")] = param
    result: dict[int, str] = {}
    for (layer, tp), file in source.layers.items():
        if tp or layer in owned or not file.value:
            continue
        candidates = [key for key, members in tied.items() if set(members) <= set(file.value)]
        if pipeline is not None and pipeline.tied is not None:
            candidates = [key for key in candidates if layer in pipeline.tied.get(key, ())]
        if len(candidates) > 1:
            raise UnsupportedError(
                f"{Path(file.path).name} could hold any of the tied modules {candidates}",
                hint="name the tied layers in the commit's model.pipeline",
            )
        if candidates:
            result[layer] = candidates[0]
    return result


def read_layer_weights(source: DeepSpeedContents, model: Model, layer: int) -> dict[str, list[Tensor]]:
    """Return the weights in a layer's files: full name -> tensor of each tensor-parallel rank.

    Raises:
        CorruptSourceError: the ranks' files hold different names.
    """
    prefix = f"tied_modules.{model.tied_layers[layer]}." if layer in model.tied_layers else f"{layer}."
    files = [source.layers[layer, tp] for tp in range(source.topology.tp)]
    problems = [
        f"{Path(file.path).name} and {Path(files[0].path).name} differ in {', '.join(sorted(differing)[:3])}"
        for file in files[1:]
        if (differing := file.value.keys() ^ files[0].value.keys())
    ]
    if problems or any(list(file.value) != list(files[0].value) for file in files):
        raise CorruptSourceError(
            f"the files of layer {layer} hold different names, or the same in another order",
            path=str(source.folder),
            problems=problems,
            hint="a file is of another layer or checkpoint: use an earlier checkpoint",
        )
    return {prefix + name: [file.value[name] for file in files] for name in files[0].value}
