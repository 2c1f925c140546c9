"""The plan: which bytes go where. Data that prints well; nothing is opened here."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.errors import PlanError
from reshard.planning.constant_bytes import identity
from reshard.planning.replicas import copies_to_compare
from reshard.storage.object_store import RemotePath
from reshard.system.limits import DEFAULT_MEMORY_BYTES
from reshard.tensors.cast import can_cast
from reshard.tensors.geometry import Box, tiles
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Index, LogicalTensor, TargetLayout, TensorKey
from reshard.tensors.shard_table import ShardTable

_LARGEST_UNIT_BYTES = 64 << 20
_LARGEST_REMOTE_UNIT_BYTES = 8 << 20  # every thread holds one
_SMALLEST_UNIT_BYTES = 1 << 20
_UNITS = 64

_PLACES = ("tensor", "replica", "offset", "size", "file", "byte_offset", "start", "stop", "chunk")
"""Columns of a `ShardTable` that say what goes where; the last three of families only."""

_NO_ROWS = np.zeros(0, dtype=np.int64)

_BUFFERS_PER_THREAD = 4  # assembled tile, one piece on its way in, one on its way out, and digest scratch
_LARGEST_TILE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Work that is done by one worker at a time.

    Attributes:
        regions: parts of source tensors: position in `Index.tensors`, and the box.
        num_bytes: of source elements.
    """

    regions: tuple[tuple[int, Box], ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rounding:
    """A tensor that must be another one, rounded.

    Attributes:
        weight: position in `Index.tensors` of the rounded tensor.
        master: position of the tensor that it was rounded from.
        dtype: type of the weight.
    """

    weight: int
    master: int
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that `execute` needs to know.

    Attributes:
        index: the source.
        layout: the target.
        source_rows: rows of `index.shards` to read, by source tensor: one complete replica each, [tensors][rows].
        target_rows: rows of `layout.shards` to write, by source tensor, [tensors][rows].
        bytes_to_read: tensor bytes; metadata and gaps come on top (a fraction of a percent).
        bytes_to_write: size of all target files.
        memory_bytes: for buffers, all threads together.
        num_threads: that read and write at the same time.
        copy_rows: rows of `index.shards` that must hold the same elements as those of `source_rows`, by source tensor:
            copies of which it is not known that they are equal; empty where copies are not compared.
        bytes_to_compare: tensor bytes of `copy_rows`, which are read besides `bytes_to_read`.
        roundings: which source tensors must be others, rounded.
        notes: what was found about copies, in words for the user.
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
    roundings: tuple[Rounding, ...] = ()
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def rounded_types(self) -> Mapping[int, str]:
        """Source tensors whose digest is taken in a type, to compare weights with masters: position -> type."""
        return {at: pair.dtype for pair in self.roundings for at in (pair.weight, pair.master)}

    @property
    def target_tensors(self) -> tuple[LogicalTensor, ...]:
        """The target's tensors; `layout.shards` refers to them."""
        return self.layout.tensors or self.index.tensors

    @functools.cached_property
    def origins(self) -> Int64Array:
        """Source tensor of every target tensor, [target tensors]."""
        return _origins(self.index, self.layout)

    @property
    def tile_bytes(self) -> int:
        """Largest part of a tensor that is in memory at once, per thread."""
        return max(1 << 16, min(_LARGEST_TILE_BYTES, self.memory_bytes // (self.num_threads * _BUFFERS_PER_THREAD)))

    @property
    def needed(self) -> list[int]:
        """Source tensors that the target is made of, in the order in which they lie in the source's files."""
        shards = self.index.shards
        numbers = [number for number, rows in enumerate(self.target_rows) if len(rows)]
        first = {number: self.source_rows[number][0] for number in numbers}
        return sorted(numbers, key=lambda n: (int(shards.file[first[n]]), int(shards.byte_offset[first[n]])))

    @property
    def unit_bytes(self) -> int:
        """Work is handed out, recorded and resumed in units of about this many source bytes.

        The same on every machine, so that workers with different memory agree about the units.
        """
        largest = _LARGEST_REMOTE_UNIT_BYTES if self.remote else _LARGEST_UNIT_BYTES
        return max(_SMALLEST_UNIT_BYTES, min(largest, self.bytes_to_read // _UNITS))

    @property
    def remote(self) -> bool:
        """The source is in an object store: a unit is fetched whole, in few requests."""
        return isinstance(self.index.root, RemotePath)

    @functools.cached_property
    def units(self) -> tuple[Unit, ...]:
        """The work: every region of every needed tensor once, in the order of the source's files."""
        units: list[Unit] = []
        regions: list[tuple[int, Box]] = []
        held = 0
        for number in self.needed:
            tensor = self.index.tensors[number]
            for box in tiles(tensor.shape, self.unit_bytes // tensor.item_bytes):
                num_bytes = box.num_elements * tensor.item_bytes
                if regions and held + num_bytes > self.unit_bytes:
                    units.append(Unit(tuple(regions), held))
                    regions, held = [], 0
                regions.append((number, box))
                held += num_bytes
        if regions:
            units.append(Unit(tuple(regions), held))
        return tuple(units)

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits that tell this conversion from any other: source files, target files, and what goes where."""
        found = hashlib.sha256(
            f"{self.index.root} {self.index.step} {self.unit_bytes}".encode(errors="surrogateescape")
        )
        for source in self.index.files:
            found.update(f"{source.path} {source.num_bytes} {source.checksums}".encode(errors="surrogateescape"))
        for target in self.layout.files:
            found.update(f"{target.path} {target.num_bytes}".encode())
            for part in identity(target.fixed):
                found.update(part)
        for tensor in self.target_tensors:
            found.update(f"{tensor.key} {tensor.shape} {tensor.dtype}".encode())
        shards = self.layout.shards
        for name in _PLACES if shards.has_families else _PLACES[:6]:
            found.update(np.ascontiguousarray(getattr(shards, name)).data)
        return found.hexdigest()[:16]

    def summary(self) -> dict[str, Any]:
        """What `reshard plan` prints."""
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
    """Match a source with a target.

    Args:
        index: the source.
        layout: the target.
        memory_bytes: for buffers.
        num_threads: that read and write at the same time.
        agreement: compare what the source holds twice: copies of a tensor, and weights with their masters.

    Raises:
        PlanError: the target wants a tensor that the source does not hold.
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
    copies = copies_to_compare(index, all_rows, source_rows) if agreement else None
    return Plan(
        index=index,
        layout=layout,
        source_rows=tuple(source_rows),
        target_rows=tuple(target_rows),
        bytes_to_read=_num_bytes(index, source_rows),
        bytes_to_write=sum(file.num_bytes for file in layout.files),
        memory_bytes=memory_bytes,
        num_threads=num_threads,
        copy_rows=() if copies is None else copies.rows,
        bytes_to_compare=0 if copies is None else _num_bytes(index, copies.rows),
        roundings=_roundings(index, source_rows) if agreement and index.has_rounded_weights else (),
        notes=() if copies is None else copies.notes,
    )


def _roundings(index: Index, source_rows: Sequence[Int64Array]) -> tuple[Rounding, ...]:
    """Weights and masters of one name that are both read."""
    read = {tensor.key: at for at, tensor in enumerate(index.tensors) if len(source_rows[at])}
    found = []
    for (state, name), weight in read.items():
        master = read.get(TensorKey("fp32", name)) if state == "weight" else None
        if master is None or index.tensors[weight].shape != index.tensors[master].shape:
            continue
        dtype = index.tensors[weight].dtype
        if can_cast(index.tensors[master].dtype, dtype):
            found.append(Rounding(weight, master, dtype))
    return tuple(found)


def _origins(index: Index, layout: TargetLayout) -> Int64Array:
    count = len(layout.tensors or index.tensors)
    origins = np.array(layout.origins, dtype=np.int64) if layout.tensors else np.arange(count, dtype=np.int64)
    if len(origins) != count or (origins < 0).any() or (origins >= len(index.tensors)).any():
        raise PlanError(f"the layout names {count} tensors and {len(origins)} origins among {len(index.tensors)}")
    return origins


def _target_rows(index: Index, layout: TargetLayout) -> list[Int64Array]:
    """Rows of the target by the source tensor that they are made of."""
    origin = _origins(index, layout)[layout.shards.tensor]
    order = np.argsort(origin, kind="stable")
    bounds = np.searchsorted(origin[order], np.arange(len(index.tensors) + 1))
    return [order[bounds[at] : bounds[at + 1]] for at in range(len(index.tensors))]


def _one_replica(shards: ShardTable, rows: Int64Array) -> Int64Array:
    """Rows of the first replica, in the order of the tensor's elements."""
    if not len(rows):
        return rows
    chosen = rows[shards.replica[rows] == shards.replica[rows].min()]
    ordered: Int64Array = chosen[np.lexsort((shards.start[chosen], *shards.offset[chosen].T[::-1]))]
    return ordered


def _num_bytes(index: Index, rows: Sequence[Int64Array]) -> int:
    """Bytes of rows by tensor."""
    num_elements = index.shards.num_elements
    return sum(
        int(num_elements[own].sum()) * tensor.item_bytes for own, tensor in zip(rows, index.tensors, strict=True)
    )
