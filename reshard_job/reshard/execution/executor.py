"""Move the bytes: every source byte is read once, every target byte written once, in bounded memory.

A unit of the plan is cut into tiles, parts of one logical tensor that fit the memory budget. A tile is gathered from
the source boxes that touch it and scattered to the target boxes that touch it; both sides are digested with their own
coordinates, so that equal digests mean that every element arrived in every copy exactly once. What a unit did is a
record; records of all units, whoever did them, add up to the proof.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import Piece
from reshard.checksums.digest import to_hex
from reshard.errors import VerificationError
from reshard.execution import source_checks, unit_records
from reshard.execution.masters import check_masters
from reshard.execution.tile import Carrier, touching
from reshard.execution.unit_records import UnitRecord
from reshard.planning.plan import Plan
from reshard.storage.source_reader import SourceReader, changed
from reshard.storage.target_writer import TargetWriter
from reshard.tensors.geometry import tiles
from reshard.tensors.intervals import Int64Array

FORK_BYTES = 64 << 20
"""What is smaller is done before processes would pay."""

_POLL_SECONDS = 0.1  # before units are asked for again where there was none for now
_END = -1

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
        content: `source_checks.content_digest` of what was read.
        touched: source files whose identity is another one at the end, and what was read of them the same.
    """

    digests: dict[str, str]
    file_crc32: tuple[int, ...]
    bytes_read: int
    bytes_written: int
    content: str
    touched: frozenset[str]


