"""Objects that a `.pt` file's pickle turns into: plain Python data, tensors as references, and inert recipes.

Nothing in this module can execute what a file says.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from reshard.tensors import layout

ITEM_BYTES = layout.ITEM_BYTES
"""Bytes of one element of each dtype that torch saves. One element of `float4_e2m1fn_x2` is two numbers."""

STORAGE_DTYPES = {
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
"""Storage class in module `torch` -> dtype (torch/storage.py, _dtype_to_storage_type_map)."""

STORAGE_CLASSES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}

UNTYPED_DTYPES = frozenset(ITEM_BYTES) - frozenset(STORAGE_CLASSES)
"""Newer dtypes, whose storages are saved as plain bytes; the tensor has the dtype (torch/storage.py, _new_dtypes)."""


def abbreviate(value: Any, levels: int = 2) -> str:
    """Return a short `repr` of any value, of some hundred characters at most, in bounded time."""
    if isinstance(value, str | bytes):
        return repr(value[:60]) + ("..." if len(value) > 60 else "")
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if not isinstance(value, list | tuple | dict):
        return repr(value) if value is None or isinstance(value, int | float | Global) else type(value).__name__
    if not levels:
        return f"{type(value).__name__} of {len(value)}"
    parts = [abbreviate(part, levels - 1) for part in itertools.islice(value, 4)]
    return f"{type(value).__name__}({', '.join(parts)}{', ...' if len(value) > 4 else ''})"


@dataclasses.dataclass(frozen=True, slots=True)
class Global:
    """Name of a class, function or constant (such as `torch.float32`) in a pickle; it is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


ORDERED_DICT = Global("collections", "OrderedDict")
WITH_ATTRIBUTES = Global("torch._tensor", "_rebuild_from_type_v2")
"""Rebuilds a tensor that has attributes."""


@dataclasses.dataclass(eq=False, slots=True)
class Inert:
    """Recipe of an object of an unknown class: enough to write it again, not enough to run it.

    Attributes:
        kind: `reduce` (callable with arguments) or `new` (class with arguments).
        target: the callable or class.
        args: its arguments.
        state: argument of BUILD, or None if there was none.
        items: appended items (list subclasses).
        pairs: set items (dict subclasses).
    """

    kind: str
    target: Global
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = dataclasses.field(default_factory=list)
    pairs: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    def __repr__(self) -> str:
        return f"Inert({self.target}, {abbreviate(self.args)})"


class StatefulDict(OrderedDict[Any, Any]):
    """A `collections.OrderedDict` with attributes, as `Module.state_dict()` makes it (`_metadata`).

    Attributes:
        state: the attributes, or None.
    """

    state: Any = None


class Size(tuple[int, ...]):
    """A `torch.Size`."""

    __slots__ = ()


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Storage:
    """A flat array of elements: one entry `data/<key>` of the archive.

    Identity matters: tensors that share a storage are views of one another.

    Attributes:
        dtype: element type, a key of `ITEM_BYTES`.
        num_elements: length.
        location: device that it was saved from, for instance `cpu` or `cuda:0`.
        file_offset: byte offset of the payload in the file it was read from; -1 for a storage that is not yet written.
        data: the payload (little endian) if it is in memory, else None.
        crc32: CRC-32 of the payload that the archive states; None if it states none (or the storage is new).
    """

    dtype: str
    num_elements: int
    location: str = "cpu"
    file_offset: int = -1
    data: bytes | None = None
    crc32: int | None = None

    @property
    def num_bytes(self) -> int:
        """Length of the payload."""
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Tensor:
    """A strided view of a storage.

    Attributes:
        storage: storage of its elements.
        offset: first element, in elements of the storage.
        shape: `[ndim]`.
        stride: `[ndim]`, in elements.
        requires_grad: as saved.
        parameter: it was saved as a `torch.nn.Parameter`.
        attributes: (class, Python attributes) of a tensor that was saved with some, else None.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False
    attributes: tuple[Global, Any] | None = None

    @property
    def dtype(self) -> str:
        """Element type."""
        return self.storage.dtype

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_contiguous(self) -> bool:
        """True if its elements follow each other in row-major order."""
        if 0 in self.shape:
            return True
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True

    @property
    def file_offset(self) -> int:
        """Byte offset of its first element in the file it was read from."""
        return self.storage.file_offset + self.offset * ITEM_BYTES[self.dtype]

    def same_view(self, other: Tensor) -> bool:
        """Return True if both tensors view the same elements in the same way."""
        return (
            self.storage is other.storage
            and self.offset == other.offset
            and self.shape == other.shape
            and self.stride == other.stride
        )


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Compute row-major strides in elements as torch does (a size of 0 counts as 1)."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def new_tensor(dtype: str, shape: tuple[int, ...], data: bytes | None = None) -> Tensor:
    """Create a contiguous tensor with a storage of its own."""
    count = 1
    for size in shape:
        count *= size
    storage = Storage(dtype=dtype, num_elements=count, data=data)
    return Tensor(storage=storage, offset=0, shape=shape, stride=contiguous_stride(shape))


def copy_container(value: Any, copy: Callable[[Any], Any]) -> Any:
    """Copy a container, with `copy` applied to its elements but not to keys of dicts; return other objects as is."""
    if isinstance(value, StatefulDict):
        copied = StatefulDict((key, copy(item)) for key, item in value.items())
        copied.state = copy(value.state)
        return copied
    if isinstance(value, dict):
        return {key: copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy(item) for item in value]
    if isinstance(value, tuple) and not isinstance(value, Size):
        return tuple(copy(item) for item in value)
    if isinstance(value, Inert):
        return Inert(
            value.kind,
            value.target,
            tuple(copy(item) for item in value.args),
            copy(value.state),
            [copy(item) for item in value.items],
            [(copy(key), copy(item)) for key, item in value.pairs],
        )
    return value
