"""Compare the optimizer's states that are no tensors with dims: `step`, and what other optimizers keep beside it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.pt.objects import ITEM_BYTES, Global, Inert, Tensor
from reshard.formats.pt.reader import read_tensor_bytes

_NUMBERS = {
    *(Global(f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")),
    *(Global(module, "complex") for module in ("builtins", "__builtin__")),
}
"""Callables that make a number; all other objects may hold anything."""


def require_plain(key: str, value: Any, path: str) -> None:
    """Check that a state which is no tensor with dims consists of numbers and texts, so that it can be compared.

    Raises:
        UnsupportedError: it holds tensors, or objects: whether other partitions have equal ones is not known.
    """
    if isinstance(value, Tensor) or _is_plain(value):
        return
    raise UnsupportedError(
        f"optimizer state {key!r:.80} is a {type(value).__name__} that holds tensors or objects",
        path=path,
        hint="only states with one value per weight, or one per group, are converted",
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Inert):
        return value.target in _NUMBERS
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str | bytes | Global)


def identify_scalars(scalars: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a value for each scalar that is equal for equal ones; `path` is the file that holds them."""
    return {key: identify_scalar(value, path) for key, value in scalars.items()}


def identify_scalar(value: Any, path: str) -> Any:
    """Return a hashable value that is equal for equal scalars or containers: for a tensor its type and CRC-32.

    Bytes of the file at `path` are read only where the archive does not state their CRC-32.
    """
    if isinstance(value, Tensor):
        storage, num_bytes = value.storage, value.num_elements * ITEM_BYTES[value.dtype]
        if value.num_elements != 1 or (storage.crc32 is not None and storage.num_bytes == num_bytes):
            return value.dtype, storage.crc32
        return value.dtype, zlib.crc32(read_tensor_bytes(path, value, limit_bytes=num_bytes))
    if isinstance(value, float) and math.isnan(value):
        return float, "nan"
    if isinstance(value, Mapping):
        return frozenset((key, identify_scalar(item, path)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(identify_scalar(item, path) for item in value)
    if isinstance(value, Inert):
        return value.target, identify_scalar((value.args, value.state), path)
    return value
