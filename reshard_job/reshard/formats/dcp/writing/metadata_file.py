"""`.metadata` for `FileSystemReader` to unpickle, written as bytes.

Source: torch/distributed/checkpoint/metadata.py of torch 2.13 (`Metadata` as `FileSystemWriter.finish` leaves it).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reshard.formats.dcp.metadata import METADATA_FILE, VERSION, Entry
from reshard.formats.dcp.writing.records import BATCH, BUILT, MODULE, NEW, Records
from reshard.formats.pt.emit import Emitter
from reshard.formats.pt.objects import Global, Inert, Size
from reshard.tensors.layout import TargetFile

_STRIDED = Inert("reduce", Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Inert("reduce", Global(MODULE, "_MEM_FORMAT_ENCODING"), (0,))


def metadata_file(entries: Iterable[Entry]) -> TargetFile:
    """`.metadata` of the entries."""
    every = list(entries)
    emitter = Emitter()
    records = Records(emitter)
    emitter.value(Global(MODULE, "Metadata"))
    emitter.parts.append(NEW)
    emitter.text("state_dict_metadata")
    emitter.parts.append(b"}(")
    for at, entry in enumerate(every):
        if at and at % BATCH == 0:
            emitter.parts.append(b"u(")
        _describe(emitter, records, entry)
    emitter.parts.append(b"u")
    emitter.text("planner_data")
    emitter.value({entry.key: tuple(entry.path) for entry in every})
    emitter.text("storage_data")
    emitter.parts.append(b"}(")
    for entry in every:
        records.items(entry)
    emitter.parts.append(b"u")
    emitter.text("storage_meta")
    emitter.value(_new("StorageMeta", {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}))
    emitter.text("version")
    emitter.text(VERSION)
    emitter.parts.append(BUILT)
    fixed = tuple(emitter.pieces())
    return TargetFile(path=METADATA_FILE, num_bytes=fixed[-1][0] + len(fixed[-1][1]), fixed=fixed)


def _describe(emitter: Emitter, records: Records, entry: Entry) -> None:
    """Key and value of an entry in `state_dict_metadata`."""
    emitter.text(entry.key)
    if entry.shape is None:
        emitter.value(_new("BytesStorageMetadata", None))
        return
    emitter.value(Global(MODULE, "TensorStorageMetadata"))
    emitter.parts.append(NEW)
    emitter.text("properties")
    state = (Global("torch", entry.dtype), _STRIDED, False, _CONTIGUOUS, False)
    emitter.value(_new("TensorProperties", state))
    emitter.text("size")
    emitter.value(Size(entry.shape))
    emitter.text("chunks")
    emitter.parts.append(b"](")
    records.chunks(entry)
    emitter.parts.append(b"e" + BUILT)


def _new(name: str, state: Any) -> Inert:
    return Inert("new", Global(MODULE, name), (), state)
