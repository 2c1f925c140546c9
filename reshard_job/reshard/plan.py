"""The plan: which bytes go where. Data that prints well; nothing is opened here."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from reshard.errors import PlanError
from reshard.layout import Index, Int64Array, LogicalTensor, ShardTable, TargetLayout

DEFAULT_MEMORY_BYTES = 96 << 20
"""For buffers. The interpreter with numpy takes about 60 MiB besides, so the process stays below 256 MiB."""

_BUFFERS_PER_THREAD = 4  # assembled tile, one piece on its way in, one on its way out, and digest scratch
_LARGEST_TILE_BYTES = 8 << 20  # larger reads and writes gain nothing on the disks and file systems measured


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `execute` needs to know.

    Attributes:
        index: the source.
        layout: the target.
        source_rows: rows of `index.shards` to read, by tensor: one complete replica each, [num_tensors][rows].
        target_rows: rows of `layout.shards` to write, by tensor, [num_tensors][rows].
        bytes_to_read: tensor bytes; metadata and gaps come on top (a fraction of a percent).
        bytes_to_write: size of all target files.
        memory_bytes: for buffers, all threads together.
        num_threads: that read and write at the same time.
    """

    index: Index
    layout: TargetLayout
    source_rows: tuple[Int64Array, ...]
    target_rows: tuple[Int64Array, ...]
    bytes_to_read: int
    bytes_to_write: int
    memory_bytes: int
    num_threads: int

    @property
    def tile_bytes(self) -> int:
        """Largest part of a tensor that is in memory at once, per thread."""
        return max(1 << 16, min(_LARGEST_TILE_BYTES, self.memory_bytes // (self.num_threads * _BUFFERS_PER_THREAD)))

    @property
    def needed(self) -> list[int]:
        """Tensors that the target holds, in the order in which they are moved: that of the source's files."""
        shards = self.index.shards
        numbers = [number for number, rows in enumerate(self.target_rows) if len(rows)]
        first = {number: self.source_rows[number][0] for number in numbers}
        return sorted(numbers, key=lambda n: (int(shards.file[first[n]]), int(shards.byte_offset[first[n]])))

    def summary(self) -> dict[str, Any]:
        """What `reshard plan` prints."""
        num_tensors = sum(1 for rows in self.target_rows if len(rows))
        return {
            "source": str(self.index.root),
            "format": self.layout.format,
            "mode": "materialize",
            "from": str(self.index.topology),
            "to": str(self.layout.topology),
            "step": self.index.step,
            "tensors": num_tensors,
            "source_shards": int(sum(len(rows) for rows in self.source_rows)),
            "target_shards": int(sum(len(rows) for rows in self.target_rows)),
            "bytes_to_read": self.bytes_to_read,
            "bytes_to_write": self.bytes_to_write,
            "files_to_write": len(self.layout.files),
            "memory_bytes": self.memory_bytes,
            "threads": self.num_threads,
        }


def make_plan(
    index: Index, layout: TargetLayout, *, memory_bytes: int = DEFAULT_MEMORY_BYTES, num_threads: int = 1
) -> Plan:
    """Match a source with a target.

    Raises:
        PlanError: the target wants a tensor that the source does not hold.
    """
    count = len(index.tensors)
    target_rows = layout.shards.by_tensor(count)
    source_rows = [
        _one_replica(index.shards, rows) if len(target) else rows[:0]
        for rows, target in zip(index.shards.by_tensor(count), target_rows, strict=True)
    ]
    absent = [
        str(index.tensors[number].key)
        for number in range(count)
        if len(target_rows[number]) and not len(source_rows[number])
    ]
    if absent:
        raise PlanError("the source does not hold tensors that the target needs", problems=absent)
    return Plan(
        index=index,
        layout=layout,
        source_rows=tuple(source_rows),
        target_rows=tuple(target_rows),
        bytes_to_read=sum(
            _num_bytes(index.shards, rows, tensor) for rows, tensor in zip(source_rows, index.tensors, strict=True)
        ),
        bytes_to_write=sum(file.num_bytes for file in layout.files),
        memory_bytes=memory_bytes,
        num_threads=num_threads,
    )


def _one_replica(shards: ShardTable, rows: Int64Array) -> Int64Array:
    """Rows of the first replica, in the order of the tensor's elements."""
    if not len(rows):
        return rows
    chosen = rows[shards.replica[rows] == shards.replica[rows].min()]
    ordered: Int64Array = chosen[np.lexsort(shards.offset[chosen].T[::-1])]
    return ordered


def _num_bytes(shards: ShardTable, rows: Int64Array, tensor: LogicalTensor) -> int:
    return int(shards.size[rows].prod(axis=1).sum()) * tensor.item_bytes
