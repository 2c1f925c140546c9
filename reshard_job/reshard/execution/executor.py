"""Move the bytes: every source byte is read once, every target byte written once, in bounded memory.

A unit of the plan is cut into tiles: boxes of one logical tensor that fit the memory budget. A tile is gathered from
the source boxes that touch it and scattered to the target boxes that touch it. Both sides are digested with their own
coordinates, so that equal digests prove that every element arrived in every copy exactly once. Each unit has a record
of the ranges and digests. The records of all units, from any number of workers, together prove the conversion.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

from reshard.checksums import crc
from reshard.checksums.crc import CrcRange
from reshard.checksums.digest import to_hex
from reshard.errors import VerificationError
from reshard.execution import averages, source_checks, unit_records
from reshard.execution.masters import check_masters
from reshard.execution.scan import find_touching
from reshard.execution.tile import Carrier
from reshard.execution.unit_records import UnitRecord
from reshard.planning.plan import LARGEST_REMOTE_UNIT_BYTES, Plan
from reshard.profile.clock import Phase, PhaseClock, name_process
from reshard.profile.collector import current, timed
from reshard.profile.devices import find_devices
from reshard.profile.events import FileNames
from reshard.profile.steering import FEWEST_UNITS, Limits, Steering
from reshard.storage.source_reader import SourceReader, source_changed_error
from reshard.storage.target_writer import TargetWriter
from reshard.system.limits import DEFAULT_MEMORY_BYTES, free_memory_bytes
from reshard.tensors.geometry import tiles
from reshard.tensors.intervals import Int64Array

FORK_BYTES = 64 << 20
"""Smallest number of bytes that processes move faster than threads, because starting them takes time."""

SPARE_BYTES = 512 << 20
"""Smallest number of bytes for which more processes are forked than start to work: they take milliseconds."""

SPARE_PROCESS_BYTES = 32 << 20
"""Free memory for each process beyond those that start to work: what it changes of the memory that it shares."""

SPARE_THREAD_BYTES = 4 * LARGEST_REMOTE_UNIT_BYTES
"""Memory beyond the default for each thread that reads an object store beyond those that start to work: its unit, and
what the store's library holds of it meanwhile."""

FLUSHERS = 4
"""Most threads that bring the bytes of done units to storage; there are as many as units wait for it."""

_POLL_SECONDS = 0.1  # time before `units` is asked again after it had no unit for now
_END = -1

Progress = Callable[[int], None]
"""Called with the number of source bytes moved since the last call."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a conversion.

    Attributes:
        digests: target tensor -> digest in hex; source and target have the same digests.
        file_crc32: CRC-32 of every target file, in the layout's order.
        bytes_read: bytes read from the source.
        bytes_written: bytes written to the target.
        content: `source_checks.content_digest` of the ranges that were read.
        touched: source files whose identity changed while the ranges that were read stayed the same.
        averaged: source tensor whose copies differed and were averaged -> largest difference between two copies.
    """

    digests: dict[str, str]
    file_crc32: tuple[int, ...]
    bytes_read: int
    bytes_written: int
    content: str
    touched: frozenset[str]
    averaged: Mapping[str, float] = dataclasses.field(default_factory=dict)


