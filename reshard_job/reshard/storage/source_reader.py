"""Read ranges of source files and compute their checksums.

Reads are positioned reads on shared descriptors, so any number of threads may read one file.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import CrcRange
from reshard.errors import CorruptSourceError, SourceChangedError, make_read_error
from reshard.profile.clock import UNTIMED, Phase, PhaseClock
from reshard.storage.files import Bytes, File, LocalFile, open_file
from reshard.storage.object_store import RemoteFile, fetch_ranges
from reshard.system.file_handles import Handles
from reshard.tensors.layout import Checksum, SourceFile

GAP_BYTES = 256 << 10
"""Largest gap between two ranges that are fetched in one request. A store sends about as many bytes in the time that it
needs to answer a request (10 ms at 25 MB/s for a single stream)."""

_MAPPED_GAP_BYTES = 64 << 10
"""Largest gap between two ranges of a local file that are mapped together. To map so much more takes less time than to
map twice."""

_MOST_MAPPED_BYTES = 8 << 20
"""Bytes that a thread maps at once for all it will read next; more are mapped box by box, so that they do not count as
memory of this process."""

_BLOCK_BYTES = 4 << 20


class SourceReader:
    """Files of a source checkpoint, opened read-only when they are first needed."""

    may_map = False
    """True if local files may be read through memory mappings. A file that becomes shorter then ends the process by
    SIGBUS, so this is set in child processes only."""

    def __init__(self, root: Path, files: Sequence[SourceFile], *, bytes_per_second: float | None = None) -> None:
        self._root = root
        self._files = files
        self._open_files = Handles(self._open, lambda file: file.close())
        self._fetched = threading.local()
        self._pace = None if bytes_per_second is None else Pace(bytes_per_second)

    def read_into(self, file: int, position: int, target: Bytes) -> CrcRange:
        """Fill `target` ([num_bytes], contiguous) from a file.

        Raises:
            CorruptSourceError: the file is shorter than it was, or cannot be read.
        """
        self.fill(file, position, target)
        return CrcRange(position, len(target), crc.crc32(target.data))

    def fill(self, file: int, position: int, target: Bytes) -> None:
        """Fill `target` ([num_bytes], contiguous) from a file without computing a checksum.

        Raises:
            CorruptSourceError: the file is shorter than it was, or cannot be read.
        """
        block = self._block_with(file, position, len(target))
        if block is not None:
            target[:] = block
            return
        if self._pace is not None:
            self._pace.take(len(target))
        with self._open_files.borrow(file) as source:
            self._fill(source, file, position, target)

    def view(self, file: int, position: int, num_bytes: int) -> Bytes | None:
        """Return a range in memory without a copy ([num_bytes], read-only); None if it must be read instead.

        A range that `prefetch` requested from the disk is read: in virtual machines the first access to fresh pages
        through a mapping took three times as long as a copy by the kernel.

        Raises:
            CorruptSourceError: the file cannot be opened.
        """
        content = self._block_with(file, position, num_bytes)
        if content is None and self.may_map and not self._is_awaited(file, position):
            with self._open_files.borrow(file) as source:
                if isinstance(source, LocalFile):
                    content = self._map(source, position, num_bytes)
        return content

    def _is_awaited(self, file: int, position: int) -> bool:
        """Return True if the last `prefetch` of this thread requested this position from the disk."""
        ranges = getattr(self._fetched, "awaited", {}).get(file, ())
        at = bisect.bisect_right(ranges, position, key=lambda item: item[0]) - 1
        return at >= 0 and position < ranges[at][1]

    def _fill(self, source: File, number: int, position: int, target: Bytes) -> None:
        done = 0
        while done < len(target):
            try:
                count = source.read_into(target[done:], position + done)
            except OSError as error:
                where = f"cannot be read at byte {position + done}"
                raise make_read_error(error, self._path(number), what=where) from error
            if count == 0:
                raise self._truncated_error(number, position + done, position + len(target))
            done += count

    def _truncated_error(self, number: int, position: int, end: int) -> CorruptSourceError:
        return CorruptSourceError(
            f"ends at byte {position}, {end - position} more bytes were expected there: truncated",
            path=self._path(number),
            hint="use an earlier commit",
        )

    def prefetch(self, ranges: Iterable[tuple[int, int, int]], clock: PhaseClock = UNTIMED) -> None:
        """Prepare the ranges that this thread will read next.

        What the page cache holds of local files is mapped, if that is allowed. The kernel begins to read the rest, so
        that the disk works while the first ranges are moved. Remote files are fetched now, in few large requests.

        Args:
            ranges: (file, first byte, first byte behind the range) of each range.
            clock: measures what is fetched now.
        """
        self._fetched.blocks, self._fetched.gaps = {}, []
        awaited: dict[int, list[tuple[int, int]]] = {}
        blocks: dict[int, list[tuple[int, Bytes]]] = {}
        remote: list[tuple[int, int, int]] = []
        wanted = sorted(ranges)
        mapped_bytes = 0
        for file, start, end in coalesce(wanted, _MAPPED_GAP_BYTES if self.may_map else GAP_BYTES):
            with self._open_files.borrow(file) as source:
                if not isinstance(source, LocalFile):
                    remote.append((file, start, end))
                    continue
                clock.lap(Phase.PREPARE)
                is_cached = self.may_map and source.is_cached(start, end - start)
                mapped = (
                    source.view(start, end - start)
                    if is_cached and mapped_bytes + end - start <= _MOST_MAPPED_BYTES
                    else None
                )
                if mapped is not None:
                    clock.lap(Phase.POPULATE, 0, file)  # its bytes are counted where they are used
                    mapped_bytes += len(mapped)
                    blocks.setdefault(file, []).append((start, mapped))
                elif self._pace is None and not is_cached:
                    source.prefetch(start, end - start)
                    awaited.setdefault(file, []).append((start, end))
        clock.lap(Phase.PREPARE)
        fetched = self._fetch(remote)
        clock.share(Phase.READ, [(file, end - start) for file, start, end in remote])
        for (file, start, _), block in zip(remote, fetched, strict=True):
            blocks.setdefault(file, []).append((start, block))
            if self._files[file].crc32 is not None:
                self._record_gaps(file, wanted, start, block)
        self._fetched.blocks, self._fetched.awaited = blocks, awaited

    def _fetch(self, ranges: Sequence[tuple[int, int, int]]) -> list[Bytes]:
        """Fetch ranges of remote files at the same time.

        Raises:
            CorruptSourceError: a file is shorter than it was, or cannot be read.
        """
        if self._pace is not None:
            self._pace.take(sum(end - start for _, start, end in ranges))
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(self._open_files.borrow(file)) for file, _, _ in ranges]
            remote = [
                (file, *part[1:]) for file, part in zip(files, ranges, strict=True) if isinstance(file, RemoteFile)
            ]
            try:
                contents = fetch_ranges(remote)
            except OSError as error:
                raise make_read_error(error, str(error.filename or self._root)) from error
        for (file, start, end), content in zip(ranges, contents, strict=True):
            if len(content) != end - start:
                raise self._truncated_error(file, start + len(content), end)
        return [np.frombuffer(content, dtype=np.uint8) for content in contents]

    def _map(self, source: LocalFile, start: int, num_bytes: int) -> Bytes | None:
        """Map a range that the page cache holds; None if it must be read instead."""
        is_cached = self.may_map and source.is_cached(start, num_bytes)
        return source.view(start, num_bytes) if is_cached else None

    def _record_gaps(self, file: int, wanted: Sequence[tuple[int, int, int]], start: int, block: Bytes) -> None:
        """Record the checksums of fetched gaps, so that the file's checksum needs no second request for them."""
        first, last = (bisect.bisect_left(wanted, (file, at, 0)) for at in (start, start + len(block)))
        position = start
        for _, low, high in wanted[first:last]:
            if low > position:
                content = block[position - start : low - start]
                self._fetched.gaps.append((file, CrcRange(position, len(content), crc.crc32(content.data))))
            position = max(position, high)

    def fetched_gaps(self) -> Sequence[tuple[int, CrcRange]]:
        """Return (file, range) of the gaps that the last `prefetch` of this thread fetched between its ranges."""
        gaps: Sequence[tuple[int, CrcRange]] = getattr(self._fetched, "gaps", ())
        return gaps

    def _block_with(self, file: int, position: int, num_bytes: int) -> Bytes | None:
        blocks = getattr(self._fetched, "blocks", {}).get(file)
        if not blocks:
            return None
        at = bisect.bisect_right(blocks, position, key=lambda item: item[0]) - 1
        start, block = blocks[at]
        inside = at >= 0 and position + num_bytes <= start + len(block)
        return block[position - start : position - start + num_bytes] if inside else None

    def check_sums(self, read: Mapping[int, Sequence[CrcRange]], without: Collection[int] = ()) -> int:
        """Compare the ranges that were read with the checksums that the containers state.

        If only some bytes of a range with a checksum were read, the others are read here.

        Args:
            read: ranges that were read, by file.
            without: files that are not compared.

        Returns:
            Number of bytes that were read here.

        Raises:
            CorruptSourceError: ranges are damaged; the error lists them.
        """
        problems: list[str] = []
        more = 0
        for number, ranges in sorted(read.items()):
            file = self._files[number]
            ordered = sorted(set(ranges)) if file.checksums and number not in without else []
            for stated in file.checksums if ordered else ():
                completed = self._complete_stated(number, ordered, stated)
                if completed is None:
                    continue
                actual, num_bytes = completed
                more += num_bytes
                if actual != stated.crc32:
                    problems.append(describe_mismatch(file, stated, actual))
        if problems:
            raise damaged_ranges_error(problems, str(self._root))
        return more

    def checksum(self, file: int, position: int, num_bytes: int) -> CrcRange:
        """Read a range in blocks and compute its checksum.

        Raises:
            CorruptSourceError: the file is shorter than it was, or cannot be read.
        """
        value = 0
        for at in range(position, position + num_bytes, _BLOCK_BYTES):
            block = np.empty(min(_BLOCK_BYTES, position + num_bytes - at), dtype=np.uint8)
            self.fill(file, at, block)
            value = crc.crc32(block.data, value)
        return CrcRange(position, num_bytes, value)

    def _complete_stated(self, file: int, ranges: Sequence[CrcRange], stated: Checksum) -> tuple[int, int] | None:
        """Return (CRC-32 of the stated range, bytes read to complete it), or None if nothing of it was read before."""
        end = stated.start + stated.num_bytes
        inside = [
            crc_range
            for crc_range in crc.select_starting_in(ranges, stated.start, end)
            if crc_range.start + crc_range.num_bytes <= end
        ]
        return self.complete(file, inside, stated.start, stated.num_bytes) if inside else None

    def complete(self, file: int, ranges: Sequence[CrcRange], start: int, num_bytes: int) -> tuple[int, int]:
        """Return the CRC-32 of a range of which sorted inner ranges are known, and the number of bytes read for it.

        Bytes that no inner range covers are read here. Of inner ranges that overlap, one is used. The others are read
        again and compared with their checksums.

        Raises:
            SourceChangedError: an overlapping range has another content than before.
            CorruptSourceError: the file cannot be read.
        """
        known, overlapping = crc.separate_overlaps(ranges)
        for crc_range in overlapping:
            if self.checksum(file, crc_range.start, crc_range.num_bytes) != crc_range:
                problem = f"{self._files[file].path}: was read twice with another content"
                raise source_changed_error([problem], str(self._root))
        more = sum(crc_range.num_bytes for crc_range in overlapping)
        for at, length in crc.find_gaps(known, start, start + num_bytes) or ():
            known.append(self.checksum(file, at, length))
            more += length
        return crc.assemble(known, start=start, num_bytes=num_bytes), more

    def close(self) -> None:
        """Close all files."""
        self._open_files.close()

    def _path(self, file: int) -> str:
        return str(self._root / self._files[file].path)

    def _open(self, file: int) -> File:
        try:
            source = open_file(self._root / self._files[file].path, root=self._root)
        except OSError as error:
            raise make_read_error(error, self._path(file), what="cannot be opened") from error
        expected = self._files[file].identity
        is_stated = self._files[file].crc32 is not None
        if expected is not None and (why := expected.difference(source.identity, is_stated=is_stated)):
            source.close()
            raise source_changed_error([f"{self._files[file].path}: {why}"], str(self._root))
        return source


