"""Read the optimizer of ZeRO-0, which a tensor-parallel rank saves as a whole inside its model file.

fp32 training saves the state dict of the torch optimizer. bf16 training saves that of `FP16_UnfusedOptimizer` around
it, with master weights, or that of `FP16_Optimizer` around DeepSpeed's `FusedAdam`, where each group is a flat tensor.
The optimizer numbers parameters and does not name them. Names follow from the module's order, group by group.
Source: deepspeed/runtime/engine.py, `_common_checkpoint_state`, runtime/fp16/unfused_optimizer.py and
fused_optimizer.py (0.19.8).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.deepspeed.contents import DeepSpeedContents
from reshard.formats.deepspeed.matching import Shape, match_names, match_sizes
from reshard.formats.deepspeed.pipeline import PipelineInfo
from reshard.formats.deepspeed.scalars import require_plain
from reshard.formats.pt.objects import Storage, Tensor, contiguous_stride
from reshard.formats.pt.reader import PtFile, read_tensor_bytes

_SAMPLE = 8  # elements of each parameter that are compared
FLAT_MASTERS = "fp32_groups_flat"
"""Key that only `FP16_Optimizer` saves: `[groups]`, master weights of a group one after the other, without padding."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParamState:
    """States of one parameter.

    Attributes:
        tensors: state (`fp32` where there are master weights, `exp_avg`, ...) -> tensor of the parameter's shape.
        scalars: the other states, as saved (`step`).
        order: names of the optimizer's states in its own order.
    """

    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, Any]
    order: tuple[str, ...]


