"""Records of chunks and of items in `.metadata`: one, or those of an entry in columns.

A checkpoint of thousands of ranks has millions. What of them was written before (classes, attributes, keys, most file
names) is referred to. Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from reshard.formats.dcp.chunks import Chunks, in_columns
from reshard.formats.dcp.metadata import Entry
from reshard.formats.pt.blocks import Block, constant, integers, joined, references, replaced, some, texts
from reshard.formats.pt.emit import Emitter, integer
from reshard.formats.pt.objects import Global, Inert, Size
from reshard.tensors.geometry import Box
from reshard.tensors.intervals import Int64Array

MODULE = "torch.distributed.checkpoint.metadata"
NEW = b")\x81}("  # an object without arguments, and the dict of its attributes
BUILT = b"ub"
BATCH = 1000  # as the standard pickler: what reads it holds so many objects on its stack
_STORAGE_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_INDEX = Global(MODULE, "MetadataIndex")
_CHUNK = Global(MODULE, "ChunkStorageMetadata")
_SIZE = Global("torch", "Size")
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}
_FEW = 12  # so many records are written as fast one by one
_ROWS = 1 << 15


class Records:
    """Writes the records of one `.metadata`."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._num_items = 0
        self._names: tuple[str, ...] = ()
        self._memo = np.zeros(0, dtype=np.int64)  # numbers of `_names` in the emitter's memo, or -1

    def chunks(self, entry: Entry) -> None:
        """The elements of the list `chunks` of a tensor."""
        emitter = self._emitter
        alone = _alone(entry, _CHUNK in emitter.memo)
        for at, (box, _) in enumerate(entry.chunks[:alone]):
            if at and at % BATCH == 0:
                emitter.parts.append(b"e(")
            assert box is not None
            self._chunk(box)
        if alone < len(entry.chunks):
            emitter.parts += self._chunk_columns(in_columns([entry.chunks]), alone, len(entry.shape or ()))

    def items(self, entry: Entry) -> None:
        """The pairs of an entry in the dict `storage_data`."""
        emitter = self._emitter
        alone = _alone(entry, {_INDEX, _STORAGE_INFO, _SIZE} <= emitter.memo.keys())
        for at in range(alone):
            if self._num_items and self._num_items % BATCH == 0:
                emitter.parts.append(b"u(")
            self._item(entry, at)
            self._num_items += 1
        if alone < len(entry.chunks):
            emitter.parts += self._item_columns(in_columns([entry.chunks]), alone, entry)
            self._num_items += len(entry.chunks) - alone

    def _chunk(self, box: Box) -> None:
        emitter = self._emitter
        if _CHUNK not in emitter.memo:
            emitter.value(Inert("new", _CHUNK, (), {"offsets": Size(box.offset), "sizes": Size(box.size)}))
            return
        before, between = self._around_sizes()
        emitter.parts.append(b"".join((before, _size(box.offset), between, _size(box.size), BUILT)))

    def _chunk_columns(self, chunks: Chunks, alone: int, ndim: int) -> Iterator[bytes]:
        before, between = self._around_sizes()
        for low in range(alone, len(chunks), _ROWS):
            rows = np.arange(low, min(low + _ROWS, len(chunks)))
            blocks = [
                some(b"e(", (rows % BATCH == 0) & (rows > 0)),
                constant(before),
                *_sizes(chunks.offset[rows, :ndim]),
                constant(between),
                *_sizes(chunks.size[rows, :ndim]),
                constant(BUILT),
            ]
            yield joined(blocks, len(rows))

    def _around_sizes(self) -> tuple[bytes, bytes]:
        """What a chunk begins with, and what stands between its two sizes."""
        refer = self._emitter.reference
        size = refer(_SIZE)
        return refer(_CHUNK) + NEW + refer(("text", "offsets")) + size, refer(("text", "sizes")) + size

    def _item(self, entry: Entry, at: int) -> None:
        emitter = self._emitter
        box, place = entry.chunks[at]
        if box is None or not {_INDEX, _STORAGE_INFO, _SIZE} <= emitter.memo.keys():
            index: dict[str, Any] = {"fqn": entry.key, "index": None}
            if box is not None:
                index |= {"index": at, "offset": Size(box.offset)}
            emitter.value(Inert("new", _INDEX, (), index))
            info = {"relative_path": place.file, "offset": place.offset, "length": place.length}
            emitter.value(Inert("new", _STORAGE_INFO, (), info))
            return
        before, size, name, offset, length = self._around_places(entry.key)
        emitter.parts.append(b"".join((before, integer(at), size, _size(box.offset), name)))
        emitter.text(place.file)
        emitter.parts.append(b"".join((offset, integer(place.offset), length, integer(place.length), BUILT)))

    def _item_columns(self, chunks: Chunks, alone: int, entry: Entry) -> Iterator[bytes]:
        before, size, name, offset, length = map(constant, self._around_places(entry.key))
        first = self._num_items - alone
        for low in range(alone, len(chunks), _ROWS):
            rows = np.arange(low, min(low + _ROWS, len(chunks)))
            blocks = [
                some(b"u(", ((first + rows) % BATCH == 0) & (first + rows > 0)),
                before,
                integers(rows),
                size,
                *_sizes(chunks.offset[rows, : len(entry.shape or ())]),
                name,
                self._file_names(chunks.names, chunks.file[rows]),
                offset,
                integers(chunks.start[rows]),
                length,
                integers(chunks.length[rows]),
                constant(BUILT),
            ]
            yield joined(blocks, len(rows))

    def _around_places(self, key: str) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        """What of an item stands before its index, offset in the tensor, file, first byte, and length."""
        refer = self._emitter.reference
        return (
            refer(_INDEX) + NEW + refer(("text", "fqn")) + refer(("text", key)) + refer(("text", "index")),
            refer(("text", "offset")) + refer(_SIZE),
            BUILT + refer(_STORAGE_INFO) + NEW + refer(("text", "relative_path")),
            refer(("text", "offset")),
            refer(("text", "length")),
        )

    def _file_names(self, names: tuple[str, ...], file: Int64Array) -> Block:
        """Of every item that of its file: written out where it stands for the first time."""
        if names is not self._names:
            self._names, self._memo = names, np.full(len(names), -1, dtype=np.int64)
        new: dict[int, bytes] = {}
        unknown = np.flatnonzero(self._memo[file] < 0)
        for row in unknown[np.sort(np.unique(file[unknown], return_index=True)[1])].tolist():
            number, key = int(file[row]), ("text", names[file[row]])
            if key not in self._emitter.memo:
                new[row] = self._emitter.new_text(names[number])
            self._memo[number] = self._emitter.memo[key]
        found = references(self._memo[file])
        return replaced(found, np.array(list(new), dtype=np.int64), texts(list(new.values()))) if new else found


def _alone(entry: Entry, known: bool) -> int:
    """How many chunks of an entry are written one by one: all of few, and the first of all, which gives names."""
    return len(entry.chunks) if len(entry.chunks) < _FEW or not entry.is_tensor else int(not known)


def _size(sizes: Sequence[int]) -> bytes:
    """A `torch.Size`, whose name is on the stack."""
    content = b"".join(map(integer, sizes))
    inner = content + _TUPLES[len(sizes)] if len(sizes) < 4 else b"(" + content + b"t"
    return inner + b"\x85R"


def _sizes(sizes: Int64Array) -> list[Block]:
    """The same of many, [records, ndim]."""
    ndim = sizes.shape[1]
    marked, closed = (b"", _TUPLES[ndim]) if ndim < 4 else (b"(", b"t")
    return [constant(marked), *map(integers, sizes.T), constant(closed + b"\x85R")]