def describe_mismatch(file: SourceFile, stated: Checksum, actual: int) -> str:
    """Describe a range whose checksum differs from the one that its file states, or a file's from its commit's."""
    if stated.start == 0 and stated.num_bytes == file.num_bytes:
        return f"{file.path}: CRC-32 {stated.crc32:08x} was committed, the content has {actual:08x}"
    where = f"{file.path}: bytes {stated.start}:{stated.start + stated.num_bytes}"
    return f"{where} have CRC-32 {actual:08x}, the file itself states {stated.crc32:08x}"


def damaged_ranges_error(problems: Sequence[str], path: str | None) -> CorruptSourceError:
    """Make the error for ranges of a source that differ from their checksums."""
    what = "1 tensor is damaged" if len(problems) == 1 else f"{len(problems)} tensors are damaged"
    return CorruptSourceError(what, path=path, problems=problems[:20], hint="use an earlier commit")


def source_changed_error(problems: Sequence[str], path: str) -> SourceChangedError:
    """Make the error for files that changed after they were indexed."""
    return SourceChangedError(
        "the source changed while it was converted: nothing was published",
        path=path,
        problems=problems[:20],
        hint="convert it again when nobody writes to it, or use an earlier commit",
    )


def coalesce(ranges: Iterable[tuple[int, int, int]], gap_bytes: int = GAP_BYTES) -> Iterator[tuple[int, int, int]]:
    """Join sorted ranges (file, start, end) that are at most `gap_bytes` apart."""
    current: tuple[int, int, int] | None = None
    for file, start, end in ranges:
        if current is not None and current[0] == file and start - current[2] <= gap_bytes:
            current = (file, current[1], max(end, current[2]))
            continue
        if current is not None:
            yield current
        current = (file, start, end)
    if current is not None:
        yield current


class Pace:
    """Limits the bytes per second of all threads together, so that other users of the storage get their share."""

    def __init__(self, bytes_per_second: float) -> None:
        self._seconds_per_byte = 1 / bytes_per_second
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Wait until the limit allows `num_bytes` more."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            until = self._free_at = start + num_bytes * self._seconds_per_byte
        time.sleep(max(0.0, until - now))
