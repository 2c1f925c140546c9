"""Write the files with the model's weights and the run's scalars: `mp_rank_*` below ZeRO-3, and `layer_*` of pipelines.

ZeRO-3 stores no weights beside its master weights. A target of another stage gets its weights from those, rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.deepspeed import autoep, names
from reshard.formats.deepspeed.logical import Param, read_layer_weights
from reshard.formats.deepspeed.writing.carried_objects import Template
from reshard.formats.deepspeed.writing.optimizer_files import Buffer
from reshard.formats.deepspeed.writing.stages import is_inside, merge_modules
from reshard.formats.deepspeed.writing.target import Target
from reshard.formats.deepspeed.writing.zero0 import lay_out_optimizer
from reshard.formats.pt.objects import Size, StatefulDict, Tensor, new_tensor

Module = dict[str, tuple[Param, Tensor]]


def write_model(target: Target, pp: int, tp: int, buffers: list[Buffer]) -> None:
    """Write `mp_rank_*_model_states.pt` of one model-parallel rank; `buffers` are the groups of its first rank."""
    like = target.source.models[target.like(pp, tp), 0]
    template = Template(like, target.budget)
    replaced: dict[str, Any] = {
        **target.common(like.value, first=pp == tp == 0, tp=tp),
        **target.arguments(template, like.value),
        **target.config(template, like.value),
        "param_shapes": [_make_param_shapes(target, buffer, tp) for buffer in buffers]
        if target.topology.zero
        else None,
    }
    own: Module = {}
    if target.source.pipeline:
        replaced["buffer_names"] = _list_buffer_names(target, pp)
    if target.source.has_modules:
        module = _list_stage_module(target, pp, tp) if target.source.pipeline else like.value["module"]
        replaced["module"], own = _make_module(target, module, template, tp)
        replaced |= _make_frozen(target, like.value, replaced["module"], tp)
    if target.source.pipeline and target.source.experts is not None:
        stage = target.stages[pp]
        replaced["num_experts"] = target.source.experts.list_counts(name for group in stage.groups for name in group)
    has_optimizer = target.topology.zero == 0 and not target.weights_alone
    optimizer = lay_out_optimizer(target, pp, tp) if has_optimizer else None
    if optimizer is not None:
        replaced["optimizer"] = optimizer.value
    value = template.copy_except(like.value, replaced)
    if target.source.experts is not None and target.source.has_modules:
        value = target.fold(value, 0, tp, "dense", param_families=autoep.list_families(value["module"]))
    file = target.add_file(names.model_file(pp * target.topology.tp + tp), value)
    for param, tensor in own.values():
        file.add_weight(param, tensor, tp, target.next_copy(param.name, tp))
    for param, state, tensor in optimizer.tensors if optimizer is not None else ():
        file.add_state(state, param, tensor, tp, target.copy_of(param.name, pp))


def write_layers(target: Target) -> None:
    """Write the `layer_*` files, which do not depend on pp and are cut anew for another tp."""
    source = target.source
    model_axis = source.model_axis or target.topology.tp > 1
    copies: dict[str, int] = {}
    for layer in sorted({layer for layer, _ in source.layers}):
        shards_by_name = read_layer_weights(source, target.extra.model, layer)
        for name in shards_by_name:
            copies[name] = copies.get(name, -1) + 1
        for tp in range(target.topology.tp):
            like = source.layers[layer, min(tp, source.topology.tp - 1)]
            value = StatefulDict()
            value.state = Template(like, target.budget).copy(getattr(like.value, "state", None))
            for key, (name, shards) in zip(like.value, shards_by_name.items(), strict=True):
                value[key] = new_tensor(shards[0].dtype, target.shard(name, tp))
            file = target.add_file(names.layer_file(layer, tp, model_axis=model_axis), value)
            for key, name in zip(like.value, shards_by_name, strict=True):
                file.add_weight(target.params.get(name) or target.weights[name], value[key], tp, copies[name])


def write_experts(target: Target) -> None:
    """Write a file for each expert with the whole model's names; it does not depend on the degree of parallelism.

    ZeRO-3 has no such files: its experts are in the optimizer's files.
    """
    if target.topology.zero == 3:
        return
    if target.source.experts is not None and target.source.topology.zero == 3:
        _write_partitioned_experts(target)
    first_layers: dict[int, int] = {}  # of each stage, which counts its layers of experts from 0
    for (layer, expert), like in target.source.expert_files.items():
        if target.source.experts is not None and target.source.experts.stacked:
            _write_slices(target, layer, expert, {name: tensor.dtype for name, tensor in like.value.items()})
            continue
        value = StatefulDict() if isinstance(like.value, StatefulDict) else {}
        for name, tensor in like.value.items():
            value[name] = new_tensor(tensor.dtype, tensor.shape)
        pp = target.find_stage(next(iter(value), ""))
        number = layer - first_layers.setdefault(pp, layer)
        file = target.add_file(names.expert_file(number, expert, pp * target.topology.tp), value)
        for name, tensor in value.items():
            file.add_weight(target.params.get(name) or target.weights[name], tensor, 0, 0)


def _write_slices(target: Target, layer: int, expert: int, dtypes: Mapping[str, str]) -> None:
    """Write an expert's slices of stacks (AutoEP), for each tensor-parallel rank that saves them.

    `dtypes` has the types of the slices by their names.
    """
    topology = target.topology
    stacks = {name: target.params[name.rpartition(".")[0]] for name in dtypes}
    count = next(iter(stacks.values())).shape[0]
    for copy, (tp, dp) in enumerate(autoep.list_writers(topology, expert * topology.ep // count).items()):
        tensors = {name: new_tensor(dtype, stacks[name].shape[1:]) for name, dtype in dtypes.items()}
        value = target.fold(dict(tensors), dp, tp, "routed_expert")
        file = target.add_file(names.expert_file(layer, expert, tp), value)
        for name, tensor in tensors.items():
            file.add_expert(stacks[name], tensor, expert, copy)


def _write_partitioned_experts(target: Target) -> None:
    """Write the files of the experts of a ZeRO-3 source, which has none: the weights are its rounded master weights."""
    layers = autoep.read_layers(target.source.models[0, 0].value)
    dtype = target.source.half_type or "float32"
    for layer in layers:
        stacks = [f"{layer['expert_key_prefix']}.{weight}" for weight in autoep.WEIGHTS]
        for expert in range(int(layer["num_experts"])):
            dtypes = dict.fromkeys((f"{stack}.{expert}" for stack in stacks), dtype)
            _write_slices(target, int(layer["moe_layer_id"]), expert, dtypes)


def _list_stage_module(target: Target, pp: int, tp: int) -> StatefulDict:
    """Return `module` of a stage, with the tensors of the source's stages."""
    source = target.source
    ranks = [stage * source.topology.tp + min(tp, source.topology.tp - 1) for stage in range(source.topology.pp)]
    modules = [source.models[rank, 0].value["module"] for rank in ranks]
    if not target.bounds and target.topology.pp > 1:  # the stages are the source's
        own: StatefulDict = modules[pp]
        return own
    layers = range(target.bounds[pp], target.bounds[pp + 1]) if target.bounds else None
    merged = StatefulDict(merge_modules(target.extra.model, modules, layers))
    merged.state = modules[0].state
    return merged


