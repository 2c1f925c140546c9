"""Emit the pickle of an object tree as torch.load expects it (protocol 2).

This is the inverse of `machine` and `reader`, for plain data, `Inert` recipes and `Tensor` references. Objects that
occur twice are written once and then referred to, as in the standard pickler.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from reshard.errors import UnsafePickleError, UnsupportedError
from reshard.formats.pt.objects import (
    STORAGE_CLASSES,
    UNTYPED_DTYPES,
    Global,
    Inert,
    Size,
    StatefulDict,
    Storage,
    Tensor,
)
from reshard.formats.pt.trust import is_accepted

_REBUILD_TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_NEWER_TENSOR = Global("torch._utils", "_rebuild_tensor_v3")
_REBUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_WITH_ATTRIBUTES = Global("torch._tensor", "_rebuild_from_type_v2")
_ORDERED_DICT = Global("collections", "OrderedDict")
_SIZE = Global("torch", "Size")
_PIECE_BYTES = 16 << 20


def emit(value: Any) -> tuple[bytes, list[Storage]]:
    """Pickle an object tree.

    Returns:
        The pickle, and its storages in the order of their keys `0`, `1`, ...

    Raises:
        UnsupportedError: it holds an object that a reader of `.pt` files never returns.
        CorruptSourceError: it is nested too deeply.
        UnsafePickleError: it holds a global that is not accepted (`trust`).
    """
    emitter = Emitter()
    try:
        emitter.emit_value(value)
    except RecursionError as error:
        raise UnsupportedError("objects are nested too deeply") from error
    return emitter.join_bytes(), list(emitter.storages)


def encode_integer(value: int) -> bytes:
    """Encode the shortest opcode that pushes an integer."""
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<I", len(data))) + data


class Emitter:
    """Writer of one pickle, with its output and memo."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.memo: dict[Any, int] = {}
        self.keep: list[Any] = []
        self.storages: dict[Storage, str] = {}

    def join_bytes(self) -> bytes:
        """Return the pickle of the one object that was emitted."""
        return b"".join(content for _, content in self.iterate_bytes())

    def iterate_bytes(self) -> Iterator[tuple[int, bytes]]:
        """Yield the pickle as a few (position, bytes) pairs, and release what was yielded: it can be gigabytes."""
        self.parts = [b".", *self.parts[::-1], b"\x80\x02"]
        position = 0
        while self.parts:
            some, num_bytes = [], 0
            while self.parts and num_bytes < _PIECE_BYTES:
                some.append(self.parts.pop())
                num_bytes += len(some[-1])
            yield position, b"".join(some)
            position += num_bytes

    def encode_reference(self, key: Any) -> bytes:
        """Encode the opcode that pushes an object that was written before.

        Args:
            key: the object's key in the memo: a `Global`, or ("text", string).
        """
        index = self.memo[key]
        return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)

    def recall(self, key: Any) -> bool:
        """Emit a reference to an object if it was written before; return whether it was."""
        if key not in self.memo:
            return False
        self.parts.append(self.encode_reference(key))
        return True

    def remember(self, key: Any, value: Any) -> None:
        """Memoize the object on top of the stack, so that it can be referred to."""
        self.parts.append(self._memoize(key, value))

    def _memoize(self, key: Any, value: Any) -> bytes:
        index = len(self.memo)
        self.memo[key] = index
        self.keep.append(value)
        return b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)

    def emit_value(self, value: Any) -> None:
        """Emit any object that a reader returns."""
        kind = type(value)
        if value is None or kind is bool:
            self.parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
        elif kind is int:
            self.emit_integer(value)
        elif kind is float:
            self.parts.append(b"G" + struct.pack(">d", value))
        elif kind is str:
            self.emit_text(value)
        elif kind is bytes:
            self._emit_bytes(value)
        elif kind is Global:
            self._emit_global(value)
        elif self.recall(id(value)):
            return
        elif kind is tuple:
            self._emit_tuple(value)
            if value:
                self.remember(id(value), value)
        elif kind is Size:
            self._emit_call(_SIZE, (tuple(value),))
            self.remember(id(value), value)
        elif kind is list:
            self.parts.append(b"]")
            self.remember(id(value), value)
            self._emit_items(value)
        elif kind is dict:
            self.parts.append(b"}")
            self.remember(id(value), value)
            self._emit_pairs(list(value.items()))
        elif kind is StatefulDict:
            self._emit_call(_ORDERED_DICT, ())
            self.remember(id(value), value)
            self._emit_pairs(list(value.items()))
            self._emit_state(value.state)
        elif kind is Tensor:
            self._emit_tensor(value)
            self.remember(id(value), value)
        elif kind is Inert:
            self._emit_inert(value)
        else:
            raise UnsupportedError(f"cannot write a {kind.__module__}.{kind.__qualname__} into a .pt file")

    def emit_integer(self, value: int) -> None:
        """Emit an integer."""
        self.parts.append(encode_integer(value))

    def emit_text(self, value: str) -> None:
        """Emit a string, or a reference to an equal one."""
        if not self.recall(("text", value)):
            self.parts.append(self.encode_text(value))

    def encode_text(self, value: str) -> bytes:
        """Encode the opcodes of a string that was not written before, and memoize it."""
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data + self._memoize(("text", value), value)

    def _emit_bytes(self, value: bytes) -> None:
        header = b"C" + bytes([len(value)]) if len(value) < 256 else b"B" + struct.pack("<I", len(value))
        self.parts.append(header + value)

    def _emit_global(self, value: Global) -> None:
        if not self.recall(value):
            if not is_accepted(value):  # checked for every global, so that no unaccepted one is ever written
                raise UnsafePickleError(f"{value!s:.200} is not among the names that may be written into a pickle")
            self.parts.append(b"c" + f"{value.module}\n{value.name}\n".encode())
            self.remember(value, value)

    def _emit_tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.parts.append(b")")
            return
        if len(value) > 3:
            self.parts.append(b"(")
        for item in value:
            self.emit_value(item)
        self.parts.append({1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t"))

    def _emit_items(self, items: list[Any]) -> None:
        if items:
            self.parts.append(b"(")
            for item in items:
                self.emit_value(item)
            self.parts.append(b"e")

    def _emit_pairs(self, pairs: list[tuple[Any, Any]]) -> None:
        if pairs:
            self.parts.append(b"(")
            for key, item in pairs:
                self.emit_value(key)
                self.emit_value(item)
            self.parts.append(b"u")

    def _emit_state(self, state: Any) -> None:
        if state is not None:
            self.emit_value(state)
            self.parts.append(b"b")

    def _emit_call(self, target: Global, args: tuple[Any, ...], *, opcode: bytes = b"R") -> None:
        self._emit_global(target)
        self._emit_tuple(args)
        self.parts.append(opcode)

    def _emit_inert(self, value: Inert) -> None:
        self._emit_call(value.target, value.args, opcode=b"R" if value.kind == "reduce" else b"\x81")
        self.remember(id(value), value)
        self._emit_items(value.items)
        self._emit_pairs(value.pairs)
        self._emit_state(value.state)

    def _emit_tensor(self, tensor: Tensor) -> None:
        newer = tensor.dtype in UNTYPED_DTYPES
        rebuild = _REBUILD_NEWER_TENSOR if newer else _REBUILD_TENSOR
        if tensor.parameter:
            self._emit_global(_REBUILD_PARAMETER)
        if tensor.attributes is not None:
            self._emit_global(_WITH_ATTRIBUTES)
            self.parts.append(b"(")
            self._emit_global(rebuild)
            self._emit_global(tensor.attributes[0])
        else:
            self._emit_global(rebuild)
        self.parts.append(b"(")
        self._emit_storage(tensor.storage)
        self.emit_integer(tensor.offset)
        self._emit_tuple(tensor.shape)
        self._emit_tuple(tensor.stride)
        self.emit_value(False if tensor.parameter else tensor.requires_grad)
        self._emit_call(_ORDERED_DICT, ())
        if newer:
            self._emit_global(Global("torch", tensor.dtype))
        self.parts.append(b"t")
        if tensor.attributes is not None:
            self.emit_value(tensor.attributes[1])
            self.parts.append(b"t")
        self.parts.append(b"R")
        if tensor.parameter:
            self.emit_value(tensor.requires_grad)
            self._emit_call(_ORDERED_DICT, ())
            self.parts.append(b"\x87R")

    def _emit_storage(self, storage: Storage) -> None:
        key = self.storages.setdefault(storage, str(len(self.storages)))
        self.parts.append(b"(")
        self.emit_text("storage")
        if storage.dtype in UNTYPED_DTYPES:
            self._emit_global(Global("torch.storage", "UntypedStorage"))
        else:
            self._emit_global(Global("torch", STORAGE_CLASSES[storage.dtype]))
        self.emit_text(key)
        self.emit_text(storage.location)
        self.emit_integer(storage.num_bytes if storage.dtype in UNTYPED_DTYPES else storage.num_elements)
        self.parts.append(b"tQ")
