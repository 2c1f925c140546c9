"""Unpickle metadata with Python's own unpickler, in which every name stands for an inert object.

The strict reader of `formats.pt` has accepted the source's files before, and the target's files are ours. Nothing that
a pickle names is imported or called here: every class is replaced by a subclass of `Inert`, whose methods do nothing.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from reshard.errors import VerificationError

DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""torch's classes of typed storages -> name of their type."""

ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "complex128": 16,
}
"""Name of a type -> bytes of an element."""


class StorageId(NamedTuple):
    """A storage as a pickle names it."""

    key: str
    dtype: str
    num_elements: int


class StoredTensor(NamedTuple):
    """A tensor as a pickle describes it; `offset` and `stride` count elements."""

    storage: StorageId
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class Inert:
    """Stands for an object of any class: it keeps the arguments and the state, and does nothing."""

    qualified_name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_options: Any) -> Inert:
        self = object.__new__(cls)
        self.args, self.state = args, None
        return self

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Ignore an item of a list that is no list here."""

    def extend(self, items: Any) -> None:
        """Ignore items of a list that is no list here."""

    def field(self, name: str) -> Any:
        """Return an attribute of the object's state, or None."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        return next((state[name] for state in states if isinstance(state, dict) and name in state), None)


def _size(*args: Any) -> tuple[int, ...]:
    return tuple(args[0]) if args else ()


def _tensor(  # noqa: PLR0917  (the order of torch's arguments)
    storage: StorageId, offset: int, size: Sequence[int], stride: Sequence[int], grad: Any = None, hooks: Any = None,
    metadata: Any = None,
) -> StoredTensor:  # fmt: skip
    return _tensor_v3(storage, offset, size, stride, grad, hooks, storage.dtype, metadata)


def _tensor_v3(  # noqa: PLR0917  (the order of torch's arguments)
    storage: StorageId, offset: int, size: Sequence[int], stride: Sequence[int], grad: Any, hooks: Any, dtype: str,
    metadata: Any = None,
) -> StoredTensor:  # fmt: skip
    """Return a tensor of a type without a class of storages; its storage counts bytes."""
    if metadata:
        raise VerificationError(f"a witness cannot read it: values of a tensor are not its bytes ({metadata!r:.80})")
    return StoredTensor(storage, offset, tuple(size), tuple(stride), dtype)


def _parameter(data: Any, *_more: Any) -> Any:
    return data


def _subclass(rebuild: Callable[..., Any], _kind: Any, args: Sequence[Any], _state: Any = None) -> Any:
    """Return a tensor that was saved with attributes of its own; `rebuild` is one of the functions above, or inert."""
    return rebuild(*args)


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): _size,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}


@functools.lru_cache(maxsize=1024)
def _make_class(name: str) -> type[Inert]:
    return type("Inert", (Inert,), {"qualified_name": name})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module == "torch" and name in ITEM_BYTES:
            return name
        if module in ("torch", "torch.storage"):
            if name in DTYPES:
                return DTYPES[name]
            if name == "UntypedStorage":
                return "uint8"
        return _make_class(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> StorageId:
        _, dtype, key, _, num_elements, *_ = pid
        return StorageId(str(key), dtype if isinstance(dtype, str) else "uint8", int(num_elements))


class NotWitnessedError(Exception):
    """The stranger cannot say where tensors are; the text says why."""


_MOST_BYTES = 64 << 20


class Pickles:
    """Loads pickles; equal ones, which many ranks write, are one object."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}
        self._num_bytes = 0

    def load(self, data: bytes) -> Any:
        """Return the object that a pickle describes.

        Raises:
            NotWitnessedError: there are more metadata than the witness may hold in memory.
        """
        key = hashlib.sha256(data).digest()
        if key not in self._known:
            self._num_bytes += len(data)
            if self._num_bytes > _MOST_BYTES:
                raise NotWitnessedError(f"the files have more than {_MOST_BYTES >> 20} MiB of pickles")
            self._known[key] = load(data)
        return self._known[key]


def load(data: bytes) -> Any:
    """Return the object that a pickle describes, with inert objects in the place of all classes."""
    return _Unpickler(io.BytesIO(data)).load()
