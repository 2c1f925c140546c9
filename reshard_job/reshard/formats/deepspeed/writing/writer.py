"""Lay out a native DeepSpeed checkpoint for another topology, in files that unmodified DeepSpeed loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.base import Request
from reshard.formats.deepspeed import autoep, pipeline
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.described.example import Example
from reshard.formats.deepspeed.experts import Experts
from reshard.formats.deepspeed.fields import (
    Kind,
    choose_kind,
    detect_kind,
    read_offload_device,
    refuse_small_gradients,
    require_settings,
)
from reshard.formats.deepspeed.logical import Model, Param
from reshard.formats.deepspeed.muon import is_same_training
from reshard.formats.deepspeed.names import NAME
from reshard.formats.deepspeed.reading.groups import has_muon
from reshard.formats.deepspeed.reading.reader import DeepSpeedExtra, NativeConvertible
from reshard.formats.deepspeed.writing.advice import collect_advice, note_partitioned_states, refuse_flat_states
from reshard.formats.deepspeed.writing.model_files import write_experts, write_layers, write_model
from reshard.formats.deepspeed.writing.optimizer_files import list_buffers, write_optimizers
from reshard.formats.deepspeed.writing.origins import TargetRows
from reshard.formats.deepspeed.writing.progress import Progress
from reshard.formats.deepspeed.writing.rank_copies import RankCopies
from reshard.formats.deepspeed.writing.stages import assign_stages
from reshard.formats.deepspeed.writing.target import Target
from reshard.formats.deepspeed.writing.zero3 import write_zero3
from reshard.formats.pt.objects import Tensor
from reshard.tensors.layout import Index, TargetLayout
from reshard.tensors.shard_table import ranges_of
from reshard.topology import MOST_RANKS, Topology


def lay_out(index: Index, request: Request, example: Example | None = None) -> TargetLayout:
    """Lay out the tensors of `index` for `request.topology`.

    Everything besides tensors (files, settings, client state) comes from `request.like` if it is given, else from the
    checkpoint behind `index`. `example` says what `request.like` is if it was made of a model description.

    Raises:
        UnsupportedError: the conversion would need a guess or is not implemented.
    """
    weights_alone = example is not None and example.weights_alone
    target = _find_weights_topology(index, request.topology) if weights_alone else request.topology
    extra, splits, misfits = _split_known_family(_find_extra(index, request), target)
    _refuse(extra, target, misfits)
    if isinstance(index.extra, DeepSpeedExtra):
        refuse_small_gradients(index.extra.source, target)
        _refuse_muon(index.extra.source, extra.source, target)
    stages, bounds = assign_stages(extra.source, extra.model, target)
    params = {
        name: param if extra.source.is_stacked(name) else _pad_param(param, extra.model, target.tp)
        for name, param in extra.model.params.items()
    }
    weights = {name: _pad_param(param, extra.model, target.tp) for name, param in extra.weights.items()}
    rows = TargetRows(index, extra.aliases)
    result = Target(
        extra=extra,
        progress=None if request.like is None else Progress.of(index, extra.aliases),
        topology=target,
        kind=Kind.PLAIN if weights_alone else choose_kind(extra.source, target.zero),
        weights_alone=weights_alone,
        stages=stages,
        bounds=bounds,
        params=params,
        weights=weights,
        rows=rows,
        layout_note=_set_parts(extra.source.models[0, 0].value.get("pipeline_layout"), target, bounds),
    )
    if target.zero == 3:
        write_zero3(result)
    else:
        for pp in range(target.pp):
            _write_stage(result, pp)
    if not extra.source.has_modules:
        write_layers(result)
    write_experts(result)
    rows.require()
    refuse_flat_states(result, is_flat=index.topology.zero > 0 and index.format in {NAME, "universal"})
    return TargetLayout(
        format=NAME,
        topology=target,
        files=tuple(result.files),
        shards=rows.build(),
        tensors=tuple(rows.tensors),
        origins=tuple(rows.origins),
        model=_make_commit_model(extra, target, bounds),
        notes=(
            *(() if example is None else example.notes),
            *splits,
            *rows.notes(),
            *collect_advice(result, _find_topology(index)),
            *note_partitioned_states(result, index.topology),
        ),
        aliases=extra.aliases,
        zeros=ranges_of(rows.zeros),
    )


def _find_weights_topology(index: Index, target: Topology) -> Topology:
    """Return the topology of a checkpoint without an optimizer: its files are those of ZeRO stages 0, 1 and 2.

    Raises:
        UnsupportedError: ZeRO-3 has its weights in the optimizer's files, and loads none without them.
    """
    if target.zero == 3:
        raise UnsupportedError(
            f"{target}: the source holds weights alone, and DeepSpeed loads none at ZeRO stage 3 without an optimizer"
            " (load_module_only=True finds the module empty)",
            path=str(index.root),
            hint="load the weights into the model before deepspeed.initialize, or train in stage 1 or 2",
        )
    return dataclasses.replace(target, zero=0)


def _find_topology(index: Index) -> Topology | None:
    """Return the topology of a source whose files state all of it, else None.

    Only native checkpoints at tp=1 and pp=1 state cp.
    """
    own = isinstance(index.extra, DeepSpeedExtra) and index.topology.tp * index.topology.pp == 1
    return index.topology if own else None


def _find_extra(index: Index, request: Request) -> DeepSpeedExtra:
    extra = index.extra if request.like is None else request.like.extra
    if isinstance(extra, DeepSpeedExtra):
        return extra
    if isinstance(extra, NativeConvertible):
        return extra.to_native()
    if request.like is not None:
        raise UnsupportedError(
            f"--like names a checkpoint of the format {request.like.format}, expected {NAME}",
            path=str(request.like.root),
        )
    raise UnsupportedError(
        f"the source is of the format {index.format}, which does not say what else DeepSpeed files hold",
        path=str(index.root),
        hint="describe the model with --model and the run with --ds-config (docs/model-description.md), or name with"
        " --like a DeepSpeed checkpoint of the same model, native or universal: one that the new run saves after a step"
        " will do, but its learning-rate schedule goes on",
    )


def _split_known_family(
    extra: DeepSpeedExtra, target: Topology
) -> tuple[DeepSpeedExtra, tuple[str, ...], tuple[str, ...]]:
    """Split a model for tensor parallelism as its family is split, where nothing else says how.

    Returns:
        The checkpoint with the splits, notes about them, and the reasons why the model is of no known family.

    Raises:
        UnsupportedError: see `split_by_family`.
    """
    model, source = extra.model, extra.source
    if target.tp == 1 or source.topology.tp > 1 or model.patterns.tells_rows or source.experts is not None:
        return extra, (), ()
    from reshard.formats.deepspeed.families.choose import Model as ToSplit
    from reshard.formats.deepspeed.families.choose import split_by_family  # only a change of tp needs it

    split = split_by_family(
        ToSplit(
            params=model.params,
            weights=extra.weights,
            aliases=extra.aliases,
            patterns=model.patterns,
            file=source.models[0, 0].value,
        ),
        target.tp,
    )
    if isinstance(split, list):
        return extra, (), tuple(split)
    model = dataclasses.replace(model, params=split.params, patterns=split.patterns)
    return dataclasses.replace(extra, model=model, weights=split.weights), (split.note,), ()


def _write_stage(target: Target, pp: int) -> None:
    buffers = [list_buffers(target, pp, part) for part in range(target.topology.ep)]
    rank_copies: RankCopies[list[dict[str, Tensor]]] = RankCopies(target, are_adjacent=False)
    for tp in range(target.topology.tp):
        write_model(target, pp, tp, buffers[autoep.find_part(target.topology, 0, tp)[0]])
        if target.topology.zero:
            write_optimizers(target, pp, tp, buffers, rank_copies)


def _make_commit_model(extra: DeepSpeedExtra, target: Topology, bounds: tuple[int, ...]) -> dict[str, Any]:
    """Return the commit's description of the model, with the bounds of the target's stages."""
    model = dict(extra.commit_model)
    info = extra.model.pipeline  # from the commit, or else from the client state
    described = model.get("pipeline") or (None if info is None else pipeline.to_wire(info))
    if (description := _set_parts(described, target, bounds)) is not None:
        model["pipeline"] = description
    return model


def _set_parts(described: Any, target: Topology, bounds: tuple[int, ...]) -> dict[str, Any] | None:
    """Return a description of a pipeline with the bounds of the target's stages; None if it is no such description."""
    if not isinstance(described, Mapping) or "num_layers" not in described:
        return None
    parts = bounds or ((0, described["num_layers"]) if target.pp == 1 else tuple(described.get("parts", ())))
    return {**described, "parts": list(parts)}


