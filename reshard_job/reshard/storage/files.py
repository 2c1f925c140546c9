"""Positioned reads of files, on this machine's file systems or in an object store.

Readers of formats open files with `open_file`, so that they work for local and for remote checkpoints alike.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import errno
import functools
import io
import mmap
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from reshard.file_identity import FileIdentity
from reshard.storage.object_store import RemotePath, location

Bytes = npt.NDArray[np.uint8]

_MADV_POPULATE_READ = 22  # linux/mman.h, since 5.14
_CACHESTAT = 451  # number of the system call of Linux 6.5 on all architectures that Python is built for

_opened: contextvars.ContextVar[dict[str, FileIdentity] | None] = contextvars.ContextVar("opened", default=None)


class File(Protocol):
    """An open file. Any number of threads may read it."""

    @property
    def num_bytes(self) -> int:
        """Return the size when the file was opened."""
        ...

    @property
    def is_remote(self) -> bool:
        """Return True if every read is a request over a network, so that few large reads are faster than many."""
        ...

    @property
    def identity(self) -> FileIdentity:
        """Return what tells the file from another file of the same name."""
        ...

    def read(self, num_bytes: int, position: int) -> bytes:
        """Read up to `num_bytes` from `position`; fewer at the end of the file.

        Raises:
            OSError: the file cannot be read.
        """
        ...

    def read_into(self, target: Bytes, position: int) -> int:
        """Fill `target` ([num_bytes], contiguous) from `position` and return the number of bytes read.

        Raises:
            OSError: the file cannot be read.
        """
        ...

    def close(self) -> None:
        """Close the file."""
        ...

    def __enter__(self) -> File: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LocalFile:
    """A file on a file system of this machine."""

    is_remote = False

    def __init__(self, path: Path, *, follow: bool = False, root: Path | None = None) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        self._descriptor = os.open(path, flags) if root is None else _open_below(root, path, flags)
        mode = os.fstat(self._descriptor).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # devices never end; reading a folder raises EISDIR
            os.close(self._descriptor)
            raise OSError(errno.EINVAL, "is a pipe or device, expected a file", str(path))

    @property
    def num_bytes(self) -> int:
        """Return the current size."""
        return os.fstat(self._descriptor).st_size

    @property
    def identity(self) -> FileIdentity:
        """Return what tells the file now from another file of the same name."""
        return FileIdentity.of_status(os.fstat(self._descriptor))

    def read(self, num_bytes: int, position: int) -> bytes:
        """Read up to `num_bytes` from `position`, see `File.read`."""
        return os.pread(self._descriptor, num_bytes, position)

    def read_into(self, target: Bytes, position: int) -> int:
        """Fill `target` from `position`, see `File.read_into`."""
        return os.preadv(self._descriptor, [target.data], position)

    def view(self, start: int, num_bytes: int) -> Bytes | None:
        """Map a range into memory without a copy ([num_bytes], read-only); return None if that is not possible.

        The whole range is in memory when this method returns. If the file is truncated or cannot be read, the mapping
        fails here and returns None, and a read then raises the reason. Otherwise a later access to the mapping would
        raise SIGBUS, which ends the process.
        """
        offset = start - start % mmap.ALLOCATIONGRANULARITY
        if not num_bytes:  # mmap would map the whole file
            return None
        try:
            mapping = mmap.mmap(self._descriptor, start - offset + num_bytes, prot=mmap.PROT_READ, offset=offset)
            mapping.madvise(_MADV_POPULATE_READ)
        except (
            OSError,
            ValueError,
        ):  # no mappings here, an old kernel, a bad range, or (ValueError) one behind the end
            return None
        return np.frombuffer(mapping, dtype=np.uint8)[start - offset :]

    def is_cached(self, start: int, num_bytes: int) -> bool:
        """Return True if the whole range is in the page cache.

        Older kernels are asked by mincore(2), which needs forty times as long, and which reports every page as cached
        if the caller may not write the file.
        """
        if not num_bytes or start + num_bytes > self.num_bytes:
            return False
        first, last = start // mmap.PAGESIZE, (start + num_bytes - 1) // mmap.PAGESIZE
        count = _count_cached_pages(self._descriptor, start, num_bytes)
        return self._is_in_core(start, num_bytes) if count is None else count == last - first + 1

    def _is_in_core(self, start: int, num_bytes: int) -> bool:
        mincore = c_function("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        offset = start - start % mmap.ALLOCATIONGRANULARITY
        length = start - offset + num_bytes
        if mincore is None:
            return False
        try:
            mapped = np.frombuffer(
                mmap.mmap(self._descriptor, length, prot=mmap.PROT_READ, offset=offset), dtype=np.uint8
            )
        except (OSError, ValueError):
            return False
        pages = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
        return mincore(mapped.ctypes.data, length, pages.ctypes.data) == 0 and bool((pages & 1).all())

    def prefetch(self, start: int, num_bytes: int) -> None:
        """Let the kernel begin to read a range into the page cache, because it will be read soon."""
        os.posix_fadvise(self._descriptor, start, num_bytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _count_cached_pages(descriptor: int, start: int, num_bytes: int) -> int | None:
    """Return the number of a range's pages that are in the page cache, or None if this kernel does not say it.

    The kernel says it since 6.5, and only of files that the caller owns or may write (`cachestat` in Linux'
    include/uapi/linux/mman.h: a range of two numbers, and five counts of which the first one is of cached pages).
    """
    if sys.platform != "linux":
        return None
    call = c_function("syscall", ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    if call is None:
        return None
    wanted, counts = (ctypes.c_uint64 * 2)(start, num_bytes), (ctypes.c_uint64 * 5)()
    if call(_CACHESTAT, descriptor, ctypes.addressof(wanted), ctypes.addressof(counts), 0) != 0:
        return None
    return counts[0]


@functools.cache
def c_function(name: str, *types: Any) -> Callable[..., int] | None:
    """Return a function of Linux' C library that Python does not offer, or None on other systems."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = types
    typed: Callable[..., int] = function
    return typed


