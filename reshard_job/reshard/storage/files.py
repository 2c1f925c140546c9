"""Positioned reads of files, on this machine's file systems or in an object store.

Readers of formats open what they read through `open_file`, so that they need not know where a checkpoint is.
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

_opened: contextvars.ContextVar[dict[str, FileIdentity] | None] = contextvars.ContextVar("opened", default=None)


class File(Protocol):
    """An open file. Any number of threads may read it."""

    @property
    def num_bytes(self) -> int:
        """Size when it was opened."""
        ...

    @property
    def slow_to_ask(self) -> bool:
        """Every read is a request over a network: better few large ones."""
        ...

    @property
    def identity(self) -> FileIdentity:
        """What tells it from another file of its name."""
        ...

    def read(self, num_bytes: int, position: int) -> bytes:
        """Up to `num_bytes` from `position`; fewer at the end of the file.

        Raises:
            OSError: it cannot be read.
        """
        ...

    def read_into(self, target: Bytes, position: int) -> int:
        """Fill `target` ([num_bytes], contiguous) from `position`; number of bytes read, fewer at the file's end.

        Raises:
            OSError: it cannot be read.
        """
        ...

    def close(self) -> None:
        """Done."""
        ...

    def __enter__(self) -> File: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LocalFile:
    """A file that the operating system knows."""

    slow_to_ask = False

    def __init__(self, path: Path, *, follow: bool = False, root: Path | None = None) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        self._descriptor = os.open(path, flags) if root is None else _open_below(root, path, flags)
        mode = os.fstat(self._descriptor).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # devices never end; of a folder, reading says what it is
            os.close(self._descriptor)
            raise OSError(errno.EINVAL, "is a pipe or device, expected a file", str(path))

    @property
    def num_bytes(self) -> int:
        """Size now."""
        return os.fstat(self._descriptor).st_size

    @property
    def identity(self) -> FileIdentity:
        """What tells it now from another file of its name."""
        return FileIdentity.of_status(os.fstat(self._descriptor))

    def read(self, num_bytes: int, position: int) -> bytes:
        """See `File`."""
        return os.pread(self._descriptor, num_bytes, position)

    def read_into(self, target: Bytes, position: int) -> int:
        """See `File`."""
        return os.preadv(self._descriptor, [target.data], position)

    def view(self, start: int, num_bytes: int) -> Bytes | None:
        """A range as the kernel holds it, not copied ([num_bytes], read-only), or None where it cannot be had so.

        All of it is in memory when this returns. So what is truncated or cannot be read is found here, where it is
        None and reading says why, and does not end the process by a signal when the memory is looked at.
        """
        offset = start - start % mmap.ALLOCATIONGRANULARITY
        if not num_bytes:  # mmap would take that as all there is
            return None
        try:
            mapping = mmap.mmap(self._descriptor, start - offset + num_bytes, prot=mmap.PROT_READ, offset=offset)
            mapping.madvise(_MADV_POPULATE_READ)
        except (OSError, ValueError):  # no mappings here, an old kernel, or a bad range; ValueError: behind the end
            return None
        return np.frombuffer(mapping, dtype=np.uint8)[start - offset :]

    def holds(self, start: int, num_bytes: int) -> bool:
        """The kernel has all of a range in memory (mincore(2): it says so of any file to whoever may not write it)."""
        ask = c_function("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        offset = start - start % mmap.ALLOCATIONGRANULARITY
        length = start - offset + num_bytes
        if ask is None or not num_bytes:
            return False
        try:
            mapped = np.frombuffer(
                mmap.mmap(self._descriptor, length, prot=mmap.PROT_READ, offset=offset), dtype=np.uint8
            )
        except (OSError, ValueError):
            return False
        pages = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
        return ask(mapped.ctypes.data, length, pages.ctypes.data) == 0 and bool((pages & 1).all())

    def expect(self, start: int, num_bytes: int) -> None:
        """A range will be read soon: the kernel begins to fetch what it does not hold."""
        os.posix_fadvise(self._descriptor, start, num_bytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """See `File`."""
        os.close(self._descriptor)

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@functools.cache
def c_function(name: str, *types: Any) -> Callable[..., int] | None:
    """A function of Linux' C library that Python does not offer, or None elsewhere."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = types
    found: Callable[..., int] = function
    return found


def _open_below(root: Path, path: Path, flags: int) -> int:
    """Open a file without following a link in any folder between it and `root`, which may be a link itself.

    Raises:
        OSError: it cannot be opened, or one of the folders is a link.
    """
    folders = path.relative_to(root).parts[:-1]
    if (
        not folders or ".." in folders
    ):  # the latter is a link of a download cache that was judged before it was followed
        return os.open(path, flags)
    here = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            try:
                inner = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            except NotADirectoryError as error:
                raise OSError(errno.ELOOP, f"{folder} is a link or no folder", str(path)) from error
            os.close(here)
            here = inner
        return os.open(path.name, flags, dir_fd=here)
    finally:
        os.close(here)


def open_file(path: str | Path, *, follow: bool = False, root: Path | None = None) -> File:
    """Open a file for reading.

    Args:
        path: of this machine, or a URL.
        follow: a symbolic link is followed, not refused.
        root: folder of the checkpoint that the file belongs to: folders in it that are links are refused, too.

    Raises:
        OSError: it cannot be opened.
    """
    found = path if isinstance(path, Path) else location(path)
    file: File = found.open_remote() if isinstance(found, RemotePath) else LocalFile(found, follow=follow, root=root)
    if (opened := _opened.get()) is not None:
        opened.setdefault(str(found), file.identity)
    return file


@contextlib.contextmanager
def noting_opened() -> Iterator[dict[str, FileIdentity]]:
    """Collect path and identity of every file that this thread opens with `open_file`, as it was when first opened."""
    opened: dict[str, FileIdentity] = {}
    token = _opened.set(opened)
    try:
        yield opened
    finally:
        _opened.reset(token)
        if (outer := _opened.get()) is not None:
            outer.update({path: outer.get(path, found) for path, found in opened.items()})


def identity_at(path: Path) -> FileIdentity:
    """Return the identity of the file that has a path now.

    A local file is opened, because a network file system asks its server then, and may answer from memory else.

    Raises:
        OSError: there is no such file.
    """
    if isinstance(path, RemotePath):
        return path.identity()
    with LocalFile(path) as file:
        return file.identity


def read_all(file: File) -> bytes:
    """Return the whole content of a file, which one read gives at most 2 GiB of.

    Raises:
        OSError: it cannot be read.
    """
    parts: list[bytes] = []
    position, num_bytes = 0, file.num_bytes
    while position < num_bytes and (part := file.read(num_bytes - position, position)):
        parts.append(part)
        position += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Stream(io.RawIOBase):
    """A file as a seekable stream, for libraries that want one."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.num_bytes}[whence]
        if base + offset < 0:
            raise OSError(f"cannot seek to byte {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Position."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes from here, or all."""
        left = max(0, self._file.num_bytes - self._position)
        content = self._file.read(left if size < 0 else min(size, left), self._position)
        self._position += len(content)
        return content
