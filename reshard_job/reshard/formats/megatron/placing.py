"""Choose the source tensor of each tensor of the target; the target has the tensors of an example."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from reshard.errors import UnsupportedError
from reshard.formats.megatron.example import MegatronExtra, TensorLocation
from reshard.tensors.cast import can_cast
from reshard.tensors.layout import PADDING, Index, LogicalTensor, TensorKey

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Megatron-Core loads these with any number of rows, and pads them itself (`allow_shape_mismatch`)."""

_MODEL = ("weight", "fp32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensor:
    """A tensor of the target.

    Attributes:
        location: its location in the example.
        tensor: the logical tensor that the reader will return.
        origin: position in `Index.tensors` of the source tensor.
    """

    location: TensorLocation
    tensor: LogicalTensor
    origin: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All tensors of the target.

    Attributes:
        tensors: the tensors, in the example's order.
        optimizer: the optimizer's states are among them.
        notes: messages about what of the source is left behind or changed.
    """

    tensors: tuple[PlacedTensor, ...]
    optimizer: bool
    notes: tuple[str, ...]


def place_tensors(index: Index, extra: MegatronExtra, weight_dtype: str | None, where: str) -> Placement:
    """Choose the source tensor of every tensor of the example; of its weights only, if the source has no optimizer.

    Raises:
        UnsupportedError: one of the two lacks a tensor, or shapes differ, or a dtype cannot be converted.
    """
    at = _number_tensors(index)
    optimizer = _has_optimizer(at, extra.locations)
    problems: list[str] = []
    placed: list[PlacedTensor] = []
    for key, location in extra.locations.items():
        if key.state != "weight" and not optimizer:
            continue
        asked_dtype = weight_dtype if weight_dtype is not None and can_cast(location.dtype, weight_dtype) else None
        masters = optimizer and TensorKey("fp32", key.name) in extra.locations
        choice = _choose_origin(key, location, asked_dtype, at, index, masters=masters, optimizer=optimizer)
        if choice is None:
            problems.append(f"{key} {list(location.shape)} is not in the source")
            continue
        origin, dtype = choice
        shape = index.tensors[origin].shape
        if shape != location.shape and not _differs_in_rows(key.name, shape, location.shape):
            problems.append(f"{key} is {list(shape)}, and {list(location.shape)} in the one it shall be like")
        elif not can_cast(index.tensors[origin].dtype, dtype):
            problems.append(f"{key}: {index.tensors[origin].dtype} cannot be written as {dtype}")
        else:
            placed.append(
                PlacedTensor(location=location, tensor=LogicalTensor(key=key, shape=shape, dtype=dtype), origin=origin)
            )
    problems += _find_unplaced(index, extra.locations, placed, optimizer)
    problems += _find_mixed_types(placed)
    if problems:
        raise UnsupportedError(
            f"{len(problems)} tensors do not fit",
            path=where,
            problems=problems[:20],
            hint="name with --like a Megatron-Core checkpoint of the same model and optimizer, saved with "
            "--dist-ckpt-optim-fully-reshardable, give a map of names, or take the weights alone (--states weight)",
        )
    return Placement(
        tensors=tuple(placed), optimizer=optimizer, notes=tuple(_list_notes(index, extra, placed, optimizer))
    )


def _number_tensors(index: Index) -> dict[TensorKey, int]:
    """Map each key to the position of its tensor in the source; a tied weight has a key for each of its names."""
    at = {tensor.key: number for number, tensor in enumerate(index.tensors)}
    for second, name in index.aliases.items():
        at |= {
            TensorKey(key.state, second): number
            for key, number in list(at.items())
            if key.name == name and TensorKey(key.state, second) not in at
        }
    return at


def _has_optimizer(at: Mapping[TensorKey, int], locations: Mapping[TensorKey, TensorLocation]) -> bool:
    """Return True if the source has an optimizer; master weights alone count only if the example has no more."""
    source_states = {key.state for key in at} - {"weight"}
    example_states = {key.state for key in locations} - {"weight"}
    return bool(source_states - {"fp32"}) or (source_states == example_states == {"fp32"})


def _choose_origin(
    key: TensorKey,
    location: TensorLocation,
    asked_dtype: str | None,
    at: Mapping[TensorKey, int],
    index: Index,
    *,
    masters: bool,
    optimizer: bool,
) -> tuple[int, str] | None:
    """Choose the source tensor and the dtype of a tensor of the target.

    A weight that is rounded from a master weight gets the requested dtype, or else the example's. A weight without a
    master keeps its dtype.

    Args:
        key: key of the tensor.
        location: its location in the example.
        asked_dtype: requested dtype, or None.
        at: positions of the source's tensors.
        index: the source.
        masters: the target has master weights too.
        optimizer: the target has states of the optimizer.

    Returns:
        Position of the source tensor and dtype; None if the source has no such tensor.
    """
    own, master = at.get(key), at.get(TensorKey("fp32", key.name))
    if key.state == "weight":
        dtype = asked_dtype or location.dtype
        is_sole_master = optimizer and not masters and dtype == "float32"  # the optimizer updates it
        if master is not None and (own is None or index.tensors[own].dtype != dtype or is_sole_master):
            return master, dtype
        if own is None:
            return None
        is_master = masters and master is None and index.tensors[own].dtype == "float32"
        return own, dtype if asked_dtype or is_master else index.tensors[own].dtype
    if own is None and key.state == "fp32":
        weight = at.get(TensorKey("weight", key.name))
        own = weight if weight is not None and index.tensors[weight].dtype == "float32" else None
    return None if own is None else (own, index.tensors[own].dtype)


def _differs_in_rows(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return name in _VOCABULARY and len(shape) == len(expected) and shape[1:] == expected[1:]


def _find_unplaced(
    index: Index, locations: Mapping[TensorKey, TensorLocation], placed: list[PlacedTensor], optimizer: bool
) -> Iterator[str]:
    """Yield a message for each source tensor that the example lacks, in any state that can replace it."""
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
        if not any(TensorKey(state, name) in locations for name in names for state in states):
            yield f"{key} {list(tensor.shape)} is not in the checkpoint that the target shall be like"


def _find_mixed_types(placed: list[PlacedTensor]) -> Iterator[str]:
    """Yield a message for each layer with another dtype than the layers before it in the same entry."""
    types: dict[str, str] = {}
    for item in placed:
        if types.setdefault(item.location.key, item.tensor.dtype) != item.tensor.dtype:
            yield f"{item.tensor.key} is {item.tensor.dtype}, an earlier layer {types[item.location.key]}: one entry"


def _list_notes(index: Index, extra: MegatronExtra, placed: list[PlacedTensor], optimizer: bool) -> Iterator[str]:
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
    resized = [item for item in placed if item.tensor.shape != item.location.shape]
    if resized:
        names = ", ".join(f"{item.tensor.key} {list(item.tensor.shape)}" for item in resized[:3])
        yield f"with the vocabulary of the source, which Megatron-Core pads when it loads: {names}"
    if not optimizer:
        reason = " (they are laid out for the optimizer's own buffers)" if extra.buckets else ""
        yield f"no states of an optimizer{reason}: weights alone, which load with --no-load-optim or --finetune"
