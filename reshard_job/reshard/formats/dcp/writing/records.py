"""Records of chunks and items in `.metadata`, written one by one, or in columns for all chunks of an entry.

A checkpoint of thousands of ranks has millions of records. Classes, attribute names, keys and most file names are
written once and then referred to. Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from reshard.formats.dcp.chunks import Chunks, stack_chunks
from reshard.formats.dcp.metadata import Entry
from reshard.formats.pt.blocks import (
    Block,
    constant_block,
    integer_block,
    join_blocks,
    masked_block,
    reference_block,
    replace_rows,
    text_block,
)
from reshard.formats.pt.emit import Emitter, encode_integer
from reshard.formats.pt.objects import Global, Inert, Size
from reshard.tensors.geometry import Box
from reshard.tensors.intervals import Int64Array

MODULE = "torch.distributed.checkpoint.metadata"
NEW = b")\x81}("  # an object without arguments, and the dict of its attributes
BUILT = b"ub"
BATCH = 1000  # as in the standard pickler: it bounds the number of objects on the reader's stack
_STORAGE_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_INDEX = Global(MODULE, "MetadataIndex")
_CHUNK = Global(MODULE, "ChunkStorageMetadata")
_SIZE = Global("torch", "Size")
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}
_FEW = 12  # fewer records than this are written as fast one by one
_ROWS = 1 << 15


class Records:
    """Writer of the records of one `.metadata`."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._num_items = 0
        self._names: tuple[str, ...] = ()
        self._memo = np.zeros(0, dtype=np.int64)  # numbers of `_names` in the emitter's memo, or -1

    def emit_chunks(self, entry: Entry) -> None:
        """Emit the elements of the list `chunks` of a tensor."""
        emitter = self._emitter
        alone = _count_single(entry, _CHUNK in emitter.memo)
        for at, (box, _) in enumerate(entry.chunks[:alone]):
            if at and at % BATCH == 0:
                emitter.parts.append(b"e(")
            assert box is not None
            self._emit_chunk(box)
        if alone < len(entry.chunks):
            emitter.parts += self._encode_chunk_columns(stack_chunks([entry.chunks]), alone, len(entry.shape or ()))

    def emit_items(self, entry: Entry) -> None:
        """Emit the pairs of an entry in the dict `storage_data`."""
        emitter = self._emitter
        alone = _count_single(entry, {_INDEX, _STORAGE_INFO, _SIZE} <= emitter.memo.keys())
        for at in range(alone):
            if self._num_items and self._num_items % BATCH == 0:
                emitter.parts.append(b"u(")
            self._emit_item(entry, at)
            self._num_items += 1
        if alone < len(entry.chunks):
            emitter.parts += self._encode_item_columns(stack_chunks([entry.chunks]), alone, entry)
            self._num_items += len(entry.chunks) - alone

    def _emit_chunk(self, box: Box) -> None:
        emitter = self._emitter
        if _CHUNK not in emitter.memo:
            emitter.emit_value(Inert("new", _CHUNK, (), {"offsets": Size(box.offset), "sizes": Size(box.size)}))
            return
        before, between = self._around_sizes()
        emitter.parts.append(b"".join((before, _encode_size(box.offset), between, _encode_size(box.size), BUILT)))

    def _encode_chunk_columns(self, chunks: Chunks, alone: int, ndim: int) -> Iterator[bytes]:
        before, between = self._around_sizes()
        for low in range(alone, len(chunks), _ROWS):
            rows = np.arange(low, min(low + _ROWS, len(chunks)))
            blocks = [
                masked_block(b"e(", (rows % BATCH == 0) & (rows > 0)),
                constant_block(before),
                *_encode_sizes(chunks.offset[rows, :ndim]),
                constant_block(between),
                *_encode_sizes(chunks.size[rows, :ndim]),
                constant_block(BUILT),
            ]
            yield join_blocks(blocks, len(rows))

    def _around_sizes(self) -> tuple[bytes, bytes]:
        """Encode the opcodes of a chunk before its offset, and between its offset and its size."""
        refer = self._emitter.encode_reference
        size = refer(_SIZE)
        return refer(_CHUNK) + NEW + refer(("text", "offsets")) + size, refer(("text", "sizes")) + size

    def _emit_item(self, entry: Entry, at: int) -> None:
        emitter = self._emitter
        box, place = entry.chunks[at]
        if box is None or not {_INDEX, _STORAGE_INFO, _SIZE} <= emitter.memo.keys():
            index: dict[str, Any] = {"fqn": entry.key, "index": None}
            if box is not None:
                index |= {"index": at, "offset": Size(box.offset)}
            emitter.emit_value(Inert("new", _INDEX, (), index))
            info = {"relative_path": place.file, "offset": place.offset, "length": place.length}
            emitter.emit_value(Inert("new", _STORAGE_INFO, (), info))
            return
        before, size, name, offset, length = self._around_places(entry.key)
        emitter.parts.append(b"".join((before, encode_integer(at), size, _encode_size(box.offset), name)))
        emitter.emit_text(place.file)
        emitter.parts.append(
            b"".join((offset, encode_integer(place.offset), length, encode_integer(place.length), BUILT))
        )

    def _encode_item_columns(self, chunks: Chunks, alone: int, entry: Entry) -> Iterator[bytes]:
        before, size, name, offset, length = map(constant_block, self._around_places(entry.key))
        first = self._num_items - alone
        for low in range(alone, len(chunks), _ROWS):
            rows = np.arange(low, min(low + _ROWS, len(chunks)))
            blocks = [
                masked_block(b"u(", ((first + rows) % BATCH == 0) & (first + rows > 0)),
                before,
                integer_block(rows),
                size,
                *_encode_sizes(chunks.offset[rows, : len(entry.shape or ())]),
                name,
                self._file_names(chunks.names, chunks.file[rows]),
                offset,
                integer_block(chunks.start[rows]),
                length,
                integer_block(chunks.length[rows]),
                constant_block(BUILT),
            ]
            yield join_blocks(blocks, len(rows))

    def _around_places(self, key: str) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        """Encode the opcodes of an item before its index, offset in the tensor, file name, first byte, and length."""
        refer = self._emitter.encode_reference
        return (
            refer(_INDEX) + NEW + refer(("text", "fqn")) + refer(("text", key)) + refer(("text", "index")),
            refer(("text", "offset")) + refer(_SIZE),
            BUILT + refer(_STORAGE_INFO) + NEW + refer(("text", "relative_path")),
            refer(("text", "offset")),
            refer(("text", "length")),
        )

    def _file_names(self, names: tuple[str, ...], file: Int64Array) -> Block:
        """Encode the file name of every item: as text where it occurs for the first time, then as a reference."""
        if names is not self._names:
            self._names, self._memo = names, np.full(len(names), -1, dtype=np.int64)
        new: dict[int, bytes] = {}
        unknown = np.flatnonzero(self._memo[file] < 0)
        for row in unknown[np.sort(np.unique(file[unknown], return_index=True)[1])].tolist():
            number, key = int(file[row]), ("text", names[file[row]])
            if key not in self._emitter.memo:
                new[row] = self._emitter.encode_text(names[number])
            self._memo[number] = self._emitter.memo[key]
        blocks = reference_block(self._memo[file])
        return (
            replace_rows(blocks, np.array(list(new), dtype=np.int64), text_block(list(new.values()))) if new else blocks
        )


def _count_single(entry: Entry, known: bool) -> int:
    """Count the chunks of an entry that are written one by one: all of a few, else the first, which defines names."""
    return len(entry.chunks) if len(entry.chunks) < _FEW or not entry.is_tensor else int(not known)


def _encode_size(sizes: Sequence[int]) -> bytes:
    """Encode a `torch.Size`; its class is on the stack already."""
    content = b"".join(map(encode_integer, sizes))
    inner = content + _TUPLES[len(sizes)] if len(sizes) < 4 else b"(" + content + b"t"
    return inner + b"\x85R"


def _encode_sizes(sizes: Int64Array) -> list[Block]:
    """Encode the `torch.Size` of every record, [records, ndim]; its class is on the stack already."""
    ndim = sizes.shape[1]
    marked, closed = (b"", _TUPLES[ndim]) if ndim < 4 else (b"(", b"t")
    return [constant_block(marked), *map(integer_block, sizes.T), constant_block(closed + b"\x85R")]