def execute(plan: Plan, folder: Path, *, progress: Progress | None = None, sync: bool = True) -> Outcome:
    """Convert into `folder`, which exists, is empty, and is published by the caller afterwards.

    Raises:
        CorruptSourceError: the source ended early or does not match its own checksums, or those of its commit.
        SourceChangedError: the source is not the one that was indexed.
        StorageFullError: no space left for the target.
        VerificationError: the digests of source and target differ.
    """
    with Mover(plan, folder, sync=sync, progress=progress) as mover:
        outcome = mover.finish(mover.do(range(len(plan.units))))
        mover.sync()
        return outcome


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
        self._source = SourceReader(plan.index.root, plan.index.files, bytes_per_second=bytes_per_second)
        self._target = TargetWriter(folder, plan.layout.files, plan.layout.zeros)
        self._sync = sync
        self._progress = progress
        self._stop = threading.Event()
        self._is_local = not plan.remote and bytes_per_second is None  # connections and a pace are shared by threads

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

    def do(self, units: Iterable[int | None], done: Callable[[UnitRecord], None] | None = None) -> list[UnitRecord]:
        """Do units, as many at a time as the plan says; `units` is asked for the next one when one is done.

        Where `units` has none for now (None) it is asked again soon, while what was begun goes on.
        `done` is told about each unit when its bytes are on stable storage, from another thread.

        Raises:
            ReshardError: the first failure; no further unit is begun.
        """
        records: list[UnitRecord] = []
        flushes: list[Future[None]] = []

        def took(record: UnitRecord) -> None:
            records.append(record)
            flushes.append(flusher.submit(self._settle, record, done))  # while the next unit is read

        with ThreadPoolExecutor(1) as flusher:
            if self._is_local and pays_to_fork(self.plan.bytes_to_read):
                self._do_in_processes(iter(units), took)
            else:
                self._do_in_threads(iter(units), took)
            for flush in flushes:
                flush.result()
        return records

    def _do_in_processes(self, units: Iterator[int | None], took: Callable[[UnitRecord], None]) -> None:
        from reshard.system.process_pool import map_in_processes

        carrier = Carrier(self.plan, self._source, self._target)
        self._source.may_map = True  # a file that becomes shorter ends a child only

        def told(record: UnitRecord) -> None:
            took(record)
            if self._progress is not None:
                self._progress(self.plan.units[record.unit].num_bytes)

        map_in_processes(units, self.plan.num_threads, lambda unit: self._do_unit(unit, carrier, None), told)
        self._source.may_map = False

    def _do_in_threads(self, units: Iterator[int | None], took: Callable[[UnitRecord], None]) -> None:
        lock = threading.Lock()

        def work() -> None:
            carrier = Carrier(self.plan, self._source, self._target)
            while not self._stop.is_set():
                with lock:
                    unit = next(units, _END)
                    if unit is None:
                        self._stop.wait(_POLL_SECONDS)
                        continue
                if unit == _END:
                    return
                record = self._do_unit(unit, carrier, self._progress)
                if self._stop.is_set():  # another thread has failed: the record may be incomplete
                    return
                took(record)

        with ThreadPoolExecutor(self.plan.num_threads) as pool:
            try:
                futures = [pool.submit(work) for _ in range(self.plan.num_threads)]
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()
            for future in futures:
                future.result()
        self._stop.clear()

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

    def sync(self) -> None:
        """Wait until all that was written is on stable storage, where this run was asked for that.

        Raises:
            StorageFullError, TargetError: the storage refuses.
        """
        if self._sync:
            self._target.sync()

    def finish(self, records: Iterable[UnitRecord], *, fresh: bool = True, touched: Collection[str] = ()) -> Outcome:
        """Compare digests and checksums, and complete the files.

        Args:
            records: of all units.
            fresh: this run made the files.
            touched: source files that other runs, which made some of the records, knew with another identity.

        Raises:
            VerificationError: digests differ, a unit is missing, weights are not their masters rounded, or a byte of a
                file is not accounted for.
            CorruptSourceError: the source does not match its own checksums, or those of its commit.
            SourceChangedError: the source is not the one that was indexed.
            StorageFullError, TargetError: the files cannot be completed.
        """
        every = {record.unit: record for record in records}
        if missing := set(range(len(self.plan.units))) - every.keys():
            raise VerificationError(f"{len(missing)} of {len(self.plan.units)} units were not done")
        read, written = (
            unit_records.merge(r.read for r in every.values()),
            unit_records.merge(r.written for r in every.values()),
        )
        more, touched_now = self._check_source(read, touched)
        digests = unit_records.compare_copies(self.plan, every.values())
        check_masters(self.plan, self._source, unit_records.unequal_roundings(self.plan, every.values()))
        unit_records.check_written(self.plan, written)
        sums, fixed = self._target.finish(written, fresh=fresh)
        return Outcome(
            digests={str(self.plan.target_tensors[at].key): to_hex(value) for at, value in sorted(digests.items())},
            file_crc32=tuple(sums),
            bytes_read=unit_records.num_bytes(read) + more,
            bytes_written=unit_records.num_bytes(written) + fixed,
            content=source_checks.content_digest(self.plan.index, read),
            touched=frozenset(touched_now),
        )

    def _check_source(self, read: source_checks.Ranges, touched: Collection[str]) -> tuple[int, Collection[str]]:
        """(Bytes read for it, files that somebody touched meanwhile); raises as `finish` does."""
        index = self.plan.index
        whole, more = source_checks.check_committed(self._source, index, read, self.plan.num_threads)
        more += self._source.check_sums(read, without=whole)
        now = source_checks.touched_files(index)
        proved = {index.files[number].path for number in whole}
        if doubted := (now.keys() | set(touched)) - proved:
            more += source_checks.check_again(self._source, index, read, doubted)
            if later := [path for path, found in source_checks.touched_files(index).items() if now.get(path) != found]:
                raise changed([f"{path}: was touched while it was compared" for path in later], str(index.root))
        return more, now.keys()

    def _do_unit(self, unit: int, carrier: Carrier, progress: Progress | None) -> UnitRecord:
        record = UnitRecord(unit=unit)
        self._source.expect(_extents(self.plan, unit))
        for number, region in self.plan.units[unit].regions:
            item_bytes = self.plan.index.tensors[number].item_bytes
            source = self.plan.index.shards.touching(self.plan.source_rows[number], region)
            target = self.plan.layout.shards.touching(self.plan.target_rows[number], region)
            copies = self.plan.index.shards.touching(copy_rows_of(self.plan, number), region)
            for tile in tiles(region.size, max(1, self.plan.tile_bytes // item_bytes)):
                if self._stop.is_set():
                    return record
                carrier.move(record, number, tile.shift(region.offset), (source, target, copies))
                if progress is not None:
                    progress(tile.num_elements * item_bytes)
        for file, piece in self._source.between():
            record.read[file].append(piece)
        if any(len(set(pieces)) != len(pieces) for pieces in record.written.values()):
            raise VerificationError(f"unit {unit} of the plan wrote bytes twice: nothing was published")
        for pieces in (*record.read.values(), *record.written.values()):
            pieces[:] = crc.join(pieces)
        return record


def copy_rows_of(plan: Plan, number: int) -> Int64Array:
    """Rows of a source tensor that hold other copies, to be compared with the one that is converted."""
    return plan.copy_rows[number] if plan.copy_rows else plan.source_rows[number][:0]


def pays_to_fork(num_bytes: int) -> bool:
    """So many bytes of local files are better moved by processes, and this one can have them."""
    return num_bytes >= FORK_BYTES and can_fork()


def can_fork() -> bool:
    """This process can be copied: on Linux, and where no other thread, of whatever library, may hold a lock meanwhile.

    So it is for the command. A program that uses the library has threads as a rule: numpy starts some, torch many.
    """
    tasks = Path("/proc/self/task")
    started = sys.modules.get("multiprocessing")  # whose daemons may have no children
    return tasks.is_dir() and len(list(tasks.iterdir())) == 1 and not (started and started.current_process().daemon)


def content_now(plan: Plan) -> str:
    """Read what a conversion reads, and return the `content_digest` of it.

    Raises:
        SourceError: the source cannot be read.
    """
    index = plan.index
    source = SourceReader(index.root, index.files)
    found: list[dict[int, list[Piece]]] = []
    try:
        for unit in range(len(plan.units)):
            pieces: dict[int, list[Piece]] = defaultdict(list)
            source.expect(_extents(plan, unit))
            for number, region in plan.units[unit].regions:
                rows = index.shards.touching(plan.source_rows[number], region)
                for row, part in touching(index.shards, rows, region):
                    positions, num_bytes = row.runs(part, index.tensors[number].item_bytes)
                    pieces[row.file] += [source.checksum(row.file, position, num_bytes) for position in positions]
            for file, piece in source.between():
                pieces[file].append(piece)
            found.append({file: crc.join(every) for file, every in pieces.items()})
    finally:
        source.close()
    return source_checks.content_digest(index, unit_records.merge(found))


def _extents(plan: Plan, unit: int) -> Iterator[tuple[int, int, int]]:
    """(file, first byte, first byte behind) of what a unit reads of every source box."""
    for number, region in plan.units[unit].regions:
        item_bytes = plan.index.tensors[number].item_bytes
        rows = np.concatenate([plan.source_rows[number], copy_rows_of(plan, number)])
        for row, part in touching(plan.index.shards, rows, region):
            first = sum((p - b) * s for p, b, s in zip(part.offset, row.box.offset, row.strides, strict=True))
            last = first + sum((size - 1) * stride for size, stride in zip(part.size, row.strides, strict=True))
            start = row.byte_offset + first * item_bytes
            yield row.file, start, start + (last - first + 1) * item_bytes
