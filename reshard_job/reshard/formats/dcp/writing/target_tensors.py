"""Choose the tensors of the target, their paths in its state dict, and the source tensor of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from reshard.errors import UnsupportedError
from reshard.formats.base import Request
from reshard.formats.dcp.metadata import StatePath
from reshard.formats.dcp.reader import DcpExtra
from reshard.tensors.layout import PADDING, Index, LogicalTensor, TensorKey

MODEL, OPTIMIZER = "model", "optim"
"""Containers for tensors of another format, named as in torch's own examples."""

_FLOATS = frozenset(("float64", "float32", "float16", "bfloat16"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetTensor:
    """A tensor of the target.

    Attributes:
        path: its path in the state dict.
        tensor: the logical tensor that the reader will return.
        origin: position in `Index.tensors` of the source tensor.
    """

    path: StatePath
    tensor: LogicalTensor
    origin: int


def keep_tensors(index: Index, request: Request, extra: DcpExtra) -> Iterator[TargetTensor]:
    """Yield every tensor of a DCP source, at its own path."""
    for at, tensor in enumerate(index.tensors):
        dtype = tensor.dtype
        if tensor.key.state == "weight" and dtype in _FLOATS:
            dtype = request.weight_dtype or dtype
        yield TargetTensor(path=extra.paths[tensor.key], tensor=dataclasses.replace(tensor, dtype=dtype), origin=at)


def name_tensors(index: Index, request: Request) -> list[TargetTensor]:
    """Name the tensors of another format: weights (masters, if any) under `model`, states flattened under `optim`."""
    at = {tensor.key: number for number, tensor in enumerate(index.tensors)}
    names = dict.fromkeys(key.name for key in at if key.state in ("weight", "fp32") and not _is_padding(key))
    second: dict[str, list[str]] = {}
    for other, name in index.aliases.items():
        second.setdefault(name, []).append(other)
    tensors: list[TargetTensor] = []
    for name in names:
        origin, dtype = _choose_weight(index, at, name, request.weight_dtype)
        for alias in (name, *second.get(name, ())):
            tensor = dataclasses.replace(index.tensors[origin], key=TensorKey("weight", alias), dtype=dtype)
            tensors.append(TargetTensor(path=(MODEL, alias), tensor=tensor, origin=origin))
    for key, number in at.items():
        if key.state not in ("weight", "fp32") and not _is_padding(key):
            path: StatePath = (OPTIMIZER, f"state.{key.name}.{key.state}")
            tensors.append(TargetTensor(path=path, tensor=index.tensors[number], origin=number))
    return tensors


def _choose_weight(index: Index, at: dict[TensorKey, int], name: str, asked: str | None) -> tuple[int, str]:
    """Choose source tensor and dtype of a weight: its master weight, if there is one, as FSDP2 stores parameters."""
    weight, master = at.get(TensorKey("weight", name)), at.get(TensorKey("fp32", name))
    if weight is not None and (master is None or index.tensors[weight].dtype == asked):
        dtype = index.tensors[weight].dtype
        return weight, asked if asked is not None and dtype in _FLOATS else dtype
    assert master is not None
    return master, asked or index.tensors[master].dtype


def _is_padding(key: TensorKey) -> bool:
    return key.name.endswith(PADDING)


def has_only_weights(index: Index) -> bool:
    """Return True if the source has no optimizer states: its format has none, or the user left them out."""
    return all(tensor.key.state in ("weight", "fp32") for tensor in index.tensors)


def place_like(tensors: Iterable[TargetTensor], index: Index, like: Index, extra: DcpExtra) -> list[TargetTensor]:
    """Move the tensors to the paths that they have in `like`, a checkpoint of the same model.

    Raises:
        UnsupportedError: the two do not hold the same tensors; if the source has weights only, the same weights.
    """
    shapes = {tensor.key: tensor.shape for tensor in like.tensors}
    scalars = {TensorKey(state, name) for group in index.groups for name in group.names for state in group.scalars}
    placed: list[TargetTensor] = []
    problems: list[str] = []
    for item in tensors:
        key = item.tensor.key
        if key not in extra.paths:
            problems.append(f"{key} is not in the checkpoint that the target shall be like")
        elif shapes[key] != item.tensor.shape:
            problems.append(f"{key} is {list(item.tensor.shape)}, and {list(shapes[key])} in the one it shall be like")
        else:
            placed.append(dataclasses.replace(item, path=extra.paths[key]))
    wanting = {key for key in shapes if key.state == "weight" or not has_only_weights(index)}
    missing = wanting - {item.tensor.key for item in placed} - scalars
    problems += [f"{key} is only in the checkpoint that the target shall be like" for key in sorted(missing)]
    if problems:
        raise UnsupportedError(
            f"{len(problems)} tensors do not fit",
            path=str(like.root),
            problems=problems[:20],
            hint="name with --like a checkpoint of the same model and optimizer, or give a map of names",
        )
    return placed


def list_notes(index: Index, request: Request, extra: DcpExtra | None = None) -> tuple[str, ...]:
    """List notes about what the source holds and a target with another state dict does not."""
    notes = []
    keys = {tensor.key: tensor.dtype for tensor in index.tensors}
    rounded = [
        key
        for key, dtype in keys.items()
        if key.state == "weight" and keys.get(TensorKey("fp32", key.name), dtype) != dtype
    ]
    if rounded and keys[rounded[0]] != request.weight_dtype:
        notes.append(
            f"{len(rounded)} weights of type {keys[rounded[0]]} are left behind: model.* holds the fp32 master weights "
            "that they are rounded from, as FSDP2 keeps fp32 parameters under mixed precision"
        )
    if padding := sorted({key.name.removesuffix(PADDING) for key in keys if _is_padding(key)}):
        notes.append(f"padding rows of {', '.join(padding)} are left behind: the target has the vocabulary's true size")
    if not any(group.options for group in index.groups) and any(key.state not in ("weight", "fp32") for key in keys):
        notes.append("the source says nothing of the optimizer's settings: optim.param_groups of the target has none")
    if extra is not None and extra.naming.rest:
        notes.append(f"left behind, as tensors have other names than in the source: {', '.join(index.notes)}")
    return tuple(notes)
