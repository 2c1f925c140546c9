"""Move rows of a shard table to other coordinates: intersect them with a part of their tensor, and shift them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from reshard.names.rules import Cut
from reshard.tensors.intervals import Int64Array
from reshard.tensors.shard_table import ShardTable


def select_rows(shards: ShardTable, rows: Int64Array) -> ShardTable:
    """Return a table of these rows only."""
    columns = {field.name: getattr(shards, field.name)[rows] for field in dataclasses.fields(ShardTable)}
    return ShardTable(**columns)


def renumber(shards: ShardTable, tensor: int) -> ShardTable:
    """Return the rows as rows of another tensor."""
    return dataclasses.replace(shards, tensor=np.full(len(shards), tensor, dtype=np.int64))


def narrow(shards: ShardTable, cut: Cut, dim: int, item_bytes: int) -> ShardTable:
    """Return what the rows of a whole tensor hold of one part, in the part's coordinates."""
    return _intersect(shards, dim, cut.whole, cut.size, cut.local, item_bytes)


def widen(shards: ShardTable, cut: Cut, dim: int, item_bytes: int) -> ShardTable:
    """Return what the rows of a part hold of the boxes of one cut, in the coordinates of the whole tensor."""
    return _intersect(shards, dim, cut.local, cut.size, cut.whole, item_bytes)


def _intersect(shards: ShardTable, dim: int, low: int, size: int, to: int, item_bytes: int) -> ShardTable:  # noqa: PLR0917
    """Return the elements `low:low + size` of the rows along `dim`, shifted to `to`; other dims stay as they are."""
    start = np.maximum(shards.offset[:, dim], low)
    stop = np.minimum(shards.offset[:, dim] + shards.size[:, dim], low + size)
    overlapping = np.flatnonzero(start < stop)
    rows = select_rows(shards, overlapping)
    start, stop = start[overlapping], stop[overlapping]
    skipped = (start - rows.offset[:, dim]) * rows.stride[:, dim] * item_bytes
    offset, sizes = rows.offset.copy(), rows.size.copy()
    offset[:, dim] = start - low + to
    sizes[:, dim] = stop - start
    return dataclasses.replace(rows, offset=offset, size=sizes, byte_offset=rows.byte_offset + skipped)


def unstack(shards: ShardTable, dim: int) -> ShardTable:
    """Return the rows without a dim along which each has one element."""
    return _replace_dims(shards, lambda matrix, _: np.delete(matrix, dim, axis=1))


def stack(shards: ShardTable, dim: int) -> ShardTable:
    """Return the rows with one more dim, along which each lies at the first element."""
    return _replace_dims(shards, lambda matrix, fill: np.insert(matrix, dim, fill, axis=1))


def pad(shards: ShardTable, num_dims: int) -> ShardTable:
    """Return the rows with columns for `num_dims` dims; the columns that are dropped are of dims that no tensor has."""

    def resize(matrix: Int64Array, fill: int) -> Int64Array:
        more = np.full((len(matrix), max(0, num_dims - matrix.shape[1])), fill, dtype=np.int64)
        return np.ascontiguousarray(np.hstack([matrix, more])[:, :num_dims])

    return _replace_dims(shards, resize)


def join(tables: list[ShardTable], num_dims: int) -> ShardTable:
    """Concatenate tables, with columns for `num_dims` dims."""
    padded = [pad(table, num_dims) for table in tables]
    names = [field.name for field in dataclasses.fields(ShardTable)]
    return ShardTable(**{name: np.concatenate([getattr(table, name) for table in padded]) for name in names})


def _replace_dims(shards: ShardTable, change: Callable[[Int64Array, int], Int64Array]) -> ShardTable:
    """Apply `change(column, fill)` to the columns of dims; `fill` is the value for an absent dim."""
    return dataclasses.replace(
        shards, offset=change(shards.offset, 0), size=change(shards.size, 1), stride=change(shards.stride, 0)
    )
