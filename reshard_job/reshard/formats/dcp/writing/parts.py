"""Lay out a checkpoint that several DCP folders hold together, in folders of the same names.

Each folder is laid out as if it were alone, with the entries that it has in the source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from reshard.formats.base import Request
from reshard.formats.dcp.metadata import Entry
from reshard.formats.dcp.reader import DcpExtra
from reshard.formats.dcp.writing.writer import lay_out
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Index, TargetLayout
from reshard.tensors.shard_table import Ranges, ShardTable
from reshard.tensors.views import keep_tensors

_MISSING = {"size": 1}
"""Value of dims that a tensor lacks, where it is not 0, by column of the table."""


def lay_out_parts(index: Index, request: Request, parts: Sequence[str]) -> TargetLayout:
    """Lay out the tensors of `index` for `request.topology` in the folders that hold them.

    Args:
        index: of a checkpoint that `dcp.read_parts` has read.
        request: options of the target.
        parts: names of the folders.

    Raises:
        UnsupportedError: see `writer.lay_out`.
    """
    assert isinstance(index.extra, DcpExtra)
    part_of = _find_parts(index, parts)
    layouts, chosen = [], []
    for number, part in enumerate(parts):
        own = np.flatnonzero(part_of == number).tolist()
        layouts.append(lay_out(_keep_part(index, index.extra, own, part), request))
        chosen.append(own)
    return _join(layouts, chosen, parts)


def _find_parts(index: Index, parts: Sequence[str]) -> Int64Array:
    """Return which of the folders holds each tensor, [tensors]; tensors without elements go by their state."""
    numbers = {part: number for number, part in enumerate(parts)}
    part_of_file = np.array([numbers[file.path.partition("/")[0]] for file in index.files], dtype=np.int64)
    by_state = [0 if tensor.key.state == "weight" else len(parts) - 1 for tensor in index.tensors]
    found = np.array(by_state, dtype=np.int64)
    found[index.shards.tensor] = part_of_file[index.shards.file]
    return found


def _keep_part(index: Index, extra: DcpExtra, chosen: list[int], part: str) -> Index:
    kept = keep_tensors(index, chosen)
    paths = {tensor.key: extra.paths[tensor.key] for tensor in kept.tensors}
    carried = tuple(entry for entry in extra.carried if _is_in(entry, part))
    return dataclasses.replace(kept, extra=dataclasses.replace(extra, paths=paths, carried=carried))


def _is_in(entry: Entry, part: str) -> bool:
    return entry.chunks[0][1].file.partition("/")[0] == part


def _join(layouts: Sequence[TargetLayout], chosen: Sequence[list[int]], parts: Sequence[str]) -> TargetLayout:
    """Return all layouts as one, with the names of the folders in front of the files' names."""
    first_file = np.cumsum([0, *(len(layout.files) for layout in layouts)]).tolist()
    first_tensor = np.cumsum([0, *(len(layout.tensors) for layout in layouts)]).tolist()
    shifts = list(zip(first_tensor, first_file, strict=True))
    return dataclasses.replace(
        layouts[0],
        files=tuple(
            dataclasses.replace(file, path=f"{part}/{file.path}")
            for layout, part in zip(layouts, parts, strict=True)
            for file in layout.files
        ),
        shards=_join_tables([layout.shards for layout in layouts], shifts),
        tensors=tuple(tensor for layout in layouts for tensor in layout.tensors),
        origins=tuple(own[at] for layout, own in zip(layouts, chosen, strict=True) for at in layout.origins),
        notes=tuple(note for layout in layouts for note in layout.notes),
        zeros=_join_ranges([layout.zeros for layout in layouts], first_file),
    )


def _join_tables(tables: Sequence[ShardTable], shifts: Sequence[tuple[int, int]]) -> ShardTable:
    """Concatenate tables; `shifts` has the first tensor and the first file of each."""
    ndim = max(table.offset.shape[1] for table in tables)
    columns: dict[str, Int64Array] = {}
    for field in dataclasses.fields(ShardTable):
        values: list[Int64Array] = [getattr(table, field.name) for table in tables]
        if values[0].ndim == 2:
            values = [_widen(value, ndim, _MISSING.get(field.name, 0)) for value in values]
        columns[field.name] = np.concatenate(values)
    rows = [len(table.tensor) for table in tables]
    columns["tensor"] = columns["tensor"] + np.repeat([tensor for tensor, _ in shifts][: len(rows)], rows)
    columns["file"] = columns["file"] + np.repeat([file for _, file in shifts][: len(rows)], rows)
    return ShardTable(**columns)


def _widen(matrix: Int64Array, ndim: int, missing: int) -> Int64Array:
    widened: Int64Array = np.pad(matrix, ((0, 0), (0, ndim - matrix.shape[1])), constant_values=missing)
    return widened


def _join_ranges(ranges: Sequence[Ranges | None], first_file: Sequence[int]) -> Ranges | None:
    known = [own for own in ranges if own is not None]
    if len(known) < len(ranges):
        return None
    return Ranges(
        first=np.concatenate([own.first + first for own, first in zip(known, first_file, strict=False)]),
        last=np.concatenate([own.last + first for own, first in zip(known, first_file, strict=False)]),
        start=np.concatenate([own.start for own in known]),
        stop=np.concatenate([own.stop for own in known]),
    )
