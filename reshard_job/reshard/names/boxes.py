"""Rows of a shard table in other coordinates: intersected with a part of their tensor, and shifted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from reshard.names.rules import Cut
from reshard.tensors.intervals import Int64Array
from reshard.tensors.shard_table import ShardTable


def rows_of(shards: ShardTable, rows: Int64Array) -> ShardTable:
    """These rows only."""
    columns = {field.name: getattr(shards, field.name)[rows] for field in dataclasses.fields(ShardTable)}
    return ShardTable(**columns)


def renumber(shards: ShardTable, tensor: int) -> ShardTable:
    """The rows as rows of another tensor."""
    return dataclasses.replace(shards, tensor=np.full(len(shards), tensor, dtype=np.int64))


def narrow(shards: ShardTable, cut: Cut, dim: int, item_bytes: int) -> ShardTable:
    """What the rows of a whole tensor hold of one part, in the part's coordinates."""
    return _intersect(shards, dim, cut.whole, cut.size, cut.local, item_bytes)


def widen(shards: ShardTable, cut: Cut, dim: int, item_bytes: int) -> ShardTable:
    """What the rows of a part hold of one piece of the whole, in the whole's coordinates."""
    return _intersect(shards, dim, cut.local, cut.size, cut.whole, item_bytes)


def _intersect(shards: ShardTable, dim: int, low: int, size: int, to: int, item_bytes: int) -> ShardTable:  # noqa: PLR0917
    """Elements `low:low + size` of the rows along `dim`, which come to lie at `to`; all else stays."""
    start = np.maximum(shards.offset[:, dim], low)
    stop = np.minimum(shards.offset[:, dim] + shards.size[:, dim], low + size)
    hit = np.flatnonzero(start < stop)
    found = rows_of(shards, hit)
    start, stop = start[hit], stop[hit]
    skipped = (start - found.offset[:, dim]) * found.stride[:, dim] * item_bytes
    offset, sizes = found.offset.copy(), found.size.copy()
    offset[:, dim] = start - low + to
    sizes[:, dim] = stop - start
    return dataclasses.replace(found, offset=offset, size=sizes, byte_offset=found.byte_offset + skipped)


def unstack(shards: ShardTable, dim: int) -> ShardTable:
    """The rows without a dim, along which each has one element."""
    return _replace_dims(shards, lambda matrix, _: np.delete(matrix, dim, axis=1))


def stack(shards: ShardTable, dim: int) -> ShardTable:
    """The rows with one dim more, along which each has its first element."""
    return _replace_dims(shards, lambda matrix, fill: np.insert(matrix, dim, fill, axis=1))


def pad(shards: ShardTable, num_dims: int) -> ShardTable:
    """The rows with columns for so many dims; columns that go are of dims that no tensor has."""

    def resize(matrix: Int64Array, fill: int) -> Int64Array:
        more = np.full((len(matrix), max(0, num_dims - matrix.shape[1])), fill, dtype=np.int64)
        return np.ascontiguousarray(np.hstack([matrix, more])[:, :num_dims])

    return _replace_dims(shards, resize)


def join(tables: list[ShardTable], num_dims: int) -> ShardTable:
    """All rows, one table after the other."""
    padded = [pad(table, num_dims) for table in tables]
    names = [field.name for field in dataclasses.fields(ShardTable)]
    return ShardTable(**{name: np.concatenate([getattr(table, name) for table in padded]) for name in names})


def _replace_dims(shards: ShardTable, change: Callable[[Int64Array, int], Int64Array]) -> ShardTable:
    """Change the columns of dims; the second argument is what a dim holds that a tensor lacks."""
    return dataclasses.replace(
        shards, offset=change(shards.offset, 0), size=change(shards.size, 1), stride=change(shards.stride, 0)
    )
