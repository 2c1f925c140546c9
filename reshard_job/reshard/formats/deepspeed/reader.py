"""Index a native DeepSpeed checkpoint: every stored byte of model and optimizer as a box of a logical tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.commit import Commit
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed import autoep, flat, patterns, pipeline
from reshard.formats.deepspeed.fields import Kind, kind_of
from reshard.formats.deepspeed.groups import read_groups
from reshard.formats.deepspeed.logical import Model, Param, describe, layer_weights, make_param, param_shapes
from reshard.formats.deepspeed.rows import Place, Rows
from reshard.formats.deepspeed.source import Source, open_source
from reshard.formats.deepspeed.states import check_scalars, group_states
from reshard.formats.deepspeed.unpartitioned import param_states
from reshard.formats.pt.objects import Inert, Tensor
from reshard.formats.pt.reader import PtFile
from reshard.layout import ITEM_BYTES, Checksum, Index, SourceFile

NAME = "deepspeed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What the writer needs besides the tensors.

    Attributes:
        source: the files.
        model: the whole model.
        weights: module parameters and buffers that are not optimized (frozen, buffers), by name.
        commit_model: `Commit.model` of the source.
        element_bytes: of the model's dtype, which `parameter_alignment` depends on.
        aliases: second name of a tied weight -> its first.
    """

    source: Source
    model: Model
    weights: Mapping[str, Param]
    commit_model: Mapping[str, Any]
    element_bytes: int
    aliases: Mapping[str, str]


def read_index(folder: Path, commit: Commit | None, told: Mapping[str, Any] | None = None) -> Index:
    """Index the checkpoint in `folder`.

    Args:
        folder: of the tag.
        commit: its commit marker, if it has one.
        told: how tensors are cut (`pattern_file.load`), instead of what the checkpoint says about it.

    Raises:
        CorruptSourceError, UnsafePickleError, UnsupportedError: see `reshard.formats.base`.
    """
    source = open_source(folder)
    check_scalars(source)
    first = source.models[0, 0].value
    commit_model = dict(commit.model) if commit is not None else {}
    info = first.get("universal_checkpoint_info") if told is None else told
    layers = commit_model.get("pipeline", first.get("pipeline_layout"))
    model = describe(source, patterns.parse(info), pipeline.parse(layers))
    rows = Rows()
    files = {file.path: at for at, file in enumerate(source.files)}
    weights: dict[str, Param] = {}
    aliases: dict[str, str] = {}
    if source.pipeline:
        _add_layers(rows, source, model, files, weights)
    elif source.topology.zero < 3:
        aliases = _add_modules(rows, source, model, files, weights)
        _add_experts(rows, source, model, files, weights)
    else:
        aliases = _shared_names(first.get("shared_params"), model)
    element_bytes = 2 if source.half_type else 4
    if source.topology.zero == 0:
        _add_unpartitioned(rows, source, model, files)
    elif source.topology.zero < 3:
        _add_partitions(rows, source, model, files, element_bytes)
    else:
        _add_zero3(rows, source, model, files)
        _add_zero3_frozen(rows, source, model, files, weights)
        _add_zero3_buffers(rows, source, model, files, weights)
    return Index(
        root=folder,
        format=NAME,
        topology=source.topology,
        step=source.step,
        samples=source.samples if commit is None else commit.samples,
        tensors=tuple(rows.tensors),
        files=tuple(_source_file(file) for file in source.files),
        shards=rows.build(),
        groups=read_groups(source, model),
        aliases=aliases,
        extra=Extra(
            source=source,
            model=model,
            weights=weights,
            commit_model=commit_model,
            element_bytes=element_bytes,
            aliases=aliases,
        ),
    )


def _source_file(file: PtFile) -> SourceFile:
    checksums = sorted(
        (storage.file_offset, storage.num_bytes, storage.crc32)
        for storage in file.storages.values()
        if storage.crc32 is not None and storage.num_bytes
    )
    return SourceFile(
        path=Path(file.path).name,
        num_bytes=file.num_bytes,
        checksums=tuple(Checksum(start=start, num_bytes=count, crc32=crc) for start, count, crc in checksums),
    )


