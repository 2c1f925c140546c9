"""What `.metadata` says: entries of the state dict, how each is cut, and where every piece lies.

The pickle is read by our own machine: its classes become inert recipes, whose fields are checked one by one here, and
records that repeat become columns, which are checked all at once.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py (`_StorageInfo`) of torch 2.13.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.dcp.chunks import Piece, Pieces, Place
from reshard.formats.dcp.joined import join
from reshard.formats.dcp.listed import (
    MAX_DIMS,
    METADATA_FILE,
    Rows,
    WrongError,
    add_records,
    box_of,
    chunk_columns,
    fields_of,
    item_columns,
    item_of,
    place_of,
)
from reshard.formats.pt import columns, machine
from reshard.formats.pt.columns import Run
from reshard.formats.pt.objects import Global, Inert, Size
from reshard.storage.files import open_file, read_all
from reshard.system.limits import format_bytes, free_memory_bytes
from reshard.tensors.layout import ITEM_BYTES

__all__ = ["METADATA_FILE", "VERSION", "Entry", "Path_", "Place", "read_metadata"]

VERSION = "1.0.0"
"""`CURRENT_DCP_VERSION` of torch 2.13; earlier releases write no version."""

_MEMORY_SHARE = 6
"""Memory to index a checkpoint, in bytes for each byte of `.metadata` (measured, and something more)."""

_CHUNK_BYTES = 175
"""Of the file that torch writes, for each chunk of a tensor (measured)."""

_MAX_SIZE = 1 << 62

Path_ = tuple[str | int, ...]
"""Keys and list positions that lead to a value in the state dict."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of the flattened state dict.

    Attributes:
        key: its flat name.
        path: the way to it in the state dict.
        shape: of the full tensor, [ndim]; None for what is not a tensor.
        dtype: of the tensor, torch's name; empty for what is not a tensor.
        chunks: boxes of the tensor and their items; for what is not a tensor one item, and no box.
    """

    key: str
    path: Path_
    shape: tuple[int, ...] | None
    dtype: str
    chunks: Sequence[Piece]

    @property
    def is_tensor(self) -> bool:
        """Not an arbitrary object."""
        return self.shape is not None


def read_metadata(folder: Path, *, in_columns: bool = True) -> tuple[Entry, ...]:
    """All entries, in the order of the file.

    Args:
        folder: of the checkpoint.
        in_columns: chunks never are objects, as long as the file is laid out like what torch writes.

    Raises:
        UnsafePickleError: the pickle wants more than data.
        CorruptSourceError: truncated, or contradicts itself.
        UnsupportedError: of another version, with entries that this version does not read, or too large for memory.
    """
    path = folder / METADATA_FILE
    try:
        with open_file(path) as file:
            num_bytes = file.num_bytes
            _check_memory(num_bytes, path)
            data = read_all(file)
    except OSError as error:
        link = error.errno == errno.ELOOP
        raise CorruptSourceError(
            "is a symbolic link" if link else f"cannot be read: {error.strerror or error}",
            path=str(path),
            hint="copy what it links to into the folder: cp -rL" if link else "",
        ) from error
    has_runs = False
    if in_columns:
        root, has_runs = columns.load_columns(
            data, persistent_load=_refuse_persistent, rebuild=machine.rebuild_containers, path=str(path)
        )
        small = len(data) <= machine.MAX_PICKLE_BYTES
        if not has_runs or not small:
            del data
        try:
            return _Parser(str(path)).entries(root)
        except (CorruptSourceError, UnsupportedError):
            if not has_runs or not small:
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
    """What an entry is but for its chunks."""

    key: str
    path: Path_
    shape: tuple[int, ...] | None
    dtype: str


class _Parser:
    """Checks the recipes of one file; problems are collected."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[str] = []
        self.unsupported: list[str] = []
        self.items = Rows()
        self.boxes = Rows()
        self.numbers: dict[str, int] = {}
        self.files: dict[str, int] = {}

    def entries(self, root: Any) -> tuple[Entry, ...]:
        try:
            fields = fields_of(root, "Metadata")
        except WrongError as error:
            raise CorruptSourceError(f"is not the metadata of a DCP checkpoint: {error}", path=self.path) from error
        version = fields.get("version")
        if version not in (None, VERSION):
            raise UnsupportedError(f"version {version!r}: this program reads {VERSION!r}", path=self.path)
        described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
        paths = fields.get("planner_data")
        if not isinstance(described, Mapping) or not isinstance(stored, Mapping):
            raise CorruptSourceError("has no state_dict_metadata or no storage_data", path=self.path)
        self.numbers = {key: at for at, key in enumerate(described) if isinstance(key, str)}
        strings = self._items(stored)
        if not isinstance(paths, Mapping):
            paths = {}
        headers = [self._entry(at, key, value, paths.get(key)) for at, (key, value) in enumerate(described.items())]
        _forget(described, stored)
        joined = join(
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
                chunks=Pieces(
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
        """Collect all items; strings that the columns refer to."""
        strings: list[str] = []
        for run in stored.runs if isinstance(stored, columns.Table) else ():
            strings = run.strings
            add_records(
                self.items, run, -1, lambda template: item_columns(template) is not None, lambda pair: self._item(*pair)
            )
        for index, value in stored.items():
            self._item(index, value)
        return strings

    def _item(self, index: Any, value: Any) -> None:
        try:
            key, offset = item_of(index)
            info = fields_of(value, "_StorageInfo")
            place = place_of(key, info)
        except WrongError as error:
            self.problems.append(f"storage_data: {error}")
            return
        number = self.numbers.setdefault(key, len(self.numbers))
        self.items.add(number, offset, (self.files.setdefault(place.file, len(self.files)), place.offset, place.length))
        if wrapped := info.get("transform_descriptors"):
            self.unsupported.append(f"{key}: written through {wrapped!r:.80}, expected plain torch.save")

    def _entry(self, at: int, key: Any, value: Any, path: Any) -> _Header | None:
        try:
            if not isinstance(key, str):
                raise WrongError(f"state_dict_metadata has the key {key!r:.80}")
            way = _way(key, path)
            if isinstance(value, Inert) and value.target.name == "BytesStorageMetadata":
                self.boxes.add(at, None, ())
                return _Header(key, way, None, "")
            fields = fields_of(value, "TensorStorageMetadata")
            size, dtype = fields.get("size"), _dtype(fields.get("properties"))
            if not isinstance(size, Size) or len(size) > MAX_DIMS or any(part >= _MAX_SIZE for part in size):
                raise WrongError(f"size {size!s:.80}")
            if dtype not in ITEM_BYTES:
                self.unsupported.append(f"{key}: type {dtype}, expected one of {', '.join(ITEM_BYTES)}")
            shape = tuple(size)
            for item in _list(fields.get("chunks")):
                self._boxes(at, item, shape)
        except WrongError as error:
            self.problems.append(f"{key}: {error}" if isinstance(key, str) else str(error))
            return None
        return _Header(key, way, shape, dtype)

    def _boxes(self, at: int, item: Any, shape: tuple[int, ...]) -> None:
        """Collect a chunk, or a run of them."""
        if isinstance(item, Run):
            add_records(
                self.boxes,
                item,
                at,
                lambda template: (found := chunk_columns(template)) is not None and len(found[0]) == len(shape),
                lambda record: self.boxes.add(at, *_inside(record[0], shape)),
            )
        else:
            self.boxes.add(at, *_inside(item, shape))


def _forget(described: Mapping[Any, Any], stored: Mapping[Any, Any]) -> None:
    """Let go of columns that were collected: others are about to be made of them."""
    if isinstance(stored, columns.Table):
        stored.runs.clear()
    for value in described.values():
        fields = value.state if isinstance(value, Inert) and isinstance(value.state, Mapping) else {}
        if isinstance(listing := fields.get("chunks"), columns.Listing):
            listing.clear()


def _inside(chunk: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and size, if they can be."""
    offset, size = box_of(chunk, shape)
    if any(part >= _MAX_SIZE for part in (*offset, *size)):
        raise WrongError(f"a chunk at {list(offset)!s:.80} lies outside of the tensor {list(shape)}")
    return offset, size


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise WrongError(f"expected a list of chunks, found {value!r:.80}")
    return value


def _way(key: str, path: Any) -> Path_:
    if path is None:
        return (key,)
    if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
        raise WrongError(f"planner_data has the path {path!r:.80}")
    if ".".join(map(str, path)) != key:
        raise WrongError(f"planner_data has the path {path!r:.200}, which is another key")
    return path


def _dtype(properties: Any) -> str:
    """`TensorProperties` are a tuple (dtype, layout, requires_grad, memory_format, pin_memory)."""
    state = properties.state if isinstance(properties, Inert) else None
    if not isinstance(state, tuple) or len(state) < 2:
        raise WrongError(f"properties {state!r:.80}")
    if not isinstance(state[0], Global) or state[0].module != "torch":
        raise WrongError(f"a dtype {state[0]!r:.80}")
    layout = state[1].args if isinstance(state[1], Inert) else state[1]
    if layout not in (("torch.strided",), Global("torch", "strided")):
        raise WrongError(f"layout {layout!r:.80}: expected torch.strided")
    return state[0].name
