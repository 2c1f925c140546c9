"""What `.metadata` says: entries of the state dict, how each is cut, and where every piece lies.

The pickle is read by our own machine: its classes become inert recipes, whose fields are checked one by one here.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py (`_StorageInfo`) of torch 2.13.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.pt import machine
from reshard.formats.pt.objects import Global, Inert, Size
from reshard.geometry import Box
from reshard.layout import ITEM_BYTES

METADATA_FILE = ".metadata"
VERSION = "1.0.0"
"""`CURRENT_DCP_VERSION` of torch 2.13; earlier releases write no version."""

_CHUNK_BYTES = 145
"""Of the file that torch writes, for each chunk of a tensor (measured)."""

_FILE_NAME = re.compile(r"^[^/\\\0]+$")
_Places = dict[str, dict[tuple[int, ...] | None, "Place"]]
"""Items by key and by the offset of their chunk; None for what is not a tensor."""

Path_ = tuple[str | int, ...]
"""Keys and list positions that lead to a value in the state dict."""


class Place(NamedTuple):
    """Where an item lies: one complete `.pt` archive inside a file.

    Attributes:
        file: name of the file.
        offset: first byte.
        length: bytes.
    """

    file: str
    offset: int
    length: int


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
    chunks: tuple[tuple[Box | None, Place], ...]

    @property
    def is_tensor(self) -> bool:
        """Not an arbitrary object."""
        return self.shape is not None


def read_metadata(folder: Path) -> tuple[Entry, ...]:
    """All entries, in the order of the file.

    Raises:
        UnsafePickleError: the pickle wants more than data.
        CorruptSourceError: truncated, or contradicts itself.
        UnsupportedError: of another version, or with entries that this version does not read.
    """
    path = folder / METADATA_FILE
    try:
        num_bytes = path.stat().st_size
        if num_bytes > machine.MAX_PICKLE_BYTES:
            raise _too_large(num_bytes, path)
        data = path.read_bytes()
    except OSError as error:
        raise CorruptSourceError(f"cannot be read: {error.strerror}", path=str(path)) from error
    root = machine.load(data, persistent_load=_refuse_persistent, rebuild=machine.rebuild_containers, path=str(path))
    return _Parser(str(path)).entries(root)


def _too_large(num_bytes: int, path: Path) -> UnsupportedError:
    limit = machine.MAX_PICKLE_BYTES
    return UnsupportedError(
        f"has {num_bytes} bytes, at most {limit} are read: about {limit // _CHUNK_BYTES} chunks",
        path=str(path),
        hint="save each parameter in fewer chunks, for instance sharded within a group of ranks and replicated over"
        " the groups (HSDP), or load and save it again with torch.distributed.checkpoint on fewer ranks",
    )


def _refuse_persistent(identifier: Any) -> Any:
    raise ValueError(f"a persistent id {identifier!r:.80}")


class _WrongError(Exception):
    """Something about one entry."""


class _Parser:
    """Checks the recipes of one file; problems are collected."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[str] = []
        self.unsupported: list[str] = []

    def entries(self, root: Any) -> tuple[Entry, ...]:
        try:
            fields = _fields(root, "Metadata")
        except _WrongError as error:
            raise CorruptSourceError(f"is not the metadata of a DCP checkpoint: {error}", path=self.path) from error
        version = fields.get("version")
        if version not in (None, VERSION):
            raise UnsupportedError(f"version {version!r}: this program reads {VERSION!r}", path=self.path)
        described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
        paths = fields.get("planner_data")
        if not isinstance(described, Mapping) or not isinstance(stored, Mapping):
            raise CorruptSourceError("has no state_dict_metadata or no storage_data", path=self.path)
        places = self._places(stored)
        if not isinstance(paths, Mapping):
            paths = {}
        found = [self._entry(key, value, paths.get(key), places) for key, value in described.items()]
        for key, own in places.items():
            for offset in own:
                where = "" if offset is None else f" at {list(offset)}"
                self.problems.append(f"{key}: storage_data has an item{where} that state_dict_metadata does not have")
        if self.problems:
            raise CorruptSourceError(
                f"contradicts itself ({len(self.problems)} problems)",
                path=self.path,
                problems=self.problems[:20],
                hint="use an earlier checkpoint",
            )
        if self.unsupported:
            raise UnsupportedError("has entries that are not read", path=self.path, problems=self.unsupported[:20])
        return tuple(entry for entry in found if entry is not None)

    def _places(self, stored: Mapping[Any, Any]) -> _Places:
        places: _Places = {}
        for index, value in stored.items():
            try:
                name = _fields(index, "MetadataIndex")
                key, offset = name.get("fqn"), name.get("offset")
                if not isinstance(key, str) or not (offset is None or isinstance(offset, Size)):
                    raise _WrongError(f"an index {key!r:.80} at {offset!r:.80}")
                at = None if offset is None else tuple(offset)
                if at in places.setdefault(key, {}):
                    raise _WrongError(f"{key}: two items at {offset!r:.80}")
                info = _fields(value, "_StorageInfo")
                places[key][at] = _place(key, info)
            except _WrongError as error:
                self.problems.append(f"storage_data: {error}")
                continue
            if wrapped := info.get("transform_descriptors"):
                self.unsupported.append(f"{key}: written through {wrapped!r:.80}, expected plain torch.save")
        return places

    def _entry(self, key: Any, value: Any, path: Any, places: _Places) -> Entry | None:
        try:
            if not isinstance(key, str):
                raise _WrongError(f"state_dict_metadata has the key {key!r:.80}")
            way = _way(key, path)
            if isinstance(value, Inert) and value.target.name == "BytesStorageMetadata":
                chunks: tuple[tuple[Box | None, Place], ...] = ((None, _taken(places, key, None)),)
                return Entry(key=key, path=way, shape=None, dtype="", chunks=chunks)
            fields = _fields(value, "TensorStorageMetadata")
            shape, dtype = fields.get("size"), _dtype(fields.get("properties"))
            if not isinstance(shape, Size):
                raise _WrongError(f"size {shape!r:.80}")
            if dtype not in ITEM_BYTES:
                self.unsupported.append(f"{key}: type {dtype}, expected one of {', '.join(ITEM_BYTES)}")
            # A replica that was not left out when it was saved is listed twice, and stored once.
            boxes = dict.fromkeys(_box(chunk, tuple(shape)) for chunk in _list(fields.get("chunks")))
            chunks = tuple((box, _taken(places, key, box.offset)) for box in boxes)
            return Entry(key=key, path=way, shape=tuple(shape), dtype=dtype, chunks=chunks)
        except _WrongError as error:
            self.problems.append(f"{key}: {error}" if isinstance(key, str) else str(error))
            if isinstance(key, str):
                places.pop(key, None)  # the entry is reported once
            return None


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """State of a recipe for torch's class `name`, wherever torch keeps it: the modules differ between releases."""
    if not isinstance(value, Inert) or value.target.name != name or not isinstance(value.state, Mapping):
        raise _WrongError(f"expected a {name}, found {value!r:.100}")
    return value.state


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _WrongError(f"expected a list of chunks, found {value!r:.80}")
    return value


