"""Checkpoints in object stores, through fsspec: `s3://bucket/folder`, `gs://...`, `memory://...`.

A `RemotePath` has the methods of a path that readers of formats use (name, children, size), and opens objects that are
read by ranges. Most fsspec libraries cache the list of a folder until `RemotePath.forget` is called.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import os
import re
import stat
import threading
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.errors import StoreError, UsageError
from reshard.file_identity import FileIdentity

_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")
_COLLAPSED = re.compile(r"^([a-z][a-z0-9+.-]+):/")
_FILE = "file://"
_LIBRARIES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
_VERSIONS = (
    *("ETag", "etag", "generation", "VersionId", "version_id"),
    *("LastModified", "last_modified", "updated", "mtime", "modified", "created"),
)
"""Keys under which fsspec's stores state the version of an object; the first key that is present is used."""

_BLOCK_BYTES = 64 << 10  # readers of metadata read small neighbouring ranges: one request fetches all of them

_REQUEST_BYTES = 8 << 20
"""Largest request where several are sent at a time."""


class Requests:
    """Counts requests for data and the bytes that they ask for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count a request of `num_bytes`."""
        with self._lock:
            self.count += 1
            self.num_bytes += num_bytes


REQUESTS = Requests()
"""Requests of this process."""


def location(text: str) -> Path:
    """Return the path for a user's text: a folder of this machine (also as `file:///folder`), or a URL.

    Raises:
        UsageError: the URL names no bucket, no library for its store is installed, or the text cannot be a path.
    """
    path = local(text)
    if path is not None:
        return path
    if text == (_URL.match(text) or [""])[0]:
        raise UsageError(f"{text} names no bucket: write for instance {text}bucket/folder")
    path = RemotePath(text)
    path.filesystem()
    return path


def local(text: str) -> Path | None:
    """Return the path on this machine for a user's text, or None if the text is a URL of a store.

    Raises:
        UsageError: the URL is of a file on another machine, or the text cannot be a path.
    """
    check_path(text)
    match = _URL.match(text)
    if match is None:
        return Path(text)
    if match[1] != match[1].lower():
        raise UsageError(f"{text}: expected the scheme of the URL in lower case", hint=f"write {match[1].lower()}://")
    if not text.startswith(_FILE):
        return None
    path = text.removeprefix(_FILE).removeprefix("localhost")
    if not path.startswith("/"):
        raise UsageError(f"{text}: expected an absolute path after file://", hint="write file:///folder, or the path")
    from urllib.parse import unquote

    return Path(unquote(path))


def check_path(text: str) -> None:
    """Refuse text that the operating system does not accept as a path.

    Raises:
        UsageError: the text holds a zero byte, or half of a surrogate pair.
    """
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise UsageError(f"{text!r:.200} is no path: it holds half of a surrogate pair") from error
    if b"\0" in name:
        raise UsageError(f"{text!r:.200} is no path: it holds a zero byte")


@functools.cache
def _filesystem(scheme: str) -> Any:
    try:
        return importlib.import_module("fsspec").filesystem(scheme)
    except ImportError as error:
        raise UsageError(
            f"{scheme}:// needs a library that is not installed: {error}",
            hint=f"pip install {_LIBRARIES.get(scheme, 'the fsspec implementation of that store')}",
        ) from error
    except Exception as error:  # implementations raise any class of error
        raise UsageError(
            f"{scheme}:// is of no store that can be opened by its URL alone: {error}",
            hint=f"name a folder of this machine, or a URL such as {', '.join(f'{known}://' for known in _LIBRARIES)}",
        ) from error