def execute(plan: Plan, folder: Path, *, progress: Progress | None = None, sync: bool = True) -> Outcome:
    """Convert into `folder`, which must exist and be empty; the caller publishes it afterwards.

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
    """Open files of a conversion, and the threads or processes that move its units."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        sync: bool = True,
        bytes_per_second: float | None = None,
        progress: Progress | None = None,
        adapts: bool = False,
    ) -> None:
        """Store what to do; nothing is opened or made yet.

        Args:
            plan: of the conversion.
            folder: folder of the target.
            sync: bring all bytes to stable storage.
            bytes_per_second: limit of reading, or None.
            progress: called with the source bytes that were moved.
            adapts: choose the number of workers by what is measured; the plan's number is where it starts.
        """
        self.plan = plan
        self._folder = folder
        self._collector = current()
        self._source = SourceReader(plan.index.root, plan.index.files, bytes_per_second=bytes_per_second)
        self._target = TargetWriter(folder, plan.layout.files, plan.layout.zeros)
        self._sync = sync
        self._progress = progress
        self._stop = threading.Event()
        self._is_local = not plan.is_remote and bytes_per_second is None  # only threads share connections and a pace
        self._steering = Steering(limits_for(plan, adapts=adapts and bytes_per_second is None), adapts=adapts)

    @timed("make files")
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
        """Move units, as many at the same time as the plan's number of threads.

        Args:
            units: numbers of the units. None means that there is no unit for now: `units` is asked again soon, and
                units that were begun go on.
            done: is called from another thread with each record, when the unit's bytes are on stable storage.

        Returns:
            The records of all units.

        Raises:
            ReshardError: a unit failed; the first failure is raised and no further unit is begun.
        """
        records: list[UnitRecord] = []
        flushes: list[Future[None]] = []

        def collect(record: UnitRecord) -> None:
            records.append(record)
            flushes.append(flusher.submit(self._settle, record, done))  # while the next unit is read

        with ThreadPoolExecutor(FLUSHERS) as flusher:
            if self._is_local and is_worth_forking(self.plan.bytes_to_read):
                self._do_in_processes(iter(units), collect)
            else:
                self._do_in_threads(iter(units), collect)
            for flush in flushes:
                flush.result()
        self._collector.add_decisions(self._steering.decisions)
        self.collect_times(records)
        return records

    def collect_times(self, records: Iterable[UnitRecord]) -> None:
        """Give the times of all known units to the collector of this run."""
        index, layout = self.plan.index, self.plan.layout
        names = FileNames(
            find_devices(index.root, [file.path for file in index.files]),
            find_devices(self._folder, [file.path for file in layout.files]),
        )
        self._collector.set_units([record.times for record in records if record.times is not None], names)

    def _do_in_processes(self, units: Iterator[int | None], collect: Callable[[UnitRecord], None]) -> None:
        from reshard.system.process_pool import map_in_processes

        carrier = Carrier(self.plan, self._source, self._target, PhaseClock())
        self._source.may_map = True  # a file that becomes shorter ends a child, not this process
        steering = self._steering

        def on_result(record: UnitRecord) -> None:
            num_bytes = self.plan.units[record.unit].num_bytes
            steering.add(record.times, num_bytes)
            collect(record)
            if self._progress is not None:
                self._progress(num_bytes)

        def do(task: tuple[int, int]) -> UnitRecord:
            return self._do_unit(*task, carrier, None)

        tasks = (None if unit is None else (unit, steering.tile_bytes) for unit in units)
        map_in_processes(tasks, steering.limits.most, do, on_result, active=lambda: steering.active)
        self._source.may_map = False

    def _do_in_threads(self, units: Iterator[int | None], collect: Callable[[UnitRecord], None]) -> None:
        lock, steering_lock, done = threading.Lock(), threading.Lock(), threading.Event()
        steering = self._steering

        def work(number: int) -> None:
            carrier = Carrier(self.plan, self._source, self._target, PhaseClock(f"{name_process()}, thread {number}"))
            while not self._stop.is_set():
                if number >= steering.active:
                    if done.wait(_POLL_SECONDS):
                        return
                    continue
                with lock:
                    unit = next(units, _END)
                    if unit is None:
                        self._stop.wait(_POLL_SECONDS)
                        continue
                if unit == _END:
                    done.set()
                    return
                record = self._do_unit(unit, steering.tile_bytes, carrier, self._progress)
                if self._stop.is_set():  # another thread has failed: the record may be incomplete
                    return
                with steering_lock:  # not that of the units: who waits for one of those must not hold up records
                    steering.add(record.times, self.plan.units[unit].num_bytes)
                collect(record)

        with ThreadPoolExecutor(steering.limits.most) as pool:
            try:
                futures = [pool.submit(work, number) for number in range(steering.limits.most)]
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._stop.set()
                done.set()
            for future in futures:
                future.result()
        self._stop.clear()

    def _settle(self, record: UnitRecord, done: Callable[[UnitRecord], None] | None) -> None:
        """Bring a unit's bytes to stable storage and report its record; without `done` only begin to write them."""
        started, began = time.time(), time.perf_counter()
        for file, ranges in record.written.items() if self._sync else ():
            if done is not None:
                self._target.flush(file)
            else:
                self._target.begin_flush(file, ranges)
        if record.times is not None and self._sync:
            seconds = time.perf_counter() - began
            record.times = dataclasses.replace(record.times, flush_started=started, flush_seconds=seconds)
        if done is not None:
            done(record)

    def is_intact(self, record: UnitRecord, *, reread: bool) -> bool:
        """Return True if the record's files existed before this run and, with `reread`, hold the recorded content."""
        if self._target.created & record.written.keys():
            return False
        every = ((file, crc_range) for file, ranges in record.written.items() for crc_range in ranges)
        return not reread or all(self._target.has_content(file, crc_range) for file, crc_range in every)

    def sync(self) -> None:
        """Wait until all written bytes are on stable storage, if this run was made with `sync`.

        Raises:
            StorageFullError: no space left.
            TargetError: any other failure.
        """
        started, began = time.time(), time.perf_counter()
        if self._sync:
            self._target.sync()
            self._collector.add_step("sync", started, time.perf_counter() - began)

    def finish(self, records: Iterable[UnitRecord], *, fresh: bool = True, touched: Collection[str] = ()) -> Outcome:
        """Compare digests and checksums, and complete the files.

        Args:
            records: records of all units.
            fresh: this run made the files.
            touched: source files that had another identity in other runs, which made some of the records.

        Raises:
            VerificationError: digests differ, a unit is missing, weights are not their masters rounded, or a byte of a
                file is not accounted for.
            CorruptSourceError: the source does not match its own checksums, or those of its commit.
            SourceChangedError: the source is not the one that was indexed.
            StorageFullError: no space left to complete the files.
            TargetError: the files cannot be completed.
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
            averaged=unit_records.largest_differences(self.plan, every.values()),
        )

    def _check_source(self, read: source_checks.ReadRanges, touched: Collection[str]) -> tuple[int, Collection[str]]:
        """Compare the source with its checksums and identities; raises as `finish` does.

        Returns:
            Bytes that were read for it, and the files whose identity changed during the conversion.
        """
        index = self.plan.index
        whole, more = source_checks.check_committed(self._source, index, read, self.plan.num_threads)
        more += self._source.check_sums(read, without=whole)
        now = source_checks.find_touched_files(index)
        proved = {index.files[number].path for number in whole}
        if doubted := (now.keys() | set(touched)) - proved:
            more += source_checks.check_again(self._source, index, read, doubted)
            later = source_checks.find_touched_files(index)
            if problems := [
                f"{path}: was touched while it was compared"
                for path, identity in later.items()
                if now.get(path) != identity
            ]:
                raise source_changed_error(problems, str(index.root))
        return more, now.keys()

    def _do_unit(self, unit: int, tile_bytes: int, carrier: Carrier, progress: Progress | None) -> UnitRecord:
        record = UnitRecord(unit=unit)
        carrier.clock.begin()
        carrier.use_tile_bytes(tile_bytes)
        self._source.prefetch(_source_ranges(self.plan, unit), carrier.clock)
        carrier.clock.lap(Phase.PREPARE)
        for number, box in self.plan.units[unit].boxes:
            item_bytes = self.plan.index.tensors[number].item_bytes
            source = self.plan.index.shards.rows_touching(self.plan.source_rows[number], box)
            target = self.plan.layout.shards.rows_touching(self.plan.target_rows[number], box)
            copies = self.plan.index.shards.rows_touching(copy_rows_of(self.plan, number), box)
            largest = tile_bytes // (averages.BUFFERS if number in self.plan.averages else 1)
            for tile in tiles(box.size, max(1, largest // item_bytes)):
                if self._stop.is_set():
                    return record
                carrier.move(record, number, tile.shift(box.offset), (source, target, copies))
                if progress is not None:
                    progress(tile.num_elements * item_bytes)
        for file, crc_range in self._source.fetched_gaps():
            record.read[file].append(crc_range)
        if any(len(set(ranges)) != len(ranges) for ranges in record.written.values()):
            raise VerificationError(f"unit {unit} of the plan wrote bytes twice: nothing was published")
        for ranges in (*record.read.values(), *record.written.values()):
            ranges[:] = crc.join(ranges)
        record.times = carrier.clock.end()
        return record


def limits_for(plan: Plan, *, adapts: bool) -> Limits:
    """Return how many workers may move a plan's units; one that does not adapt has always the plan's number."""
    most = plan.num_threads
    if adapts and plan.bytes_to_read >= SPARE_BYTES and len(plan.units) >= FEWEST_UNITS:
        if plan.is_remote:
            spare = (plan.memory_bytes - DEFAULT_MEMORY_BYTES) // SPARE_THREAD_BYTES
        else:
            spare = (free_memory_bytes() or 0) // SPARE_PROCESS_BYTES
        most += max(0, min(most, spare))
    return Limits(
        processors=plan.num_threads,
        start=plan.num_threads,
        most=most,
        memory_bytes=plan.memory_bytes,
        largest_tile_bytes=plan.tile_bytes,
    )


def copy_rows_of(plan: Plan, number: int) -> Int64Array:
    """Return the rows of a source tensor that hold other copies, to compare with the copy that is converted."""
    return plan.copy_rows[number] if plan.copy_rows else plan.source_rows[number][:0]


def is_worth_forking(num_bytes: int) -> bool:
    """Return True if processes move so many bytes of local files faster than threads, and this process can fork."""
    return num_bytes >= FORK_BYTES and can_fork()


def can_fork() -> bool:
    """Return True if this process can be forked safely: on Linux, if it has no other thread that may hold a lock.

    The command line has no other threads. Programs that use the library usually have some: numpy starts a few, torch
    starts many.
    """
    tasks = Path("/proc/self/task")
    processes = sys.modules.get("multiprocessing")  # daemonic processes of this module may not have children
    is_daemon = processes is not None and processes.current_process().daemon
    return tasks.is_dir() and len(list(tasks.iterdir())) == 1 and not is_daemon


def read_content_digest(plan: Plan) -> str:
    """Read the ranges that a conversion reads, and return their `content_digest`.

    Raises:
        SourceError: the source cannot be read.
    """
    index = plan.index
    source = SourceReader(index.root, index.files)
    by_unit: list[dict[int, list[CrcRange]]] = []
    try:
        for unit in range(len(plan.units)):
            ranges: dict[int, list[CrcRange]] = defaultdict(list)
            source.prefetch(_source_ranges(plan, unit))
            for number, box in plan.units[unit].boxes:
                for tensor, rows in _rows_read(plan, number, recorded=True):
                    for row, common in find_touching(index.shards, index.shards.rows_touching(rows, box), box):
                        positions, num_bytes = row.byte_ranges(common, index.tensors[tensor].item_bytes)
                        ranges[row.file] += [source.checksum(row.file, position, num_bytes) for position in positions]
            for file, crc_range in source.fetched_gaps():
                ranges[file].append(crc_range)
            by_unit.append({file: crc.join(every) for file, every in ranges.items()})
    finally:
        source.close()
    return source_checks.content_digest(index, unit_records.merge(by_unit))


def _source_ranges(plan: Plan, unit: int) -> Iterator[tuple[int, int, int]]:
    """Yield (file, first byte, first byte behind the range) of what a unit reads of every source box."""
    for number, box in plan.units[unit].boxes:
        for tensor, rows in _rows_read(plan, number):
            item_bytes = plan.index.tensors[tensor].item_bytes
            for row, common in find_touching(plan.index.shards, rows, box):
                first = sum(
                    (low - base) * s for low, base, s in zip(common.offset, row.box.offset, row.strides, strict=True)
                )
                last = first + sum((size - 1) * stride for size, stride in zip(common.size, row.strides, strict=True))
                start = row.byte_offset + first * item_bytes
                yield row.file, start, start + (last - first + 1) * item_bytes


def _rows_read(plan: Plan, number: int, *, recorded: bool = False) -> Iterator[tuple[int, Int64Array]]:
    """Yield (tensor, rows) of all that is read to move a source tensor, or of what its record says of that."""
    yield number, plan.source_rows[number]
    average = plan.averages.get(number)
    if average is not None:
        own = average.rows_read(number)
        yield from itertools.islice(own, 1 if recorded and average.moves_master else None)
    else:
        yield number, copy_rows_of(plan, number)
