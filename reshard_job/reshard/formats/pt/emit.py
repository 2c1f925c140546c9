"""Emit the pickle of an object tree as torch.load expects it (protocol 2).

The inverse of `machine` and `reader`: plain data, `Inert` recipes and `Tensor` references. Objects that occur twice
are written once and referred to, as the standard pickler does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from reshard.errors import CorruptSourceError, UnsafePickleError, UnsupportedError
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
    """The pickle of `value`, and its storages in the order of their keys `0`, `1`, ...

    Raises:
        UnsupportedError: an object that a reader of `.pt` files never yields.
        CorruptSourceError: nested too deeply.
        UnsafePickleError: a name that is not accepted (`trust`).
    """
    emitter = Emitter()
    try:
        emitter.value(value)
    except RecursionError as error:
        raise CorruptSourceError("objects are nested too deeply") from error
    return emitter.pickled(), list(emitter.storages)


def integer(value: int) -> bytes:
    """The opcode of an integer."""
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<I", len(data))) + data


class Emitter:
    """Output and memo of one pickle."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.memo: dict[Any, int] = {}
        self.keep: list[Any] = []
        self.storages: dict[Storage, str] = {}

    def pickled(self) -> bytes:
        """The pickle of the one object that was written."""
        return b"".join(content for _, content in self.pieces())

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """The same cut into a few pieces with their positions; lets go of what it yields: it can be gigabytes."""
        self.parts = [b".", *self.parts[::-1], b"\x80\x02"]
        position = 0
        while self.parts:
            some, num_bytes = [], 0
            while self.parts and num_bytes < _PIECE_BYTES:
                some.append(self.parts.pop())
                num_bytes += len(some[-1])
            yield position, b"".join(some)
            position += num_bytes

    def reference(self, key: Any) -> bytes:
        """What puts an object on the stack that was written before: a `Global`, or ("text", string)."""
        index = self.memo[key]
        return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)

    def recall(self, key: Any) -> bool:
        """Refer to an object, if it was written before."""
        if key not in self.memo:
            return False
        self.parts.append(self.reference(key))
        return True

    def remember(self, key: Any, value: Any) -> None:
        """The object on top of the stack may be referred to."""
        self.parts.append(self._noted(key, value))

    def _noted(self, key: Any, value: Any) -> bytes:
        index = len(self.memo)
        self.memo[key] = index
        self.keep.append(value)
        return b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)

    def value(self, value: Any) -> None:
        """Write an object, whatever it is."""
        kind = type(value)
        if value is None or kind is bool:
            self.parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
        elif kind is int:
            self.integer(value)
        elif kind is float:
            self.parts.append(b"G" + struct.pack(">d", value))
        elif kind is str:
            self.text(value)
        elif kind is bytes:
            self._bytes(value)
        elif kind is Global:
            self._global(value)
        elif self.recall(id(value)):
            return
        elif kind is tuple:
            self._tuple(value)
            if value:
                self.remember(id(value), value)
        elif kind is Size:
            self._call(_SIZE, (tuple(value),))
            self.remember(id(value), value)
        elif kind is list:
            self.parts.append(b"]")
            self.remember(id(value), value)
            self._items(value)
        elif kind is dict:
            self.parts.append(b"}")
            self.remember(id(value), value)
            self._pairs(list(value.items()))
        elif kind is StatefulDict:
            self._call(_ORDERED_DICT, ())
            self.remember(id(value), value)
            self._pairs(list(value.items()))
            self._state(value.state)
        elif kind is Tensor:
            self._tensor(value)
            self.remember(id(value), value)
        elif kind is Inert:
            self._inert(value)
        else:
            raise UnsupportedError(f"cannot write a {kind.__module__}.{kind.__qualname__} into a .pt file")

    def integer(self, value: int) -> None:
        """Write an integer."""
        self.parts.append(integer(value))

    def text(self, value: str) -> None:
        """Write a string."""
        if not self.recall(("text", value)):
            self.parts.append(self.new_text(value))

    def new_text(self, value: str) -> bytes:
        """The opcodes of a string that was not written before, and may be referred to from now on."""
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data + self._noted(("text", value), value)

    def _bytes(self, value: bytes) -> None:
        header = b"C" + bytes([len(value)]) if len(value) < 256 else b"B" + struct.pack("<I", len(value))
        self.parts.append(header + value)

    def _global(self, value: Global) -> None:
        if not self.recall(value):
            if not is_accepted(value):  # whatever way it came: nothing else gets into a file
                raise UnsafePickleError(f"{value!s:.200} is not among the names that may be written into a pickle")
            self.parts.append(b"c" + f"{value.module}\n{value.name}\n".encode())
            self.remember(value, value)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.parts.append(b")")
            return
        if len(value) > 3:
            self.parts.append(b"(")
        for item in value:
            self.value(item)
        self.parts.append({1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t"))

    def _items(self, items: list[Any]) -> None:
        if items:
            self.parts.append(b"(")
            for item in items:
                self.value(item)
            self.parts.append(b"e")

    def _pairs(self, pairs: list[tuple[Any, Any]]) -> None:
        if pairs:
            self.parts.append(b"(")
            for key, item in pairs:
                self.value(key)
                self.value(item)
            self.parts.append(b"u")

    def _state(self, state: Any) -> None:
        if state is not None:
            self.value(state)
            self.parts.append(b"b")

    def _call(self, target: Global, args: tuple[Any, ...], *, opcode: bytes = b"R") -> None:
        self._global(target)
        self._tuple(args)
        self.parts.append(opcode)

    def _inert(self, value: Inert) -> None:
        self._call(value.target, value.args, opcode=b"R" if value.kind == "reduce" else b"\x81")
        self.remember(id(value), value)
        self._items(value.items)
        self._pairs(value.pairs)
        self._state(value.state)

    def _tensor(self, tensor: Tensor) -> None:
        newer = tensor.dtype in UNTYPED_DTYPES
        rebuild = _REBUILD_NEWER_TENSOR if newer else _REBUILD_TENSOR
        if tensor.parameter:
            self._global(_REBUILD_PARAMETER)
        if tensor.attributes is not None:
            self._global(_WITH_ATTRIBUTES)
            self.parts.append(b"(")
            self._global(rebuild)
            self._global(tensor.attributes[0])
        else:
            self._global(rebuild)
        self.parts.append(b"(")
        self._storage(tensor.storage)
        self.integer(tensor.offset)
        self._tuple(tensor.shape)
        self._tuple(tensor.stride)
        self.value(False if tensor.parameter else tensor.requires_grad)
        self._call(_ORDERED_DICT, ())
        if newer:
            self._global(Global("torch", tensor.dtype))
        self.parts.append(b"t")
        if tensor.attributes is not None:
            self.value(tensor.attributes[1])
            self.parts.append(b"t")
        self.parts.append(b"R")
        if tensor.parameter:
            self.value(tensor.requires_grad)
            self._call(_ORDERED_DICT, ())
            self.parts.append(b"\x87R")

    def _storage(self, storage: Storage) -> None:
        key = self.storages.setdefault(storage, str(len(self.storages)))
        self.parts.append(b"(")
        self.text("storage")
        if storage.dtype in UNTYPED_DTYPES:
            self._global(Global("torch.storage", "UntypedStorage"))
        else:
            self._global(Global("torch", STORAGE_CLASSES[storage.dtype]))
        self.text(key)
        self.text(storage.location)
        self.integer(storage.num_bytes if storage.dtype in UNTYPED_DTYPES else storage.num_elements)
        self.parts.append(b"tQ")