class RemotePath(PosixPath):
    """A folder or an object in a store that fsspec supports."""

    __slots__ = ()

    def __str__(self) -> str:
        return _COLLAPSED.sub(r"\1://", super().__str__())

    def filesystem(self) -> Any:
        """Return the fsspec file system for this path's scheme.

        Raises:
            UsageError: no library for the scheme is installed.
        """
        return _filesystem(str(self).partition("://")[0])

    def _info(self) -> dict[str, Any]:
        if "://" not in str(self):  # the parent of a bucket
            raise FileNotFoundError(errno.ENOENT, "no bucket is named", str(self))
        try:
            info: dict[str, Any] = self.filesystem().info(str(self))
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "no such object or folder", str(self)) from error
        except Exception as error:  # stores raise any class of error
            raise _as_oserror(error, self) from error
        return info

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Return True if there is an object or a folder of this name."""
        return self._kind() is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return True if the path is a folder."""
        return self._kind() == "directory"

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return True if the path is an object."""
        return self._kind() == "file"

    def is_symlink(self) -> bool:
        """Return False, because object stores have no links."""
        return False

    def _kind(self) -> str | None:
        try:
            return str(self._info()["type"])
        except FileNotFoundError:
            return None

    def absolute(self) -> RemotePath:
        """Return the path itself, because URLs are absolute."""
        return self

    def resolve(self, strict: bool = False) -> RemotePath:
        """Return the path itself, because object stores have no links."""
        return self

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return a status with kind and size; other fields are 0."""
        info = self._info()
        kind = stat.S_IFDIR | 0o755 if info["type"] == "directory" else stat.S_IFREG | 0o644
        return os.stat_result((kind, 0, 0, 1, 0, 0, int(info.get("size") or 0), 0, 0, 0))

    def lstat(self) -> os.stat_result:
        """Return the same as `stat`, because object stores have no links."""
        return self.stat()

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """Yield the objects and folders in this folder."""
        try:
            names = self.filesystem().ls(str(self), detail=False)
        except Exception as error:  # stores raise any class of error
            raise _as_oserror(error, self) from error
        for name in sorted(names):
            if (child := PurePosixPath(name).name) != self.name:
                yield self / child

    def rglob(self, pattern: str) -> Generator[RemotePath, None, None]:
        """Yield all objects and folders below this folder; supports the pattern `*` only."""
        if pattern != "*":
            raise NotImplementedError(pattern)
        for child in self.iterdir():
            yield child
            if child.is_dir():
                yield from child.rglob(pattern)

    def read_bytes(self) -> bytes:
        """Read the whole object."""
        with self.open_remote() as file:
            return file.read(file.num_bytes, 0)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """Read the whole object as text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open(self, mode: str = "r", *_options: Any, **_named: Any) -> Any:
        """Open the object as a stream for reading."""
        if mode == "rb":
            return self.filesystem().open(str(self), "rb")
        if mode == "r":
            return io.StringIO(self.read_text())
        raise OSError(f"{self}: object stores are read only here")

    def open_remote(self) -> RemoteFile:
        """Open the object for positioned reads."""
        info = self._info()
        if info["type"] == "directory":
            raise IsADirectoryError(f"{self}: is a folder")
        return RemoteFile(self, int(info["size"]), _identity(info))

    def identity(self) -> FileIdentity:
        """Return what tells the object from another one of the same name.

        Raises:
            OSError: there is no such object.
        """
        return _identity(self._info())

    def forget(self, folders: Iterable[RemotePath] = ()) -> None:
        """Drop the library's cached lists, and list some folders again.

        One request lists a folder of many objects, and most libraries then answer questions about each object from
        that list.
        """
        self.filesystem().invalidate_cache()
        for folder in sorted(folders):
            with contextlib.suppress(OSError):
                next(iter(folder.iterdir()), None)


def _identity(info: dict[str, Any]) -> FileIdentity:
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return FileIdentity(int(info.get("size") or 0), version=version.strip('"'))


def _as_oserror(error: Exception, path: RemotePath) -> OSError:
    """Convert a store's error to an OSError that names `path`; the store's own message may name another object."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "no such object or folder", str(path))
    return StoreError(
        f"the store answers {type(error).__name__}: {error}",
        path=str(path),
        hint="check the URL, the credentials and the endpoint (for S3: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...)",
    )


class RemoteFile:
    """An object that is read by ranges."""

    is_remote = True

    def __init__(self, path: RemotePath, num_bytes: int, identity: FileIdentity) -> None:
        self._path = path
        self._filesystem = path.filesystem()
        self.num_bytes = num_bytes
        self.identity = identity
        self._block: tuple[int, bytes] = (0, b"")

    def read(self, num_bytes: int, position: int) -> bytes:
        """Read up to `num_bytes`, see `reshard.storage.files.File.read`; one larger request serves many small reads."""
        num_bytes = max(0, min(num_bytes, self.num_bytes - position))
        if num_bytes >= _BLOCK_BYTES:
            return self._fetch(position, position + num_bytes)
        start, block = self._block
        if not start <= position <= position + num_bytes <= start + len(block):
            # The directory of an archive is read backwards from the end of the file, everything else forwards.
            tail = self.num_bytes - position <= _BLOCK_BYTES
            start = max(0, self.num_bytes - _BLOCK_BYTES) if tail else position
            block = self._fetch(start, min(self.num_bytes, start + _BLOCK_BYTES))
            self._block = (start, block)
        return block[position - start : position - start + num_bytes]

    def read_into(self, target: npt.NDArray[np.uint8], position: int) -> int:
        """Fill `target` from `position`, see `reshard.storage.files.File.read_into`."""
        content = self._fetch(position, min(self.num_bytes, position + len(target)))
        target[: len(content)] = np.frombuffer(content, dtype=np.uint8)
        return len(content)

    @property
    def path(self) -> RemotePath:
        """Return the object's path."""
        return self._path

    def _fetch(self, start: int, end: int) -> bytes:
        if end <= start:
            return b""
        REQUESTS.add(end - start)
        try:
            content: bytes = self._filesystem.cat_file(str(self._path), start=start, end=end)
        except Exception as error:  # stores raise any class of error
            raise _as_oserror(error, self._path) from error
        return content

    def close(self) -> None:
        """Do nothing, because no connection is kept open."""

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def fetch_ranges(ranges: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes]:
    """Fetch ranges of objects of one store at the same time; large ones in several requests.

    Args:
        ranges: object, first byte, and first byte behind the range.

    Returns:
        The content of each range; shorter where the object ends.

    Raises:
        StoreError: a request failed.
    """
    parts = [
        (number, file, at, min(end, at + _REQUEST_BYTES))
        for number, (file, start, end) in enumerate(ranges)
        for at in range(start, end, _REQUEST_BYTES)
    ]
    if not parts:
        return [b"" for _ in ranges]
    for _, _, start, end in parts:
        REQUESTS.add(end - start)
    paths = [str(file.path) for _, file, _, _ in parts]
    starts, ends = [start for _, _, start, _ in parts], [end for _, _, _, end in parts]
    try:
        found = ranges[0][0].path.filesystem().cat_ranges(paths, starts, ends, on_error="return")
    except Exception as error:  # stores raise any class of error
        raise _as_oserror(error, parts[0][1].path) from error
    contents: list[list[bytes]] = [[] for _ in ranges]
    for (number, file, _, _), content in zip(parts, found, strict=True):
        if isinstance(content, Exception):
            raise _as_oserror(content, file.path) from content
        contents[number].append(content)
    return [pieces[0] if len(pieces) == 1 else b"".join(pieces) for pieces in contents]
