"""The plan of a conversion: which source bytes go to which target bytes. Pure data; no file is opened here."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.errors import PlanError
from reshard.planning.averages import Average, describe_averages, find_averages
from reshard.planning.constant_bytes import identity_bytes
from reshard.planning.replicas import copies_to_compare
from reshard.planning.units import Units
from reshard.storage.object_store import RemotePath
from reshard.system.limits import DEFAULT_MEMORY_BYTES
from reshard.tensors.cast import can_cast
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Index, LogicalTensor, TargetLayout, TensorKey
from reshard.tensors.shard_table import ShardTable

LARGEST_UNIT_BYTES = 64 << 20
LARGEST_REMOTE_UNIT_BYTES = 24 << 20
"""Limit for a source in an object store: every thread holds a whole unit of it in memory."""

SMALLEST_UNIT_BYTES = 1 << 20
_UNITS = 64

_PLACES = ("tensor", "replica", "offset", "size", "file", "byte_offset", "start", "stop", "chunk")
"""Columns of a `ShardTable` that enter a plan's fingerprint; the last three only if there are families."""

_NO_ROWS = np.zeros(0, dtype=np.int64)

_BUFFERS_PER_THREAD = 4  # the tile, a box that is being read, a slice that is being written, and the digest's memory
_LARGEST_TILE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Rounding:
    """A weight that must equal its master weight, rounded to the weight's type.

    Attributes:
        weight: position of the weight in `Index.tensors`.
        master: position of its master weight.
        dtype: type of the weight.
    """

    weight: int
    master: int
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a conversion: source, target, and the units of work between them.

    Attributes:
        index: the source.
        layout: the target.
        source_rows: rows of `index.shards` to read, by source tensor: one complete replica each, [tensors][rows].
        target_rows: rows of `layout.shards` to write, by source tensor, [tensors][rows].
        bytes_to_read: tensor bytes to read; metadata and gaps add a fraction of a percent.
        bytes_to_write: size of all target files.
        memory_bytes: memory for the buffers of all threads together.
        num_threads: number of threads that read and write.
        copy_rows: rows of `index.shards` that hold other copies of the elements in `source_rows`, by source tensor.
            They are read, because no checksum proves them equal, and compared or averaged. Empty if there are none.
        bytes_to_compare: tensor bytes of `copy_rows`, which are read in addition to `bytes_to_read`. Master weights
            that are read again for an averaged weight do not count.
        averages: source tensors that the target holds the mean of, by position in `Index.tensors`.
        roundings: weights that are compared with their master weights.
        notes: sentences for the user about copies that differ.
    """

    index: Index
    layout: TargetLayout
    source_rows: tuple[Int64Array, ...]
    target_rows: tuple[Int64Array, ...]
    bytes_to_read: int
    bytes_to_write: int
    memory_bytes: int
    num_threads: int
    copy_rows: tuple[Int64Array, ...] = ()
    bytes_to_compare: int = 0
    averages: Mapping[int, Average] = dataclasses.field(default_factory=dict)
    roundings: tuple[Rounding, ...] = ()
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def rounded_types(self) -> Mapping[int, str]:
        """Map weights and master weights of `roundings` to the type in which their digests are compared."""
        return {at: pair.dtype for pair in self.roundings for at in (pair.weight, pair.master)}

    @property
    def target_tensors(self) -> tuple[LogicalTensor, ...]:
        """Return the target's tensors; `layout.shards` refers to them."""
        return self.layout.tensors or self.index.tensors

    @functools.cached_property
    def origins(self) -> Int64Array:
        """Return the position of the source tensor of every target tensor, [target tensors]."""
        return _origins(self.index, self.layout)

    @property
    def tile_bytes(self) -> int:
        """Return the largest size of a tile, the box that one thread holds in memory at once."""
        return max(1 << 16, min(_LARGEST_TILE_BYTES, self.memory_bytes // (self.num_threads * _BUFFERS_PER_THREAD)))

    @property
    def needed(self) -> list[int]:
        """List the source tensors that the target is made of, in the order of the source's files."""
        shards = self.index.shards
        numbers = [number for number, rows in enumerate(self.target_rows) if len(rows)]
        first = {number: self.source_rows[number][0] for number in numbers}
        return sorted(numbers, key=lambda n: (int(shards.file[first[n]]), int(shards.byte_offset[first[n]])))

    @property
    def unit_bytes(self) -> int:
        """Return the approximate number of source bytes of a unit.

        It does not depend on the machine, so that workers with different memory agree about the units.
        """
        largest = LARGEST_REMOTE_UNIT_BYTES if self.is_remote else LARGEST_UNIT_BYTES
        return max(SMALLEST_UNIT_BYTES, min(largest, self.bytes_to_read // _UNITS))

    @property
    def is_remote(self) -> bool:
        """Return True if the source is in an object store, so that a unit is fetched whole, in few requests."""
        return isinstance(self.index.root, RemotePath)

    @functools.cached_property
    def units(self) -> Units:
        """Cut all needed tensors into units, in the order of the source's files."""
        tensors = self.index.tensors
        needed = [(number, tensors[number].shape, tensors[number].item_bytes) for number in self.needed]
        return Units(needed, self.unit_bytes)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return 16 hex digits that identify this conversion: source files, target files, and all target boxes."""
        sha256 = hashlib.sha256(
            f"{self.index.root} {self.index.step} {self.unit_bytes}".encode(errors="surrogateescape")
        )
        for source in self.index.files:
            sha256.update(f"{source.path} {source.num_bytes} {source.checksums}".encode(errors="surrogateescape"))
        for target in self.layout.files:
            sha256.update(f"{target.path} {target.num_bytes}".encode())
            for content in identity_bytes(target.fixed):
                sha256.update(content)
        for tensor in self.target_tensors:
            sha256.update(f"{tensor.key} {tensor.shape} {tensor.dtype}".encode())
        for number, average in self.averages.items():
            sha256.update(f"average of {self.index.tensors[number].key} over {len(average.ranks)}".encode())
        shards = self.layout.shards
        for name in _PLACES if shards.has_families else _PLACES[:6]:
            sha256.update(np.ascontiguousarray(getattr(shards, name)).data)
        return sha256.hexdigest()[:16]

    def summary(self) -> dict[str, Any]:
        """Return the plan's numbers as `reshard plan` prints them."""
        return {
            "source": str(self.index.root),
            "source_format": self.index.format,
            "format": self.layout.format,
            "mode": "materialize",
            "from": str(self.index.topology),
            "to": str(self.layout.topology),
            "step": self.index.step,
            "tensors": int(np.count_nonzero(np.bincount(self.layout.shards.tensor))),
            "source_shards": int(self.index.shards.num_boxes[np.concatenate([_NO_ROWS, *self.source_rows])].sum()),
            "target_shards": int(self.layout.shards.num_boxes.sum()),
            "bytes_to_read": self.bytes_to_read + self.bytes_to_compare,
            "bytes_to_compare": self.bytes_to_compare,
            "bytes_to_write": self.bytes_to_write,
            "files_to_write": len(self.layout.files),
            "units": len(self.units),
            "memory_bytes": self.memory_bytes,
            "threads": self.num_threads,
            "notes": [
                *(self.index.notes if self.layout.format != self.index.format else ()),
                *self.layout.notes,
                *self.notes,
            ],
        }


def make_plan(
    index: Index,
    layout: TargetLayout,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    num_threads: int = 1,
    agreement: bool = False,
) -> Plan:
    """Make the plan that converts a source into a target.

    Args:
        index: the source.
        layout: the target.
        memory_bytes: memory for buffers.
        num_threads: number of threads that read and write.
        agreement: compare data that the source holds twice: copies of a tensor, and weights with their masters.

    Raises:
        PlanError: the target needs a tensor that the source does not hold.
    """
    target_rows = _target_rows(index, layout)
    all_rows = index.shards.by_tensor(len(index.tensors))
    source_rows = [
        _one_replica(index.shards, rows) if len(target) else rows[:0]
        for rows, target in zip(all_rows, target_rows, strict=True)
    ]
    absent = [
        str(tensor.key)
        for tensor, source, target in zip(index.tensors, source_rows, target_rows, strict=True)
        if len(target) and not len(source)
    ]
    if absent:
        raise PlanError("the source does not hold tensors that the target needs", problems=absent)
    averages = find_averages(index, all_rows, source_rows, agreement=agreement)
    copies = copies_to_compare(index, all_rows, source_rows, averages) if agreement else None
    copy_rows = _copy_rows(averages, len(index.tensors), () if copies is None else copies.rows)
    return Plan(
        index=index,
        layout=layout,
        source_rows=tuple(source_rows),
        target_rows=tuple(target_rows),
        bytes_to_read=_num_bytes(index, source_rows),
        bytes_to_write=sum(file.num_bytes for file in layout.files),
        memory_bytes=memory_bytes,
        num_threads=num_threads,
        copy_rows=copy_rows,
        bytes_to_compare=_num_bytes(index, copy_rows) if copy_rows else 0,
        averages=averages,
        roundings=_roundings(index, source_rows) if agreement and index.has_rounded_weights else (),
        notes=(*(() if copies is None else copies.notes), *describe_averages(index, averages)),
    )


def _copy_rows(
    averages: Mapping[int, Average], num_tensors: int, compared: Sequence[Int64Array]
) -> tuple[Int64Array, ...]:
    """Return the rows of copies that are compared or averaged, [tensors][rows]; empty if there can be none."""
    if not averages:
        return tuple(compared)
    return tuple(
        averages[number].copy_rows if number in averages else compared[number] if compared else _NO_ROWS
        for number in range(num_tensors)
    )


def _roundings(index: Index, source_rows: Sequence[Int64Array]) -> tuple[Rounding, ...]:
    """Find the weights that are read together with their master weights."""
    read = {tensor.key: at for at, tensor in enumerate(index.tensors) if len(source_rows[at])}
    roundings = []
    for (state, name), weight in read.items():
        master = read.get(TensorKey("fp32", name)) if state == "weight" else None
        if master is None or index.tensors[weight].shape != index.tensors[master].shape:
            continue
        dtype = index.tensors[weight].dtype
        if can_cast(index.tensors[master].dtype, dtype):
            roundings.append(Rounding(weight, master, dtype))
    return tuple(roundings)


def _origins(index: Index, layout: TargetLayout) -> Int64Array:
    count = len(layout.tensors or index.tensors)
    origins = np.array(layout.origins, dtype=np.int64) if layout.tensors else np.arange(count, dtype=np.int64)
    if len(origins) != count or (origins < 0).any() or (origins >= len(index.tensors)).any():
        raise PlanError(f"the layout names {count} tensors and {len(origins)} origins among {len(index.tensors)}")
    return origins


def _target_rows(index: Index, layout: TargetLayout) -> list[Int64Array]:
    """Group the target's rows by the source tensor that they are made of."""
    origin = _origins(index, layout)[layout.shards.tensor]
    order = np.argsort(origin, kind="stable")
    bounds = np.searchsorted(origin[order], np.arange(len(index.tensors) + 1))
    return [order[bounds[at] : bounds[at + 1]] for at in range(len(index.tensors))]


def _one_replica(shards: ShardTable, rows: Int64Array) -> Int64Array:
    """Return the rows of the first replica, in the order of the tensor's elements."""
    if not len(rows):
        return rows
    chosen = rows[shards.replica[rows] == shards.replica[rows].min()]
    ordered: Int64Array = chosen[np.lexsort((shards.start[chosen], *shards.offset[chosen].T[::-1]))]
    return ordered


def _num_bytes(index: Index, rows: Sequence[Int64Array]) -> int:
    """Return the bytes of all rows, given by tensor."""
    num_elements = index.shards.num_elements
    return sum(
        int(num_elements[own].sum()) * tensor.item_bytes for own, tensor in zip(rows, index.tensors, strict=True)
    )
