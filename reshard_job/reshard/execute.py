"""Move the bytes: every source byte is read once, every target byte written once, in bounded memory.

A unit of the plan is cut into tiles, parts of one logical tensor that fit the memory budget. A tile is gathered from
the source boxes that touch it and scattered to the target boxes that touch it; both sides are digested with their own
coordinates, so that equal digests mean that every element arrived in every copy exactly once. What a unit did is a
record; records of all units, whoever did them, add up to the proof.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from reshard import crc, proof
from reshard.cast import UNSIGNED, Bits, cast
from reshard.crc import Piece
from reshard.digest import box_term, to_hex
from reshard.errors import VerificationError
from reshard.files import Bytes
from reshard.geometry import Box, tiles
from reshard.intervals import Int64Array
from reshard.plan import Plan
from reshard.proof import UnitRecord
from reshard.reading import Source
from reshard.shards import ShardRow, ShardTable
from reshard.writing import Target

Progress = Callable[[int], None]
"""Called with the number of source bytes moved since the last call."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened.

    Attributes:
        digests: target tensor to digest in hex; source and target agree.
        file_crc32: CRC-32 of every target file, in the layout's order.
        bytes_read: from the source.
        bytes_written: to the target.
    """

    digests: dict[str, str]
    file_crc32: tuple[int, ...]
    bytes_read: int
    bytes_written: int


def execute(plan: Plan, folder: Path, *, progress: Progress | None = None, sync: bool = True) -> Outcome:
    """Convert into `folder`, which exists, is empty, and is published by the caller afterwards.

    Raises:
        CorruptSourceError: the source ended early or does not match its own checksums.
        StorageFullError: no space left for the target.
        VerificationError: the digests of source and target differ.
    """
    with Mover(plan, folder, sync=sync, progress=progress) as mover:
        return mover.finish(mover.do(range(len(plan.units))))


class Mover:
    """Open files of a conversion, and the threads that work on them."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        sync: bool = True,
        bytes_per_second: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.plan = plan
        self._source = Source(plan.index.root, plan.index.files, bytes_per_second=bytes_per_second)
        self._target = Target(folder, plan.layout.files)
        self._sync = sync
        self._progress = progress
        self._stop = threading.Event()

    def __enter__(self) -> Mover:
        try:
            self._target.create()
        except BaseException:
            self._target.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._source.close()
        self._target.close()

    def do(self, units: Iterable[int], done: Callable[[UnitRecord], None] | None = None) -> list[UnitRecord]:
        """Do units, in as many threads as the plan says; `units` is asked for the next one when a thread is free.

        `done` is told about each unit when its bytes are on stable storage, from another thread.

        Raises:
            ReshardError: the first failure of any thread; no further unit is begun.
        """
        todo, lock = iter(units), threading.Lock()
        records: list[UnitRecord] = []
        flushes: list[Future[None]] = []

        def work() -> None:
            scratch = np.empty(self.plan.tile_bytes, dtype=np.uint8)
            while not self._stop.is_set():
                with lock:
                    unit = next(todo, None)
                if unit is None:
                    return
                record = self._do_unit(unit, scratch)
                if self._stop.is_set():  # another thread has failed: the record may be incomplete
                    return
                records.append(record)
                flushes.append(flusher.submit(self._settle, record, done))  # while the next unit is read

        with ThreadPoolExecutor(1) as flusher, ThreadPoolExecutor(self.plan.num_threads) as pool:
            try:
                futures = [pool.submit(work) for _ in range(self.plan.num_threads)]
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()
            for future in (*futures, *flushes):
                future.result()
        self._stop.clear()
        return records

    def _settle(self, record: UnitRecord, done: Callable[[UnitRecord], None] | None) -> None:
        """What is said to be done is on stable storage; where nothing is said, it is on its way there."""
        for file, pieces in record.written.items() if self._sync else ():
            if done is not None:
                self._target.flush(file)
            else:
                self._target.begin_flush(file, pieces)
        if done is not None:
            done(record)

    def intact(self, record: UnitRecord, *, reread: bool) -> bool:
        """The files that the record speaks of were there when this began, and with `reread` hold what it says."""
        if self._target.created & record.written.keys():
            return False
        every = ((file, piece) for file, pieces in record.written.items() for piece in pieces)
        return not reread or all(self._target.holds(file, piece) for file, piece in every)

    def finish(self, records: Iterable[UnitRecord], *, fresh: bool = True) -> Outcome:
        """Compare digests and checksums, and complete the files, which are `fresh` if this run made them.

        Raises:
            VerificationError: digests differ, or a unit is missing.
            CorruptSourceError: the source does not match its own checksums.
            StorageFullError, TargetError: the files cannot be completed.
        """
        every = {record.unit: record for record in records}
        if missing := set(range(len(self.plan.units))) - every.keys():
            raise VerificationError(f"{len(missing)} of {len(self.plan.units)} units were not done")
        read, written = proof.merge(r.read for r in every.values()), proof.merge(r.written for r in every.values())
        more = self._source.check_sums(read)
        digests = proof.compare(self.plan, every.values())
        proof.check_written(self.plan, written)
        sums, fixed = self._target.finish(written, sync=self._sync, fresh=fresh)
        return Outcome(
            digests={str(self.plan.target_tensors[at].key): to_hex(value) for at, value in sorted(digests.items())},
            file_crc32=tuple(sums),
            bytes_read=proof.num_bytes(read) + more,
            bytes_written=proof.num_bytes(written) + fixed,
        )

    def _do_unit(self, unit: int, scratch: Bytes) -> UnitRecord:
        record = UnitRecord(unit=unit)
        self._source.expect(_extents(self.plan, unit))
        for number, region in self.plan.units[unit].regions:
            item_bytes = self.plan.index.tensors[number].item_bytes
            source = self.plan.index.shards.touching(self.plan.source_rows[number], region)
            target = self.plan.layout.shards.touching(self.plan.target_rows[number], region)
            for tile in tiles(region.size, max(1, self.plan.tile_bytes // item_bytes)):
                if self._stop.is_set():
                    return record
                self._move_tile(record, number, tile.shift(region.offset), (source, target), scratch)
                if self._progress is not None:
                    self._progress(tile.num_elements * item_bytes)
        if any(len(set(pieces)) != len(pieces) for pieces in record.written.values()):
            raise VerificationError(f"unit {unit} of the plan wrote bytes twice: nothing was published")
        for pieces in (*record.read.values(), *record.written.values()):
            pieces[:] = crc.join(pieces)
        return record

    def _move_tile(
        self, record: UnitRecord, number: int, tile: Box, rows: tuple[Int64Array, Int64Array], scratch: Bytes
    ) -> None:
        plan = self.plan
        tensor, shape = plan.index.tensors[number], plan.index.tensors[number].shape
        targets = list(touching(plan.layout.shards, rows[1], tile))
        if not targets:
            return
        kinds = {row.tensor: plan.target_tensors[row.tensor].dtype for row, _ in targets}
        num_bytes = tile.num_elements * tensor.item_bytes
        buffer: Bits = _buffer(scratch, num_bytes).view(UNSIGNED[tensor.item_bytes]).reshape(tile.size)
        found: dict[str, int] = dict.fromkeys(kinds.values(), 0)
        sources = list(touching(plan.index.shards, rows[0], tile))
        known: int | None = None
        for row, part in sources:
            elements, known = self._read(record, row, part, buffer[_slices(part, tile)])
            for dtype in found:
                own = known if dtype == tensor.dtype else None
                found[dtype] ^= box_term(cast(elements, tensor.dtype, dtype), part, shape, known_crc32=own)
        for number_, dtype in kinds.items():
            record.source[number_] ^= found[dtype]
        converted = {dtype: cast(buffer, tensor.dtype, dtype) for dtype in found}
        for row, part in targets:
            dtype = kinds[row.tensor]
            elements = np.ascontiguousarray(converted[dtype][_slices(part, tile)])
            # One source box and one target box, both the whole tile: the same bytes in memory have the same sums.
            same = part == tile and len(sources) == 1 and dtype == tensor.dtype
            written = self._write(record, row, part, elements, known if same else None)
            term = found[dtype] if same else box_term(elements, part, shape, known_crc32=written)
            record.target[row.tensor, row.replica] ^= term

    def _read(self, record: UnitRecord, row: ShardRow, part: Box, view: Bits) -> tuple[Bits, int | None]:
        """Read a part into its place in the tile.

        Returns:
            It in one piece of memory, and its CRC-32 where it was in one piece in the file.
        """
        elements: Bits = view if view.flags.c_contiguous else np.empty(part.size, dtype=view.dtype)
        pieces = [self._source.read_into(row.file, position, piece) for position, piece in _runs(row, part, elements)]
        record.read[row.file] += pieces
        if elements is not view:
            view[...] = elements
        return elements, pieces[0].crc32 if len(pieces) == 1 else None

    def _write(self, record: UnitRecord, row: ShardRow, part: Box, elements: Bits, known: int | None) -> int | None:
        """Write a part, whose CRC-32 may be known; returns it where it is in one piece in the file."""
        runs = list(_runs(row, part, elements))
        own = known if len(runs) == 1 else None
        pieces = [self._target.write(row.file, position, piece, own) for position, piece in runs]
        record.written[row.file] += pieces
        return pieces[0].crc32 if len(pieces) == 1 else None


def _extents(plan: Plan, unit: int) -> Iterator[tuple[int, int, int]]:
    """(file, first byte, first byte behind) of what a unit reads of every source box."""
    for number, region in plan.units[unit].regions:
        item_bytes = plan.index.tensors[number].item_bytes
        for row, part in touching(plan.index.shards, plan.source_rows[number], region):
            first = sum((p - b) * s for p, b, s in zip(part.offset, row.box.offset, row.strides, strict=True))
            last = first + sum((size - 1) * stride for size, stride in zip(part.size, row.strides, strict=True))
            start = row.byte_offset + first * item_bytes
            yield row.file, start, start + (last - first + 1) * item_bytes


def _buffer(scratch: Bytes, num_bytes: int) -> Bytes:
    return scratch[:num_bytes] if num_bytes <= len(scratch) else np.empty(num_bytes, dtype=np.uint8)


def touching(shards: ShardTable, rows: Int64Array, tile: Box) -> Iterator[tuple[ShardRow, Box]]:
    """Boxes of rows that touch the tile, each with the common region."""
    for row in shards.within(rows, tile):
        part = row.box.intersect(tile)
        if part is not None:
            yield row, part


def _slices(part: Box, tile: Box) -> tuple[Any, ...]:
    """Index of a part in its tile's array; a view, for scalars too."""
    within = (low - base for low, base in zip(part.offset, tile.offset, strict=True))
    return (*(slice(low, low + size) for low, size in zip(within, part.size, strict=True)), ...)


def _runs(row: ShardRow, part: Box, elements: Bits) -> Iterator[tuple[int, Bytes]]:
    """Cut a part of a row's box into pieces that are consecutive in the file.

    Yields:
        Position in the file in bytes, and the piece's bytes in `elements` (contiguous, of the part's size).
    """
    item_bytes = elements.dtype.itemsize
    start = sum((p - b) * s for p, b, s in zip(part.offset, row.box.offset, row.strides, strict=True))
    dim, expected = part.ndim, 1
    while dim > 0 and (part.size[dim - 1] == 1 or row.strides[dim - 1] == expected):
        dim -= 1
        expected *= part.size[dim]
    flat = elements.reshape(-1).view(np.uint8)
    first = row.byte_offset + start * item_bytes
    if dim == 0:
        yield first, flat
        return
    distances = np.zeros(1, dtype=np.int64)
    for size, stride in zip(part.size[:dim], row.strides[:dim], strict=True):
        distances = (distances[:, None] + np.arange(size) * stride).reshape(-1)
    length = expected * item_bytes
    for number, distance in enumerate((distances * item_bytes + first).tolist()):
        yield distance, flat[number * length : (number + 1) * length]


def row_term(
    source: Source,
    row: ShardRow,
    shape: tuple[int, ...],
    item_bytes: int,
    max_elements: int,
    *,
    types: tuple[str, str] | None = None,
) -> RowTerm:
    """Term of one row of a source, read in parts of at most `max_elements`, and the ranges that were read.

    With `types`, that of its elements changed from the first type to the second.
    """
    term, pieces = 0, []
    for tile in tiles(row.box.size, max_elements):
        part = tile.shift(row.box.offset)
        elements: Bits = np.empty(part.size, dtype=UNSIGNED[item_bytes])
        own = [source.read_into(row.file, position, piece) for position, piece in _runs(row, part, elements)]
        known = own[0].crc32 if len(own) == 1 and types is None else None
        term ^= box_term(elements if types is None else cast(elements, *types), part, shape, known_crc32=known)
        pieces += own
    return RowTerm(term, crc.join(pieces))


@dataclasses.dataclass(frozen=True, slots=True)
class RowTerm:
    """Term of a row in its tensor's digest, and the ranges that were read for it."""

    term: int
    pieces: list[Piece]