def unwrap_optimizer(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state dict of the torch optimizer, with or without a wrapper around it."""
    inner = optimizer.get("optimizer_state_dict", optimizer)
    return inner if isinstance(inner, Mapping) else {}


def read_param_states(
    optimizer: Mapping[str, Any], path: str, named: Sequence[Mapping[str, Shape]]
) -> list[list[ParamState]]:
    """Return the states of every parameter, `[groups][params]`.

    Args:
        optimizer: as saved.
        path: of the file, for messages.
        named: names and shapes of the parameters of each group, in the same order.

    Raises:
        CorruptSourceError: states are missing or contradict each other.
        UnsupportedError: a state has neither one value per weight nor one per parameter.
    """
    saved = _read_saved_states(optimizer, path)
    if FLAT_MASTERS not in optimizer:
        return saved
    return [_cut(group[0], shapes, path) for group, shapes in zip(saved, named, strict=True)]


def _cut(flat: ParamState, shapes: Mapping[str, Shape], path: str) -> list[ParamState]:
    """Cut the states of a flat group into those of its parameters."""
    *starts, end = 0, *itertools.accumulate(math.prod(shape) for shape in shapes.values())
    if wrong := [tensor.shape for tensor in flat.tensors.values() if tensor.shape != (end,)]:
        raise CorruptSourceError(f"a flat group of {end} elements has a state of the shape {wrong[0]}", path=path)
    return [
        dataclasses.replace(
            flat, tensors={key: make_view(tensor, start, shape) for key, tensor in flat.tensors.items()}
        )
        for start, shape in zip(starts, shapes.values(), strict=True)
    ]


def make_view(flat: Tensor, start: int, shape: Shape) -> Tensor:
    """Return a contiguous view of a flat tensor that begins at element `start`."""
    return dataclasses.replace(flat, offset=flat.offset + start, shape=shape, stride=contiguous_stride(shape))


def _read_saved_states(optimizer: Mapping[str, Any], path: str) -> list[list[ParamState]]:
    """Return the states in the optimizer's own order, `[groups][params]`; a flat group has one entry."""
    inner = unwrap_optimizer(optimizer)
    groups, states = inner.get("param_groups"), inner.get("state")
    masters = optimizer.get("fp32_groups")
    if FLAT_MASTERS in optimizer:
        flat = optimizer[FLAT_MASTERS]
        if not isinstance(flat, list) or not all(isinstance(item, Tensor) and item.shape for item in flat):
            raise CorruptSourceError(f"its {FLAT_MASTERS} is no list of flat tensors", path=path)
        masters = [[master] for master in flat]
    if not isinstance(groups, list) or not isinstance(states, Mapping):
        raise CorruptSourceError("its optimizer has no state and param_groups", path=path)
    if masters is not None and [len(group) for group in masters] != [len(group["params"]) for group in groups]:
        raise CorruptSourceError("its fp32_groups do not fit the optimizer's param_groups", path=path)
    saved = [
        [
            _split(states.get(number, {}), None if masters is None else masters[at][place], number, path)
            for place, number in enumerate(group["params"])
        ]
        for at, group in enumerate(groups)
    ]
    if FLAT_MASTERS in optimizer:
        _check_flat([state for group in saved for state in group], path)
    return saved


def _check_flat(states: Sequence[ParamState], path: str) -> None:
    """Check that flat groups are contiguous and have all states, which FP16_Optimizer creates in its constructor."""
    if any(tensor.stride != (1,) for state in states for tensor in state.tensors.values()):
        raise CorruptSourceError(f"its {FLAT_MASTERS}, or a state of one, is not contiguous", path=path)
    if len({frozenset(state.order) for state in states}) > 1 or not all(state.order for state in states):
        raise CorruptSourceError("a flat group of its optimizer lacks states", path=path)


def _split(states: Any, master: Tensor | None, number: int, path: str) -> ParamState:
    if not isinstance(states, Mapping):
        raise CorruptSourceError(f"the states of parameter {number} are {states!r:.80}, expected a dict", path=path)
    tensors: dict[str, Tensor] = {} if master is None else {"fp32": master}
    scalars: dict[str, Any] = {}
    for key, value in states.items():
        if not isinstance(value, Tensor) or not value.shape:
            require_plain(key, value, path)
            scalars[key] = value
        else:
            tensors[key] = value
    shapes = {tensor.shape for tensor in tensors.values()}
    if len(shapes) > 1:
        raise UnsupportedError(
            f"the states of parameter {number} have the shapes {sorted(shapes)}",
            path=path,
            hint="only states with one value per weight, or one per parameter, are converted",
        )
    return ParamState(tensors=tensors, scalars=scalars, order=tuple(states))


def find_names(optimizer: Mapping[str, Any], module: Mapping[str, Tensor], file: PtFile) -> list[dict[str, Shape]]:
    """Find names and shapes of the shards of every parameter group, in the optimizer's order, like `param_shapes`.

    Raises:
        UnsupportedError: the names do not follow from the file.
    """
    states = _read_saved_states(optimizer, file.path)
    shapes = [[next((t.shape for t in state.tensors.values()), None) for state in group] for group in states]
    saved = [group.get("param_names") for group in unwrap_optimizer(optimizer)["param_groups"]]
    flat = FLAT_MASTERS in optimizer
    if all(
        isinstance(names, list) and (flat or len(names) == len(group))
        for names, group in zip(saved, states, strict=True)
    ):
        return [{name: module[name].shape for name in names if name in module} for names in saved]
    unknown = [(at, place) for at, group in enumerate(shapes) for place, shape in enumerate(group) if shape is None]
    if unknown:
        at, place = unknown[0]
        raise UnsupportedError(
            f"{len(unknown)} parameters, such as number {place} of group {at}, have no state in the optimizer that"
            " would tell their shape (no gradient so far, or an optimizer without states)",
            path=file.path,
            hint="build the optimizer from named_parameters()",
        )
    candidates: list[tuple[str, Shape]] = []
    seen: set[tuple[int, int, Shape]] = set()
    buffers = set(file.value.get("buffer_names") or ())
    for name, tensor in module.items():
        identity = (id(tensor.storage), tensor.offset, tensor.shape)
        if name not in buffers and identity not in seen:  # a second name of a tied weight is no parameter of its own
            seen.add(identity)
            candidates.append((name, tensor.shape))
    known = [[shape for shape in group if shape is not None] for group in shapes]
    if flat:
        counts = [(name, math.prod(shape)) for name, shape in candidates]
        names = match_sizes([math.prod(shape) for (shape,) in known], counts, file.path)
        _check_order(names, dict(candidates), states, module, file)
    else:
        names = match_names(known, candidates, file.path)
    by_name = dict(candidates)
    return [{name: by_name[name] for name in own} for own in names]


def _check_order(
    groups: Sequence[Sequence[str]], shapes: Mapping[str, Shape], states: Sequence[Sequence[ParamState]],
    module: Mapping[str, Tensor], file: PtFile,
) -> None:  # fmt: skip
    """Check the order of parameters in flat groups by values, because sizes do not determine it.

    The first master weights of each parameter, rounded, must be its first weights.

    Raises:
        UnsupportedError: they are not.
    """
    for names, (state,) in zip(groups, states, strict=True):
        start = 0
        for name in names:
            count = min(_SAMPLE, math.prod(shapes[name])) if module[name].is_contiguous else 0
            master = np.frombuffer(_read_first(state.tensors["fp32"], start, count, file), "<f4")
            weight = _read_first(module[name], 0, count, file)
            if module[name].dtype == "bfloat16":
                bits = master.view("<u4").astype(np.uint64)
                rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
            else:
                rounded = master.astype("<f2").tobytes() if module[name].dtype == "float16" else weight
            if rounded != weight:
                raise UnsupportedError(
                    f"its optimizer holds flat groups in another order than the module's: {name} is not where its size"
                    " says",
                    path=file.path,
                    hint="train with ZeRO stage 1, or build the optimizer from named_parameters()",
                )
            start += math.prod(shapes[name])


def _read_first(tensor: Tensor, start: int, count: int, file: PtFile) -> bytes:
    return read_tensor_bytes(file.path, make_view(tensor, start, (count,)), limit_bytes=1 << 40)


def build_stage_module(source: DeepSpeedContents, info: PipelineInfo | None, pp: int, tp: int) -> dict[str, Tensor]:
    """Return the weights of a pipeline stage under the names of its PipelineModule: tied modules first, then layers.

    Raises:
        UnsupportedError: it is not known which layers the stage has, or which of them are tied.
        CorruptSourceError: the description has another number of stages.
    """
    parts = () if info is None else info.parts or ((0, info.num_layers) if source.topology.pp == 1 else ())
    if info is None or info.tied is None or not parts:
        raise UnsupportedError(
            "ZeRO-0 with a PipelineModule: its optimizer numbers parameters, and which layers each stage has, and which"
            " of them are tied, is not known",
            path=str(source.folder),
            hint="save with client_state={'pipeline_layout': {num_layers, partition_method, tied, parts}}, or train"
            " with zero_optimization.stage 1",
        )
    if len(parts) != source.topology.pp + 1:
        raise CorruptSourceError(
            f"has {source.topology.pp} pipeline stages, its pipeline_layout has the parts {list(parts)}",
            path=str(source.folder),
        )
    tied: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    keys = {layer: key for key, layers in info.tied.items() for layer in layers}
    for layer in range(parts[pp], parts[pp + 1]):
        weights, prefix = (own, f"{layer}.") if layer not in keys else (tied, f"tied_modules.{keys[layer]}.")
        places = info.tied[keys[layer]] if layer in keys else (layer,)  # a tied layer with a forward_fn has no file
        file = next((source.layers[at, tp] for at in places if (at, tp) in source.layers), None)
        storages: dict[int, Storage] = {}  # equal files share their storages, equal layers must not
        for name, tensor in ({} if file is None else file.value).items():
            storage = storages.setdefault(id(tensor.storage), dataclasses.replace(tensor.storage))
            weights.setdefault(prefix + name, dataclasses.replace(tensor, storage=storage))
    return tied | own
