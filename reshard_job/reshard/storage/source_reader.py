"""Reading ranges of source files, with checksums of what passed.

Positioned reads on shared descriptors, so any number of threads may read one file.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import Piece
from reshard.errors import CorruptSourceError, SourceChangedError
from reshard.storage.files import Bytes, File, LocalFile, open_file
from reshard.system.file_handles import Handles
from reshard.tensors.layout import Checksum, SourceFile

GAP_BYTES = 256 << 10
"""Bytes that may be read for nothing to save a request: about what a store sends in the time that it takes to answer
one (10 ms at 25 MB/s for a single stream)."""

_BLOCK_BYTES = 4 << 20


class SourceReader:
    """Files of a source checkpoint, opened read-only when first needed."""

    may_map = False
    """Local files may be looked at in mappings: in a process that may be ended by what happens to them."""

    def __init__(self, root: Path, files: Sequence[SourceFile], *, bytes_per_second: float | None = None) -> None:
        self._root = root
        self._files = files
        self._open_files = Handles(self._open, lambda file: file.close())
        self._fetched = threading.local()
        self._pace = None if bytes_per_second is None else Pace(bytes_per_second)

    def read_into(self, file: int, position: int, target: Bytes) -> Piece:
        """Fill `target` ([num_bytes], contiguous) from a file.

        Raises:
            CorruptSourceError: the file is shorter than it was, or cannot be read.
        """
        self.fill(file, position, target)
        return Piece(position, len(target), crc.crc32(target.data))

    def fill(self, file: int, position: int, target: Bytes) -> None:
        """The same without the checksum."""
        block = self._block_with(file, position, len(target))
        if block is not None:
            target[:] = block
            return
        if self._pace is not None:
            self._pace.take(len(target))
        with self._open_files.borrow(file) as source:
            self._fill(source, file, position, target)

    def view(self, file: int, position: int, num_bytes: int) -> Bytes | None:
        """A range where it is, not copied ([num_bytes], read-only); None where it must be read.

        What has just come from the disk is read: in virtual machines, to look at it first through a mapping was seen to
        cost three times as much as to let the kernel copy it.

        Raises:
            CorruptSourceError: the file cannot be opened.
        """
        found = self._block_with(file, position, num_bytes)
        if found is None and self.may_map and not self._is_awaited(file, position):
            with self._open_files.borrow(file) as source:
                if isinstance(source, LocalFile) and source.holds(position, num_bytes):
                    found = source.view(position, num_bytes)
        return found

    def _is_awaited(self, file: int, position: int) -> bool:
        """The disk was asked for it by `expect`."""
        ranges = getattr(self._fetched, "awaited", {}).get(file, ())
        at = bisect.bisect_right(ranges, position, key=lambda item: item[0]) - 1
        return at >= 0 and position < ranges[at][1]

    def _fill(self, source: File, number: int, position: int, target: Bytes) -> None:
        done = 0
        while done < len(target):
            try:
                count = source.read_into(target[done:], position + done)
            except OSError as error:
                raise CorruptSourceError(
                    f"cannot be read at byte {position + done}: {error}", path=self._path(number)
                ) from error
            if count == 0:
                raise CorruptSourceError(
                    f"ends at byte {position + done}, {len(target) - done} more bytes were expected there: truncated",
                    path=self._path(number),
                    hint="use an earlier commit",
                )
            done += count

    def expect(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """This thread will read these ranges next: let the disk begin, so that it works while the first are moved.

        Where every read is a request over a network they are fetched now: few large requests, not many small ones.

        Args:
            ranges: (file, first byte, first byte behind) of what will be read.
        """
        self._fetched.blocks, self._fetched.between = {}, []
        awaited: dict[int, list[tuple[int, int]]] = {}
        blocks: dict[int, list[tuple[int, Bytes]]] = {}
        wanted = sorted(ranges)
        for file, start, end in coalesce(wanted):
            with self._open_files.borrow(file) as source:
                if isinstance(source, LocalFile):
                    if self._pace is None:
                        held = self.may_map and source.holds(start, end - start)
                        source.expect(start, end - start)
                        if not held:
                            awaited.setdefault(file, []).append((start, end))
                    continue
            block: Bytes = np.empty(end - start, dtype=np.uint8)
            self.fill(file, start, block)
            blocks.setdefault(file, []).append((start, block))
            if self._files[file].crc32 is not None:
                self._note_between(file, wanted, start, block)
        self._fetched.blocks, self._fetched.awaited = blocks, awaited

    def _note_between(self, file: int, wanted: Sequence[tuple[int, int, int]], start: int, block: Bytes) -> None:
        """Keep the checksums of what was fetched between the ranges: it would be fetched again for that of the file."""
        first, last = (bisect.bisect_left(wanted, (file, at, 0)) for at in (start, start + len(block)))
        position = start
        for _, low, high in wanted[first:last]:
            if low > position:
                content = block[position - start : low - start]
                self._fetched.between.append((file, Piece(position, len(content), crc.crc32(content.data))))
            position = max(position, high)

    def between(self) -> Sequence[tuple[int, Piece]]:
        """(File, range) of what the last `expect` of this thread fetched between the ranges that it was given."""
        found: Sequence[tuple[int, Piece]] = getattr(self._fetched, "between", ())
        return found

    def _block_with(self, file: int, position: int, num_bytes: int) -> Bytes | None:
        blocks = getattr(self._fetched, "blocks", {}).get(file)
        if not blocks:
            return None
        at = bisect.bisect_right(blocks, position, key=lambda item: item[0]) - 1
        start, block = blocks[at]
        inside = at >= 0 and position + num_bytes <= start + len(block)
        return block[position - start : position - start + num_bytes] if inside else None

    def check_sums(self, read: Mapping[int, Sequence[Piece]], without: Collection[int] = ()) -> int:
        """Compare what was read with the checksums that the containers state, reading what completes a range.

        Args:
            read: ranges by file.
            without: files to leave out.

        Returns:
            Bytes that were read to complete ranges.

        Raises:
            CorruptSourceError: with every range that is damaged.
        """
        problems: list[str] = []
        more = 0
        for number, pieces in sorted(read.items()):
            file = self._files[number]
            ordered = sorted(set(pieces)) if file.checksums and number not in without else []
            for stated in file.checksums if ordered else ():
                found = self._checksum(number, ordered, stated)
                if found is None:
                    continue
                actual, num_bytes = found
                more += num_bytes
                if actual != stated.crc32:
                    problems.append(differs(file, stated, actual))
        if problems:
            raise damaged(problems, str(self._root))
        return more

    def checksum(self, file: int, position: int, num_bytes: int) -> Piece:
        """A range and its checksum, read in blocks.

        Raises:
            CorruptSourceError: the file is shorter than it was, or cannot be read.
        """
        value = 0
        for at in range(position, position + num_bytes, _BLOCK_BYTES):
            block = np.empty(min(_BLOCK_BYTES, position + num_bytes - at), dtype=np.uint8)
            self.fill(file, at, block)
            value = crc.crc32(block.data, value)
        return Piece(position, num_bytes, value)

    def _checksum(self, file: int, pieces: Sequence[Piece], stated: Checksum) -> tuple[int, int] | None:
        """(CRC-32 of the range, bytes read to complete it), or None where nothing of the range was needed."""
        end = stated.start + stated.num_bytes
        inside = [piece for piece in crc.starting_in(pieces, stated.start, end) if piece.start + piece.num_bytes <= end]
        return self.complete(file, inside, stated.start, stated.num_bytes) if inside else None

    def complete(self, file: int, pieces: Sequence[Piece], start: int, num_bytes: int) -> tuple[int, int]:
        """Return the CRC-32 of a range of which sorted pieces inside it are known, and how many bytes this has read.

        Of pieces that overlap one is taken, and the other is read again: it must still be what it was.

        Raises:
            SourceChangedError: it is not.
            CorruptSourceError: the file cannot be read.
        """
        taken, doubled = crc.disjoint(pieces)
        for piece in doubled:
            if self.checksum(file, piece.start, piece.num_bytes) != piece:
                raise changed([f"{self._files[file].path}: was read twice with another content"], str(self._root))
        more = sum(piece.num_bytes for piece in doubled)
        for at, length in crc.gaps(taken, start, start + num_bytes) or ():
            taken.append(self.checksum(file, at, length))
            more += length
        return crc.assemble(taken, start=start, num_bytes=num_bytes), more

    def close(self) -> None:
        """Close all files."""
        self._open_files.close()

    def _path(self, file: int) -> str:
        return str(self._root / self._files[file].path)

    def _open(self, file: int) -> File:
        try:
            found = open_file(self._root / self._files[file].path, root=self._root)
        except OSError as error:
            raise CorruptSourceError(f"cannot be opened: {error.strerror or error}", path=self._path(file)) from error
        expected = self._files[file].identity
        is_stated = self._files[file].crc32 is not None
        if expected is not None and (why := expected.difference(found.identity, is_stated=is_stated)):
            found.close()
            raise changed([f"{self._files[file].path}: {why}"], str(self._root))
        return found


def differs(file: SourceFile, stated: Checksum, actual: int) -> str:
    """What to say of a range with another checksum than its file states, or of a file with another than its commit."""
    if stated.start == 0 and stated.num_bytes == file.num_bytes:
        return f"{file.path}: CRC-32 {stated.crc32:08x} was committed, the content has {actual:08x}"
    where = f"{file.path}: bytes {stated.start}:{stated.start + stated.num_bytes}"
    return f"{where} have CRC-32 {actual:08x}, the file itself states {stated.crc32:08x}"


def damaged(problems: Sequence[str], path: str | None) -> CorruptSourceError:
    """What to raise where ranges of a source differ from their checksums."""
    what = "1 tensor is damaged" if len(problems) == 1 else f"{len(problems)} tensors are damaged"
    return CorruptSourceError(what, path=path, problems=problems[:20], hint="use an earlier commit")


def changed(problems: Sequence[str], path: str) -> SourceChangedError:
    """What to raise where files are not those that were indexed."""
    return SourceChangedError(
        "the source changed while it was converted: nothing was published",
        path=path,
        problems=problems[:20],
        hint="convert it again when nobody writes to it, or use an earlier commit",
    )


def coalesce(ranges: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join sorted ranges (file, start, end) whose gaps cost less than another request."""
    current: tuple[int, int, int] | None = None
    for file, start, end in ranges:
        if current is not None and current[0] == file and start - current[2] <= GAP_BYTES:
            current = (file, current[1], max(end, current[2]))
            continue
        if current is not None:
            yield current
        current = (file, start, end)
    if current is not None:
        yield current


class Pace:
    """Keeps all threads together at a number of bytes per second, so that others get their share of the storage."""

    def __init__(self, bytes_per_second: float) -> None:
        self._seconds_per_byte = 1 / bytes_per_second
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Wait until it is time for `num_bytes` more."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            until = self._free_at = start + num_bytes * self._seconds_per_byte
        time.sleep(max(0.0, until - now))
