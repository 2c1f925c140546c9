"""Write small files and make file names durable, on this machine's file systems. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from pathlib import Path
from typing import Literal, NoReturn

_BLOCK_BYTES = 4 << 20
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file atomically: a reader finds the whole old content or the whole new one, also after a crash.

    Raises:
        OSError: the file cannot be written; the draft beside it is removed.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write_draft(draft, "wb", content)
        draft.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write_draft(draft: Path, mode: Literal["wb", "xb"], content: bytes) -> None:
    with open(draft, mode) as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def create_file(path: Path, content: bytes) -> bool:
    """Create a small file with its whole content; return False if it exists, which leaves it as it is.

    Raises:
        OSError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        _write_draft(draft, "xb", content)
        try:
            os.link(draft, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            draft.rename(path)  # no hard links here: of two writers the last one wins, so each has to read the file
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def read_file(path: Path, max_bytes: int) -> bytes | None:
    """Read a small regular file; return None if there is none.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or a longer one.
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise ValueError(f"expected a regular file of at most {max_bytes} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        return None


def sync_folder(folder: str | Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and make the name of each durable.

    Raises:
        OSError: a folder cannot be made.
    """
    missing = [folder, *folder.parents]
    missing = missing[: next((at for at, path in enumerate(missing) if path.is_dir()), len(missing))]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folders(folder: Path) -> None:
    """Make all names in `folder` and in the folders below it durable, the deepest first; links are not followed.

    Raises:
        OSError: a folder cannot be synced.
    """
    for root, _, _ in os.walk(folder, topdown=False, onerror=_raise):
        sync_folder(root)


def _raise(error: OSError) -> NoReturn:
    raise error


def file_crc32(path: str | Path) -> int:
    """Compute the CRC-32 (zlib) of a file, reading blocks of 4 MiB."""
    crc = 0
    with (path if isinstance(path, Path) else Path(path)).open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
