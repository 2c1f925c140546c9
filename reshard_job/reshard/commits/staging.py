"""The hidden folder beside a target in which it grows, until it appears complete or not at all."""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from reshard.errors import (
    CorruptSourceError,
    SourceChangedError,
    StorageFullError,
    TargetError,
    TargetTakenError,
    VerificationError,
)
from reshard.storage.durable import make_folder
from reshard.storage.target_writer import free_bytes, target_errors
from reshard.system.limits import format_bytes

FINISH_FILE = ".finish"
"""Locked by the worker that completes a shared result."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_UNFINISHED = re.compile(r"\..+\.partial-[0-9a-f]{1,16}", re.DOTALL)
_NUMBER = re.compile(r"[0-9a-f]{1,16}")


class Sharing(enum.Enum):
    """Who may work on an unfinished result, and what becomes of it after a failure."""

    ALONE = "alone"
    """This run; a failure removes it."""
    RESUMABLE = "resumable"
    """One run at a time; a failure leaves it for the next run of the same conversion."""
    TOGETHER = "together"
    """Any number of workers at a time; likewise."""


def unfinished(target: Path, name: str) -> Path:
    """The hidden folder of an unfinished result, by a name of its own (at most 16 characters)."""
    return target.parent / f".{target.name}.partial-{name}"


def is_unfinished(path: Path) -> bool:
    """It has the name of such a folder: what lies in it looks like a checkpoint, and holes in it look like zeros."""
    return _UNFINISHED.fullmatch(path.absolute().name) is not None


@contextlib.contextmanager
def staging(target: Path, fingerprint: str, num_bytes: int, sharing: Sharing) -> Iterator[Path]:
    """A folder for the unfinished result; what killed runs of other conversions left for this target is removed.

    The folder is locked while its runs live. File systems without locks on folders (some NFS) cannot tell: there the
    later run of the same conversion wins, and the earlier one fails without harm.

    Args:
        target: folder that the result will be.
        fingerprint: of the conversion.
        num_bytes: that the result will have.
        sharing: who may work on it.

    Raises:
        StorageFullError: the result would not fit.
        TargetError: the folder cannot be made, or somebody else works on it.
    """
    parent = target.parent
    folder = unfinished(target, os.urandom(4).hex() if sharing is Sharing.ALONE else fingerprint)
    keep = sharing is not Sharing.ALONE
    descriptor = None
    try:  # from before the folder is made: a signal may come at once
        with _permission(target), target_errors(target, num_bytes):
            make_folder(parent)
            for stale in _left_behind(target):
                if stale != folder:
                    _remove_unless_locked(stale)
            check_free(parent, num_bytes - _allocated_bytes(folder))
            descriptor = _own(folder)
        _lock(descriptor, folder, shared=sharing is Sharing.TOGETHER)
        yield folder
    except (VerificationError, CorruptSourceError, SourceChangedError):
        keep = sharing is Sharing.TOGETHER
        raise
    except TargetTakenError:  # it can never be published
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


@contextlib.contextmanager
def _permission(target: Path) -> Iterator[None]:
    """Say which folder it is that may not be written."""
    try:
        yield
    except TargetError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise forbidden(above(target)) from error
        raise


def above(path: Path) -> Path:
    """The nearest folder above a path that exists."""
    return next(parent for parent in path.absolute().parents if parent.is_dir())


def forbidden(folder: Path) -> TargetError:
    """What to raise where no folder can be made for want of permission."""
    return TargetError(
        "no folder may be made here: no permission, or a read-only file system",
        path=str(folder),
        hint="a result grows in a hidden folder beside its place: the folder that holds both must be writable",
    )


def _own(folder: Path) -> int:
    """Make the folder unless it is there, and open it; no link is followed: what is written would lie elsewhere.

    Raises:
        TargetError: a link or something else has its name.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    try:
        return os.open(folder, _FOLDER)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise TargetError(
            f"is a {'link' if folder.is_symlink() else 'file'}, expected the folder of the unfinished result",
            path=str(folder),
            hint="remove it, and run the same command again",
        ) from error


def _lock(descriptor: int, folder: Path, *, shared: bool) -> None:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TargetError(
            "another run works on this conversion", path=str(folder), hint="wait for it, or share with --worker I/N"
        ) from error
    except OSError:
        return


def check_free(parent: Path, num_bytes: int) -> None:
    """There is space for so many bytes on the file system of a folder.

    Raises:
        StorageFullError: there is not.
    """
    free = free_bytes(parent)
    if free < num_bytes:
        raise StorageFullError(
            f"{format_bytes(num_bytes)} are needed, {format_bytes(free)} are free",
            path=str(parent),
            hint="free space on the volume, or keep fewer commits; nothing was written",
        )


def _left_behind(target: Path) -> list[Path]:
    """Return the folders of unfinished results of this very target: its name is text, and no pattern."""
    stem = unfinished(target, "").name
    found = [path for path in target.parent.iterdir() if path.name.startswith(stem)]
    return [path for path in found if _NUMBER.fullmatch(path.name, len(stem))]


def _allocated_bytes(folder: Path) -> int:
    """Bytes that an unfinished result occupies already."""
    if folder.is_symlink():
        return 0
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            found += path.lstat().st_blocks * 512
    return found


def _remove_unless_locked(folder: Path) -> None:
    try:
        descriptor = os.open(folder, _FOLDER)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Of all workers on an unfinished result, one at a time; the folder may be gone when it is one's turn."""
    try:
        descriptor = os.open(folder / FINISH_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except FileNotFoundError:
        yield
        return
    except OSError as error:
        raise TargetError(
            f"cannot be opened: {error.strerror}", path=str(folder / FINISH_FILE), hint="remove it, and run again"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
