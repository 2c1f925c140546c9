"""Find the copies of tensors that must be read to prove that all copies in a source are equal.

A source that several ranks wrote holds some tensors several times: weights that tensor parallelism replicates, tied
weights of several pipeline stages, buffers. A conversion takes one copy, and the others must equal it bit by bit. Where
the containers state checksums of exactly the same elements, the checksums are compared, which costs nothing. Other
copies are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Checksums, Index, LogicalTensor, SourceFile, TensorKey
from reshard.tensors.shard_table import ShardTable

_NO_ROWS = np.zeros(0, dtype=np.int64)

_Content = frozenset[tuple[object, ...]]
"""Boxes of a copy, each with the checksum of its bytes or with their file and position."""


class Copies(NamedTuple):
    """Copies of the tensors of a source that must be compared with the copies that are converted.

    Attributes:
        rows: rows of the source's table to compare, by tensor, [tensors][rows].
        notes: sentences for the user about tensors whose copies may differ, and do.
    """

    rows: tuple[Int64Array, ...]
    notes: tuple[str, ...]


def copies_to_compare(
    index: Index, rows: Sequence[Int64Array], chosen: Sequence[Int64Array], averaged: Collection[int] = ()
) -> Copies:
    """Find the copies that must be read.

    Args:
        index: the source.
        rows: all rows of each tensor, [tensors][rows].
        chosen: rows of the copy that is converted; no rows if the tensor is not needed, [tensors][rows].
        averaged: positions of tensors whose copies may differ, because they are averaged.
    """
    stated = StatedChecksums(index.files)
    to_compare: list[Int64Array] = []
    differing: list[str] = []
    for number, (tensor, own, taken) in enumerate(zip(index.tensors, rows, chosen, strict=True)):
        if len(taken) == len(own) or not len(taken) or number in averaged:
            to_compare.append(_NO_ROWS)
            continue
        groups = group_by_replica(index.shards, own)
        first, *bound = (groups[copy] for copy in find_equal_copies(index, tensor.key, groups))
        unproved = [other for other in bound if not stated.are_equal(index.shards, tensor, first, other)]
        to_compare.append(np.concatenate([_NO_ROWS, *unproved]))
        if tensor.key in index.rank_local and any(
            stated.are_different(index.shards, tensor, first, other) for other in groups.values()
        ):
            differing.append(tensor.key.name)
    note = describe_rank_local(differing)
    return Copies(tuple(to_compare), (note,) if note else ())


def find_equal_copies(index: Index, key: TensorKey, copies: Iterable[int]) -> list[int]:
    """Return those of a tensor's copies that must be equal, in order; the first is the one that is taken."""
    first, *others = sorted(copies)
    if key in index.rank_local:
        return [first]
    limit = index.free_copies.get(key)
    return [first, *(copy for copy in others if limit is None or copy < limit)]


def describe_rank_local(names: Sequence[str]) -> str:
    """Return the sentence about buffers whose copies differ, and may; empty if there are none."""
    if not names:
        return ""
    few = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"buffers differ between data-parallel ranks: the first rank's are taken ({few})"


def group_by_replica(shards: ShardTable, rows: Int64Array) -> dict[int, Int64Array]:
    """Group rows of one tensor by the copy that they belong to."""
    order = rows[np.argsort(shards.replica[rows], kind="stable")]
    replica = shards.replica[order]
    borders = np.flatnonzero(np.diff(replica)) + 1
    groups = np.split(order, borders)
    return {int(shards.replica[group[0]]): group for group in groups}


class StatedChecksums:
    """Checksums that containers state, by file and first byte."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._known: dict[int, Mapping[int, tuple[int, int]]] = {}  # by id: files of equal ranks share one sequence

    def are_equal(self, shards: ShardTable, tensor: LogicalTensor, one: Int64Array, other: Int64Array) -> bool:
        """Return True if two copies are proved equal: they are the same bytes, or have the same stated checksums."""
        if _places(shards, one) == _places(shards, other):
            return True
        content = self._content(shards, tensor, one)
        return content is not None and content == self._content(shards, tensor, other)

    def are_different(self, shards: ShardTable, tensor: LogicalTensor, one: Int64Array, other: Int64Array) -> bool:
        """Return True if two copies are proved different: both have stated checksums, and these differ."""
        first, second = self._content(shards, tensor, one), self._content(shards, tensor, other)
        return first is not None and second is not None and first != second

    def _content(self, shards: ShardTable, tensor: LogicalTensor, rows: Int64Array) -> _Content | None:
        """Return the boxes of a copy with their stated checksums; None if a box has no checksum of its own."""
        content = set()
        for at in rows.tolist():
            box = _box(shards, at)
            num_bytes = int(shards.size[at].prod()) * tensor.item_bytes
            spanned = (int(((shards.size[at] - 1) * shards.stride[at]).sum()) + 1) * tensor.item_bytes
            stated = self._of(int(shards.file[at])).get(int(shards.byte_offset[at]))
            if shards.chunk[at] or stated is None or stated[0] != num_bytes or spanned != num_bytes:
                return None
            content.add((*box, stated[1]))
        return frozenset(content)

    def _of(self, file: int) -> Mapping[int, tuple[int, int]]:
        checksums = self._files[file].checksums
        if id(checksums) not in self._known:
            if isinstance(checksums, Checksums):
                columns = (checksums.start.tolist(), checksums.num_bytes.tolist(), checksums.crc32.tolist())
                pairs = {start: (num_bytes, crc32) for start, num_bytes, crc32 in zip(*columns, strict=True)}
            else:
                pairs = {item.start: (item.num_bytes, item.crc32) for item in checksums}
            self._known[id(checksums)] = pairs
        return self._known[id(checksums)]


def _places(shards: ShardTable, rows: Int64Array) -> _Content:
    """Return the boxes of a copy with their files and positions."""
    places = ((*_box(shards, at), int(shards.file[at]), int(shards.byte_offset[at])) for at in rows.tolist())
    return frozenset((*place, int(shards.chunk[at])) for place, at in zip(places, rows.tolist(), strict=True))


def _box(shards: ShardTable, at: int) -> tuple[object, ...]:
    """Return offset, size and stride of a row's box, and the interval of its elements if it is a family."""
    dims = (shards.offset[at], shards.size[at], shards.stride[at])
    return (*(tuple(column.tolist()) for column in dims), int(shards.start[at]), int(shards.stop[at]))
