"""A DCP target with an object for each chunk: what the writer that works in columns has to agree with."""

from collections.abc import Iterator, Sequence
from typing import Any

from reshard.formats.base import Request
from reshard.formats.dcp.chunks import Place
from reshard.formats.dcp.metadata import Entry
from reshard.formats.dcp.naming import flat_name
from reshard.formats.dcp.writing.objects import add_numbers, add_options
from reshard.formats.dcp.writing.target_tensors import TargetTensor, name_tensors
from reshard.formats.pt.emit import Emitter, encode_integer
from reshard.formats.pt.objects import Global, Inert, Size, new_tensor
from reshard.formats.pt.writer import lay_out_pt
from reshard.tensors.geometry import Box, whole
from reshard.tensors.layout import ChecksumField, Index, TargetFile

MODULE = "torch.distributed.checkpoint.metadata"
INDEX, CHUNK, SIZE = Global(MODULE, "MetadataIndex"), Global(MODULE, "ChunkStorageMetadata"), Global("torch", "Size")
INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
STRIDED = Inert("reduce", Global("torch.serialization", "_get_layout"), ("torch.strided",))
CONTIGUOUS = Inert("reduce", Global(MODULE, "_MEM_FORMAT_ENCODING"), (0,))
Row = tuple[int, Box, int, int]
"""Tensor, box, file, and first byte."""


