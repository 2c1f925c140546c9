"""Copy objects from source files to target files unchanged, with the bytes of their small tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.pt.objects import ITEM_BYTES, Global, Inert, Storage, Tensor, contiguous_stride, copy_container
from reshard.formats.pt.reader import PtFile, read_tensor_bytes

MAX_INLINE_BYTES = 16 << 20
"""Limit on a tensor outside of model and optimizer; random states take kilobytes."""

MAX_TOTAL_INLINE_BYTES = 256 << 20
"""Limit on all copies in all files of a target, because they are in memory until they are written."""

_ENUM = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
_FRAGMENT = Global("deepspeed.utils.tensor_fragment", "fragment_address")


class Budget:
    """Counts the bytes of tensors that may still be copied for one target."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit = MAX_TOTAL_INLINE_BYTES if limit_bytes is None else limit_bytes
        self._left = self._limit

    def spend(self, tensor: Tensor, path: str) -> None:
        """Count the bytes of one more copy.

        Raises:
            UnsupportedError: the copies exceed the limit.
        """
        self._left -= tensor.num_elements * ITEM_BYTES[tensor.dtype]
        if self._left < 0:
            raise UnsupportedError(
                f"tensors outside of model and optimizer take more than {self._limit} bytes in the files of the target,"
                " which each rank's state is copied into",
                path=path,
                hint="keep large tensors out of the client state",
            )


class Template:
    """Copies values of one file; an object that occurs twice stays one object."""

    def __init__(self, file: PtFile, budget: Budget | None = None) -> None:
        self._file = file
        self._budget = budget or Budget()
        self._copies: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        """Return a deep copy whose tensors have their own storages with data.

        Raises:
            UnsupportedError: a tensor is larger than `MAX_INLINE_BYTES`, or all copies exceed the budget.
        """
        if id(value) in self._copies:
            return self._copies[id(value)]
        result = self._copy(value)
        self._copies[id(value)] = result
        return result

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._budget.spend(value, str(self._file.path))
            data = self._bytes(value)
            storage = Storage(dtype=value.dtype, num_elements=value.num_elements, location="cpu", data=data)
            return dataclasses.replace(value, storage=storage, offset=0, stride=contiguous_stride(value.shape))
        return copy_container(value, self.copy)

    def _bytes(self, tensor: Tensor) -> bytes:
        if tensor.storage.data is None:
            return read_tensor_bytes(self._file.path, tensor, limit_bytes=MAX_INLINE_BYTES)
        return tensor.storage.data  # the tensor is a copy, so it is contiguous and alone in its storage

    def copy_except(self, value: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a dict in the same order with some values replaced; replacements for absent keys come last."""
        result = {key: replaced[key] if key in replaced else self.copy(item) for key, item in value.items()}
        return {**result, **replaced}


def make_zero_stage_enum(stage: int) -> Inert:
    """Make the pickled form of `ZeroStageEnum(stage)`."""
    return Inert("reduce", _ENUM, (stage,))


def make_fragment_address(start: int, num_elements: int) -> Inert:
    """Make the pickled form of `fragment_address(numel=..., start=...)`."""
    return Inert("new", _FRAGMENT, (), {"numel": num_elements, "start": start})
