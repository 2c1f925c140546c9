"""Estimate how long a conversion will take on this storage: a short measurement, and arithmetic on the plan.

The measurement reads at most 64 MiB, spread over the source's files, and writes at most 32 MiB beside the target; each
takes at most about a second. A rate that is not measured is assumed, and the output says so.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.checksums import crc
from reshard.checksums.digest import digest_term
from reshard.commits.staging import nearest_folder
from reshard.planning.plan import Plan
from reshard.storage.files import Bytes, open_file
from reshard.storage.object_store import RemotePath
from reshard.system.limits import format_bytes, format_seconds
from reshard.tensors.cast import cast
from reshard.tensors.geometry import whole
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import LogicalTensor
from reshard.tensors.shard_table import ShardTable

READ_BYTES = 64 << 20
WRITE_BYTES = 32 << 20
_BLOCK_BYTES = 1 << 20
_MOST_SECONDS = 1.0
_ASSUMED_READ = _ASSUMED_WRITE = 500e6  # bytes/s: a network volume or a SATA disk
_START_SECONDS = 0.3  # interpreter, numpy, metadata of a small checkpoint

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Speed of one kind of work.

    Attributes:
        bytes_per_second: the speed.
        measured: True if it was measured on this machine, False if it is assumed.
        detail: how it was measured, or why it is assumed.
    """

    bytes_per_second: float
    measured: bool
    detail: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates that a conversion's time depends on; `check` is the rate of digests and checksums in one thread."""

    read: Rate
    write: Rate
    check: Rate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds that a conversion will take, in all and for each kind of work."""

    seconds: float
    read_seconds: float
    write_seconds: float
    check_seconds: float
    rates: Rates

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON value."""
        return {
            "seconds": round(self.seconds, 3),
            "read_seconds": round(self.read_seconds, 3),
            "write_seconds": round(self.write_seconds, 3),
            "check_seconds": round(self.check_seconds, 3),
            "rates": dataclasses.asdict(self.rates),
        }

    def lines(self) -> list[str]:
        """Return lines for people."""
        parts = (
            ("read", self.read_seconds, self.rates.read),
            ("write", self.write_seconds, self.rates.write),
            ("check", self.check_seconds, self.rates.check),
        )
        return [
            f"about {format_seconds(self.seconds)}",
            *(
                f"{name:<6} {format_seconds(seconds):>8} at {format_bytes(rate.bytes_per_second)}/s"
                f" ({'measured' if rate.measured else 'assumed'}: {rate.detail})"
                for name, seconds, rate in parts
                if seconds  # a virtual commit reads and checks nothing
            ),
        ]


def estimate(plan: Plan, rates: Rates) -> Estimate:
    """Estimate the seconds for a plan: reads and writes take turns on the storage, all threads check meanwhile."""
    num_bytes = plan.bytes_to_read + plan.bytes_to_compare
    read = num_bytes / rates.read.bytes_per_second
    write = plan.bytes_to_write / rates.write.bytes_per_second
    check = (num_bytes + plan.bytes_to_write) / rates.check.bytes_per_second / plan.num_threads
    # One thread reads, checks and writes in turn; with several threads, one checks while another waits for storage.
    busy = read + write + check if plan.num_threads == 1 else max(read + write, check)
    return Estimate(
        seconds=_START_SECONDS + busy, read_seconds=read, write_seconds=write, check_seconds=check, rates=rates
    )


def estimate_manifest(num_bytes: int, rates: Rates) -> Estimate:
    """Estimate the seconds for a virtual commit of so many bytes: only metadata of the source is read."""
    write = num_bytes / rates.write.bytes_per_second
    return Estimate(
        seconds=_START_SECONDS + write, read_seconds=0.0, write_seconds=write, check_seconds=0.0, rates=rates
    )


