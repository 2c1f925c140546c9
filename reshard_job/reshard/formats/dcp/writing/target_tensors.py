"""Which tensors the target has, where they are in its state dict, and which tensor of the source each is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from reshard.errors import UnsupportedError
from reshard.formats.base import Request
from reshard.formats.dcp.metadata import Path_
from reshard.formats.dcp.reader import DcpExtra
from reshard.tensors.layout import PADDING, Index, LogicalTensor, TensorKey

MODEL, OPTIMIZER = "model", "optim"
"""Where tensors of another format go: what torch's own examples call it."""

_FLOATS = frozenset(("float64", "float32", "float16", "bfloat16"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tensor of the target.

    Attributes:
        path: where it is in the state dict.
        tensor: as the reader will find it.
        origin: source tensor that it is made of, position in `Index.tensors`.
    """

    path: Path_
    tensor: LogicalTensor
    origin: int


def own_tensors(index: Index, request: Request, extra: DcpExtra) -> Iterator[Wanted]:
    """From a DCP source: every tensor where it is."""
    for at, tensor in enumerate(index.tensors):
        dtype = tensor.dtype
        if tensor.key.state == "weight" and dtype in _FLOATS:
            dtype = request.weight_dtype or dtype
        yield Wanted(path=extra.paths[tensor.key], tensor=dataclasses.replace(tensor, dtype=dtype), origin=at)


def named_tensors(index: Index, request: Request) -> list[Wanted]:
    """From another format: weights (master weights, if there are any) under `model`, states flattened under `optim`."""
    at = {tensor.key: number for number, tensor in enumerate(index.tensors)}
    names = dict.fromkeys(key.name for key in at if key.state in ("weight", "fp32") and not _is_padding(key))
    second: dict[str, list[str]] = {}
    for other, name in index.aliases.items():
        second.setdefault(name, []).append(other)
    wanted: list[Wanted] = []
    for name in names:
        origin, dtype = _weight(index, at, name, request.weight_dtype)
        for known in (name, *second.get(name, ())):
            tensor = dataclasses.replace(index.tensors[origin], key=TensorKey("weight", known), dtype=dtype)
            wanted.append(Wanted(path=(MODEL, known), tensor=tensor, origin=origin))
    for key, number in at.items():
        if key.state not in ("weight", "fp32") and not _is_padding(key):
            path: Path_ = (OPTIMIZER, f"state.{key.name}.{key.state}")
            wanted.append(Wanted(path=path, tensor=index.tensors[number], origin=number))
    return wanted


def _weight(index: Index, at: dict[TensorKey, int], name: str, asked: str | None) -> tuple[int, str]:
    """Source tensor and type of a weight: the master weight where there is one, as FSDP2 keeps its parameters."""
    weight, master = at.get(TensorKey("weight", name)), at.get(TensorKey("fp32", name))
    if weight is not None and (master is None or index.tensors[weight].dtype == asked):
        dtype = index.tensors[weight].dtype
        return weight, asked if asked is not None and dtype in _FLOATS else dtype
    assert master is not None
    return master, asked or index.tensors[master].dtype


def _is_padding(key: TensorKey) -> bool:
    return key.name.endswith(PADDING)


def weights_alone(index: Index) -> bool:
    """The source has no state of an optimizer: it comes from a format without, or none was asked for."""
    return all(tensor.key.state in ("weight", "fp32") for tensor in index.tensors)


def placed_like(wanted: Iterable[Wanted], index: Index, like: Index, extra: DcpExtra) -> list[Wanted]:
    """The same tensors where a checkpoint of the same model has them; from weights alone, without its optimizer.

    Raises:
        UnsupportedError: the two do not hold the same tensors.
    """
    shapes = {tensor.key: tensor.shape for tensor in like.tensors}
    scalars = {TensorKey(state, name) for group in index.groups for name in group.names for state in group.scalars}
    found: list[Wanted] = []
    problems: list[str] = []
    for item in wanted:
        key = item.tensor.key
        if key not in extra.paths:
            problems.append(f"{key} is not in the checkpoint that the target shall be like")
        elif shapes[key] != item.tensor.shape:
            problems.append(f"{key} is {list(item.tensor.shape)}, and {list(shapes[key])} in the one it shall be like")
        else:
            found.append(dataclasses.replace(item, path=extra.paths[key]))
    wanting = {key for key in shapes if key.state == "weight" or not weights_alone(index)}
    missing = wanting - {item.tensor.key for item in found} - scalars
    problems += [f"{key} is only in the checkpoint that the target shall be like" for key in sorted(missing)]
    if problems:
        raise UnsupportedError(
            f"{len(problems)} tensors do not fit",
            path=str(like.root),
            problems=problems[:20],
            hint="name with --like a checkpoint of the same model and optimizer, or give a map of names",
        )
    return found


def notes_on(index: Index, request: Request, extra: DcpExtra | None = None) -> tuple[str, ...]:
    """What of a source the target does not hold, where it is not the source's own state dict."""
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
