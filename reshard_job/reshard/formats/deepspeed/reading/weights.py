"""Index weights as boxes of logical tensors: modules, pipeline layers, experts, frozen parameters, buffers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed import autoep, flat
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.logical import Model, Param, make_param, read_layer_weights
from reshard.formats.deepspeed.rows import Place, Rows
from reshard.formats.deepspeed.slots import locate_tensor
from reshard.formats.pt.objects import Tensor
from reshard.formats.pt.reader import PtFile


def add_layers(
    rows: Rows, source: DeepSpeedContents, model: Model, files: Mapping[str, int], weights: dict[str, Param]
) -> None:
    """Add the weights of a PipelineModule, which has a file per layer and tensor-parallel rank.

    Raises:
        CorruptSourceError: the layer files lack parameters.
    """
    copies: dict[str, int] = {}
    for layer in sorted({layer for layer, _ in source.layers}):
        for name, shards in read_layer_weights(source, model, layer).items():
            param = _find_param(name, shards, model, source, weights)
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


def read_shared_names(shared: Any, model: Model) -> dict[str, str]:
    """Return the second names of tied weights that `shared_params` states: second name -> first name."""
    pairs = shared.items() if isinstance(shared, Mapping) else ()
    return {alias: name for alias, name in pairs if name in model.params and alias not in model.params}


def add_modules(
    rows: Rows, source: DeepSpeedContents, model: Model, files: Mapping[str, int], weights: dict[str, Param]
) -> dict[str, str]:
    """Add the weights in `module` of each model-parallel rank's model file: of a model without layer files.

    Returns:
        Second name of a tied weight -> its first.

    Raises:
        CorruptSourceError: ranks have modules of different names, or the modules lack parameters.
    """
    copies: Counter[str] = Counter()
    aliases: dict[str, str] = {}
    # DeepSpeed saves models with experts with one copy for each name of a tied weight.
    shared = read_shared_names(source.models[0, 0].value.get("shared_params"), model)
    for pp in range(source.topology.pp):
        own_files = [source.models[pp * source.topology.tp + tp, 0] for tp in range(source.topology.tp)]
        modules = [_read_module(file) for file in own_files]
        if any(list(module) != list(modules[0]) for module in modules):
            raise CorruptSourceError("tensor-parallel ranks hold modules of different names", path=str(source.folder))
        seen: dict[str, Tensor] = {}

        def add(name: str, shards: list[Tensor], own_files: list[PtFile] = own_files) -> None:
            param = _find_param(name, shards, model, source, weights)
            for tp, (tensor, file) in enumerate(zip(shards, own_files, strict=True)):
                _add_weight(rows, param, tensor, Place(source.topology.tp, tp, copies[name], files[file.path], 0))
            copies[name] += 1

        for name in modules[0]:
            shards = [module[name] for module in modules]
            twin = next((other for other, tensor in seen.items() if shards[0].same_view(tensor)), shared.get(name))
            if twin is not None and name not in model.params:
                aliases[name] = twin
                first = modules[0].get(twin)
                if first is not None and not shards[0].same_view(first):
                    add(twin, shards)
                continue
            seen[name] = shards[0]
            for own in (shards, *_find_frozen_copies(own_files, name, shards)):
                add(name, own)
        expected = (name for group in model.stages[pp].groups for name in group if not source.is_expert(name))
        if missing := sorted(name for name in expected if name not in modules[0]):
            raise CorruptSourceError(f"the module misses {', '.join(missing[:5])}", path=own_files[0].path)
    return aliases


def _find_frozen_copies(files: Sequence[PtFile], name: str, shards: list[Tensor]) -> list[list[Tensor]]:
    """Return the shards of a frozen parameter in `frozen_param_fragments`, if those are separate copies."""
    fragments = [file.value.get("frozen_param_fragments") for file in files]
    values = [own.get(name) if isinstance(own, Mapping) else None for own in fragments]
    copies = [tensor for tensor in values if isinstance(tensor, Tensor)]
    kinds = [(tensor.shape, tensor.dtype) for tensor in copies]
    is_whole = kinds == [(tensor.shape, tensor.dtype) for tensor in shards]
    return [copies] if is_whole and not copies[0].same_view(shards[0]) else []


def add_experts(
    rows: Rows, source: DeepSpeedContents, model: Model, files: Mapping[str, int], weights: dict[str, Param]
) -> None:
    """Add the weights of experts: a file for each, with the whole model's names, or with slices of stacks.

    Raises:
        CorruptSourceError: files hold unknown names, or lack weights.
    """
    experts = source.experts
    if experts is None:
        return
    counts: dict[str, int] = {}
    for (layer, expert), file in source.expert_files.items():
        for name, tensor in file.value.items():
            if not experts.stacked:
                param = _find_param(name, [tensor], model, source, weights)
                _add_weight(rows, param, tensor, Place(1, 0, 0, files[file.path], 0))
                counts[name] = 1
                continue
            stack = autoep.find_stack(name, expert, file.path)
            known = model.params.get(stack)
            for copy, own in enumerate((file, *source.expert_copies.get((layer, expert), ()))):
                found = own.value.get(name)
                if known is None:
                    autoep.refuse_frozen(stack, own.path)
                if found is None or found.shape != known.shape[1:]:
                    expected = f"expected a slice of {known.shape}"
                    raise CorruptSourceError(f"holds {name} {tensor.shape}, {expected}", path=own.path)
                place = Place(known.shape[0], expert, copy, files[own.path], found.file_offset)
                rows.add_shard("weight", known, place, dtype=found.dtype, strides=(found.num_elements, *found.stride))
            counts[stack] = counts.get(stack, 0) + 1
    lacking = (
        name for name in model.params if experts.holds(name) and counts.get(name) != experts.stacked.get(name, 1)
    )
    if missing := sorted(lacking):
        raise CorruptSourceError(f"no file of an expert holds {', '.join(missing[:5])}", path=str(source.folder))


def add_zero3_frozen(
    rows: Rows, source: DeepSpeedContents, model: Model, files: Mapping[str, int], weights: dict[str, Param]
) -> None:
    """Add frozen parameters of ZeRO-3, of which each rank has a slot in `frozen_param_fragments`."""
    topology = source.topology
    for mp in range(topology.tp * topology.pp):
        own = [source.models[mp, dp] for dp in range(topology.dp)]
        rank_tensors = [(file, file.value.get("frozen_param_fragments") or {}) for file in own]
        for name in dict.fromkeys(name for _, fragments in rank_tensors for name in fragments):
            if name not in weights:
                shapes = [
                    tuple((source.models[tp, 0].value.get("frozen_param_shapes") or {}).get(name, ()))
                    for tp in range(topology.tp)
                ]
                weights[name] = make_param(name, shapes, model.patterns, topology.tp)
            shape = (own[0].value.get("frozen_param_shapes") or {}).get(name, ())
            (slot,), length = flat.zero3_slots([math.prod(shape)], topology.dp)
            dtype, ranges = locate_tensor(rank_tensors, name, files, length=length, what=f"frozen parameter {name}")
            place = Place(topology.tp, mp, 0, 0, 0)
            rows.add_slots("weight", weights[name], place, ranges, dtype=dtype, offset=0, size=slot.size)


def add_zero3_buffers(
    rows: Rows, source: DeepSpeedContents, model: Model, files: Mapping[str, int], weights: dict[str, Param]
) -> None:
    """Add buffers of ZeRO-3, which are not partitioned: every rank's model file holds them whole."""
    known: dict[int, Mapping[str, Tensor]] = {}  # equal files of many ranks share one object
    modules = {
        rank: known.get(id(file.value.get("module")))
        or known.setdefault(id(file.value.get("module")), _read_module(file))
        for rank, file in source.models.items()
    }
    for (mp, dp), file in source.models.items():
        for name in file.value.get("buffer_names") or ():
            tensor = modules[mp, dp].get(name)
            if tensor is None:
                continue
            shards = [modules[tp, dp].get(name, tensor) for tp in range(source.topology.tp)]
            param = _find_param(name, shards, model, source, weights)
            _add_weight(rows, param, tensor, Place(source.topology.tp, mp, dp, files[file.path], 0))


def _read_module(file: PtFile) -> Mapping[str, Tensor]:
    value = file.value.get("module")
    if not isinstance(value, Mapping) or not all(isinstance(item, Tensor) for item in value.values()):
        raise UnsupportedError("its module is not a dict of tensors", path=file.path)
    return value


def _find_param(
    name: str, shards: list[Tensor], model: Model, source: DeepSpeedContents, weights: dict[str, Param]
) -> Param:
    """Return the parameter that a stored weight belongs to; buffers and frozen parameters are added to `weights`.

    Raises:
        CorruptSourceError: the shards have other shapes than the parameter.
    """
    shapes = [tensor.shape for tensor in shards]
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