def _add_layers(rows: Rows, source: Source, model: Model, files: Mapping[str, int], weights: dict[str, Param]) -> None:
    """Weights of a PipelineModule: one file per layer and tensor-parallel rank."""
    copies: dict[str, int] = {}
    for layer in sorted({layer for layer, _ in source.layers}):
        for name, shards in layer_weights(source, model, layer).items():
            param = _weight(name, shards, model, source, weights)
            copy = copies[name] = copies.get(name, -1) + 1
            for tp, tensor in enumerate(shards):
                _add_weight(
                    rows, param, tensor, Place(source.topology.tp, tp, copy, files[source.layers[layer, tp].path], 0)
                )
    if missing := sorted(model.params.keys() - copies.keys()):
        raise CorruptSourceError(
            f"no layer file holds the weights of {', '.join(missing[:5])}",
            path=str(source.folder),
            hint="a layer_*-model_states.pt file is missing",
        )


def _shared_names(shared: Any, model: Model) -> dict[str, str]:
    """Second names of tied weights as ZeRO-3 states them."""
    found = shared.items() if isinstance(shared, Mapping) else ()
    return {alias: name for alias, name in found if name in model.params and alias not in model.params}


def _add_modules(
    rows: Rows, source: Source, model: Model, files: Mapping[str, int], weights: dict[str, Param]
) -> dict[str, str]:
    """Weights of a model without pipeline: `module` in each tensor-parallel rank's model file.

    Returns:
        Second name of a tied weight -> its first.
    """
    modules = [_module(source.models[tp, 0]) for tp in range(source.topology.tp)]
    if any(list(module) != list(modules[0]) for module in modules):
        raise CorruptSourceError("tensor-parallel ranks hold modules of different names", path=str(source.folder))
    seen: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    # Models with experts are saved with a copy for each name of a tied weight.
    shared = _shared_names(source.models[0, 0].value.get("shared_params"), model)
    for name in modules[0]:
        shards = [module[name] for module in modules]
        twin = next((other for other, tensor in seen.items() if shards[0].same_view(tensor)), shared.get(name))
        if twin is not None and name not in model.params:
            aliases[name] = twin
            continue
        seen[name] = shards[0]
        param = _weight(name, shards, model, source, weights)
        for tp, tensor in enumerate(shards):
            _add_weight(rows, param, tensor, Place(source.topology.tp, tp, 0, files[source.models[tp, 0].path], 0))
    experts = source.experts
    others = (name for name in model.params.keys() - set(modules[0]) if experts is None or not experts.holds(name))
    if missing := sorted(others):
        raise CorruptSourceError(f"the module misses {', '.join(missing[:5])}", path=source.models[0, 0].path)
    return aliases


def _add_experts(rows: Rows, source: Source, model: Model, files: Mapping[str, int], weights: dict[str, Param]) -> None:
    """Weights of experts: a file for each, with names as in the whole model, or slices of stacks."""
    experts = source.experts
    if experts is None:
        return
    found: dict[str, int] = {}
    for (_, expert), file in source.expert_files.items():
        for name, tensor in file.value.items():
            if not experts.stacked:
                param = _weight(name, [tensor], model, source, weights)
                _add_weight(rows, param, tensor, Place(1, 0, 0, files[file.path], 0))
                found[name] = 1
                continue
            stack = autoep.split_name(name, expert, file.path)
            known = model.params.get(stack)
            if known is None or tensor.shape != known.shape[1:]:
                raise CorruptSourceError(f"holds {name} {tensor.shape}, a slice of no known stack", path=file.path)
            place = Place(known.shape[0], expert, 0, files[file.path], tensor.file_offset)
            rows.add_shard("weight", known, place, dtype=tensor.dtype, strides=(tensor.num_elements, *tensor.stride))
            found[stack] = found.get(stack, 0) + 1
    lacking = (name for name in model.params if experts.holds(name) and found.get(name) != experts.stacked.get(name, 1))
    if missing := sorted(lacking):
        raise CorruptSourceError(f"no file of an expert holds {', '.join(missing[:5])}", path=str(source.folder))


def _module(file: PtFile) -> Mapping[str, Tensor]:
    value = file.value.get("module")
    if not isinstance(value, Mapping) or not all(isinstance(item, Tensor) for item in value.values()):
        raise CorruptSourceError("its module is not a dict of tensors", path=file.path)
    return value


