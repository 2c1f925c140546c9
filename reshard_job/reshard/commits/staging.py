"""The hidden staging folder beside a target: a result is written there and published whole by a rename."""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import re
import shutil
import time
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

_PATIENCE_SECONDS = 1.0
"""Time to wait for a lock: the processes of a run that was killed end a moment after it, and hold the lock so long."""

_POLL_SECONDS = 0.02
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_UNFINISHED = re.compile(r"\..+\.partial-[0-9a-f]{1,16}", re.DOTALL)
_NUMBER = re.compile(r"[0-9a-f]{1,16}")


class Sharing(enum.Enum):
    """Mode of access to an unfinished result: the runs that may work on it, and the effect of a failure."""

    ALONE = "alone"
    """Only this run works on it; a failure removes it."""
    RESUMABLE = "resumable"
    """One run at a time works on it; a failure leaves it for the next run of the same conversion."""
    TOGETHER = "together"
    """Any number of workers work on it at a time; a failure leaves it for the other workers."""


def unfinished_folder(target: Path, name: str) -> Path:
    """Return the path of the hidden folder of an unfinished result; `name` has at most 16 characters."""
    return target.parent / f".{target.name}.partial-{name}"


def is_unfinished(path: Path) -> bool:
    """Return True if a path has the name of an unfinished result's folder.

    Such a folder looks like a checkpoint, but bytes that were not written yet are zero.
    """
    return _UNFINISHED.fullmatch(path.absolute().name) is not None


@contextlib.contextmanager
def staging(target: Path, fingerprint: str, num_bytes: int, sharing: Sharing) -> Iterator[Path]:
    """Make the folder for an unfinished result and lock it; remove those that killed runs left for this target.

    The folder is locked while runs work on it. Some file systems (some NFS) cannot lock folders. There the later run of
    the same conversion wins, and the earlier one fails without harm.

    Args:
        target: folder of the result.
        fingerprint: fingerprint of the conversion.
        num_bytes: bytes that the result will have.
        sharing: who may work on the result.

    Raises:
        StorageFullError: the result would not fit.
        TargetError: the folder cannot be made, or another run works on it.
    """
    parent = target.parent
    folder = unfinished_folder(target, os.urandom(4).hex() if sharing is Sharing.ALONE else fingerprint)
    keep = sharing is not Sharing.ALONE
    descriptor = None
    try:  # begins before the folder is made, because a signal may arrive at any time
        with _permission(target), target_errors(target, num_bytes):
            make_folder(parent)
            for stale in _unfinished_folders(target):
                if stale != folder:
                    _remove_unless_locked(stale)
            check_free(parent, num_bytes - _allocated_bytes(folder))
            descriptor = _make_and_open(folder)
        _lock(descriptor, folder, shared=sharing is Sharing.TOGETHER)
        yield folder
    except (VerificationError, CorruptSourceError, SourceChangedError):
        keep = sharing is Sharing.TOGETHER
        raise
    except TargetTakenError:  # the result can never be published
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


@contextlib.contextmanager
def _permission(target: Path) -> Iterator[None]:
    """Replace an error for missing permission by one that names the folder that must be writable."""
    try:
        yield
    except TargetError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise no_permission_error(nearest_folder(target)) from error
        raise


def nearest_folder(path: Path) -> Path:
    """Return the nearest existing folder above a path."""
    return next(parent for parent in path.absolute().parents if parent.is_dir())


def no_permission_error(folder: Path) -> TargetError:
    """Make the error for a folder in which no folder can be made, for lack of permission."""
    return TargetError(
        "no folder may be made here: no permission, or a read-only file system",
        path=str(folder),
        hint="a result grows in a hidden folder beside its place: the folder that holds both must be writable",
    )


def _make_and_open(folder: Path) -> int:
    """Make the folder unless it exists, and open it; a link is not followed, because it could lead anywhere.

    Raises:
        TargetError: a link or a file has the folder's name.
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
    """Lock an open folder, and wait a moment for the processes of a run that was killed just now.

    Raises:
        TargetError: another run holds the lock.
    """
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
                continue
            raise TargetError(
                "another run works on this conversion", path=str(folder), hint="wait for it, or share with --worker I/N"
            ) from error
        except OSError:  # this file system has no such locks
            return
        else:
            return


def check_free(parent: Path, num_bytes: int) -> None:
    """Check that the file system of a folder has space for `num_bytes`.

    Raises:
        StorageFullError: it does not.
    """
    free = free_bytes(parent)
    if free is not None and free < num_bytes:
        raise StorageFullError(
            f"{format_bytes(num_bytes)} are needed, {format_bytes(free)} are free",
            path=str(parent),
            hint="free space on the volume, or keep fewer commits; nothing was written",
        )


def _unfinished_folders(target: Path) -> list[Path]:
    """Return the folders of unfinished results of this target; its name is compared as text, not as a pattern."""
    stem = unfinished_folder(target, "").name
    folders = [path for path in target.parent.iterdir() if path.name.startswith(stem)]
    return [path for path in folders if _NUMBER.fullmatch(path.name, len(stem))]


def _allocated_bytes(folder: Path) -> int:
    """Return the bytes that an unfinished result occupies already."""
    if folder.is_symlink():
        return 0
    num_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            num_bytes += path.lstat().st_blocks * 512
    return num_bytes


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
def hold_finish_lock(folder: Path) -> Iterator[None]:
    """Let one worker at a time complete an unfinished result; it may be published when this worker gets the lock.

    Raises:
        TargetError: the lock file cannot be opened.
    """
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
