"""Rows of a shard table from chunks: what DCP and the formats that use its container have in common."""

from __future__ import annotations

import dataclasses
import json
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reshard.errors import CorruptSourceError
from reshard.formats.dcp.chunks import Chunks, in_columns
from reshard.formats.dcp.items import Items
from reshard.formats.dcp.metadata import Entry
from reshard.planning.check import cover_problems
from reshard.storage.files import open_file
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Checksums, LogicalTensor, SourceFile
from reshard.tensors.shard_table import ShardTable

SUFFIX = ".distcp"
CONFIG_FILE = "metadata.json"
"""Of Megatron-Core, beside `.metadata`."""

_MAX_CONFIG_BYTES = 1 << 20  # torch_dist's has a hundred
_RANK = re.compile(r"^__(\d+)_\d+\.distcp$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Chunks that are parts of logical tensors, in columns.

    Attributes:
        tensor: position of the logical tensor, [parts].
        entry: position of the entry in `entries`, [parts].
        entries: that the chunks belong to.
        chunks: boxes of the entries, and their items, [parts].
        drop: leading dims of size 1 that the entry has and the logical tensor does not, [entries].
    """

    tensor: Int64Array
    entry: Int64Array
    entries: Sequence[Entry]
    chunks: Chunks
    drop: Int64Array


def check_files(folder: Path, entries: Iterable[Entry]) -> None:
    """Every file that is named is there and long enough, and no other file of a rank is.

    Raises:
        CorruptSourceError: with every file that is not as it should be.
    """
    chunks = in_columns(entry.chunks for entry in entries)
    end = np.zeros(len(chunks.names), dtype=np.int64)
    np.maximum.at(end, chunks.file, chunks.start + chunks.length)
    ends = dict(zip(chunks.names, end.tolist(), strict=True))
    try:
        found = {item.name: item.lstat() for item in folder.iterdir()}
    except OSError as error:
        raise CorruptSourceError(f"cannot be listed: {error.strerror}", path=str(folder)) from error
    problems = []
    for name, needed in sorted(ends.items()):
        if name not in found:
            problems.append(f"{name} is missing")
        elif not stat.S_ISREG(found[name].st_mode):
            problems.append(f"{name} is a link, or another thing that is not a file")
        elif found[name].st_size < needed:
            problems.append(f"{name} is truncated: its items need {needed} bytes, it has {found[name].st_size}")
    problems += [  # an empty one is that of a rank which had nothing to save
        f"{name} is not named in .metadata"
        for name in sorted(found.keys() - ends)
        if name.endswith(SUFFIX) and (found[name].st_size or not stat.S_ISREG(found[name].st_mode))
    ]
    if problems:
        raise CorruptSourceError(
            "its files do not fit its .metadata",
            path=str(folder),
            problems=problems[:20],
            hint="a file was lost, or another save went into the same folder (files that are not named may be removed)",
        )


def backend_of(folder: Path) -> str | None:
    """`sharded_backend` of Megatron-Core's `metadata.json`; None where there is no such thing."""
    try:
        with open_file(folder / CONFIG_FILE) as file:
            value = json.loads(file.read(_MAX_CONFIG_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return None
    backend = value.get("sharded_backend") if isinstance(value, dict) else None
    return backend if isinstance(backend, str) else None


def make_table(
    items: Items, names: Sequence[str], tensors: Sequence[LogicalTensor], parts: Parts
) -> tuple[tuple[SourceFile, ...], ShardTable]:
    """Files with their checksums, and rows; chunks are looked up in the order of the files.

    Args:
        items: to look chunks up in.
        names: of all files.
        tensors: that the parts are of.
        parts: chunks that are part of a tensor.

    Raises:
        CorruptSourceError: an item is not what `.metadata` says, or parts do not cover a tensor exactly.
    """
    ranked = sorted(names, key=_by_rank)
    numbers = {name: at for at, name in enumerate(ranked)}
    file = np.array([numbers[name] for name in parts.chunks.names], dtype=np.int64)[parts.chunks.file]
    held = np.flatnonzero(parts.chunks.size.all(axis=1))
    rows = held[np.lexsort((parts.chunks.start[held], file[held]))]
    found = _look_up(items, parts, rows)
    shards = _shards(tensors, parts, rows, file[rows], found)
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
    # Rows are in the order of the files and in these of the items, so the checksums are, too.
    stated = np.flatnonzero(found.num_bytes)
    bounds = np.searchsorted(file[rows][stated], np.arange(len(ranked) + 1)).tolist()
    columns = (found.start[stated], found.num_bytes[stated], found.crc32[stated])
    files = tuple(
        SourceFile(
            path=name,
            num_bytes=items.file_bytes(name),
            checksums=Checksums(*(column[bounds[at] : bounds[at + 1]] for column in columns)),
        )
        for at, name in enumerate(ranked)
    )
    return files, shards


class _Found(NamedTuple):
    """What is in the items, [rows]; `num_bytes` is 0 where none is stated."""

    byte_offset: Int64Array
    strides: Int64Array
    start: Int64Array
    num_bytes: Int64Array
    crc32: Int64Array


def _look_up(items: Items, parts: Parts, rows: Int64Array) -> _Found:
    count = len(rows)
    strides = np.zeros((count, parts.chunks.size.shape[1]), dtype=np.int64)
    offset, start, num_bytes, crc32 = (np.zeros(count, dtype=np.int64) for _ in range(4))
    for at, row in enumerate(rows.tolist()):
        entry = parts.entries[parts.entry[row]]
        ndim = len(entry.shape or ())
        box, place = parts.chunks.piece(row, ndim)
        chunk = items.chunk(entry, box, place)
        offset[at], strides[at, :ndim] = chunk.byte_offset, chunk.strides
        if (stated := chunk.checksum) is not None:
            start[at], num_bytes[at], crc32[at] = stated.start, stated.num_bytes, stated.crc32
    return _Found(offset, strides, start, num_bytes, crc32)


def _shards(
    tensors: Sequence[LogicalTensor], parts: Parts, rows: Int64Array, file: Int64Array, found: _Found
) -> ShardTable:
    """Rows of tensors: without the leading dims that only the entries have."""
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
        byte_offset=found.byte_offset,
        stride=dropped(found.strides, 0),
    )


def names_of(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Files of all entries."""
    chunks = in_columns(entry.chunks for entry in entries)
    return tuple(chunks.names[at] for at in np.flatnonzero(np.bincount(chunks.file, minlength=len(chunks.names))))


def num_ranks(names: Iterable[str]) -> int:
    """Ranks that wrote a file; at least 1."""
    ranks = [int(match[1]) for name in names if (match := _RANK.match(name))]
    return max(ranks, default=0) + 1


def _by_rank(name: str) -> tuple[int, str]:
    match = _RANK.match(name)
    return (int(match[1]) if match else -1, name)
