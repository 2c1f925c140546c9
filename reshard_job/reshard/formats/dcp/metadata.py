"""Read `.metadata`: the entries of the state dict, how each is cut into chunks, and which item holds each chunk.

The pickle machine of `formats.pt` turns objects into `Inert` recipes, whose fields are checked here one by one, and
records that repeat into batches, whose columns are checked at once.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py (`_StorageInfo`) of torch 2.13.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError, make_read_error
from reshard.formats.dcp.chunks import EntryChunks, Place, PlacedChunk
from reshard.formats.dcp.joined import join_items
from reshard.formats.dcp.listed import (
    MAX_DIMS,
    METADATA_FILE,
    EntryError,
    RowCollector,
    add_records,
    find_chunk_columns,
    find_item_columns,
    parse_box,
    parse_fields,
    parse_item,
    parse_place,
)
from reshard.formats.pt import columns, machine
from reshard.formats.pt.batches import BatchDict, BatchList, RecordBatch
from reshard.formats.pt.objects import Global, Inert, Size
from reshard.storage.files import open_file, read_all
from reshard.system.limits import format_bytes, free_memory_bytes
from reshard.tensors.layout import ITEM_BYTES

__all__ = ["METADATA_FILE", "VERSION", "Entry", "Place", "StatePath", "read_metadata"]

VERSION = "1.0.0"
"""`CURRENT_DCP_VERSION` of torch 2.13; earlier releases write no version."""

_MEMORY_SHARE = 6
"""Memory that indexing a checkpoint takes, in bytes for each byte of `.metadata` (measured, with a margin)."""

_CHUNK_BYTES = 175
"""Bytes of `.metadata` for each chunk of a tensor, as torch writes it (measured)."""

_MAX_SIZE = 1 << 62

StatePath = tuple[str | int, ...]
"""Keys and list positions that lead to a value in the state dict."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of the flattened state dict.

    Attributes:
        key: its flat name.
        path: keys and list positions that lead to it in the state dict.
        shape: shape of the full tensor, [ndim]; None for an entry that is not a tensor.
        dtype: torch's name of the tensor's dtype; empty for an entry that is not a tensor.
        chunks: boxes of the tensor and their items; one item without a box for an entry that is not a tensor.
    """

    key: str
    path: StatePath
    shape: tuple[int, ...] | None
    dtype: str
    chunks: Sequence[PlacedChunk]

    @property
    def is_tensor(self) -> bool:
        """True for a tensor, False for any other object."""
        return self.shape is not None


def read_metadata(folder: Path, *, in_columns: bool = True) -> tuple[Entry, ...]:
    """Read all entries, in the order of the file.

    Args:
        folder: folder of the checkpoint.
        in_columns: decode records that repeat into columns, if the file is laid out as torch writes it.

    Raises:
        UnsafePickleError: the pickle does more than build data.
        CorruptSourceError: the file is truncated, or contradicts itself.
        UnsupportedError: another version, entries that this version does not read, or too large for the free memory.
    """
    path = folder / METADATA_FILE
    try:
        with open_file(path) as file:
            num_bytes = file.num_bytes
            _check_memory(num_bytes, path)
            data = read_all(file)
    except OSError as error:
        raise make_read_error(error, str(path)) from error
    has_batches = False
    if in_columns:
        root, has_batches = columns.load_columns(
            data, persistent_load=_refuse_persistent, rebuild=machine.rebuild_containers, path=str(path)
        )
        small = len(data) <= machine.MAX_PICKLE_BYTES
        if not has_batches or not small:
            del data
        try:
            return _Parser(str(path)).entries(root)
        except (CorruptSourceError, UnsupportedError):
            if not has_batches or not small:
                raise
    root = columns.load_objects(
        data, persistent_load=_refuse_persistent, rebuild=machine.rebuild_containers, path=str(path)
    )
    return _Parser(str(path)).entries(root)


def _check_memory(num_bytes: int, path: Path) -> None:
    free = free_memory_bytes()
    if num_bytes <= machine.MAX_PICKLE_BYTES or free is None or num_bytes * _MEMORY_SHARE <= free:
        return
    raise UnsupportedError(
        f"has {num_bytes} bytes, which are about {num_bytes // _CHUNK_BYTES} chunks: to index them takes about "
        f"{format_bytes(num_bytes * _MEMORY_SHARE)} of memory, {format_bytes(free)} is free",
        path=str(path),
        hint="give the process more memory, or save each parameter in fewer chunks, for instance sharded within a group"
        " of ranks and replicated over the groups (HSDP)",
    )


def _refuse_persistent(identifier: Any) -> Any:
    raise ValueError(f"a persistent id {identifier!r:.80}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Header:
    """An entry without its chunks."""

    key: str
    path: StatePath
    shape: tuple[int, ...] | None
    dtype: str


class _Parser:
    """Parser of one file, which collects problems and goes on."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[str] = []
        self.unsupported: list[str] = []
        self.items = RowCollector()
        self.boxes = RowCollector()
        self.numbers: dict[str, int] = {}
        self.files: dict[str, int] = {}

    def entries(self, root: Any) -> tuple[Entry, ...]:
        try:
            fields = parse_fields(root, "Metadata")
        except EntryError as error:
            raise UnsupportedError(f"is not the metadata of a DCP checkpoint: {error}", path=self.path) from error
        version = fields.get("version")
        if version not in (None, VERSION):
            raise UnsupportedError(f"version {version!r}: this program reads {VERSION!r}", path=self.path)
        described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
        paths = fields.get("planner_data")
        if not isinstance(described, Mapping) or not isinstance(stored, Mapping):
            raise UnsupportedError("has no state_dict_metadata or no storage_data", path=self.path)
        self.numbers = {key: at for at, key in enumerate(described) if isinstance(key, str)}
        strings = self._items(stored)
        if not isinstance(paths, Mapping):
            paths = {}
        headers = [self._entry(at, key, value, paths.get(key)) for at, (key, value) in enumerate(described.items())]
        _release_columns(described, stored)
        joined = join_items(
            self.boxes,
            self.items,
            shapes=[None if header is None else header.shape for header in headers],
            left_out={at for at, header in enumerate(headers) if header is None},
            numbers=self.numbers,
            files=self.files,
            strings=strings,
        )
        self.problems += joined.problems
        if self.problems:
            raise CorruptSourceError(
                f"contradicts itself ({len(self.problems)} problems)",
                path=self.path,
                problems=self.problems[:20],
                hint="use an earlier checkpoint",
            )
        if self.unsupported:
            raise UnsupportedError("has entries that are not read", path=self.path, problems=self.unsupported[:20])
        bounds = joined.bounds.tolist()
        return tuple(
            Entry(
                key=header.key,
                path=header.path,
                shape=header.shape,
                dtype=header.dtype,
                chunks=EntryChunks(
                    chunks=joined.chunks,
                    first=bounds[at],
                    last=bounds[at + 1],
                    ndim=None if header.shape is None else len(header.shape),
                ),
            )
            for at, header in enumerate(headers)
            if header is not None
        )

    def _items(self, stored: Mapping[Any, Any]) -> list[str]:
        """Collect all items; return the strings that their columns refer to."""
        strings: list[str] = []
        for batch in stored.batches if isinstance(stored, BatchDict) else ():
            strings = batch.strings
            add_records(
                self.items,
                batch,
                -1,
                lambda template: find_item_columns(template) is not None,
                lambda pair: self._item(*pair),
            )
        for index, value in stored.items():
            self._item(index, value)
        return strings

    def _item(self, index: Any, value: Any) -> None:
        try:
            key, offset = parse_item(index)
            info = parse_fields(value, "_StorageInfo")
            place = parse_place(key, info)
        except EntryError as error:
            self.problems.append(f"storage_data: {error}")
            return
        number = self.numbers.setdefault(key, len(self.numbers))
        self.items.add(number, offset, (self.files.setdefault(place.file, len(self.files)), place.offset, place.length))
        if wrapped := info.get("transform_descriptors"):
            self.unsupported.append(f"{key}: written through {wrapped!r:.80}, expected plain torch.save")

    def _entry(self, at: int, key: Any, value: Any, path: Any) -> _Header | None:
        try:
            if not isinstance(key, str):
                raise EntryError(f"state_dict_metadata has the key {key!r:.80}")
            way = _parse_path(key, path)
            if isinstance(value, Inert) and value.target.name == "BytesStorageMetadata":
                self.boxes.add(at, None, ())
                return _Header(key, way, None, "")
            fields = parse_fields(value, "TensorStorageMetadata")
            size, dtype = fields.get("size"), _parse_dtype(fields.get("properties"))
            if not isinstance(size, Size) or len(size) > MAX_DIMS or any(part >= _MAX_SIZE for part in size):
                raise EntryError(f"size {size!s:.80}")
            if dtype not in ITEM_BYTES:
                self.unsupported.append(f"{key}: type {dtype}, expected one of {', '.join(ITEM_BYTES)}")
            shape = tuple(size)
            for item in _check_list(fields.get("chunks")):
                self._boxes(at, item, shape)
        except EntryError as error:
            self.problems.append(f"{key}: {error}" if isinstance(key, str) else str(error))
            return None
        return _Header(key, way, shape, dtype)

    def _boxes(self, at: int, item: Any, shape: tuple[int, ...]) -> None:
        """Collect a chunk, or a batch of chunks."""
        if isinstance(item, RecordBatch):
            add_records(
                self.boxes,
                item,
                at,
                lambda template: (found := find_chunk_columns(template)) is not None and len(found[0]) == len(shape),
                lambda record: self.boxes.add(at, *_parse_chunk(record[0], shape)),
            )
        else:
            self.boxes.add(at, *_parse_chunk(item, shape))


