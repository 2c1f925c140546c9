"""Reading ranges of source files and writing ranges of target files, with checksums of what passed.

The only module that touches tensor bytes on disk. Positioned reads and writes on shared descriptors, so any number of
threads may work on one file.
"""

from __future__ import annotations

import bisect
import errno
import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reshard import crc
from reshard.errors import CorruptSourceError, StorageFullError, TargetError
from reshard.layout import SourceFile, TargetFile

Bytes = npt.NDArray[np.uint8]
Piece = tuple[int, int, int]
"""Position, length and CRC-32 of a range that was read or written."""

_GAP_LIMIT_BYTES = 1 << 20


class Source:
    """Files of a source checkpoint, opened read-only when first needed."""

    def __init__(self, root: Path, files: Sequence[SourceFile]) -> None:
        self._root = root
        self._files = files
        self._descriptors: dict[int, int] = {}
        self._pieces: list[list[Piece]] = [[] for _ in files]
        self._lock = threading.Lock()
        self.bytes_read = 0

    def read_into(self, file: int, position: int, target: Bytes) -> None:
        """Fill `target` ([num_bytes], contiguous) from a file.

        Raises:
            CorruptSourceError: the file is shorter than it was, or cannot be read.
        """
        descriptor, path, done = self._open(file), self._root / self._files[file].path, 0
        while done < len(target):
            try:
                count = os.preadv(descriptor, [target.data[done:]], position + done)
            except OSError as error:
                raise CorruptSourceError(
                    f"cannot be read at byte {position + done}: {error}", path=str(path)
                ) from error
            if count == 0:
                raise CorruptSourceError(
                    f"ends at byte {position + done}, {len(target) - done} more bytes were expected there: truncated",
                    path=str(path),
                    hint="use an earlier commit",
                )
            done += count
        piece = (position, len(target), zlib.crc32(target.data))
        with self._lock:
            self.bytes_read += len(target)
            self._pieces[file].append(piece)

    def check_sums(self) -> None:
        """Compare what was read with the checksums that the container states, reading small gaps to complete a range.

        Raises:
            CorruptSourceError: with every range that is damaged.
        """
        problems = []
        for number, file in enumerate(self._files):
            pieces = sorted(self._pieces[number])
            for stated in file.checksums:
                end = stated.start + stated.num_bytes
                inside = [piece for piece in _starting_in(pieces, stated.start, end) if piece[0] + piece[1] <= end]
                gaps = _gaps(inside, stated.start, end)
                if not inside or gaps is None or sum(length for _, length in gaps) > _GAP_LIMIT_BYTES:
                    continue
                for position, length in gaps:
                    self.read_into(number, position, np.empty(length, dtype=np.uint8))
                    inside.append(self._pieces[number][-1])
                actual = crc.assemble(inside, start=stated.start, num_bytes=stated.num_bytes)
                if actual != stated.crc32:
                    problems.append(
                        f"{file.path}: bytes {stated.start}:{end} have CRC-32 {actual:08x}, the file itself states "
                        f"{stated.crc32:08x}"
                    )
        if problems:
            raise CorruptSourceError(
                f"{len(problems)} tensors are damaged",
                path=str(self._root),
                problems=problems[:20],
                hint="use an earlier commit",
            )

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _open(self, file: int) -> int:
        with self._lock:
            if file not in self._descriptors:
                path = self._root / self._files[file].path
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                except OSError as error:
                    raise CorruptSourceError(f"cannot be opened: {error.strerror}", path=str(path)) from error
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                self._descriptors[file] = descriptor
            return self._descriptors[file]


def _starting_in(pieces: Sequence[Piece], start: int, end: int) -> list[Piece]:
    """Those of the sorted pieces that start in start:end."""
    return list(pieces[bisect.bisect_left(pieces, (start,)) : bisect.bisect_left(pieces, (end,))])


def _gaps(pieces: Sequence[Piece], start: int, end: int) -> list[tuple[int, int]] | None:
    """(position, length) of what sorted pieces leave out of start:end; None if pieces overlap."""
    gaps, position = [], start
    for offset, length, _ in pieces:
        if offset < position:
            return None
        if offset > position:
            gaps.append((position, offset - position))
        position = offset + length
    if position < end:
        gaps.append((position, end - position))
    return gaps


class Target:
    """Files of a target checkpoint in a folder that nobody else sees yet."""

    def __init__(self, folder: Path, files: Sequence[TargetFile]) -> None:
        self._folder = folder
        self._files = files
        self._descriptors: list[int] = []
        self._pieces: list[list[Piece]] = [[] for _ in files]
        self._lock = threading.Lock()
        self.bytes_written = 0
        for file in files:
            path = folder / file.path
            with target_errors(path, file.num_bytes):
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                self._descriptors.append(descriptor)
                os.ftruncate(descriptor, file.num_bytes)

    def write(self, file: int, position: int, content: Bytes) -> None:
        """Write tensor bytes ([num_bytes], contiguous).

        Raises:
            StorageFullError: no space left.
            TargetError: any other failure.
        """
        self._write(file, position, content)
        piece = (position, len(content), zlib.crc32(content.data))
        with self._lock:
            self._pieces[file].append(piece)

    def finish(self) -> list[int]:
        """Write everything that is not tensor data, sync, and return the CRC-32 of every file.

        Raises:
            StorageFullError: no space left.
            TargetError: any other failure.
        """
        sums = []
        for number, file in enumerate(self._files):
            pieces = sorted(self._pieces[number])
            fixed = [(position, bytearray(content)) for position, content in file.fixed]
            for field in file.checksums:
                end = field.start + field.num_bytes
                inside = _starting_in(pieces, field.start, end)
                value = crc.assemble(inside, start=field.start, num_bytes=field.num_bytes).to_bytes(4, "little")
                for position in field.positions:
                    _patch(fixed, position, value)
            for position, content in fixed:
                self._write(number, position, np.frombuffer(content, dtype=np.uint8))
            pieces += [(position, len(content), zlib.crc32(content)) for position, content in fixed]
            sums.append(crc.assemble(pieces, start=0, num_bytes=file.num_bytes))
            with target_errors(self._folder / file.path, file.num_bytes):
                os.fsync(self._descriptors[number])
        return sums

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _write(self, file: int, position: int, content: Bytes) -> None:
        done = 0
        with target_errors(self._folder / self._files[file].path, len(content)):
            while done < len(content):
                done += os.pwrite(self._descriptors[file], content.data[done:], position + done)
        with self._lock:
            self.bytes_written += len(content)


def _patch(fixed: Sequence[tuple[int, bytearray]], position: int, value: bytes) -> None:
    for start, content in fixed:
        if start <= position and position + len(value) <= start + len(content):
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
