"""Content of items: the position of a chunk's elements, and the values of small objects."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError, make_read_error
from reshard.formats.dcp.alike import Pattern, learn_pattern
from reshard.formats.dcp.archive import Window, read_directory
from reshard.formats.dcp.metadata import Entry, Place
from reshard.formats.pt.archive import Entry as ZipEntry
from reshard.formats.pt.objects import Inert, Tensor
from reshard.formats.pt.reader import build
from reshard.storage.files import File, open_file
from reshard.tensors.geometry import Box
from reshard.tensors.layout import ITEM_BYTES, Checksum, Plain

MAX_OBJECT_BYTES = 64 << 20
"""Largest object (data loader state, random states) that is copied to the target."""

_SCALAR_CODES = {"float32": "<f", "float64": "<d", "float16": "<e", "int64": "<q", "int32": "<i"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Position of a chunk's elements.

    Attributes:
        byte_offset: byte offset of the first element in the file.
        strides: strides in elements, [ndim].
        checksum: checksum of the storage that the item states; None if it states none.
    """

    byte_offset: int
    strides: tuple[int, ...]
    checksum: Checksum | None


class Items:
    """Reader of the items in a checkpoint's files.

    Use it as a context manager. One file is open at a time, so read items in the order of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_bytes_read = 0
        self._current: tuple[str, File] | None = None
        self._known: dict[bytes, tuple[str, Tensor]] = {}
        self._patterns: dict[tuple[str, tuple[int, ...], int], Pattern] = {}

    def __enter__(self) -> Items:
        return self

    def __exit__(self, *_error: object) -> None:
        self._close()

    def file_bytes(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            CorruptSourceError: missing, a link, or not a plain file.
        """
        return self._file(name).num_bytes

    def chunk(self, entry: Entry, box: Box, place: Place) -> Chunk:
        """Locate a chunk and check that its item holds one tensor of the chunk's size and the entry's dtype.

        Raises:
            CorruptSourceError, UnsafePickleError, UnsupportedError: see `reshard.formats.base`.
        """
        window = self._window(entry.key, place)
        alike = (entry.dtype, box.size, place.length)
        pattern = self._patterns.get(alike)
        if pattern is not None and pattern.matches(window):
            self.num_bytes_read += window.num_bytes_read
            start = window.start + pattern.payload
            stated = Checksum(start=start, num_bytes=pattern.num_bytes, crc32=pattern.read_crc32(window))
            return Chunk(byte_offset=start + pattern.first, strides=pattern.strides, checksum=stated)
        found, entries, name = self._read_tensor(window)
        if found.shape != box.size or found.dtype != entry.dtype:
            raise CorruptSourceError(
                f"{window.where}: holds {found.dtype} {list(found.shape)}, .metadata says {entry.dtype} "
                f"{list(box.size)}: files of two saves are mixed",
                hint="use an earlier checkpoint; never save twice into one folder",
            )
        storage = found.storage
        checksum = None
        if storage.crc32 is not None and storage.num_bytes:
            checksum = Checksum(start=storage.file_offset, num_bytes=storage.num_bytes, crc32=storage.crc32)
        self.num_bytes_read += window.num_bytes_read
        first = found.offset * ITEM_BYTES[found.dtype]
        if (learnt := learn_pattern(window, entries, name, first, found.stride)) is not None:
            self._patterns[alike] = learnt
        return Chunk(byte_offset=found.file_offset, strides=found.stride, checksum=checksum)

    def _read_tensor(self, window: Window) -> tuple[Tensor, Mapping[str, ZipEntry], str]:
        """Read the tensor of an item. Items of equal chunks have equal pickles, and each pickle is run once only.

        Returns:
            The tensor, the archive's entries, and the name of the entry with the tensor's storage.
        """
        entries = read_directory(window)
        _check_order(window, entries)
        pickled = _read_pickle(window, entries)
        known = self._known.get(pickled)
        entry = entries.get(f"data/{known[0]}") if known is not None else None
        if known is not None and entry is not None and entry.num_bytes == known[1].storage.num_bytes:
            storage = dataclasses.replace(known[1].storage, file_offset=entry.offset, crc32=entry.crc32)
            return dataclasses.replace(known[1], storage=storage), entries, entry.name
        value, storages = build(pickled, entries, window.where)
        if not isinstance(value, Tensor):
            kind = UnsupportedError if isinstance(value, Inert) else CorruptSourceError
            raise kind(f"{window.where}: holds a {type(value).__name__}, expected a tensor")
        key = next(key for key, item in storages.items() if item is value.storage)
        self._known[pickled] = (key, value)
        return value, entries, f"data/{key}"

    def read_object(self, key: str, place: Place) -> Any:
        """Read the object of an item that is not a tensor: plain data, `Inert` recipes, references to tensors."""
        window = self._window(key, place)
        value, _ = self._read_value(window)
        self.num_bytes_read += window.num_bytes_read
        return value

    def read_scalar(self, entry: Entry) -> int | float:
        """Read the number that an entry holds as a tensor without dims, or as an object.

        Raises:
            UnsupportedError: it is neither.
        """
        _, place = entry.chunks[0]
        window = self._window(entry.key, place)
        value, zip_entries = self._read_value(window)
        self.num_bytes_read += window.num_bytes_read
        if isinstance(value, int | float):
            return value
        code = _SCALAR_CODES.get(value.dtype) if isinstance(value, Tensor) else None
        if code is None or value.num_elements != 1:
            raise UnsupportedError(f"{window.where}: expected a number, found a {type(value).__name__}")
        storage = next(iter(zip_entries.values()))
        data = _read_checked(window, storage)
        number: int | float = struct.unpack_from(code, data, value.offset * ITEM_BYTES[value.dtype])[0]
        return number

    def read_whole(self, key: str, place: Place) -> Any:
        """Read the object of an item and the bytes of its tensors, so that it can be written again.

        Raises:
            UnsupportedError: the item is larger than `MAX_OBJECT_BYTES`, or has tensors of an unsupported kind.
            UnsafePickleError: the pickle names a global that is not accepted.
            CorruptSourceError: the item is damaged.
        """
        if place.length > MAX_OBJECT_BYTES:
            raise UnsupportedError(
                f"{place.file}: {key} has {place.length} bytes, objects of up to {MAX_OBJECT_BYTES} are carried along"
            )
        window = self._window(key, place)
        entries = read_directory(window)
        _check_order(window, entries)
        value, storages = build(_read_pickle(window, entries), entries, window.where)
        for name, storage in storages.items():
            storage.data = _read_checked(window, entries[f"data/{name}"])
        self.num_bytes_read += window.num_bytes_read
        return value

    def _read_value(self, window: Window) -> tuple[Any, Mapping[str, ZipEntry]]:
        """Read the object of an item; return it with the archive's entries of tensor storages."""
        entries = read_directory(window)
        _check_order(window, entries)
        value, _ = build(_read_pickle(window, entries), entries, window.where)
        return value, {name: entry for name, entry in entries.items() if name.startswith("data/")}

    def _window(self, key: str, place: Place) -> Window:
        file = self._file(place.file)
        where = f"{self.folder / place.file}: item {key}"
        if place.offset + place.length > file.num_bytes:
            raise CorruptSourceError(
                f"{where}: bytes {place.offset}:{place.offset + place.length} are expected, the file ends at "
                f"{file.num_bytes}: truncated",
                hint="use an earlier checkpoint",
            )
        return Window(file, place.offset, place.length, where)

    def _file(self, name: str) -> File:
        """Open a file and close the one before: there are as many files as ranks."""
        if self._current is None or self._current[0] != name:
            self._close()
            path = self.folder / name
            try:
                self._current = (name, open_file(path))
            except OSError as error:
                raise make_read_error(error, str(path), what="cannot be opened") from error
        return self._current[1]

    def _close(self) -> None:
        if self._current is not None:
            self._current[1].close()
            self._current = None