def _release_columns(described: Mapping[Any, Any], stored: Mapping[Any, Any]) -> None:
    """Release the batches, which the collectors refer to, so that memory is freed while tables are built of them."""
    if isinstance(stored, BatchDict):
        stored.batches.clear()
    for value in described.values():
        fields = value.state if isinstance(value, Inert) and isinstance(value.state, Mapping) else {}
        if isinstance(listing := fields.get("chunks"), BatchList):
            listing.clear()


def _parse_chunk(chunk: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parse the offset and size of a chunk, and check that neither is too large for 64-bit arithmetic."""
    offset, size = parse_box(chunk, shape)
    if any(part >= _MAX_SIZE for part in (*offset, *size)):
        raise EntryError(f"a chunk at {list(offset)!s:.80} lies outside of the tensor {list(shape)}")
    return offset, size


def _check_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise EntryError(f"expected a list of chunks, found {value!r:.80}")
    return value


def _parse_path(key: str, path: Any) -> StatePath:
    if path is None:
        return (key,)
    if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
        raise EntryError(f"planner_data has the path {path!r:.80}")
    if ".".join(map(str, path)) != key:
        raise EntryError(f"planner_data has the path {path!r:.200}, which is another key")
    return path


def _parse_dtype(properties: Any) -> str:
    """Parse the dtype of `TensorProperties`: (dtype, layout, requires_grad, memory_format, pin_memory)."""
    state = properties.state if isinstance(properties, Inert) else None
    if not isinstance(state, tuple) or len(state) < 2:
        raise EntryError(f"properties {state!r:.80}")
    if not isinstance(state[0], Global) or state[0].module != "torch":
        raise EntryError(f"a dtype {state[0]!r:.80}")
    layout = state[1].args if isinstance(state[1], Inert) else state[1]
    if layout not in (("torch.strided",), Global("torch", "strided")):
        raise EntryError(f"layout {layout!r:.80}: expected torch.strided")
    return state[0].name
