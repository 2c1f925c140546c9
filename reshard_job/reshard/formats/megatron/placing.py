"""Which tensors the target has, and which tensor of the source each is made of: those of an example, one for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from reshard.errors import UnsupportedError
from reshard.formats.megatron.example import Home, MegatronExtra
from reshard.tensors.cast import can_cast
from reshard.tensors.layout import PADDING, Index, LogicalTensor, TensorKey

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Megatron-Core loads these whatever their number of rows, and pads them itself (`allow_shape_mismatch`)."""

_MODEL = ("weight", "fp32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor of the target.

    Attributes:
        home: where the example has it.
        tensor: as the reader will find it.
        origin: source tensor that it is made of, position in `Index.tensors`.
    """

    home: Home
    tensor: LogicalTensor
    origin: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """All of them.

    Attributes:
        tensors: in the example's order.
        optimizer: the optimizer's states are among them.
        notes: what of the source is left behind or changed.
    """

    tensors: tuple[Placed, ...]
    optimizer: bool
    notes: tuple[str, ...]


def place(index: Index, extra: MegatronExtra, weight_dtype: str | None, where: str) -> Placing:
    """Give every tensor of the example its origin; without any state of an optimizer, the weights alone.

    Raises:
        UnsupportedError: tensors that one of the two lacks, of other shapes, or of types that cannot be written.
    """
    at = _positions(index)
    optimizer = _has_optimizer(at, extra.homes)
    problems: list[str] = []
    placed: list[Placed] = []
    for key, home in extra.homes.items():
        if key.state != "weight" and not optimizer:
            continue
        asked = weight_dtype if weight_dtype is not None and can_cast(home.dtype, weight_dtype) else None
        masters = optimizer and TensorKey("fp32", key.name) in extra.homes
        found = _origin(key, home, asked, at, index, masters=masters, optimizer=optimizer)
        if found is None:
            problems.append(f"{key} {list(home.shape)} is not in the source")
            continue
        origin, dtype = found
        shape = index.tensors[origin].shape
        if shape != home.shape and not _other_rows(key.name, shape, home.shape):
            problems.append(f"{key} is {list(shape)}, and {list(home.shape)} in the one it shall be like")
        elif not can_cast(index.tensors[origin].dtype, dtype):
            problems.append(f"{key}: {index.tensors[origin].dtype} cannot be written as {dtype}")
        else:
            placed.append(Placed(home=home, tensor=LogicalTensor(key=key, shape=shape, dtype=dtype), origin=origin))
    problems += _homeless(index, extra.homes, placed, optimizer)
    problems += _uneven(placed)
    if problems:
        raise UnsupportedError(
            f"{len(problems)} tensors do not fit",
            path=where,
            problems=problems[:20],
            hint="name with --like a Megatron-Core checkpoint of the same model and optimizer, saved with "
            "--dist-ckpt-optim-fully-reshardable, give a map of names, or take the weights alone (--states weight)",
        )
    return Placing(tensors=tuple(placed), optimizer=optimizer, notes=tuple(_notes(index, extra, placed, optimizer)))


def _positions(index: Index) -> dict[TensorKey, int]:
    """Of each tensor, also under its second name."""
    at = {tensor.key: number for number, tensor in enumerate(index.tensors)}
    for second, name in index.aliases.items():
        at |= {
            TensorKey(key.state, second): number
            for key, number in list(at.items())
            if key.name == name and TensorKey(key.state, second) not in at
        }
    return at


def _has_optimizer(at: Mapping[TensorKey, int], homes: Mapping[TensorKey, Home]) -> bool:
    """Whether the source has an optimizer: master weights alone are none, unless the example has no more."""
    held = {key.state for key in at} - {"weight"}
    known = {key.state for key in homes} - {"weight"}
    return bool(held - {"fp32"}) or (held == known == {"fp32"})


def _origin(
    key: TensorKey,
    home: Home,
    asked: str | None,
    at: Mapping[TensorKey, int],
    index: Index,
    *,
    masters: bool,
    optimizer: bool,
) -> tuple[int, str] | None:
    """Source tensor and type of a tensor of the target.

    A weight that is made of a master weight has the type that is asked for, or else the example's. One that is all
    there is of a parameter keeps its type.

    Args:
        key: of the tensor.
        home: where the example has it.
        asked: type that is asked for, or None.
        at: positions of the source's tensors.
        index: the source.
        masters: the target has master weights besides.
        optimizer: the target has states of the optimizer.
    """
    own, master = at.get(key), at.get(TensorKey("fp32", key.name))
    if key.state == "weight":
        dtype = asked or home.dtype
        goes_on = optimizer and not masters and dtype == "float32"  # it is what the optimizer goes on with
        if master is not None and (own is None or index.tensors[own].dtype != dtype or goes_on):
            return master, dtype
        if own is None:
            return None
        is_master = masters and master is None and index.tensors[own].dtype == "float32"
        return own, dtype if asked or is_master else index.tensors[own].dtype
    if own is None and key.state == "fp32":
        weight = at.get(TensorKey("weight", key.name))
        own = weight if weight is not None and index.tensors[weight].dtype == "float32" else None
    return None if own is None else (own, index.tensors[own].dtype)


def _other_rows(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return name in _VOCABULARY and len(shape) == len(expected) and shape[1:] == expected[1:]


def _homeless(index: Index, homes: Mapping[TensorKey, Home], placed: list[Placed], optimizer: bool) -> Iterator[str]:
    """Tensors of the source that the example has no place for, but for weights and master weights that it has once."""
    used = {item.origin for item in placed}
    seconds: dict[str, list[str]] = {}
    for second, name in index.aliases.items():
        seconds.setdefault(name, []).append(second)
    for number, tensor in enumerate(index.tensors):
        key = tensor.key
        if number in used or key.name.endswith(PADDING):
            continue
        names = (key.name, *seconds.get(key.name, ()))
        states = (key.state,) if optimizer or key.state not in _MODEL else _MODEL
        if not any(TensorKey(state, name) in homes for name in names for state in states):
            yield f"{key} {list(tensor.shape)} is not in the checkpoint that the target shall be like"


def _uneven(placed: list[Placed]) -> Iterator[str]:
    """Layers that are one entry are of one type."""
    types: dict[str, str] = {}
    for item in placed:
        if types.setdefault(item.home.key, item.tensor.dtype) != item.tensor.dtype:
            yield f"{item.tensor.key} is {item.tensor.dtype}, an earlier layer {types[item.home.key]}: one entry"


def _notes(index: Index, extra: MegatronExtra, placed: list[Placed], optimizer: bool) -> Iterator[str]:
    used = {item.origin for item in placed}
    rounded = [item for item in placed if index.tensors[item.origin].dtype != item.tensor.dtype]
    if rounded:
        first = index.tensors[rounded[0].origin]
        yield f"{len(rounded)} weights are converted from {first.dtype} to {rounded[0].tensor.dtype}"
    left = [
        tensor for at, tensor in enumerate(index.tensors) if at not in used and not tensor.key.name.endswith(PADDING)
    ]
    for state in _MODEL:
        if number := sum(tensor.key.state == state for tensor in left):
            yield f"{number} tensors {state}/* are left behind"
    if padding := sorted(
        {tensor.key.name.removesuffix(PADDING) for tensor in index.tensors if tensor.key.name.endswith(PADDING)}
    ):
        yield f"padding rows of {', '.join(padding)} are left behind: Megatron-Core pads the vocabulary when it loads"
    resized = [item for item in placed if item.tensor.shape != item.home.shape]
    if resized:
        names = ", ".join(f"{item.tensor.key} {list(item.tensor.shape)}" for item in resized[:3])
        yield f"with the vocabulary of the source, which Megatron-Core pads when it loads: {names}"
    if not optimizer:
        lost = " (they are laid out for the optimizer's own buffers)" if extra.buckets else ""
        yield f"no states of an optimizer{lost}: weights alone, which load with --no-load-optim or --finetune"
