"""Writing ranges of target files, with checksums of what passed.

Positioned writes on shared descriptors, so any number of threads, and of processes, may fill one file.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import Piece
from reshard.errors import StorageFullError, TargetError, VerificationError
from reshard.storage.durable import sync_folders
from reshard.storage.files import Bytes, c_function
from reshard.system.file_handles import Handles
from reshard.tensors.layout import TargetFile
from reshard.tensors.shard_table import Ranges

_BLOCK_BYTES = 4 << 20
_WRITE_BYTES = 1 << 20
"""The page cache takes memory in pieces as large as a write, up to some MiB. Where a virtual machine gives free memory
back to its host (balloon, free page reporting), large pieces are those that the host must provide anew: 4 MiB at once
took 12 times as long as 1 MiB, which elsewhere is as fast."""

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_SYNC_THREADS = 16
"""Files that are synced at the same time: a journalling file system writes one transaction for many of them."""


class TargetWriter:
    """Files of a target checkpoint in a folder that no reader sees yet. Several processes may fill the same folder."""

    def __init__(self, folder: Path, files: Sequence[TargetFile], zeros: Ranges | None = None) -> None:
        """Nothing is opened or made yet.

        Args:
            folder: of the target.
            files: all of them.
            zeros: bytes that stay zero on purpose; None where that is not known.
        """
        self._folder = folder
        self._files = files
        self._zeros = None if zeros is None else _Zeros(zeros)
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
        with self._descriptors.borrow(file) as descriptor, self._errors(file, len(content)):
            while done < len(content):
                done += os.pwrite(descriptor, content.data[done : done + _WRITE_BYTES], position + done)
        return Piece(position, len(content), crc.crc32(content.data) if crc32 is None else crc32)

    def holds(self, file: int, piece: Piece) -> bool:
        """The range has the content that it was written with; reads it."""
        value = 0
        with self._descriptors.borrow(file) as descriptor, self._errors(file, piece.num_bytes):
            for position in range(piece.start, piece.start + piece.num_bytes, _BLOCK_BYTES):
                length = min(_BLOCK_BYTES, piece.start + piece.num_bytes - position)
                value = crc.crc32(os.pread(descriptor, length, position), value)
        return value == piece.crc32

    def begin_flush(self, file: int, pieces: Sequence[Piece]) -> None:
        """Let the kernel begin to write ranges to the disk, without waiting: what comes later finds less to do."""
        begin = c_function("sync_file_range", ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint)
        if begin is None:
            return
        with self._descriptors.borrow(file) as descriptor:
            for piece in pieces:
                begin(descriptor, piece.start, piece.num_bytes, _SYNC_FILE_RANGE_WRITE)  # errors: fsync tells

    def flush(self, file: int) -> None:
        """Send what was written to stable storage; the name of a new file may not be there yet."""
        self._stable(file, os.fdatasync)

    def finish(self, written: Mapping[int, Sequence[Piece]], *, fresh: bool = True) -> tuple[list[int], int]:
        """Write everything that is not tensor data.

        Args:
            written: ranges with tensor data.
            fresh: the files were made by this run, so that what nobody wrote is zero; else zeros are written.

        Returns:
            CRC-32 of every file, and the number of bytes written here.

        Raises:
            StorageFullError: no space left.
            TargetError: any other failure.
            VerificationError: a byte was neither written once nor stays zero on purpose.
        """
        sums: list[int] = []
        problems: list[str] = []
        count = 0
        for number, file in enumerate(self._files):
            pieces = sorted(set(written.get(number, ())))
            fixed = [(position, bytearray(content)) for position, content in sorted(file.fixed)]
            for field in file.checksums:
                inside = crc.starting_in(pieces, field.start, field.start + field.num_bytes)
                value = crc.assemble(inside, start=field.start, num_bytes=field.num_bytes).to_bytes(4, "little")
                for position in field.positions:
                    _patch(fixed, position, value)
            for position, content in fixed:
                pieces.append(self.write(number, position, np.frombuffer(content, dtype=np.uint8)))
                count += len(content)
            sums.append(crc.assemble(pieces, start=0, num_bytes=file.num_bytes))
            problems += self._unaccounted(number, pieces)
            for position, length in () if fresh else crc.gaps(sorted(pieces), 0, file.num_bytes) or ():
                self.write(number, position, np.zeros(length, dtype=np.uint8))
        if problems:
            raise VerificationError(
                f"{len(problems)} files are not accounted for byte by byte: nothing was published",
                problems=problems[:20],
            )
        return sums, count

    def sync(self) -> None:
        """Have all files and the names of all folders on stable storage.

        Raises:
            StorageFullError, TargetError: the storage refuses.
        """
        with ThreadPoolExecutor(_SYNC_THREADS) as pool:
            for _ in pool.map(self._stable, range(len(self._files)), itertools.repeat(os.fsync)):
                pass
        with target_errors(self._folder, 0):
            sync_folders(self._folder)

    def _unaccounted(self, number: int, written: Sequence[Piece]) -> list[str]:
        """What is wrong with a file of which these ranges were written: bytes left out, or written twice."""
        if self._zeros is None:
            return []
        file = self._files[number]
        every = sorted([*written, *self._zeros.of(number)])
        gaps = crc.gaps(every, 0, file.num_bytes)
        if gaps is None:
            return [f"{file.path}: bytes were written twice, or should have stayed zero"]
        return [
            f"{file.path}: bytes {start}:{start + length} are neither of a tensor, nor constant, nor padding"
            for start, length in gaps[:1]
        ]

    def _stable(self, file: int, call: Callable[[int], None]) -> None:
        with self._descriptors.borrow(file) as descriptor, self._errors(file, self._files[file].num_bytes):
            call(descriptor)

    def _errors(self, file: int, num_bytes: int) -> target_errors:
        return target_errors(self._folder, num_bytes, self._files[file].path)

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


class _Zeros:
    """Bytes that stay zero, by file: those of few files at hand, and those of thousands of files as they are."""

    def __init__(self, zeros: Ranges) -> None:
        wide = zeros.last - zeros.first > 1
        order = np.argsort(zeros.first[~wide], kind="stable")
        self._single = Ranges(*(column[~wide][order] for column in zeros))
        self._wide = Ranges(*(column[wide] for column in zeros))

    def of(self, file: int) -> list[Piece]:
        """Ranges of a file."""
        low, high = np.searchsorted(self._single.first, (file, file + 1))
        wide = np.flatnonzero((self._wide.first <= file) & (file < self._wide.last))
        parts = ((self._single, slice(low, high)), (self._wide, wide))
        return [
            Piece(start, stop - start, 0)
            for ranges, rows in parts
            for start, stop in zip(ranges.start[rows].tolist(), ranges.stop[rows].tolist(), strict=True)
        ]


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Give a file its size and, where the file system can, its space: a full volume shows before a byte is moved.

    The C library's posix_fallocate would write zeros where the file system cannot reserve.
    """
    reserve = c_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
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
    """Turn the operating system's errors while writing `num_bytes` to `path`, or to `within` it, into ours."""

    def __init__(self, path: Path, num_bytes: int, within: str = "") -> None:
        self._path, self._num_bytes, self._within = path, num_bytes, within  # joined when something fails

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, OSError):
            return
        path = self._path / self._within
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = free_bytes(path.parent)
            raise StorageFullError(
                f"no space left while writing {self._num_bytes} bytes, {free} bytes are free",
                path=str(path),
                hint="free space on the volume, or keep fewer commits; nothing was published, the source is untouched",
            ) from error
        raise TargetError(f"cannot be written: {error}", path=str(path)) from error


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write on the folder's file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
