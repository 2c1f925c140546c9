"""Names of parameters that DeepSpeed's optimizers leave out: those of ZeRO-0, and of experts before 0.19.

ZeRO-0 numbers its parameters, and names follow from the order of the module. Before 0.19, the model files of a training
with experts name no parameter of the optimizer, and each rank's partition does.

Sources: deepspeed/runtime/engine.py, runtime/fp16/unfused_optimizer.py and fused_optimizer.py of 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.witness.opened import OpenedFile
from reshard.witness.pickles import NotWitnessedError, StoredTensor

Shape = tuple[int, ...]
State = tuple[str, str, StoredTensor, int, Shape]
"""State, name, the tensor that holds it, the first element in that tensor, and the shape."""

_MOST_WAYS = 100_000
_FLAT = "fp32_groups_flat"


def read_states(optimizer: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Iterator[State]:
    """Yield every state of every parameter.

    Args:
        optimizer: as the model file holds it.
        shapes: names and shapes of the module's parameters, in its order.

    Raises:
        NotWitnessedError: the names do not follow from the order.
    """
    inner = optimizer.get("optimizer_state_dict", optimizer)
    groups, states = inner["param_groups"], inner["state"]
    named = [group.get("param_names") for group in groups]
    if _FLAT in optimizer:
        names = _flat_names(named, optimizer[_FLAT], shapes)
        for group, group_names, master in zip(groups, names, optimizer[_FLAT], strict=True):
            tensors = {"fp32": master, **_tensors(states.get(group["params"][0]))}
            for state, tensor in tensors.items():
                start = 0
                for name in group_names:
                    yield state, name, tensor, start, shapes[name]
                    start += math.prod(shapes[name])
        return
    masters = optimizer.get("fp32_groups")
    found = [[_tensors(states.get(number)) for number in group["params"]] for group in groups]
    if masters is not None:
        found = [
            [{"fp32": m, **own} for m, own in zip(*pair, strict=True)] for pair in zip(masters, found, strict=True)
        ]
    known = [[next((tensor.shape for tensor in own.values()), None) for own in group] for group in found]
    if all(isinstance(names, list) and len(names) == len(group) for names, group in zip(named, known, strict=True)):
        assigned = named
    else:
        assigned = assign_names(known, shapes)
    for names, group in zip(assigned, found, strict=True):
        for name, own in zip(names, group, strict=True):
            for state, tensor in own.items():
                yield state, name, tensor, 0, tensor.shape


def _tensors(state: Any) -> dict[str, StoredTensor]:
    values = state.items() if isinstance(state, Mapping) else ()
    return {key: value for key, value in values if isinstance(value, StoredTensor) and value.shape}


def _flat_names(named: Sequence[Any], flat: Sequence[StoredTensor], shapes: Mapping[str, Shape]) -> list[list[str]]:
    if all(isinstance(names, list) for names in named):
        return [[name for name in names if name in shapes] for names in named]
    if len(flat) == 1 and flat[0].shape == (sum(math.prod(shape) for shape in shapes.values()),):
        return [list(shapes)]
    raise NotWitnessedError("the optimizer of ZeRO-0 holds several flat groups and does not name their parameters")


def assign_names(groups: Sequence[Sequence[Shape | None]], shapes: Mapping[str, Shape]) -> list[list[str]]:
    """Return the names of each group's parameters; each group has its parameters in the module's order.

    Raises:
        NotWitnessedError: not exactly one assignment fits all shapes.
    """
    lengths = tuple(map(len, groups))
    spare = len(shapes) - sum(lengths)  # parameters that no group trains
    start = (0,) * len(groups)
    layers: list[dict[tuple[int, ...], tuple[int, tuple[int, ...] | None, int]]] = [{start: (1, None, -1)}]
    for number, shape in enumerate(shapes.values()):
        reached: dict[tuple[int, ...], tuple[int, tuple[int, ...] | None, int]] = {}
        for at, (ways, _, _) in layers[-1].items():
            steps = [(at, -1)] if number - sum(at) < spare else []
            for group, place in enumerate(at):
                if place < lengths[group] and groups[group][place] in (None, shape):
                    steps.append(((*at[:group], place + 1, *at[group + 1 :]), group))
            for target, group in steps:
                known = reached.get(target, (0, None, -1))[0]
                reached[target] = (known + ways, at, group)
        if len(reached) > _MOST_WAYS:
            raise NotWitnessedError("the optimizer of ZeRO-0 does not name its parameters")
        layers.append(reached)
    if layers[-1].get(lengths, (0, None, -1))[0] != 1:
        raise NotWitnessedError("the optimizer of ZeRO-0 does not name its parameters, and several orders fit")
    names: list[list[str]] = [[] for _ in groups]
    here = lengths
    for name, layer in zip(reversed(list(shapes)), reversed(layers[1:]), strict=True):
        _, before, group = layer[here]
        if group >= 0:
            names[group].insert(0, name)
        assert before is not None
        here = before
    return names


def read_shapes_of_older_experts(
    model: OpenedFile, experts: Sequence[OpenedFile], optimizers: Sequence[OpenedFile]
) -> list[dict[str, tuple[int, ...]]]:
    """Return names and shapes of each group, in the order of its buffer, as on the ranks of the first experts.

    Each rank's `param_slice_mappings` lists the parameters in its partition by position.

    Args:
        model: the one model file.
        experts: files of experts.
        optimizers: `[dp]`, files of the optimizer.

    Raises:
        NotWitnessedError: a parameter has no weight that would tell its shape.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.value["module"].items() if hasattr(tensor, "shape")}
    for file in experts:
        shapes |= {name: tuple(tensor.shape) for name, tensor in file.value.items()}
    groups: list[dict[str, tuple[int, ...]]] = []
    for at, count in enumerate(optimizers[0].find("optimizer_state_dict", "partition_count") or ()):
        names: dict[str, tuple[int, ...]] = {}
        for file in optimizers[:: len(optimizers) // int(count)]:
            for name in _order(file.find("optimizer_state_dict", "param_slice_mappings")[at]):
                if name not in shapes:
                    raise NotWitnessedError(f"the shape of {name}, which no file of weights holds")
                names[name] = shapes[name]
        groups.append(names)
    return groups


def _order(mapping: Mapping[str, Any]) -> list[str]:
    return sorted(mapping, key=lambda name: int(mapping[name].field("start")))