def _weight(name: str, shards: list[Tensor], model: Model, source: Source, weights: dict[str, Param]) -> Param:
    """The parameter that a stored weight belongs to; buffers and frozen parameters get one of their own."""
    shapes = [tensor.shape for tensor in shards]
    if unknown := {tensor.dtype for tensor in shards} - set(ITEM_BYTES):
        raise UnsupportedError(f"weight {name} is of type {', '.join(unknown)}", path=str(source.folder))
    param = model.params.get(name) or weights.get(name)
    if param is None:
        param = weights[name] = make_param(name, shapes, model.patterns, source.topology.tp)
    tp = source.topology.tp
    expected = [param.rule.shard_shape(name, param.shape, tp, rank) for rank in range(tp)]
    if shapes != expected:
        raise CorruptSourceError(f"weight {name} has the shapes {shapes}, expected {expected}", path=str(source.folder))
    return param


def _add_weight(rows: Rows, param: Param, tensor: Tensor, place: Place) -> None:
    rows.add_shard(
        "weight", param, place._replace(byte_offset=tensor.file_offset), dtype=tensor.dtype, strides=tensor.stride
    )


def _add_unpartitioned(rows: Rows, source: Source, model: Model, files: Mapping[str, int]) -> None:
    """ZeRO-0: every state has the shape of its parameter's shard."""
    topology = source.topology
    for (tp, _), file in source.models.items():
        states = param_states(source.optimizer(tp, 0), file.path)
        for group, own in zip(source.named[tp], states, strict=True):
            for name, state in zip(group, own, strict=True):
                for key, tensor in state.tensors.items():
                    if tensor.shape != group[name]:
                        raise CorruptSourceError(
                            f"{key} of {name} has the shape {tensor.shape}, expected {group[name]}", path=file.path
                        )
                    place = Place(topology.tp, tp, 0, files[file.path], tensor.file_offset)
                    rows.add_shard(key, model.params[name], place, dtype=tensor.dtype, strides=tensor.stride)


def _add_partitions(rows: Rows, source: Source, model: Model, files: Mapping[str, int], element_bytes: int) -> None:
    """ZeRO-1/2: flat groups cut into equal partitions.

    Positions follow from the order in `param_shapes`, which is the buffer's; `param_slice_mappings` is wrong under
    `round_robin_gradients` and only compared where it should agree.
    """
    topology = source.topology
    copies = _copies(model)
    aligned = bool(source.zero_config.get("parameter_alignment")) and kind_of(source.optimizer(0, 0)) is Kind.ZERO12
    alignment = flat.param_alignment(element_bytes, aligned)
    for (mp, dp), file in source.optimizers.items():
        pp, tp = divmod(mp, topology.tp)
        shapes = param_shapes(source, mp)
        states = group_states(source, mp, dp)
        if len(states) != len(shapes):
            raise CorruptSourceError(f"{len(states)} groups, param_shapes has {len(shapes)}", path=file.path)
        for at, (state, group) in enumerate(zip(states, shapes, strict=True)):
            counts = tuple(math.prod(shape) for shape in group.values())
            names = list(group)
            num_partitions, own = source.partition(names, dp)
            layout = flat.FlatGroup(num_elements=counts, dp=num_partitions, param_alignment=alignment)
            spans = layout.spans(own)
            lean = layout.partition - layout.padding(own)
            for key, tensor in state.flat.items():
                if tensor.num_elements not in (lean, layout.partition):
                    raise CorruptSourceError(
                        f"group {at}: partition {key!r} has {tensor.num_elements} elements, expected {lean}"
                        f" or with padding {layout.partition}",
                        path=file.path,
                    )
            if not model.round_robin:
                _compare_mappings(source.optimizer(mp, dp), at, names, spans, file.path)
            for span in spans:
                param = model.params[source.whole_name(names[span.index], dp)]
                place = Place(topology.tp, tp, copies[param.name].index(pp), files[file.path], 0)
                if source.experts is not None and param.name in source.experts.stacked:
                    place = place._replace(tp=topology.ep, rank=dp % topology.ep)
                _add_span(rows, param, state.flat, span, place)


