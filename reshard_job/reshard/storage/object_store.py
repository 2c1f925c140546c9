"""Checkpoints in object stores, by fsspec: `s3://bucket/folder`, `gs://...`, `memory://...`.

A `RemotePath` answers what the readers of formats ask a path (its name, its children, its size), and gives files that
are read by ranges. What lies in a folder is asked once and remembered by most libraries, until `RemotePath.forget`.
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
from collections.abc import Generator, Iterable
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
"""Keys under which stores of fsspec name the content of an object; the first that there is tells it from others."""

_BLOCK_BYTES = 64 << 10  # a reader of metadata asks for neighbouring bits: one request for all of them


class Requests:
    """How many requests for data were made, of how many bytes together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """One more."""
        with self._lock:
            self.count += 1
            self.num_bytes += num_bytes


REQUESTS = Requests()
"""Of this process."""


def location(text: str) -> Path:
    """The path that a user names: a folder of this machine (also as `file:///folder`), or a URL.

    Raises:
        UsageError: a URL that names no bucket, or of a store for which no library is installed; or it can be no path.
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
    """The path of this machine that a user names, or None for a URL of a store.

    Raises:
        UsageError: a URL of another machine's file, or what can be no path.
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
    """Refuse what the operating system takes for no path at all.

    Raises:
        UsageError: it holds a zero byte, or half of a surrogate pair.
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
    except Exception as error:  # implementations raise what they like
        raise UsageError(
            f"{scheme}:// is of no store that can be opened by its URL alone: {error}",
            hint=f"name a folder of this machine, or a URL such as {', '.join(f'{known}://' for known in _LIBRARIES)}",
        ) from error


class RemotePath(PosixPath):
    """A folder or an object in a store that fsspec knows."""

    __slots__ = ()

    def __str__(self) -> str:
        return _COLLAPSED.sub(r"\1://", super().__str__())

    def filesystem(self) -> Any:
        """The fsspec file system.

        Raises:
            UsageError: there is none for this scheme.
        """
        return _filesystem(str(self).partition("://")[0])

    def _info(self) -> dict[str, Any]:
        if "://" not in str(self):  # the parent of a bucket
            raise FileNotFoundError(errno.ENOENT, "no bucket is named", str(self))
        try:
            found: dict[str, Any] = self.filesystem().info(str(self))
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "no such object or folder", str(self)) from error
        except Exception as error:  # stores raise what they like
            raise _as_oserror(error, self) from error
        return found

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """There is such an object or folder."""
        return self._kind() is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """It is a folder."""
        return self._kind() == "directory"

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """It is an object."""
        return self._kind() == "file"

    def is_symlink(self) -> bool:
        """There are no links."""
        return False

    def _kind(self) -> str | None:
        try:
            return str(self._info()["type"])
        except FileNotFoundError:
            return None

    def absolute(self) -> RemotePath:
        """URLs are absolute."""
        return self

    def resolve(self, strict: bool = False) -> RemotePath:
        """There are no links."""
        return self

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Kind and size."""
        info = self._info()
        kind = stat.S_IFDIR | 0o755 if info["type"] == "directory" else stat.S_IFREG | 0o644
        return os.stat_result((kind, 0, 0, 1, 0, 0, int(info.get("size") or 0), 0, 0, 0))

    def lstat(self) -> os.stat_result:
        """The same: there are no links."""
        return self.stat()

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """What lies in the folder."""
        try:
            names = self.filesystem().ls(str(self), detail=False)
        except Exception as error:  # stores raise what they like
            raise _as_oserror(error, self) from error
        for name in sorted(names):
            if (child := PurePosixPath(name).name) != self.name:
                yield self / child

    def rglob(self, pattern: str) -> Generator[RemotePath, None, None]:
        """Everything below, for the pattern `*` alone."""
        if pattern != "*":
            raise NotImplementedError(pattern)
        for child in self.iterdir():
            yield child
            if child.is_dir():
                yield from child.rglob(pattern)

    def read_bytes(self) -> bytes:
        """The whole object."""
        with self.open_remote() as file:
            return file.read(file.num_bytes, 0)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """The whole object as text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open(self, mode: str = "r", *_options: Any, **_named: Any) -> Any:
        """For reading from front to back."""
        if mode == "rb":
            return self.filesystem().open(str(self), "rb")
        if mode == "r":
            return io.StringIO(self.read_text())
        raise OSError(f"{self}: object stores are read only here")

    def open_remote(self) -> RemoteFile:
        """For positioned reads."""
        info = self._info()
        if info["type"] == "directory":
            raise IsADirectoryError(f"{self}: is a folder")
        return RemoteFile(self, int(info["size"]), _identity(info))

    def identity(self) -> FileIdentity:
        """Return what tells the object from another of its name.

        Raises:
            OSError: there is no such object.
        """
        return _identity(self._info())

    def forget(self, folders: Iterable[RemotePath] = ()) -> None:
        """Ask the store anew from now on, where its library remembers what there is; first about some folders.

        To list a folder is one request for many objects, and most libraries then answer from the list.
        """
        self.filesystem().invalidate_cache()
        for folder in sorted(folders):
            with contextlib.suppress(OSError):
                next(iter(folder.iterdir()), None)


def _identity(info: dict[str, Any]) -> FileIdentity:
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return FileIdentity(int(info.get("size") or 0), version=version.strip('"'))


def _as_oserror(error: Exception, path: RemotePath) -> OSError:
    """Another object than the one asked for may be named in a store's own message: name ours."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "no such object or folder", str(path))
    return StoreError(
        f"the store answers {type(error).__name__}: {error}",
        path=str(path),
        hint="check the URL, the credentials and the endpoint (for S3: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...)",
    )


class RemoteFile:
    """An object that is read by ranges."""

    slow_to_ask = True

    def __init__(self, path: RemotePath, num_bytes: int, identity: FileIdentity) -> None:
        self._path = path
        self._filesystem = path.filesystem()
        self.num_bytes = num_bytes
        self.identity = identity
        self._block: tuple[int, bytes] = (0, b"")

    def read(self, num_bytes: int, position: int) -> bytes:
        """See `reshard.storage.files.File`; small reads are served from one larger one."""
        num_bytes = max(0, min(num_bytes, self.num_bytes - position))
        if num_bytes >= _BLOCK_BYTES:
            return self._fetch(position, position + num_bytes)
        start, block = self._block
        if not start <= position <= position + num_bytes <= start + len(block):
            # The directory of an archive is read from its end, everything else forwards.
            tail = self.num_bytes - position <= _BLOCK_BYTES
            start = max(0, self.num_bytes - _BLOCK_BYTES) if tail else position
            block = self._fetch(start, min(self.num_bytes, start + _BLOCK_BYTES))
            self._block = (start, block)
        return block[position - start : position - start + num_bytes]

    def read_into(self, target: npt.NDArray[np.uint8], position: int) -> int:
        """See `reshard.storage.files.File`."""
        content = self._fetch(position, min(self.num_bytes, position + len(target)))
        target[: len(content)] = np.frombuffer(content, dtype=np.uint8)
        return len(content)

    def _fetch(self, start: int, end: int) -> bytes:
        if end <= start:
            return b""
        REQUESTS.add(end - start)
        try:
            content: bytes = self._filesystem.cat_file(str(self._path), start=start, end=end)
        except Exception as error:  # stores raise what they like
            raise _as_oserror(error, self._path) from error
        return content

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
