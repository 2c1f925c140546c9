"""Read several DCP folders as one checkpoint: a trainer may save the model and the optimizer apart."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reshard.errors import UnsupportedError
from reshard.formats.dcp.chunks import Chunks, EntryChunks, PlacedChunk, stack_chunks
from reshard.formats.dcp.metadata import Entry, read_metadata
from reshard.formats.dcp.tables import check_files
from reshard.tensors.intervals import Int64Array


def read_entries(root: Path, folders: Sequence[str]) -> tuple[Entry, ...]:
    """Read the entries of the folders below `root`; the names of their files begin with the folder's.

    Args:
        root: folder of the checkpoint.
        folders: names of the folders that hold it; empty for `root` itself.

    Raises:
        UnsupportedError: two folders have an entry of the same name.
        CorruptSourceError, UnsafePickleError: see `reshard.formats.base`.
    """
    if not folders:
        entries = read_metadata(root)
        check_files(root, entries)
        return entries
    by_folder = []
    for name in folders:
        entries = read_metadata(root / name)
        check_files(root / name, entries)
        by_folder.append(entries)
    counts = Counter(entry.key for entries in by_folder for entry in entries)
    if twice := [key for key, count in counts.items() if count > 1]:
        raise UnsupportedError(
            f"{' and '.join(folders)} both hold {len(twice)} entries, such as {twice[0]}",
            path=str(root),
            problems=twice[:20],
            hint="name the folder that holds the weights",
        )
    return _join(folders, by_folder)


def _join(folders: Sequence[str], by_folder: Sequence[Sequence[Entry]]) -> tuple[Entry, ...]:
    """Return all entries with the chunks of all folders in one table."""
    tables = [stack_chunks(entry.chunks for entry in entries) for entries in by_folder]
    ndim = max(table.offset.shape[1] for table in tables)
    first_file = np.cumsum([0, *(len(table.names) for table in tables)])
    chunks = Chunks(
        names=tuple(f"{folder}/{name}" for folder, table in zip(folders, tables, strict=True) for name in table.names),
        offset=np.concatenate([_widen(table.offset, ndim, 0) for table in tables]),
        size=np.concatenate([_widen(table.size, ndim, 1) for table in tables]),
        file=np.concatenate([table.file + first for table, first in zip(tables, first_file, strict=False)]),
        start=np.concatenate([table.start for table in tables]),
        length=np.concatenate([table.length for table in tables]),
    )
    joined, row = [], 0
    for entry in (entry for entries in by_folder for entry in entries):
        ndim_of = None if entry.shape is None else len(entry.shape)
        own: Sequence[PlacedChunk] = EntryChunks(chunks=chunks, first=row, last=row + len(entry.chunks), ndim=ndim_of)
        joined.append(dataclasses.replace(entry, chunks=own))
        row += len(entry.chunks)
    return tuple(joined)


def _widen(matrix: Int64Array, ndim: int, missing: int) -> Int64Array:
    more = ((0, 0), (0, ndim - matrix.shape[1]))
    widened: Int64Array = np.pad(matrix, more, constant_values=missing)
    return widened