def _check_order(window: Window, entries: Mapping[str, ZipEntry]) -> None:
    if "byteorder" in entries and (order := _read_checked(window, entries["byteorder"])) != b"little":
        raise UnsupportedError(f"{window.where}: byte order {order!r:.40}: only little endian is read")


def _read_pickle(window: Window, entries: Mapping[str, ZipEntry]) -> bytes:
    if "data.pkl" not in entries:
        raise UnsupportedError(f"{window.where}: has no entry data.pkl: not written by torch.save")
    if entries["data.pkl"].num_bytes > MAX_OBJECT_BYTES:
        raise UnsupportedError(f"{window.where}: its pickle has {entries['data.pkl'].num_bytes} bytes")
    return _read_checked(window, entries["data.pkl"])


def _read_checked(window: Window, entry: ZipEntry) -> bytes:
    """Read the payload of an entry and check it against its CRC-32."""
    data = window.get(entry.offset - window.start, entry.num_bytes)
    if entry.crc32 is not None and zlib.crc32(data) != entry.crc32:
        raise CorruptSourceError(f"{window.where}: entry {entry.name!r} is damaged: its CRC-32 does not match")
    return data


def to_plain(value: Any) -> Plain:
    """Convert the value of an option to plain data.

    Raises:
        ValueError: it holds a recipe or a tensor.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return (
            type(value)(to_plain(item) for item in value)
            if type(value) in (list, tuple)
            else list(map(to_plain, value))
        )
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_plain(item) for key, item in value.items()}
    raise ValueError(f"{value!r:.80}")