def _refuse(extra: DeepSpeedExtra, target: Topology, misfits: tuple[str, ...]) -> None:
    """Refuse conversions that need facts which the checkpoint lacks; `misfits` says why no known family helps.

    Raises:
        UnsupportedError: the message says what is lacking.
    """
    topology = extra.source.topology
    where = str(extra.source.folder)
    _refuse_stage(extra, target, where)
    if target.ep > 1 and extra.source.experts is None:
        raise UnsupportedError(f"{target}: the model has no experts", path=where, hint="leave ep out")
    if extra.source.experts is not None:
        _refuse_experts(extra.source.experts, target, where)
    if target.tp == topology.tp:
        return
    if not extra.model.patterns.declared:
        some = ", ".join(list(extra.model.params)[:5])
        raise UnsupportedError(
            f"{target}: nothing is said about how tensor parallelism cuts {some}, ...",
            path=where,
            problems=misfits,
            hint="say it with --patterns FILE, or save with client_state={'universal_checkpoint_info': ...}",
        )
    _refuse_buffers(extra, target, where)
    if not extra.model.patterns.tells_rows:
        raise UnsupportedError(
            f"{target}: universal_checkpoint_info declares no row-parallel parameter, so those would be cut along the"
            " wrong dim (Megatron-DeepSpeed leaves them out at tp=1)",
            path=where,
            problems=misfits,
            hint="save with parameter_with_row_parallelism_patterns filled in at tp=1 too",
        )


