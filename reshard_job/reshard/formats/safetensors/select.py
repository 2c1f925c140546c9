"""Select the weights of the model from a checkpoint's tensors, choose their dtypes, and note what is left behind."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from reshard.errors import UnsupportedError
from reshard.formats.safetensors.header import DTYPES, METADATA
from reshard.tensors.cast import FLOATS, can_cast
from reshard.tensors.layout import PADDING, Index, LogicalTensor, TensorKey

WEIGHT = "weight"
MASTER = "fp32"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The target's tensors.

    Attributes:
        tensors: the state `weight` of every name, in the source's order.
        origins: position of the source tensor of each, [tensors].
        notes: messages about what is left behind.
    """

    tensors: tuple[LogicalTensor, ...]
    origins: tuple[int, ...]
    notes: tuple[str, ...]


def select_weights(index: Index, dtype: str | None) -> Selection:
    """Select the weights.

    A parameter's weight is its state `weight`. Its master weight `fp32` is used if there is no such state (ZeRO-3), or
    if the requested dtype is not the weight's own: the value is then rounded once, not twice. Only floating-point
    tensors change their dtype.

    Args:
        index: the source.
        dtype: dtype of the target's floating-point tensors, or None to keep each one's own.

    Raises:
        UnsupportedError: there are no weights, or some cannot be converted to this dtype.
    """
    if dtype is not None and dtype not in FLOATS:
        raise UnsupportedError(f"--dtype {dtype}: expected one of {', '.join(FLOATS)}")
    position_of = {tensor.key: at for at, tensor in enumerate(index.tensors)}
    names = dict.fromkeys(
        key.name for key in position_of if key.state in (WEIGHT, MASTER) and not key.name.endswith(PADDING)
    )
    tensors: list[LogicalTensor] = []
    origins: list[int] = []
    problems: list[str] = []
    for name in names:
        weight, master = position_of.get(TensorKey(WEIGHT, name)), position_of.get(TensorKey(MASTER, name))
        at = _choose_origin(index, weight, master, dtype)
        source = index.tensors[at]
        target = source.dtype if dtype is None or not _is_float(source.dtype) else dtype
        if name == METADATA or not _is_text(name):
            problems.append(f"{name!r} cannot be the name of a tensor in this format")
        elif target not in DTYPES.values():
            problems.append(f"{source.key}: the format has no type {target}")
        elif not can_cast(source.dtype, target):
            problems.append(f"{source.key}: {source.dtype} cannot become {target}")
        tensors.append(LogicalTensor(key=TensorKey(WEIGHT, name), shape=source.shape, dtype=target))
        origins.append(at)
    if problems:
        raise UnsupportedError(
            f"{len(problems)} tensors cannot be written as safetensors",
            path=str(index.root),
            problems=problems[:20],
            hint="leave --dtype out where a type cannot change, or tensors out or under other names with --names FILE",
        )
    if not tensors:
        raise UnsupportedError("holds no weights: safetensors files hold nothing else", path=str(index.root))
    return Selection(tensors=tuple(tensors), origins=tuple(origins), notes=_list_notes(index, origins))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_float(dtype: str) -> bool:
    return dtype in FLOATS or dtype.startswith("float8")


def _choose_origin(index: Index, weight: int | None, master: int | None, dtype: str | None) -> int:
    if weight is None:
        assert master is not None
        return master
    own = index.tensors[weight].dtype
    return weight if master is None or dtype is None or dtype == own or not _is_float(own) else master


def _list_notes(index: Index, origins: Sequence[int]) -> tuple[str, ...]:
    """List notes about everything that is not written."""
    masters = sum(index.tensors[at].key.state == MASTER for at in origins)
    keys = [tensor.key for tensor in index.tensors]
    states = Counter(key.state for key in keys if key.state not in (WEIGHT, MASTER) and not key.name.endswith(PADDING))
    padding = dict.fromkeys(
        key.name.removesuffix(PADDING) for key in keys if key.name.endswith(PADDING) and key.state in (WEIGHT, MASTER)
    )
    notes = []
    if states:
        notes.append(
            "the optimizer stays behind: " + ", ".join(f"{name} of {count} tensors" for name, count in states.items())
        )
    if masters:
        notes.append(f"{masters} weights are the float32 master weights, rounded once where the type is another")
    elif any(key.state == MASTER for key in keys):
        notes.append("the float32 master weights stay behind: the weights are the model's own")
    if padding:
        notes.append(f"padding rows of the vocabulary stay behind: {', '.join(padding)}")
    notes += [
        f"{alias} is {name}: stored once, its second name is in the metadata"
        for alias, name in sorted(index.aliases.items())
    ]
    return tuple(notes)