def _way(key: str, path: Any) -> Path_:
    if path is None:
        return (key,)
    if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
        raise _WrongError(f"planner_data has the path {path!r:.80}")
    if ".".join(map(str, path)) != key:
        raise _WrongError(f"planner_data has the path {path!r:.200}, which is another key")
    return path


def _dtype(properties: Any) -> str:
    """`TensorProperties` are a tuple (dtype, layout, requires_grad, memory_format, pin_memory)."""
    state = properties.state if isinstance(properties, Inert) else None
    if not isinstance(state, tuple) or len(state) < 2:
        raise _WrongError(f"properties {state!r:.80}")
    if not isinstance(state[0], Global) or state[0].module != "torch":
        raise _WrongError(f"a dtype {state[0]!r:.80}")
    layout = state[1].args if isinstance(state[1], Inert) else state[1]
    if layout not in (("torch.strided",), Global("torch", "strided")):
        raise _WrongError(f"layout {layout!r:.80}: expected torch.strided")
    return state[0].name


def _box(chunk: Any, shape: tuple[int, ...]) -> Box:
    fields = _fields(chunk, "ChunkStorageMetadata")
    offset, size = fields.get("offsets"), fields.get("sizes")
    if not isinstance(offset, Size) or not isinstance(size, Size) or not len(offset) == len(size) == len(shape):
        raise _WrongError(f"a chunk at {offset!r:.80} of {size!r:.80}, the tensor is {list(shape)}")
    box = Box(tuple(offset), tuple(size))
    if any(end > limit for end, limit in zip(box.end, shape, strict=True)):
        raise _WrongError(f"chunk {box} lies outside of the tensor {list(shape)}")
    return box


def _taken(places: _Places, key: str, offset: tuple[int, ...] | None) -> Place:
    place = places.get(key, {}).pop(offset, None)
    if place is None:
        at = "" if offset is None else f" at {list(offset)}"
        raise _WrongError(f"storage_data has no item for it{at}")
    return place


def _place(key: str, fields: Mapping[str, Any]) -> Place:
    name, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    if not isinstance(name, str) or not _FILE_NAME.match(name) or name in (".", "..", METADATA_FILE):
        raise _WrongError(f"{key}: file name {name!r:.80} is not that of a file in the folder")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 1:
        raise _WrongError(f"{key}: bytes {offset!r:.40} + {length!r:.40} of {name}")
    return Place(name, offset, length)
