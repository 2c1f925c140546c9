"""Read a `.pt` file's metadata: the object tree with tensors as byte ranges. No tensor payload is read."""

from __future__ import annotations

import dataclasses
import math
import zlib
from pathlib import Path
from typing import Any, NoReturn

from reshard.errors import CorruptSourceError, UnsafePickleError, UnsupportedError, make_read_error
from reshard.formats.pt import machine
from reshard.formats.pt.archive import Entry, read_directory
from reshard.formats.pt.extent import LimitError
from reshard.formats.pt.objects import (
    ITEM_BYTES,
    STORAGE_DTYPES,
    UNTYPED_DTYPES,
    WITH_ATTRIBUTES,
    Global,
    Storage,
    Tensor,
    abbreviate,
)
from reshard.storage.files import File, open_file

_TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
_NEWER_TENSOR = Global("torch._utils", "_rebuild_tensor_v3")
_TENSORS = (_TENSOR, _NEWER_TENSOR)
_UNTYPED = frozenset((Global("torch.storage", "UntypedStorage"), Global("torch", "UntypedStorage")))
_MAX_SIZE = 1 << 58  # of elements of 16 bytes, positions still fit 63 bits
_MAX_REPEATED = 1 << 20  # elements of a tensor whose strides repeat elements (`expand`), besides
_MAX_REPEATS = 64  # times those of its storage
_MAX_RECORD_BYTES = 1 << 10
_MAX_CHECKED_BYTES = 32 << 20  # storages of small tensors are read whole, to check them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PtFile:
    """A `.pt` file as read.

    Attributes:
        path: its path.
        num_bytes: its size.
        value: the object that was saved.
        storages: all storages by their key in the archive.
        metadata_bytes: number of bytes that were read for it, without the zip directory.
    """

    path: str
    num_bytes: int
    value: Any
    storages: dict[str, Storage]
    metadata_bytes: int


def read(path: str | Path, *, root: Path | None = None) -> PtFile:
    """Read the metadata of a `.pt` file.

    Args:
        path: the file.
        root: folder of its checkpoint, if the file is in a folder below: no link on the path from there is followed.

    Raises:
        UnsupportedError: legacy layout, compressed entries, big-endian or exotic tensors.
        UnsafePickleError: the pickle does more than build data.
        CorruptSourceError: truncated or damaged.
    """
    name = str(path)
    try:
        file = open_file(path, root=root)
    except OSError as error:
        raise make_read_error(error, name, what="cannot be opened") from error
    with file:
        return read_open(file, name)[0]


def read_open(file: File, name: str) -> tuple[PtFile, dict[str, Entry]]:
    """Read the metadata of an open file, as `read` does; `name` is its path, for errors.

    Returns:
        The file as read, and the archive's entries.
    """
    try:
        entries = read_directory(file, name)
        if "data.pkl" not in entries:
            raise UnsupportedError("has no entry data.pkl: not written by torch.save (TorchScript?)", path=name)
        if "byteorder" in entries and (order := _read_record(file, entries["byteorder"], name)) != b"little":
            raise UnsupportedError(f"byte order {order!r}: only little endian is read", path=name)
        pickle_bytes = _read_payload(file, entries["data.pkl"], name, machine.MAX_PICKLE_BYTES)
        value, storages = build(pickle_bytes, entries, name)
        num_file_bytes = file.num_bytes
    except OSError as error:
        raise make_read_error(error, name) from error
    pt_file = PtFile(
        path=name,
        num_bytes=num_file_bytes,
        value=value,
        storages=storages,
        metadata_bytes=len(pickle_bytes),
    )
    return pt_file, entries


def build(pickle_bytes: bytes, entries: dict[str, Entry], path: str) -> tuple[Any, dict[str, Storage]]:
    """Build the object of an archive's pickle.

    Returns:
        The object, and its storages by their key in the archive.

    Raises:
        UnsupportedError, UnsafePickleError, CorruptSourceError: see `read`.
    """
    tensors = _Tensors(entries, path)
    value = machine.load(pickle_bytes, persistent_load=tensors.persistent_load, rebuild=tensors.rebuild, path=path)
    return value, tensors.storages