class Files:
    """Files of ranks, item by item."""

    def __init__(self, world_size: int) -> None:
        self.ends = [0] * world_size
        self.fixed: list[list[tuple[int, bytes]]] = [[] for _ in range(world_size)]
        self.checksums: list[list[ChecksumField]] = [[] for _ in range(world_size)]

    def add_object(self, rank: int, value: Any) -> Place:
        layout = lay_out_pt("archive", value)
        content = bytearray(layout.num_bytes)
        for offset, data in layout.fixed:
            content[offset : offset + len(data)] = data
        start = -(-self.ends[rank] // 64) * 64
        self.fixed[rank].append((start, bytes(content)))
        self.ends[rank] = start + len(content)
        return Place(f"__{rank}_0.distcp", start, len(content))

    def add_chunk(self, rank: int, dtype: str, shape: tuple[int, ...]) -> tuple[Place, int]:
        tensor = new_tensor(dtype, shape)
        layout = lay_out_pt("archive", tensor)
        slot, start = layout.slots[tensor.storage], -(-self.ends[rank] // 64) * 64
        self.fixed[rank] += [(start + offset, data) for offset, data in layout.fixed]
        if slot.num_bytes:
            positions = tuple(start + position for position in slot.crc_positions)
            field = ChecksumField(start=start + slot.offset, num_bytes=slot.num_bytes, positions=positions)
            self.checksums[rank].append(field)
        self.ends[rank] = start + layout.num_bytes
        return Place(f"__{rank}_0.distcp", start, layout.num_bytes), start + slot.offset

    def build(self) -> list[TargetFile]:
        return [
            TargetFile(path=f"__{rank}_0.distcp", num_bytes=end, fixed=fixed, checksums=tuple(checksums))
            for rank, (end, fixed, checksums) in enumerate(zip(self.ends, self.fixed, self.checksums, strict=True))
            if end
        ]


def lay_out(index: Index, request: Request) -> tuple[list[TargetFile], list[Row]]:
    """Files, and where every chunk goes."""
    world_size = request.topology.world_size
    files, rows = Files(world_size), []
    objects = [*add_numbers(files, index), *add_options(files, index.groups)]
    entries = []
    for at, item in enumerate(name_tensors(index, request)):
        entry, offsets = cut(files, item, world_size)
        entries.append(entry)
        for rank, ((box, _), byte_offset) in enumerate(zip(entry.chunks, offsets, strict=True)):
            rows += [(at, box, rank, byte_offset)] if box.num_elements else []
    metadata = pickled([*entries, *objects])
    last = TargetFile(path=".metadata", num_bytes=len(metadata), fixed=((0, metadata),))
    return [*files.build(), last], rows


def cut(files: Files, item: TargetTensor, world_size: int) -> tuple[Entry, list[int]]:
    chunks, offsets = [], []
    for rank, box in enumerate(boxes(item.tensor.shape, world_size)):
        place, byte_offset = files.add_chunk(rank, item.tensor.dtype, box.size)
        chunks.append((box, place))
        offsets.append(byte_offset)
    tensor = item.tensor
    return Entry(
        key=flat_name(item.path), path=item.path, shape=tensor.shape, dtype=tensor.dtype, chunks=tuple(chunks)
    ), offsets


def boxes(shape: tuple[int, ...], world_size: int) -> Iterator[Box]:
    if not shape or 0 in shape:
        yield whole(shape)
        return
    rows = -(-shape[0] // world_size)
    for first in range(0, shape[0], rows):
        yield Box((first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:]))


def pickled(entries: Sequence[Entry]) -> bytes:
    """`.metadata`, record by record."""
    emitter = Emitter()
    emitter.emit_value(Global(MODULE, "Metadata"))
    emitter.parts.append(b")\x81}(")
    emitter.emit_text("state_dict_metadata")
    pairs(emitter, [lambda entry=entry: describe(emitter, entry) for entry in entries])
    emitter.emit_text("planner_data")
    emitter.emit_value({entry.key: tuple(entry.path) for entry in entries})
    emitter.emit_text("storage_data")
    every = [(entry, at) for entry in entries for at in range(len(entry.chunks))]
    pairs(emitter, [lambda item=item: store(emitter, *item) for item in every])
    emitter.emit_text("storage_meta")
    meta = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    emitter.emit_value(Inert("new", Global(MODULE, "StorageMeta"), (), meta))
    emitter.emit_text("version")
    emitter.emit_text("1.0.0")
    emitter.parts.append(b"ub")
    return emitter.join_bytes()


def pairs(emitter: Emitter, writes: Sequence[Any], opcodes: tuple[bytes, bytes] = (b"}(", b"u")) -> None:
    begin, end = opcodes
    emitter.parts.append(begin)
    for at, write in enumerate(writes):
        emitter.parts.append(end + b"(" if at and at % 1000 == 0 else b"")
        write()
    emitter.parts.append(end)


def describe(emitter: Emitter, entry: Entry) -> None:
    emitter.emit_text(entry.key)
    if entry.shape is None:
        emitter.emit_value(Inert("new", Global(MODULE, "BytesStorageMetadata"), ()))
        return
    emitter.emit_value(Global(MODULE, "TensorStorageMetadata"))
    emitter.parts.append(b")\x81}(")
    emitter.emit_text("properties")
    state = (Global("torch", entry.dtype), STRIDED, False, CONTIGUOUS, False)
    emitter.emit_value(Inert("new", Global(MODULE, "TensorProperties"), (), state))
    emitter.emit_text("size")
    emitter.emit_value(Size(entry.shape))
    emitter.emit_text("chunks")
    pairs(emitter, [lambda box=box: chunk(emitter, box) for box, _ in entry.chunks], (b"](", b"e"))
    emitter.parts.append(b"ub")


def chunk(emitter: Emitter, box: Box) -> None:
    if CHUNK not in emitter.memo:
        emitter.emit_value(Inert("new", CHUNK, (), {"offsets": Size(box.offset), "sizes": Size(box.size)}))
        return
    add = emitter.parts.append
    add(emitter.encode_reference(CHUNK) + b")\x81}(")
    for name, values in (("offsets", box.offset), ("sizes", box.size)):
        add(emitter.encode_reference(("text", name)) + size(emitter, values))
    add(b"ub")


def store(emitter: Emitter, entry: Entry, at: int) -> None:
    box, place = entry.chunks[at]
    if box is None or not {INDEX, INFO, SIZE} <= emitter.memo.keys():
        index: dict[str, Any] = {"fqn": entry.key, "index": None}
        emitter.emit_value(Inert("new", INDEX, (), index if box is None else index | at_offset(at, box)))
        info = {"relative_path": place.file, "offset": place.offset, "length": place.length}
        emitter.emit_value(Inert("new", INFO, (), info))
        return
    add, text = emitter.parts.append, lambda name: emitter.encode_reference(("text", name))
    add(emitter.encode_reference(INDEX) + b")\x81}(" + text("fqn") + text(entry.key))
    add(text("index") + encode_integer(at) + text("offset") + size(emitter, box.offset) + b"ub")
    add(emitter.encode_reference(INFO) + b")\x81}(" + text("relative_path"))
    emitter.emit_text(place.file)
    add(text("offset") + encode_integer(place.offset) + text("length") + encode_integer(place.length) + b"ub")


def at_offset(at: int, box: Box) -> dict[str, Any]:
    return {"index": at, "offset": Size(box.offset)}


def size(emitter: Emitter, sizes: Sequence[int]) -> bytes:
    content = b"".join(map(encode_integer, sizes))
    closed = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(sizes), b"t")
    return emitter.encode_reference(SIZE) + (b"(" if len(sizes) > 3 else b"") + content + closed + b"\x85R"
