"""Write ranges of target files and compute their checksums.

Writes are positioned writes on shared descriptors, so any number of threads and processes may fill one file.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import CrcRange
from reshard.errors import ReshardError, StorageFullError, TargetError, VerificationError
from reshard.storage.durable import sync_folders
from reshard.storage.files import Bytes, c_function
from reshard.system.file_handles import Handles
from reshard.tensors.layout import TargetFile
from reshard.tensors.shard_table import Ranges

_BLOCK_BYTES = 4 << 20
_WRITE_BYTES = 1 << 20
"""Bytes of one write. The page cache allocates memory in blocks as large as a write, up to some MiB. Where a virtual
machine gives free memory back to its host (balloon, free page reporting), the host must provide large blocks anew:
writes of 4 MiB took 12 times as long as writes of 1 MiB. Elsewhere 1 MiB is as fast."""

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_SYNC_THREADS = 16
"""Files that are synced at the same time, because a journalling file system syncs many of them in one transaction."""


class TargetWriter:
    """Files of a target checkpoint in a folder that no reader sees yet. Several processes may fill the same folder."""

    def __init__(self, folder: Path, files: Sequence[TargetFile], zeros: Ranges | None = None) -> None:
        """Store what to write; no file is opened or made yet.

        Args:
            folder: folder of the target.
            files: all files of the target.
            zeros: ranges that stay zero on purpose; None if they are not known.
        """
        self._folder = folder
        self._files = files
        self._zeros = None if zeros is None else _Zeros(zeros)
        self._descriptors = Handles(self._open, os.close)
        self.created: set[int] = set()
        """Numbers of files that did not exist in their final size before."""

    def create(self) -> None:
        """Make all files in their final sizes; content that they already hold is kept.

        Raises:
            StorageFullError: no space left.
            TargetError: a file cannot be made.
        """
        for number in range(len(self._files)):
            with self._descriptors.borrow(number):
                pass

    def write(self, file: int, position: int, content: Bytes, crc32: int | None = None) -> CrcRange:
        """Write tensor bytes to a file.

        Args:
            file: number of the file.
            position: first byte in the file.
            content: bytes, [num_bytes], contiguous.
            crc32: CRC-32 of `content`, if it is known.

        Raises:
            StorageFullError: no space left.
            TargetError: any other failure.
        """
        done = 0
        with self._descriptors.borrow(file) as descriptor, self._errors(file, len(content)):
            while done < len(content):
                done += os.pwrite(descriptor, content.data[done : done + _WRITE_BYTES], position + done)
        return CrcRange(position, len(content), crc.crc32(content.data) if crc32 is None else crc32)

    def has_content(self, file: int, crc_range: CrcRange) -> bool:
        """Read a range and return True if its content has the range's CRC-32."""
        value = 0
        with self._descriptors.borrow(file) as descriptor, self._errors(file, crc_range.num_bytes):
            for position in range(crc_range.start, crc_range.start + crc_range.num_bytes, _BLOCK_BYTES):
                length = min(_BLOCK_BYTES, crc_range.start + crc_range.num_bytes - position)
                value = crc.crc32(os.pread(descriptor, length, position), value)
        return value == crc_range.crc32

    def begin_flush(self, file: int, ranges: Sequence[CrcRange]) -> None:
        """Let the kernel begin to write ranges to the disk without waiting, so that a later sync has less to do."""
        begin = c_function("sync_file_range", ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint)
        if begin is None:
            return
        with self._descriptors.borrow(file) as descriptor:
            for crc_range in ranges:
                begin(descriptor, crc_range.start, crc_range.num_bytes, _SYNC_FILE_RANGE_WRITE)  # fsync reports errors

    def flush(self, file: int) -> None:
        """Send written bytes to stable storage; the name of a new file may not be durable yet."""
        self._stable(file, os.fdatasync)

    def finish(self, written: Mapping[int, Sequence[CrcRange]], *, fresh: bool = True) -> tuple[list[int], int]:
        """Write everything that is not tensor data.

        Args:
            written: ranges with tensor data.
            fresh: this run made the files, so that bytes that were not written are zero; otherwise zeros are written.

        Returns:
            CRC-32 of every file, and the number of bytes written here.

        Raises:
            StorageFullError: no space left.
            TargetError: any other failure.
            VerificationError: some byte was written twice, or was not written and does not stay zero on purpose.
        """
        sums: list[int] = []
        problems: list[str] = []
        count = 0
        for number, file in enumerate(self._files):
            ranges = sorted(set(written.get(number, ())))
            for position, content in _constant_ranges(file, ranges):
                ranges.append(self.write(number, position, np.frombuffer(content, dtype=np.uint8)))
                count += len(content)
            sums.append(crc.assemble(ranges, start=0, num_bytes=file.num_bytes))
            problems += self._unaccounted(number, ranges)
            for position, length in () if fresh else crc.find_gaps(sorted(ranges), 0, file.num_bytes) or ():
                self.write(number, position, np.zeros(length, dtype=np.uint8))
        if problems:
            raise VerificationError(
                f"{len(problems)} files are not accounted for byte by byte: nothing was published",
                problems=problems[:20],
            )
        return sums, count

    def sync(self) -> None:
        """Wait until all files and all names in the folders are on stable storage.

        Raises:
            StorageFullError: no space left.
            TargetError: any other failure.
        """
        with ThreadPoolExecutor(_SYNC_THREADS) as pool:
            for _ in pool.map(self._stable, range(len(self._files)), itertools.repeat(os.fsync)):
                pass
        with target_errors(self._folder, 0):
            sync_folders(self._folder)

    def _unaccounted(self, number: int, written: Sequence[CrcRange]) -> list[str]:
        """Describe bytes of a file that were not written and are not zero on purpose, or that were written twice."""
        if self._zeros is None:
            return []
        file = self._files[number]
        every = sorted([*written, *self._zeros.of(number)])
        gaps = crc.find_gaps(every, 0, file.num_bytes)
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
    """Ranges that stay zero on purpose, looked up by file.

    Ranges of one file are sorted by file and found by bisection. Ranges of many files stay as they are, because to
    repeat them for thousands of files would take too much memory.
    """

    def __init__(self, zeros: Ranges) -> None:
        wide = zeros.last - zeros.first > 1
        order = np.argsort(zeros.first[~wide], kind="stable")
        self._single = Ranges(*(column[~wide][order] for column in zeros))
        self._wide = Ranges(*(column[wide] for column in zeros))

    def of(self, file: int) -> list[CrcRange]:
        """Return the ranges of a file."""
        low, high = np.searchsorted(self._single.first, (file, file + 1))
        wide = np.flatnonzero((self._wide.first <= file) & (file < self._wide.last))
        tables = ((self._single, slice(low, high)), (self._wide, wide))
        return [
            CrcRange(start, stop - start, 0)
            for ranges, rows in tables
            for start, stop in zip(ranges.start[rows].tolist(), ranges.stop[rows].tolist(), strict=True)
        ]


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Set the size of a file and reserve its space, so that a full volume is detected before a byte is moved.

    File systems that cannot reserve space only set the size. posix_fallocate of the C library is not used, because it
    writes zeros on such file systems.
    """
    reserve = c_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    if reserve is not None and num_bytes and reserve(descriptor, 0, 0, num_bytes) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, num_bytes)


def _constant_ranges(file: TargetFile, written: Sequence[CrcRange]) -> Iterable[tuple[int, bytes | bytearray]]:
    """Return the bytes of a file that are not tensor data, with the checksums of those that are filled in.

    Without checksums, the ranges are not held in memory together: they may be a large file that is carried unchanged.
    """
    if not file.checksums:
        return file.fixed
    fixed = [(position, bytearray(content)) for position, content in sorted(file.fixed)]
    for field in file.checksums:
        inside = crc.select_starting_in(written, field.start, field.start + field.num_bytes)
        value = crc.assemble(inside, start=field.start, num_bytes=field.num_bytes).to_bytes(4, "little")
        for position in field.positions:
            _patch(fixed, position, value)
    return fixed


def _patch(fixed: Sequence[tuple[int, bytearray]], position: int, value: bytes) -> None:
    at = bisect.bisect_right(fixed, position, key=lambda item: item[0]) - 1
    if at >= 0:
        start, content = fixed[at]
        if position + len(value) <= start + len(content):
            content[position - start : position - start + len(value)] = value
            return
    raise ValueError(f"no fixed bytes at {position} to hold a checksum")


class target_errors:  # noqa: N801  (a context manager that reads like a function)
    """Convert the operating system's errors of writing `num_bytes` to `path` / `within` to errors of this package."""

    def __init__(self, path: Path, num_bytes: int, within: str = "") -> None:
        self._path, self._num_bytes, self._within = path, num_bytes, within  # joined only if something fails: faster

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, ReshardError):
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


def free_bytes(folder: Path) -> int | None:
    """Return the bytes that an unprivileged user may still write on a file system; None if that states no size."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize if status.f_blocks else None  # /proc, for instance, states none