def count_requests(plan: Plan) -> tuple[int, int]:
    """Count the ranges of files that will be read and written: one for each tile and for each gap in a box."""
    read = np.concatenate([np.zeros(0, dtype=np.int64), *plan.source_rows, *plan.copy_rows])
    write = np.concatenate([np.zeros(0, dtype=np.int64), *plan.target_rows])
    return (
        _ranges(plan.index.shards, read, plan.index.tensors, plan.tile_bytes),
        _ranges(plan.layout.shards, write, plan.target_tensors, plan.tile_bytes),
    )


def _ranges(shards: ShardTable, rows: Int64Array, tensors: Sequence[LogicalTensor], tile_bytes: int) -> int:
    item = np.array([tensor.item_bytes for tensor in tensors], dtype=np.int64)[shards.tensor[rows]]
    run = np.ones(len(rows), dtype=np.int64)  # elements that follow each other without a gap
    dense = np.ones(len(rows), dtype=bool)
    for dim in reversed(range(shards.size.shape[1])):
        size, stride = shards.size[rows, dim], shards.stride[rows, dim]
        dense &= (size == 1) | (stride == run)
        run = np.where(dense, run * size, run)
    runs, parts = shards.size[rows].prod(axis=1) // np.maximum(1, run), shards.num_chunks[rows]
    last = shards.num_elements[rows] - (parts - 1) * shards.chunk[rows]  # of a family; the others are longer

    def requests(elements: Int64Array) -> Int64Array:
        counts: Int64Array = np.maximum(1, -(-elements * item // tile_bytes))
        return counts

    of_family = (parts - 1) * requests(shards.chunk[rows]) + requests(last) + shards.num_boxes[rows] - parts
    return int(np.where(shards.chunk[rows] != 0, of_family, runs * requests(run)).sum())


def assume(plan: Plan) -> Rates:
    """Assume the speed of storage, and measure only that of checksums."""
    detail = "not measured"
    return Rates(
        read=Rate(bytes_per_second=_ASSUMED_READ, measured=False, detail=detail),
        write=Rate(bytes_per_second=_ASSUMED_WRITE, measured=False, detail=detail),
        check=measure_check(casting=has_casts(plan)),
    )


def measure(plan: Plan, target: Path | None, *, clock: Clock = time.monotonic) -> Rates:
    """Measure this machine and its storage for a plan; measure writing beside `target`, if there is one."""
    return Rates(
        read=measure_read(plan.index.root, [(file.path, file.num_bytes) for file in plan.index.files], clock=clock),
        write=_NO_TARGET if target is None else measure_write(target, clock=clock),
        check=measure_check(casting=has_casts(plan), clock=clock),
    )


_NO_TARGET = Rate(
    bytes_per_second=_ASSUMED_WRITE, measured=False, detail="name the target to have its storage measured"
)


def sample(sizes: Sequence[int], budget: int, block: int = _BLOCK_BYTES) -> list[tuple[int, int, int]]:
    """Choose blocks (file, position, bytes) of at most `budget` bytes in all, spread evenly over the files."""
    ends = list(itertools.accumulate(sizes))
    total = ends[-1] if ends else 0
    count = max(1, min(budget // block, -(-total // block)))
    blocks = []
    for at in range(count if total else 0):
        position = at * total // count
        file = bisect.bisect_right(ends, position)
        within = position - (ends[file] - sizes[file])
        stop = min(within + block, within + total // count, sizes[file])
        blocks.append((file, within, stop - within))
    return blocks


def measure_read(root: Path, files: Sequence[tuple[str, int]], *, clock: Clock = time.monotonic) -> Rate:
    """Measure reading with a sample of the source; the detail says how much of it the page cache held.

    Args:
        root: folder of the files.
        files: path and size of each.
        clock: seconds.
    """
    buffer = np.empty(_BLOCK_BYTES, dtype=np.uint8)
    done = cached = 0
    started, opened = clock(), -1
    with contextlib.ExitStack() as stack:
        try:
            for file, position, length in sample([size for _, size in files], READ_BYTES):
                if file != opened:
                    stack.close()
                    read, opened = stack.enter_context(_opened(root / files[file][0])), file
                result = read(buffer[:length], position)
                if result.num_bytes != length:
                    break
                done += length
                cached += length if result.cached else 0
                if clock() - started > _MOST_SECONDS:
                    break
        except OSError:
            done = 0
    seconds = clock() - started
    if done == 0 or seconds <= 0:
        return Rate(bytes_per_second=_ASSUMED_READ, measured=False, detail="nothing could be read to measure")
    where = "one request at a time" if _is_remote(root) else f"{100 * cached // done} % of it from the page cache"
    detail = f"{format_bytes(done)} in {format_seconds(seconds)}, {where}"
    return Rate(bytes_per_second=done / seconds, measured=True, detail=detail)


class _Read(NamedTuple):
    """Number of bytes that were read, and whether they were in the page cache."""

    num_bytes: int
    cached: bool


def _is_remote(path: Path) -> bool:
    return isinstance(path, RemotePath)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Callable[[Bytes, int], _Read]]:
    """Open a file, and yield a function that fills a buffer from a position of it."""
    if _is_remote(path):
        with open_file(path) as file:
            yield lambda view, position: _Read(file.read_into(view, position), cached=False)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        yield lambda view, position: _read_local(descriptor, view, position)
    finally:
        os.close(descriptor)


def _read_local(descriptor: int, view: Bytes, position: int) -> _Read:
    with contextlib.suppress(OSError):  # a byte is not in the page cache, or the file system cannot tell
        if os.preadv(descriptor, [view.data], position, os.RWF_NOWAIT) == len(view):
            return _Read(len(view), cached=True)
    return _Read(os.preadv(descriptor, [view.data], position), cached=False)


def measure_write(target: Path, *, clock: Clock = time.monotonic) -> Rate:
    """Measure writing: write and sync a hidden file in the nearest folder above `target` that exists, and remove it."""
    folder = nearest_folder(target)
    block = os.urandom(_BLOCK_BYTES)  # some storage compresses zeros away
    done = 0
    started = clock()
    try:
        with tempfile.TemporaryFile(prefix=".reshard-probe-", dir=folder) as stream:
            while done < WRITE_BYTES and clock() - started < _MOST_SECONDS:
                done += stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        detail = f"{folder} cannot be written: {error.strerror}"
        return Rate(bytes_per_second=_ASSUMED_WRITE, measured=False, detail=detail)
    seconds = max(1e-9, clock() - started)
    detail = f"{format_bytes(done)} synced in {format_seconds(seconds)}"
    return Rate(bytes_per_second=done / seconds, measured=True, detail=detail)


def has_casts(plan: Plan) -> bool:
    """Return True if some tensors change their type."""
    pairs = zip(plan.target_tensors, plan.origins.tolist(), strict=True)
    return any(tensor.dtype != plan.index.tensors[origin].dtype for tensor, origin in pairs)


def measure_check(*, casting: bool = False, clock: Clock = time.monotonic) -> Rate:
    """Measure digest and checksum of a block in memory, with `casting` also rounding; take the better of two times."""
    elements = np.zeros((256, 4096), dtype=np.uint32)
    best = float("inf")
    for _ in range(2):
        started = clock()
        known = crc.crc32(elements.data)  # of what is read, and again of what is written
        digest_term(elements, whole(elements.shape), elements.shape, known_crc32=known)
        crc.crc32(elements.data)
        if casting:  # once for the digest of what was read, once for what is written
            cast(elements, "float32", "bfloat16")
            cast(elements, "float32", "bfloat16")
        best = min(best, clock() - started)
    what = "digest, CRC-32 and rounding" if casting else "digest and CRC-32"
    return Rate(
        bytes_per_second=elements.nbytes / max(1e-9, best),
        measured=True,
        detail=f"{what} of {format_bytes(elements.nbytes)}, one thread",
    )