def _make_param_shapes(target: Target, buffer: Buffer, tp: int) -> StatefulDict:
    return StatefulDict(
        (name, Size(target.shard(whole, tp))) for name, whole in zip(buffer.names, buffer.whole, strict=True)
    )


def _make_module(target: Target, like: StatefulDict, template: Template, tp: int) -> tuple[StatefulDict, Module]:
    """Return the module's state dict with new shapes; a tied weight's second name shares the first one's tensor."""
    module = StatefulDict()
    own: Module = {}
    module.state = template.copy(like.state)
    for name, tensor in like.items():
        twin = target.extra.aliases.get(name)
        if twin in module:
            module[name] = module[twin]
        elif name in target.params or name in target.weights:
            module[name] = new_tensor(tensor.dtype, target.shard(name, tp))
            own[name] = (target.params.get(name) or target.weights[name], module[name])
        elif target.source.topology.zero < 3 or tensor.num_elements:  # else a second name of a weight that is not saved
            raise UnsupportedError(f"the module holds {name}, which is neither parameter nor buffer")
    return module, own


def _make_frozen(target: Target, like: dict[str, Any], module: StatefulDict, tp: int) -> dict[str, Any]:
    """Return the entries of frozen parameters; ZeRO-2 saves the same tensors there and in the module.

    A run with `exclude_frozen_parameters` saves none. The entries must then be None: in any other value, such as an
    empty dict, DeepSpeed looks up every frozen parameter (engine.py 0.19.8, `load_module_state_dict`).
    """
    frozen = list_frozen_names(target, like)
    if target.topology.zero < 2 or (not frozen and like.get("frozen_param_shapes") is None):
        return {"frozen_param_shapes": None, "frozen_param_fragments": None}
    return {
        "frozen_param_shapes": target.shapes(frozen, tp),
        "frozen_param_fragments": StatefulDict((name, module[name]) for name in frozen),
    }


def list_frozen_names(target: Target, like: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the first names of the frozen parameters, without the second names of tied ones."""
    second = target.source.models[0, 0].value.get("shared_params")
    others = {*(like.get("buffer_names") or ()), *(second or ())}
    return tuple(name for name in target.weights if name not in others)


def _list_buffer_names(target: Target, pp: int) -> list[str]:
    """Return the names of the buffers in a stage's layers, collected from all stages of the source."""
    if not target.bounds and target.topology.pp > 1:  # the stages are the source's
        return list(target.source.models[target.like(pp, 0), 0].value.get("buffer_names") or ())
    names_of_all: dict[str, None] = {}
    for file in target.source.models.values():
        names_of_all.update(dict.fromkeys(file.value.get("buffer_names") or ()))
    if target.topology.pp == 1:
        return list(names_of_all)
    layers = range(target.bounds[pp], target.bounds[pp + 1])
    return [name for name in names_of_all if is_inside(target.extra.model, name, layers)]