def _refuse_buffers(extra: DeepSpeedExtra, target: Topology, where: str) -> None:
    """Refuse buffers that no pattern describes: DeepSpeed's default, dim 0, holds for parameters only.

    Raises:
        UnsupportedError: the message names the buffers.
    """
    buffers = {name for file in extra.source.models.values() for name in file.value.get("buffer_names") or ()}
    unknown = sorted(
        name
        for name in buffers & extra.weights.keys()
        if extra.weights[name].shape and not extra.model.patterns.names(name)
    )
    if unknown:
        raise UnsupportedError(
            f"{target}: no pattern says how tensor parallelism cuts the buffers {', '.join(unknown[:5])}",
            path=where,
            hint="name them in universal_checkpoint_info, or in a file of patterns (--patterns)",
        )


def _refuse_experts(experts: Experts, target: Topology, where: str) -> None:
    stages, most_tp = ((1, 2, 3), MOST_RANKS) if experts.stacked else ((1, 2), 1)
    if target.tp > most_tp or target.cp > 1 or target.zero not in stages:
        raise UnsupportedError(
            f"{target}: a model with experts is laid out at tp=1, cp=1 and ZeRO stages 1 and 2, and AutoEP's with tp,"
            " too, and at stage 3 (DeepSpeed does not train native experts at stage 3)",
            path=where,
            hint="choose zero=1 or 2 without tp and cp, such as --to dp=4,ep=2,zero=1",
        )
    if target.tp > 1 and target.ep == 1:
        raise UnsupportedError(
            f"{target}: DeepSpeed does not train AutoEP with tensor parallelism at ep=1", path=where, hint="add ep=2"
        )
    experts.check(target.ep)


def _refuse_stage(extra: DeepSpeedExtra, target: Topology, where: str) -> None:
    """Refuse ZeRO stages that DeepSpeed does not support for the model, or that need settings that were not saved.

    Raises:
        UnsupportedError: the message gives the reason.
    """
    source = extra.source
    change = f"from ZeRO stage {source.topology.zero} to {target.zero}"
    if source.pipeline and target.zero > 1:
        raise UnsupportedError(
            f"{change}: DeepSpeed has neither ZeRO-2 nor ZeRO-3 with a PipelineModule", path=where, hint="choose zero=1"
        )
    if source.pipeline and target.cp > 1:
        raise UnsupportedError(
            f"{target}: DeepSpeed's pipelines have no sequence parallelism", path=where, hint="leave cp out"
        )
    if source.pipeline and target.zero == 0 and source.half_type == "bfloat16":
        raise UnsupportedError(
            f"{change}: DeepSpeed takes BF16_Optimizer for a PipelineModule in {source.half_type} at stage 0 too",
            path=where,
            hint="choose zero=1, whose files are the same",
        )
    require_settings(source)


def _refuse_muon(source: DeepSpeedContents, like: DeepSpeedContents, target: Topology) -> None:
    """Refuse targets whose optimizer uses Muon's momentum in another way; `like` is the source or its template.

    Raises:
        UnsupportedError: training would continue with other numbers.
    """
    if not has_muon(source):
        return
    before, after = detect_kind(source.optimizer(0, 0)), choose_kind(like, target.zero)
    if not is_same_training(before, after):
        raise UnsupportedError(
            f"{target}: DeepSpeed's Muon trains with other numbers in {after.value} than in {before.value}",
            path=str(source.folder),
            hint=f"choose zero={source.topology.zero} as in the source, or a stage with the same optimizer",
        )
    devices = {read_offload_device(contents.zero_config) for contents in (source, like)}
    if source.half_type == "float16" and None in devices and len(devices) > 1:
        raise UnsupportedError(
            f"{target}: the momentum of DeepSpeed's Muon has the loss scale in it where the optimizer is not offloaded",
            path=str(source.folder),
            hint="name with --like a checkpoint with the same offload_optimizer",
        )


def _pad_param(param: Param, model: Model, tp: int) -> Param:
    """Return the parameter with the vocabulary padding of another tensor-parallel degree.

    Raises:
        UnsupportedError: the degree does not divide the parameter.
    """
    padded = model.patterns.padded_rows(tp)
    if param.rule.vocabulary and padded is not None and param.shape:
        rows = model.patterns.vocabulary_rows
        assert rows is not None
        if param.shape[0] == rows[1]:
            shape = (padded, *param.shape[1:])
            rule = param.rule if padded == rows[1] else dataclasses.replace(param.rule, parts=(), widths=())
            param = dataclasses.replace(param, shape=shape, rule=rule, rows=rows[0] if rows[0] < padded else None)
    param.rule.shard_shape(param.name, param.shape, tp)
    return param