def read_tensor_bytes(path: str | Path, tensor: Tensor, *, limit_bytes: int) -> bytes:
    """Read the payload of a small contiguous tensor.

    Raises:
        UnsupportedError: larger than `limit_bytes`, or not contiguous.
        CorruptSourceError: the file ends before the tensor does, or its storage is damaged.
    """
    num_bytes = tensor.num_elements * ITEM_BYTES[tensor.dtype]
    if num_bytes > limit_bytes or not tensor.is_contiguous:
        raise UnsupportedError(
            f"a tensor of shape {tensor.shape} outside of model and optimizer is larger than {limit_bytes} bytes"
            " or not contiguous",
            path=str(path),
            hint="keep large tensors out of the client state",
        )
    storage = tensor.storage
    checked = storage.crc32 is not None and storage.num_bytes <= _MAX_CHECKED_BYTES
    start, length = (storage.file_offset, storage.num_bytes) if checked else (tensor.file_offset, num_bytes)
    with open_file(path) as file:
        data = file.read(length, start)
    if len(data) != length:
        raise CorruptSourceError(f"ends inside a tensor at byte {tensor.file_offset}", path=str(path))
    if checked and zlib.crc32(data) != storage.crc32:
        raise CorruptSourceError(
            f"bytes {start}:{start + length} are damaged: their CRC-32 does not match",
            path=str(path),
            hint="use an earlier commit",
        )
    return data[tensor.file_offset - start :][:num_bytes]


def _read_payload(file: File, entry: Entry, path: str, limit_bytes: int) -> bytes:
    if entry.num_bytes > limit_bytes:
        raise UnsafePickleError(f"entry {entry.name!r} has {entry.num_bytes} bytes: at most {limit_bytes}", path=path)
    data = file.read(entry.num_bytes, entry.offset)
    if len(data) != entry.num_bytes:
        raise CorruptSourceError(f"ends inside of entry {entry.name!r}", path=path)
    if entry.crc32 is not None and zlib.crc32(data) != entry.crc32:
        raise CorruptSourceError(f"entry {entry.name!r} is damaged: its CRC-32 does not match", path=path)
    return data


def _read_record(file: File, entry: Entry, path: str) -> bytes:
    return _read_payload(file, entry, path, _MAX_RECORD_BYTES)