def _add_zero3(rows: Rows, source: Source, model: Model, files: Mapping[str, int]) -> None:
    """ZeRO-3: every parameter has a slot of its own in each rank's sub-group."""
    topology = source.topology
    for (mp, dp), file in source.optimizers.items():
        shapes = param_shapes(source, mp)
        states = group_states(source, mp, dp)
        if len(states) != len(shapes):
            raise CorruptSourceError(f"{len(states)} sub-groups, param_shapes has {len(shapes)}", path=file.path)
        for at, (state, group) in enumerate(zip(states, shapes, strict=True)):
            spans, length = flat.zero3_spans([math.prod(shape) for shape in group.values()], topology.dp, dp)
            for key, tensor in state.flat.items():
                if tensor.num_elements != length:
                    raise CorruptSourceError(
                        f"sub-group {at}: partition {key!r} has {tensor.num_elements} elements, expected {length}",
                        path=file.path,
                    )
            names = list(group)
            for span in spans:
                place = Place(topology.tp, mp, 0, files[file.path], 0)
                _add_span(rows, model.params[names[span.index]], state.flat, span, place)


def _add_zero3_frozen(
    rows: Rows, source: Source, model: Model, files: Mapping[str, int], weights: dict[str, Param]
) -> None:
    """Parameters that are not optimized: each rank's slot in `frozen_param_fragments`. Buffers travel in the files."""
    topology = source.topology
    for (mp, dp), file in source.models.items():
        fragments, shapes = file.value.get("frozen_param_fragments") or {}, file.value.get("frozen_param_shapes") or {}
        for name, tensor in fragments.items():
            if name not in weights:
                found = [
                    tuple((source.models[tp, 0].value.get("frozen_param_shapes") or {}).get(name, ()))
                    for tp in range(topology.tp)
                ]
                weights[name] = make_param(name, found, model.patterns, topology.tp)
            spans, length = flat.zero3_spans([math.prod(shapes.get(name, ()))], topology.dp, dp)
            if not isinstance(tensor, Tensor) or tensor.num_elements != length or not tensor.is_contiguous:
                raise CorruptSourceError(f"frozen parameter {name}: expected {length} elements", path=file.path)
            for span in spans:
                _add_span(rows, weights[name], {"weight": tensor}, span, Place(topology.tp, mp, 0, files[file.path], 0))


def _add_zero3_buffers(
    rows: Rows, source: Source, model: Model, files: Mapping[str, int], weights: dict[str, Param]
) -> None:
    """Buffers are not partitioned: every rank's model file holds them whole."""
    for (mp, dp), file in source.models.items():
        module = _module(file)
        for name in file.value.get("buffer_names") or ():
            tensor = module.get(name)
            if tensor is None:
                continue
            shards = [_module(source.models[tp, dp]).get(name, tensor) for tp in range(source.topology.tp)]
            param = _weight(name, shards, model, source, weights)
            _add_weight(rows, param, tensor, Place(source.topology.tp, mp, dp, files[file.path], 0))


def _add_span(rows: Rows, param: Param, tensors: Mapping[str, Tensor], span: flat.Span, place: Place) -> None:
    for key, tensor in tensors.items():
        at = tensor.file_offset + span.offset * ITEM_BYTES[tensor.dtype]
        rows.add_flat(key, param, place._replace(byte_offset=at), dtype=tensor.dtype, start=span.start, stop=span.stop)


def _copies(model: Model) -> dict[str, list[int]]:
    """Stages that hold each parameter; tied ones are on several."""
    found: dict[str, list[int]] = {}
    for pp, stage in enumerate(model.stages):
        for name in (name for group in stage.groups for name in group):
            found.setdefault(name, []).append(pp)
    return found


def _compare_mappings(
    state: Mapping[str, Any], at: int, names: list[str], spans: tuple[flat.Span, ...], path: str
) -> None:
    mappings = state.get("param_slice_mappings")
    if not isinstance(mappings, list) or len(mappings) <= at or not isinstance(mappings[at], Mapping):
        return
    stated = {
        name: (address.state.get("start"), address.state.get("numel"))
        for name, address in mappings[at].items()
        if isinstance(address, Inert) and isinstance(address.state, Mapping)
    }
    expected = {names[span.index]: (span.offset, span.stop - span.start) for span in spans}
    if len(stated) == len(mappings[at]) and stated != expected:
        wrong = sorted(name for name in stated.keys() | expected.keys() if stated.get(name) != expected.get(name))
        raise CorruptSourceError(
            f"group {at}: param_slice_mappings and param_shapes disagree about {', '.join(wrong[:5])}", path=path
        )
