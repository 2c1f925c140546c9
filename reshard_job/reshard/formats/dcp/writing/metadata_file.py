"""Write `.metadata` as the bytes of a pickle for torch's `FileSystemReader`.

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


def build_metadata_file(entries: Iterable[Entry]) -> TargetFile:
    """Build the file `.metadata` of the entries."""
    listed = list(entries)
    emitter = Emitter()
    records = Records(emitter)
    emitter.emit_value(Global(MODULE, "Metadata"))
    emitter.parts.append(NEW)
    emitter.emit_text("state_dict_metadata")
    emitter.parts.append(b"}(")
    for at, entry in enumerate(listed):
        if at and at % BATCH == 0:
            emitter.parts.append(b"u(")
        _emit_entry(emitter, records, entry)
    emitter.parts.append(b"u")
    emitter.emit_text("planner_data")
    emitter.emit_value({entry.key: tuple(entry.path) for entry in listed})
    emitter.emit_text("storage_data")
    emitter.parts.append(b"}(")
    for entry in listed:
        records.emit_items(entry)
    emitter.parts.append(b"u")
    emitter.emit_text("storage_meta")
    emitter.emit_value(
        _make_object("StorageMeta", {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []})
    )
    emitter.emit_text("version")
    emitter.emit_text(VERSION)
    emitter.parts.append(BUILT)
    fixed = tuple(emitter.iterate_bytes())
    return TargetFile(path=METADATA_FILE, num_bytes=fixed[-1][0] + len(fixed[-1][1]), fixed=fixed)


def _emit_entry(emitter: Emitter, records: Records, entry: Entry) -> None:
    """Emit the key and value of an entry in `state_dict_metadata`."""
    emitter.emit_text(entry.key)
    if entry.shape is None:
        emitter.emit_value(_make_object("BytesStorageMetadata", None))
        return
    emitter.emit_value(Global(MODULE, "TensorStorageMetadata"))
    emitter.parts.append(NEW)
    emitter.emit_text("properties")
    state = (Global("torch", entry.dtype), _STRIDED, False, _CONTIGUOUS, False)
    emitter.emit_value(_make_object("TensorProperties", state))
    emitter.emit_text("size")
    emitter.emit_value(Size(entry.shape))
    emitter.emit_text("chunks")
    emitter.parts.append(b"](")
    records.emit_chunks(entry)
    emitter.parts.append(b"e" + BUILT)


def _make_object(name: str, state: Any) -> Inert:
    return Inert("new", Global(MODULE, name), (), state)