def _open_below(root: Path, path: Path, flags: int) -> int:
    """Open a file below `root` without following links in the folders between; `root` itself may be a link.

    Raises:
        OSError: the file cannot be opened, or one of the folders is a link.
    """
    folders = path.relative_to(root).parts[:-1]
    # A path with ".." is the target of a link in a download cache; the reader checked that link before.
    if not folders or ".." in folders:
        return os.open(path, flags)
    here = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            try:
                inner = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            except NotADirectoryError as error:
                raise OSError(errno.ELOOP, f"{folder} is a link or not a folder", str(path)) from error
            os.close(here)
            here = inner
        return os.open(path.name, flags, dir_fd=here)
    finally:
        os.close(here)


def open_file(path: str | Path, *, follow: bool = False, root: Path | None = None) -> File:
    """Open a file for reading.

    Args:
        path: path on this machine, or a URL.
        follow: follow a symbolic link instead of refusing it.
        root: folder of the checkpoint that the file belongs to; folders below it that are links are refused, too.

    Raises:
        OSError: the file cannot be opened.
    """
    place = path if isinstance(path, Path) else location(path)
    file: File = place.open_remote() if isinstance(place, RemotePath) else LocalFile(place, follow=follow, root=root)
    if (opened := _opened.get()) is not None:
        opened.setdefault(str(place), file.identity)
    return file


@contextlib.contextmanager
def record_opened_files() -> Iterator[dict[str, FileIdentity]]:
    """Record path and identity of every file that this thread opens with `open_file`, as of its first opening."""
    opened: dict[str, FileIdentity] = {}
    token = _opened.set(opened)
    try:
        yield opened
    finally:
        _opened.reset(token)
        if (outer := _opened.get()) is not None:
            outer.update({path: outer.get(path, identity) for path, identity in opened.items()})


def identity_at(path: Path) -> FileIdentity:
    """Return the identity of the file that is at a path now.

    A local file is opened, because only then does a network file system ask its server instead of its cache.

    Raises:
        OSError: there is no such file.
    """
    if isinstance(path, RemotePath):
        return path.identity()
    with LocalFile(path) as file:
        return file.identity


def read_all(file: File) -> bytes:
    """Return the whole content of a file; several reads are needed above 2 GiB.

    Raises:
        OSError: the file cannot be read.
    """
    blocks: list[bytes] = []
    position, num_bytes = 0, file.num_bytes
    while position < num_bytes and (block := file.read(num_bytes - position, position)):
        blocks.append(block)
        position += len(block)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


class Stream(io.RawIOBase):
    """A seekable stream that reads a `File`, for libraries that need one."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position and return it, see `io.IOBase.seek`.

        Raises:
            OSError: the position would be negative.
        """
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.num_bytes}[whence]
        if base + offset < 0:
            raise OSError(f"cannot seek to byte {base + offset}: expected at least 0")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes from the current position; all remaining bytes if `size` is negative."""
        left = max(0, self._file.num_bytes - self._position)
        content = self._file.read(left if size < 0 else min(size, left), self._position)
        self._position += len(content)
        return content