class _Tensors:
    """Builder of tensors from the persistent ids and calls of one pickle, checked against the archive's entries."""

    def __init__(self, entries: dict[str, Entry], path: str) -> None:
        self.entries = entries
        self.path = path
        self.storages: dict[str, Storage] = {}
        self._keys: dict[Storage, str] = {}  # of storages that were saved as bytes, whatever their tensors are

    def persistent_load(self, identifier: Any) -> Storage:
        """Return the storage of a persistent id: `('storage', class, key, location, number of elements)`."""
        if not isinstance(identifier, tuple) or len(identifier) != 5 or identifier[0] != "storage":
            raise UnsupportedError(f"persistent id {abbreviate(identifier)} is not a storage", path=self.path)
        _, kind, key, location, num_elements = identifier
        dtype = STORAGE_DTYPES.get(kind.name) if isinstance(kind, Global) and kind.module == "torch" else None
        untyped = isinstance(kind, Global) and kind in _UNTYPED
        if untyped:
            dtype = "uint8"
        if dtype is None:
            raise UnsupportedError(f"storage class {abbreviate(kind)} is not known", path=self.path)
        if not isinstance(key, str) or not isinstance(location, str):
            raise ValueError(f"a storage with key {abbreviate(key)} at {abbreviate(location)}")
        if key in self.storages:
            known = self.storages[key]
            if known.dtype != dtype and not (untyped and known.dtype in UNTYPED_DTYPES):
                self._refuse_types(known.dtype, dtype)
            return known
        entry = self.entries.get(f"data/{key}")
        if entry is None:
            raise CorruptSourceError(f"storage {key!r:.80} has no entry", path=self.path)
        if not isinstance(num_elements, int) or entry.num_bytes != num_elements * ITEM_BYTES[dtype]:
            raise CorruptSourceError(
                f"storage {key!r:.80} of {abbreviate(num_elements)} x {dtype} is an entry of {entry.num_bytes} bytes",
                path=self.path,
            )
        self.storages[key] = Storage(
            dtype=dtype,
            num_elements=num_elements,
            location=location,
            file_offset=entry.offset,
            crc32=entry.crc32,
        )
        if untyped:
            self._keys[self.storages[key]] = key
        return self.storages[key]

    def rebuild(self, target: Global, args: tuple[Any, ...]) -> Any:
        """Build the tensor of a call that torch/_utils.py or _tensor.py defines, or a container.

        Returns:
            The object; NotImplemented for any other call.
        """
        if target == WITH_ATTRIBUTES and len(args) == 4 and args[0] in _TENSORS and isinstance(args[2], tuple):
            inner = self.rebuild(args[0], args[2])
            return dataclasses.replace(inner, attributes=(args[1], args[3]))
        if target.module == "torch._utils":
            if target == _TENSOR and len(args) >= 6:
                self._check_metadata(args[6:])
                return self._tensor(*args[:5])
            if target == _NEWER_TENSOR and len(args) >= 7:
                self._check_metadata(args[7:])
                return self._tensor(self._typed(args[0], args[6]), *args[1:5])
            if target.name == "_rebuild_parameter" and args and isinstance(args[0], Tensor):
                return dataclasses.replace(args[0], parameter=True, requires_grad=bool(args[1]))
            if target.name.startswith("_rebuild_"):
                raise UnsupportedError(f"tensor kind {target.name} is not read", path=self.path)
        return machine.rebuild_containers(target, args)

    def _refuse_types(self, first: str, second: str) -> NoReturn:
        raise UnsupportedError(
            f"a storage is seen both as {first} and as {second}",
            path=self.path,
            hint="save a copy: clone() one of the tensors that share memory",
        )

    def _check_metadata(self, more: tuple[Any, ...]) -> None:
        """Refuse what torch writes behind the usual arguments: bits that say how values differ from the bytes."""
        if more not in ((), (None,), ({},)):
            raise UnsupportedError(
                f"a tensor is saved with {abbreviate(more)}: its values are not its bytes (torch's conj or neg bit)",
                path=self.path,
                hint="call resolve_conj() and resolve_neg() on the tensor, and save again",
            )

    def _typed(self, storage: Any, dtype: Any) -> Storage:
        """Convert a storage that was saved as bytes to the dtype of a tensor that views it."""
        name = dtype.name if isinstance(dtype, Global) and dtype.module == "torch" else ""
        if name not in UNTYPED_DTYPES:
            raise UnsupportedError(f"tensors of type {name or abbreviate(dtype)} are not read", path=self.path)
        if not isinstance(storage, Storage):
            raise ValueError("a tensor without a storage")
        if storage.dtype == name:
            return storage
        if storage.dtype != "uint8" or storage not in self._keys:
            self._refuse_types(storage.dtype, name)
        count, rest = divmod(storage.num_bytes, ITEM_BYTES[name])
        if rest:
            self._refuse_types(f"{storage.num_bytes} bytes", name)
        key = self._keys.pop(storage)
        typed = dataclasses.replace(storage, dtype=name, num_elements=count)
        self.storages[key] = typed
        self._keys[typed] = key
        return typed

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any) -> Tensor:
        if not isinstance(storage, Storage):
            raise ValueError("a tensor without a storage")
        if not isinstance(size, tuple) or not isinstance(stride, tuple) or len(size) != len(stride):
            raise ValueError(f"a tensor of size {abbreviate(size)} and stride {abbreviate(stride)}")
        if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)):
            raise ValueError(
                f"a tensor of size {abbreviate(size)}, stride {abbreviate(stride)} and offset {abbreviate(offset)}"
            )
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if 0 not in size and last >= storage.num_elements:
            raise CorruptSourceError(
                f"a tensor reaches element {last} of a storage of {storage.num_elements}", path=self.path
            )
        if len(size) > machine.MAX_DIMS:
            raise LimitError(f"a tensor of {len(size)} dims: at most {machine.MAX_DIMS} are read")
        if max(offset, *stride, math.prod(max(1, length) for length in size)) >= _MAX_SIZE:
            raise LimitError(f"a tensor of size {abbreviate(size)}: at most {_MAX_SIZE} elements are read")
        if math.prod(size) > _MAX_REPEATED + _MAX_REPEATS * storage.num_elements:
            raise UnsupportedError(
                f"a tensor of size {abbreviate(size)} repeats a storage of {storage.num_elements} elements",
                path=self.path,
                hint="save what it repeats, or a contiguous copy",
            )
        return Tensor(
            storage=storage,
            offset=offset,
            shape=tuple(size),
            stride=tuple(stride),
            requires_grad=bool(requires_grad),
        )
