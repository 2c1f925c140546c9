"""Build shard tables from chunks, for DCP and for formats that use its container."""

from __future__ import annotations

import dataclasses
import json
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reshard.errors import CorruptSourceError, UnsupportedError, make_read_error
from reshard.formats.dcp.chunks import Chunks, stack_chunks
from reshard.formats.dcp.items import Items
from reshard.formats.dcp.metadata import Entry, Place
from reshard.planning.check import cover_problems
from reshard.storage.files import open_file
from reshard.tensors.geometry import Box
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import ITEM_BYTES, Checksums, LogicalTensor, SourceFile
from reshard.tensors.shard_table import ShardTable, ShardTableBuilder

SUFFIX = ".distcp"
CONFIG_FILE = "metadata.json"
"""File that Megatron-Core writes beside `.metadata`."""

_MAX_CONFIG_BYTES = 1 << 20  # torch_dist's has a hundred
_RANK = re.compile(r"(?:^|/)__(\d+)_\d+\.distcp$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorChunks:
    """Chunks of logical tensors, in columns.

    Attributes:
        tensor: position of the logical tensor, [chunks].
        entry: position of the entry in `entries`, [chunks].
        entries: entries that the chunks belong to.
        chunks: boxes and items, [chunks].
        drop: number of leading dims of size 1 that the entry has and the logical tensor does not, [entries].
    """

    tensor: Int64Array
    entry: Int64Array
    entries: Sequence[Entry]
    chunks: Chunks
    drop: Int64Array


class FlatPiece(NamedTuple):
    """Elements of a flat chunk that fill a box of a logical tensor.

    Attributes:
        tensor: position of the logical tensor.
        replica: number of the copy of the tensor.
        box: box that the elements fill, in row-major order.
        first: first element in the chunk.
    """

    tensor: int
    replica: int
    box: Box
    first: int


class FlatChunk(NamedTuple):
    """A chunk of a tensor with one dim, in which logical tensors are stored one behind the other.

    Attributes:
        entry: entry of the flat tensor.
        box: box of the chunk in it.
        place: the chunk's item.
        pieces: parts of logical tensors in the chunk.
    """

    entry: Entry
    box: Box
    place: Place
    pieces: tuple[FlatPiece, ...]


def check_files(folder: Path, entries: Iterable[Entry]) -> None:
    """Check that every file that an item names is there and long enough, and that no other rank's file is there.

    Raises:
        CorruptSourceError: lists the files that are missing, truncated or not named.
    """
    chunks = stack_chunks(entry.chunks for entry in entries)
    end = np.zeros(len(chunks.names), dtype=np.int64)
    np.maximum.at(end, chunks.file, chunks.start + chunks.length)
    ends = dict(zip(chunks.names, end.tolist(), strict=True))
    try:
        statuses = {item.name: item.lstat() for item in folder.iterdir()}
    except OSError as error:
        raise make_read_error(error, str(folder), what="cannot be listed", is_indexed=False) from error
    problems = []
    for name, needed in sorted(ends.items()):
        if name not in statuses:
            problems.append(f"{name} is missing")
        elif not stat.S_ISREG(statuses[name].st_mode):
            problems.append(f"{name} is a link, or another thing that is not a file")
        elif statuses[name].st_size < needed:
            problems.append(f"{name} is truncated: its items need {needed} bytes, it has {statuses[name].st_size}")
    problems += [  # a rank that had nothing to save leaves an empty file
        f"{name} is not named in .metadata"
        for name in sorted(statuses.keys() - ends)
        if name.endswith(SUFFIX) and (statuses[name].st_size or not stat.S_ISREG(statuses[name].st_mode))
    ]
    if problems:
        raise CorruptSourceError(
            "its files do not fit its .metadata",
            path=str(folder),
            problems=problems[:20],
            hint="a file was lost, or another save went into the same folder (files that are not named may be removed)",
        )


def read_backend(folder: Path) -> str | None:
    """Read `sharded_backend` of Megatron-Core's `metadata.json`; return None if there is no such file or value."""
    try:
        with open_file(folder / CONFIG_FILE) as file:
            value = json.loads(file.read(_MAX_CONFIG_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return None
    backend = value.get("sharded_backend") if isinstance(value, dict) else None
    return backend if isinstance(backend, str) else None


def make_table(
    items: Items,
    names: Sequence[str],
    tensors: Sequence[LogicalTensor],
    parts: TensorChunks,
    flat: Sequence[FlatChunk] = (),
) -> tuple[tuple[SourceFile, ...], ShardTable]:
    """Locate all chunks, in the order of the files, and build the files with their checksums and the shard table.

    Args:
        items: reader of the items.
        names: names of all files.
        tensors: logical tensors.
        parts: chunks of these tensors.
        flat: chunks in which some of these tensors are stored one behind the other.

    Raises:
        CorruptSourceError: an item is not what `.metadata` says, or chunks do not cover a tensor exactly.
    """
    ranked = sorted(names, key=_rank_and_name)
    numbers = {name: at for at, name in enumerate(ranked)}
    file = np.array([numbers[name] for name in parts.chunks.names], dtype=np.int64)[parts.chunks.file]
    nonempty = np.flatnonzero(parts.chunks.size.all(axis=1))
    rows = nonempty[np.lexsort((parts.chunks.start[nonempty], file[nonempty]))]
    located = _locate_chunks(items, parts, rows)
    shards = _build_shards(tensors, parts, rows, file[rows], located)
    stated: tuple[Int64Array, ...] = (file[rows], located.start, located.num_bytes, located.crc32)
    if flat:
        flat_shards, flat_stated = _build_flat(items, flat, numbers)
        shards = _join(shards, flat_shards)
        stated = tuple(np.concatenate(pair) for pair in zip(stated, flat_stated, strict=True))
    problems = cover_problems(tensors, shards, np.arange(len(shards)), side="chunks of")
    present = np.zeros(len(tensors), dtype=np.bool_)
    present[shards.tensor] = True
    problems += [
        f"{tensors[at].key} has no chunk" for at in np.flatnonzero(~present).tolist() if tensors[at].num_elements
    ]
    if problems:
        raise CorruptSourceError(
            f"chunks do not cover {len(problems)} tensors exactly", path=str(items.folder), problems=problems[:20]
        )
    checked = np.flatnonzero(stated[2])
    checked = checked[np.lexsort((stated[1][checked], stated[0][checked]))]
    bounds = np.searchsorted(stated[0][checked], np.arange(len(ranked) + 1)).tolist()
    columns = [column[checked] for column in stated[1:]]
    files = tuple(
        SourceFile(
            path=name,
            num_bytes=items.file_bytes(name),
            checksums=Checksums(*(column[bounds[at] : bounds[at + 1]] for column in columns)),
        )
        for at, name in enumerate(ranked)
    )
    return files, shards


class _LocatedChunks(NamedTuple):
    """Elements and checksums in the items, [rows]; `num_bytes` is 0 for an item that states no checksum."""

    byte_offset: Int64Array
    strides: Int64Array
    start: Int64Array
    num_bytes: Int64Array
    crc32: Int64Array


def _locate_chunks(items: Items, parts: TensorChunks, rows: Int64Array) -> _LocatedChunks:
    count = len(rows)
    strides = np.zeros((count, parts.chunks.size.shape[1]), dtype=np.int64)
    offset, start, num_bytes, crc32 = (np.zeros(count, dtype=np.int64) for _ in range(4))
    for at, row in enumerate(rows.tolist()):
        entry = parts.entries[parts.entry[row]]
        ndim = len(entry.shape or ())
        box, place = parts.chunks.chunk(row, ndim)
        chunk = items.chunk(entry, box, place)
        offset[at], strides[at, :ndim] = chunk.byte_offset, chunk.strides
        if (checksum := chunk.checksum) is not None:
            start[at], num_bytes[at], crc32[at] = checksum.start, checksum.num_bytes, checksum.crc32
    return _LocatedChunks(offset, strides, start, num_bytes, crc32)


def _build_shards(
    tensors: Sequence[LogicalTensor], parts: TensorChunks, rows: Int64Array, file: Int64Array, located: _LocatedChunks
) -> ShardTable:
    """Build the shard table, without the leading dims that only the entries have."""
    max_ndim = max([1, *(len(tensor.shape) for tensor in tensors)])
    drop = parts.drop[parts.entry[rows]]

    def dropped(matrix: Int64Array, missing: int) -> Int64Array:
        result = np.full((len(rows), max_ndim), missing, dtype=np.int64)
        for count in sorted(set(drop.tolist())):
            own = np.flatnonzero(drop == count)
            kept = matrix[own, count : count + max_ndim]
            result[own, : kept.shape[1]] = kept
        return result

    return ShardTable(
        tensor=parts.tensor[rows],
        replica=np.zeros(len(rows), dtype=np.int64),
        offset=dropped(parts.chunks.offset[rows], 0),
        size=dropped(parts.chunks.size[rows], 1),
        file=file,
        byte_offset=located.byte_offset,
        stride=dropped(located.strides, 0),
    )


def _build_flat(
    items: Items, flat: Sequence[FlatChunk], numbers: Mapping[str, int]
) -> tuple[ShardTable, tuple[Int64Array, ...]]:
    """Build the rows of flat chunks, and their checksums in columns: file, first byte, number of bytes, CRC-32."""
    table, stated = ShardTableBuilder(), []
    for entry, box, place, pieces in sorted(flat, key=lambda chunk: (numbers[chunk.place.file], chunk.place.offset)):
        chunk, file = items.chunk(entry, box, place), numbers[place.file]
        if box.num_elements > 1 and chunk.strides != (1,):
            raise UnsupportedError(f"{entry.key}: its elements are not one behind the other", path=str(items.folder))
        if (checksum := chunk.checksum) is not None:
            stated.append((file, checksum.start, checksum.num_bytes, checksum.crc32))
        for piece in pieces:
            table.add(
                tensor=piece.tensor,
                replica=piece.replica,
                box=piece.box,
                file=file,
                byte_offset=chunk.byte_offset + piece.first * ITEM_BYTES[entry.dtype],
            )
    columns = np.array(stated, dtype=np.int64).reshape(-1, 4).T
    return table.build(), tuple(columns)


def _join(one: ShardTable, other: ShardTable) -> ShardTable:
    """Concatenate two tables, with as many dims as the wider one, in the order of the files."""
    ndim = max(one.size.shape[1], other.size.shape[1])

    def widened(matrix: Int64Array, name: str) -> Int64Array:
        if matrix.ndim == 1:
            return matrix
        return np.pad(matrix, ((0, 0), (0, ndim - matrix.shape[1])), constant_values=1 if name == "size" else 0)

    names = [field.name for field in dataclasses.fields(ShardTable)]
    columns = {name: np.concatenate([widened(getattr(table, name), name) for table in (one, other)]) for name in names}
    joined = ShardTable(**columns)
    return joined.take(np.lexsort((joined.byte_offset, joined.file)))


def list_files(entries: Iterable[Entry]) -> tuple[str, ...]:
    """List the files that hold items of the entries."""
    chunks = stack_chunks(entry.chunks for entry in entries)
    return tuple(chunks.names[at] for at in np.flatnonzero(np.bincount(chunks.file, minlength=len(chunks.names))))


def count_ranks(names: Iterable[str]) -> int:
    """Count the ranks that wrote a file; at least 1."""
    ranks = [int(match[1]) for name in names if (match := _RANK.search(name))]
    return max(ranks, default=0) + 1


def _rank_and_name(name: str) -> tuple[int, str]:
    match = _RANK.search(name)
    return (int(match[1]) if match else -1, name)
