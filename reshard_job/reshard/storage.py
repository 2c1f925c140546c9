"""Reading ranges of source files and writing ranges of target files, with checksums of what passed.

The only module that touches tensor bytes on disk. Positioned reads and writes on shared descriptors, so any number of
threads, and of processes, may work on one file.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from reshard import crc
from reshard.crc import Piece
from reshard.errors import CorruptSourceError, StorageFullError, TargetError
from reshard.files import Bytes, File, LocalFile, open_file
from reshard.handles import Handles
from reshard.layout import Checksum, SourceFile, TargetFile

Pieces = Mapping[int, Sequence[Piece]]
"""Ranges that were read or written, by position of the file."""

GAP_BYTES = 256 << 10
"""Bytes that may be read for nothing to save a request: about what a store sends in the time that it takes to answer
one (10 ms at 25 MB/s for a single stream)."""

_GAP_LIMIT_BYTES = 1 << 20
_BLOCK_BYTES = 4 << 20
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_SYNC_THREADS = 16
"""Files that are synced at the same time: a journalling file system writes one transaction for many of them."""


class Source:
    """Files of a source checkpoint, opened read-only when first needed."""

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
            self._fill(source, self._path(file), position, target)

    @staticmethod
    def _fill(source: File, path: str, position: int, target: Bytes) -> None:
        done = 0
        while done < len(target):
            try:
                count = source.read_into(target[done:], position + done)
            except OSError as error:
                raise CorruptSourceError(f"cannot be read at byte {position + done}: {error}", path=path) from error
            if count == 0:
                raise CorruptSourceError(
                    f"ends at byte {position + done}, {len(target) - done} more bytes were expected there: truncated",
                    path=path,
                    hint="use an earlier commit",
                )
            done += count

    def expect(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """This thread will read these ranges next: let the disk begin, so that it works while the first are moved.

        Where every read is a request over a network they are fetched now: few large requests, not many small ones.

        Args:
            ranges: (file, first byte, first byte behind) of what will be read.
        """
        self._fetched.blocks = {}
        blocks: dict[int, list[tuple[int, Bytes]]] = {}
        for file, start, end in coalesce(sorted(ranges)):
            with self._open_files.borrow(file) as source:
                if isinstance(source, LocalFile):
                    if self._pace is None:
                        source.expect(start, end - start)
                    continue
            block: Bytes = np.empty(end - start, dtype=np.uint8)
            self.fill(file, start, block)
            blocks.setdefault(file, []).append((start, block))
        self._fetched.blocks = blocks

    def _block_with(self, file: int, position: int, num_bytes: int) -> Bytes | None:
        blocks = getattr(self._fetched, "blocks", {}).get(file)
        if not blocks:
            return None
        at = bisect.bisect_right(blocks, position, key=lambda item: item[0]) - 1
        start, block = blocks[at]
        inside = at >= 0 and position + num_bytes <= start + len(block)
        return block[position - start : position - start + num_bytes] if inside else None

    def check_sums(self, read: Pieces) -> int:
        """Compare what was read with the checksums that the containers state, reading small gaps to complete a range.

        Returns:
            Bytes that were read to complete ranges.

        Raises:
            CorruptSourceError: with every range that is damaged.
        """
        problems: list[str] = []
        more = 0
        for number, file in enumerate(self._files):
            pieces = sorted(set(read.get(number, ())))
            for stated in file.checksums:
                found = self._checksum(number, pieces, stated)
                if found is None:
                    continue
                actual, num_bytes = found
                more += num_bytes
                if actual != stated.crc32:
                    where = f"{file.path}: bytes {stated.start}:{stated.start + stated.num_bytes}"
                    problems.append(f"{where} have CRC-32 {actual:08x}, the file itself states {stated.crc32:08x}")
        if problems:
            raise CorruptSourceError(
                f"{len(problems)} tensors are damaged",
                path=str(self._root),
                problems=problems[:20],
                hint="use an earlier commit",
            )
        return more

    def _checksum(self, file: int, pieces: Sequence[Piece], stated: Checksum) -> tuple[int, int] | None:
        """(CRC-32 of the range, bytes read to complete it), or None where little of the range was needed."""
        end = stated.start + stated.num_bytes
        inside = [piece for piece in _starting_in(pieces, stated.start, end) if piece.start + piece.num_bytes <= end]
        if not inside:
            return None
        gaps = _gaps(inside, stated.start, end)
        if gaps is None:  # ranges that were read twice, with other limits
            inside, gaps = [], [(stated.start, stated.num_bytes)]
        elif sum(length for _, length in gaps) > _GAP_LIMIT_BYTES:
            return None
        more = 0
        for start, length in gaps:
            for position in range(start, start + length, _BLOCK_BYTES):
                block = np.empty(min(_BLOCK_BYTES, start + length - position), dtype=np.uint8)
                inside.append(self.read_into(file, position, block))
                more += len(block)
        return crc.assemble(inside, start=stated.start, num_bytes=stated.num_bytes), more

    def close(self) -> None:
        """Close all files."""
        self._open_files.close()

    def _path(self, file: int) -> str:
        return str(self._root / self._files[file].path)

    def _open(self, file: int) -> File:
        try:
            found = open_file(self._root / self._files[file].path)
        except OSError as error:
            raise CorruptSourceError(f"cannot be opened: {error.strerror or error}", path=self._path(file)) from error
        return found


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


def _starting_in(pieces: Sequence[Piece], start: int, end: int) -> list[Piece]:
    """Those of the sorted pieces that start in start:end."""
    first = bisect.bisect_left(pieces, start, key=lambda piece: piece.start)
    return list(pieces[first : bisect.bisect_left(pieces, end, key=lambda piece: piece.start)])


def _gaps(pieces: Sequence[Piece], start: int, end: int) -> list[tuple[int, int]] | None:
    """(position, length) of what sorted pieces leave out of start:end; None if pieces overlap."""
    gaps, position = [], start
    for piece in pieces:
        if piece.start < position:
            return None
        if piece.start > position:
            gaps.append((position, piece.start - position))
        position = piece.start + piece.num_bytes
    if position < end:
        gaps.append((position, end - position))
    return gaps


class Target:
    """Files of a target checkpoint in a folder that no reader sees yet. Several processes may fill the same folder."""

    def __init__(self, folder: Path, files: Sequence[TargetFile]) -> None:
        self._folder = folder
        self._files = files
        self._descriptors = Handles(self._open, os.close)
        self.created: set[int] = set()
        """Files that were not there in their final size."""

    def create(self) -> None:
        """Make all files in their final sizes; what they hold already is kept.

        Raises:
            StorageFullError, TargetError: that cannot be done.
        """
        for number in range(len(self._files)):
            with self._descriptors.borrow(number):
                pass

    def write(self, file: int, position: int, content: Bytes, crc32: int | None = None) -> Piece:
        """Write tensor bytes ([num_bytes], contiguous), whose CRC-32 may be known.

        Raises:
            StorageFullError: no space left.
            TargetError: any other failure.
        """
        done = 0
        path = self._folder / self._files[file].path
        with self._descriptors.borrow(file) as descriptor, target_errors(path, len(content)):
            while done < len(content):
                done += os.pwrite(descriptor, content.data[done:], position + done)
        return Piece(position, len(content), crc.crc32(content.data) if crc32 is None else crc32)

    def holds(self, file: int, piece: Piece) -> bool:
        """The range has the content that it was written with; reads it."""
        value = 0
        path = self._folder / self._files[file].path
        with self._descriptors.borrow(file) as descriptor, target_errors(path, piece.num_bytes):
            for position in range(piece.start, piece.start + piece.num_bytes, _BLOCK_BYTES):
                length = min(_BLOCK_BYTES, piece.start + piece.num_bytes - position)
                value = crc.crc32(os.pread(descriptor, length, position), value)
        return value == piece.crc32

    def begin_flush(self, file: int, pieces: Sequence[Piece]) -> None:
        """Let the kernel begin to write ranges to the disk, without waiting: what comes later finds less to do."""
        begin = _c_function("sync_file_range", ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint)
        if begin is None:
            return
        with self._descriptors.borrow(file) as descriptor:
            for piece in pieces:
                begin(descriptor, piece.start, piece.num_bytes, _SYNC_FILE_RANGE_WRITE)  # errors: fsync tells

    def flush(self, file: int) -> None:
        """Send what was written to stable storage."""
        path = self._folder / self._files[file].path
        with self._descriptors.borrow(file) as descriptor, target_errors(path, self._files[file].num_bytes):
            os.fdatasync(descriptor)

    def finish(self, written: Pieces, *, sync: bool = True, fresh: bool = True) -> tuple[list[int], int]:
        """Write everything that is not tensor data, and sync.

        Args:
            written: ranges with tensor data.
            sync: wait for stable storage.
            fresh: the files were made by this run, so that what nobody wrote is zero; else zeros are written.

        Returns:
            CRC-32 of every file, and the number of bytes written here.

        Raises:
            StorageFullError: no space left.
            TargetError: any other failure.
        """
        sums: list[int] = []
        count = 0
        for number, file in enumerate(self._files):
            pieces = sorted(set(written.get(number, ())))
            fixed = [(position, bytearray(content)) for position, content in sorted(file.fixed)]
            for field in file.checksums:
                inside = _starting_in(pieces, field.start, field.start + field.num_bytes)
                value = crc.assemble(inside, start=field.start, num_bytes=field.num_bytes).to_bytes(4, "little")
                for position in field.positions:
                    _patch(fixed, position, value)
            for position, content in fixed:
                pieces.append(self.write(number, position, np.frombuffer(content, dtype=np.uint8)))
                count += len(content)
            sums.append(crc.assemble(pieces, start=0, num_bytes=file.num_bytes))
            for position, length in () if fresh else _gaps(sorted(pieces), 0, file.num_bytes) or ():
                self.write(number, position, np.zeros(length, dtype=np.uint8))
        if sync:
            with ThreadPoolExecutor(_SYNC_THREADS) as pool:
                for _ in pool.map(self._sync, range(len(self._files))):
                    pass
        return sums, count

    def _sync(self, file: int) -> None:
        path = self._folder / self._files[file].path
        with self._descriptors.borrow(file) as descriptor, target_errors(path, self._files[file].num_bytes):
            os.fsync(descriptor)

    def close(self) -> None:
        """Close all files."""
        self._descriptors.close()

    def _open(self, file: int) -> int:
        path, num_bytes = self._folder / self._files[file].path, self._files[file].num_bytes
        with target_errors(path, num_bytes):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                if os.fstat(descriptor).st_size != num_bytes:
                    _reserve(descriptor, num_bytes)
                    self.created.add(file)
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor


@functools.cache
def _c_function(name: str, *types: Any) -> Callable[..., int] | None:
    """A function of Linux' C library that Python does not offer, or None elsewhere."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = types
    found: Callable[..., int] = function
    return found


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Give a file its size and, where the file system can, its space: a full volume shows before a byte is moved.

    The C library's posix_fallocate would write zeros where the file system cannot reserve.
    """
    reserve = _c_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    if reserve is not None and num_bytes and reserve(descriptor, 0, 0, num_bytes) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, num_bytes)


def _patch(fixed: Sequence[tuple[int, bytearray]], position: int, value: bytes) -> None:
    at = bisect.bisect_right(fixed, position, key=lambda piece: piece[0]) - 1
    if at >= 0:
        start, content = fixed[at]
        if position + len(value) <= start + len(content):
            content[position - start : position - start + len(value)] = value
            return
    raise ValueError(f"no fixed bytes at {position} to hold a checksum")


class target_errors:  # noqa: N801  (a context manager that reads like a function)
    """Turn the operating system's errors while writing `num_bytes` to `path` into ours."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path, self._num_bytes = path, num_bytes

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, OSError):
            return
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = free_bytes(self._path.parent)
            raise StorageFullError(
                f"no space left while writing {self._num_bytes} bytes, {free} bytes are free",
                path=str(self._path),
                hint="free space on the volume, or keep fewer commits; nothing was published, the source is untouched",
            ) from error
        raise TargetError(f"cannot be written: {error}", path=str(self._path)) from error


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write on the folder's file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
