"""Which copies of a tensor must be read to know that all copies in a source are equal.

A source that was written by several ranks holds some tensors several times: what tensor parallelism replicates, tied
weights of several pipeline stages, buffers. A conversion takes one copy. The others are compared with it, bit by bit:
by the checksums that the containers state where those are of the very same elements, which costs nothing, and else by
reading them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Checksums, Index, LogicalTensor, SourceFile
from reshard.tensors.shard_table import ShardTable

_NO_ROWS = np.zeros(0, dtype=np.int64)

_Content = frozenset[tuple[object, ...]]
"""What a copy holds: boxes, with the checksum of their bytes or the place of these."""


class Copies(NamedTuple):
    """Copies of the tensors of a source besides those that are converted.

    Attributes:
        rows: rows of the source's table to compare with the copy that is converted, by tensor, [tensors][rows].
        notes: which tensors have copies that differ, and may, in words for the user.
    """

    rows: tuple[Int64Array, ...]
    notes: tuple[str, ...]


def copies_to_compare(index: Index, rows: Sequence[Int64Array], chosen: Sequence[Int64Array]) -> Copies:
    """Find the copies that must be read.

    Args:
        index: the source.
        rows: of each tensor, [tensors][rows].
        chosen: those of the copy that is converted; none where the tensor is not needed, [tensors][rows].
    """
    stated = _Stated(index.files)
    found: list[Int64Array] = []
    differing: list[str] = []
    for tensor, own, taken in zip(index.tensors, rows, chosen, strict=True):
        if len(taken) == len(own) or not len(taken):
            found.append(_NO_ROWS)
            continue
        groups = _by_replica(index.shards, own)
        first = groups.pop(int(index.shards.replica[taken[0]]))
        differ = [other for other in groups.values() if not stated.agree(index.shards, tensor, first, other)]
        if tensor.key in index.rank_local:
            if any(stated.disagree(index.shards, tensor, first, other) for other in differ):
                differing.append(tensor.key.name)
            differ = []
        found.append(np.concatenate([_NO_ROWS, *differ]))
    few = ", ".join(differing[:5]) + (", ..." if len(differing) > 5 else "")
    note = f"buffers differ between data-parallel ranks: the first rank's are taken ({few})"
    return Copies(tuple(found), (note,) if differing else ())


def _by_replica(shards: ShardTable, rows: Int64Array) -> dict[int, Int64Array]:
    """Rows of one tensor by the copy that they are of."""
    order = rows[np.argsort(shards.replica[rows], kind="stable")]
    replica = shards.replica[order]
    borders = np.flatnonzero(np.diff(replica)) + 1
    parts = np.split(order, borders)
    return {int(shards.replica[part[0]]): part for part in parts}


class _Stated:
    """Checksums that containers state, by file and first byte."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._known: dict[int, Mapping[int, tuple[int, int]]] = {}  # files of alike ranks hold the same object

    def agree(self, shards: ShardTable, tensor: LogicalTensor, one: Int64Array, other: Int64Array) -> bool:
        """Two copies are known to be equal: they are the same bytes, or the same checksums are stated of them."""
        if _places(shards, one) == _places(shards, other):
            return True
        found = self._content(shards, tensor, one)
        return found is not None and found == self._content(shards, tensor, other)

    def disagree(self, shards: ShardTable, tensor: LogicalTensor, one: Int64Array, other: Int64Array) -> bool:
        """Two copies are known to differ: other checksums are stated of them."""
        found = self._content(shards, tensor, one), self._content(shards, tensor, other)
        return None not in found and found[0] != found[1]

    def _content(self, shards: ShardTable, tensor: LogicalTensor, rows: Int64Array) -> _Content | None:
        """The boxes of a copy and the checksums of their bytes; None where one of them has none of its own."""
        found = set()
        for at in rows.tolist():
            box = _box(shards, at)
            num_bytes = int(shards.size[at].prod()) * tensor.item_bytes
            extent = (int(((shards.size[at] - 1) * shards.stride[at]).sum()) + 1) * tensor.item_bytes
            stated = self._of(int(shards.file[at])).get(int(shards.byte_offset[at]))
            if shards.chunk[at] or stated is None or stated[0] != num_bytes or extent != num_bytes:
                return None
            found.add((*box, stated[1]))
        return frozenset(found)

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
    """The boxes of a copy and where they lie."""
    places = ((*_box(shards, at), int(shards.file[at]), int(shards.byte_offset[at])) for at in rows.tolist())
    return frozenset((*place, int(shards.chunk[at])) for place, at in zip(places, rows.tolist(), strict=True))


def _box(shards: ShardTable, at: int) -> tuple[object, ...]:
    """What of its tensor a row holds, in which order; of a family the elements."""
    dims = (shards.offset[at], shards.size[at], shards.stride[at])
    return (*(tuple(column.tolist()) for column in dims), int(shards.start[at]), int(shards.stop[at]))
