"""`.metadata` for `FileSystemReader` to unpickle: a record for each chunk and one for each item, written as bytes.

As objects, the millions of chunks of a checkpoint of thousands of ranks would take tens of gigabytes. Source:
torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13 (`Metadata` as `FileSystemWriter.finish` leaves
it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from reshard.formats.dcp.chunks import Place
from reshard.formats.dcp.metadata import METADATA_FILE, VERSION, Entry
from reshard.formats.pt.emit import Emitter, integer
from reshard.formats.pt.objects import Global, Inert, Size
from reshard.geometry import Box
from reshard.layout import TargetFile

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_INDEX = Global(_MODULE, "MetadataIndex")
_CHUNK = Global(_MODULE, "ChunkStorageMetadata")
_STRIDED = Inert("reduce", Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Inert("reduce", Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
_SIZE = Global("torch", "Size")
_NEW = b")\x81}("  # an object without arguments, and the dict of its attributes
_BUILT = b"ub"
_BATCH = 1000  # as the standard pickler: what reads it holds so many objects on its stack
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


def metadata_file(entries: Iterable[Entry]) -> TargetFile:
    """`.metadata` of the entries."""
    every = list(entries)
    emitter = Emitter()
    emitter.value(Global(_MODULE, "Metadata"))
    emitter.parts.append(_NEW)
    emitter.text("state_dict_metadata")
    _pairs(emitter, every, lambda entry: _describe(emitter, entry))
    emitter.text("planner_data")
    emitter.value({entry.key: tuple(entry.path) for entry in every})
    emitter.text("storage_data")
    items = ((entry, at) for entry in every for at in range(len(entry.chunks)))
    _pairs(emitter, items, lambda item: _store(emitter, *item))
    emitter.text("storage_meta")
    emitter.value(_new("StorageMeta", {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}))
    emitter.text("version")
    emitter.text(VERSION)
    emitter.parts.append(_BUILT)
    pickled = emitter.pickled()
    return TargetFile(path=METADATA_FILE, num_bytes=len(pickled), fixed=((0, pickled),))


def _pairs(emitter: Emitter, items: Iterable[Any], write: Callable[[Any], None]) -> None:
    """A dict whose pairs `write` writes."""
    emitter.parts.append(b"}(")
    for at, item in enumerate(items):
        if at and at % _BATCH == 0:
            emitter.parts.append(b"u(")
        write(item)
    emitter.parts.append(b"u")


def _describe(emitter: Emitter, entry: Entry) -> None:
    """Key and value of an entry in `state_dict_metadata`."""
    emitter.text(entry.key)
    if entry.shape is None:
        emitter.value(_new("BytesStorageMetadata", None))
        return
    emitter.value(Global(_MODULE, "TensorStorageMetadata"))
    emitter.parts.append(_NEW)
    emitter.text("properties")
    state = (Global("torch", entry.dtype), _STRIDED, False, _CONTIGUOUS, False)
    emitter.value(_new("TensorProperties", state))
    emitter.text("size")
    emitter.value(Size(entry.shape))
    emitter.text("chunks")
    emitter.parts.append(b"](")
    for at, (box, _) in enumerate(entry.chunks):
        if at and at % _BATCH == 0:
            emitter.parts.append(b"e(")
        assert box is not None
        if _CHUNK not in emitter.memo:
            emitter.value(Inert("new", _CHUNK, (), {"offsets": Size(box.offset), "sizes": Size(box.size)}))
        else:
            emitter.parts.append(_chunk(emitter, box))
    emitter.parts.append(b"e" + _BUILT)


def _chunk(emitter: Emitter, box: Box) -> bytes:
    refer = emitter.reference
    size = refer(_SIZE)
    return b"".join(
        (
            refer(_CHUNK),
            _NEW,
            refer(("text", "offsets")),
            _size(size, box.offset),
            refer(("text", "sizes")),
            _size(size, box.size),
            _BUILT,
        )
    )


def _store(emitter: Emitter, entry: Entry, at: int) -> None:
    """Key and value of an item in `storage_data`."""
    box, place = entry.chunks[at]
    if box is None or _INDEX not in emitter.memo or _STORAGE_INFO not in emitter.memo or _SIZE not in emitter.memo:
        index: dict[str, Any] = {"fqn": entry.key, "index": None}
        if box is not None:
            index |= {"index": at, "offset": Size(box.offset)}
        emitter.value(Inert("new", _INDEX, (), index))
        info = {"relative_path": place.file, "offset": place.offset, "length": place.length}
        emitter.value(Inert("new", _STORAGE_INFO, (), info))
        return
    emitter.parts.append(_item(emitter, entry.key, at, box))
    emitter.text(place.file)
    emitter.parts.append(_rest(emitter, place))


def _item(emitter: Emitter, key: str, at: int, box: Box) -> bytes:
    """The key of an item, and the beginning of its value."""
    refer = emitter.reference
    return b"".join(
        (
            refer(_INDEX),
            _NEW,
            refer(("text", "fqn")),
            refer(("text", key)),
            refer(("text", "index")),
            integer(at),
            refer(("text", "offset")),
            _size(refer(_SIZE), box.offset),
            _BUILT,
            refer(_STORAGE_INFO),
            _NEW,
            refer(("text", "relative_path")),
        )
    )


def _rest(emitter: Emitter, place: Place) -> bytes:
    refer = emitter.reference
    numbers = (refer(("text", "offset")), integer(place.offset), refer(("text", "length")), integer(place.length))
    return b"".join((*numbers, _BUILT))


def _size(name: bytes, sizes: Sequence[int]) -> bytes:
    """A `torch.Size`, whose name is on the stack after the bytes `name`."""
    content = b"".join(map(integer, sizes))
    inner = content + _TUPLES[len(sizes)] if len(sizes) < 4 else b"(" + content + b"t"
    return name + inner + b"\x85R"


def _new(name: str, state: Any) -> Inert:
    return Inert("new", Global(_MODULE, name), (), state)
