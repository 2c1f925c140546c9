"""The folder in which the ranks of one node stage their saves, in memory or on a local disk.

The first rank of the node makes the folder, and every rank holds its lock file shared; the copy process inherits the
lock of the first rank. The kernel releases the lock of a killed process, and the next process that starts on the node
removes the folders that nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from elastic_trainer.errors import ConfigurationError
from elastic_trainer.scratch import private_folder
from reshard.system.limits import free_memory_bytes

_PREFIX = "save-"
_MEMORY = frozenset({"tmpfs", "ramfs"})


def create(scratch: Path) -> tuple[Path, int]:
    """Make a staging folder, after removing those of killed processes; return it and the descriptor of its lock.

    Raises:
        TargetError: the scratch folder cannot be used.
        OSError: the folder cannot be made.
    """
    base = private_folder(scratch, variable="ETJ_STAGING")
    _remove_stale(base)
    while True:
        folder = base / f"{_PREFIX}{secrets.token_hex(8)}"
        with contextlib.suppress(ConfigurationError):  # another process took the lock file for one of a killed process
            _lock_path(folder).touch(mode=0o600)
            lock = join(folder)
            folder.mkdir()
            return folder, lock


def join(folder: Path) -> int:
    """Hold the lock of a staging folder; return its descriptor.

    Raises:
        ConfigurationError: the folder is not there: this process runs on another node than the one that made it.
    """
    path = _lock_path(folder)
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)
    raise ConfigurationError(
        f"expected the staging folder {folder} of the node's first rank, found none: ranks with one LOCAL_RANK counter "
        "must share ETJ_STAGING; set LOCAL_RANK to 0 where each rank has a container of its own"
    )


def release(folder: Path, lock: int, *, remove: bool) -> None:
    """Release the lock; with `remove`, remove the folder before."""
    if remove:
        shutil.rmtree(folder, ignore_errors=True)
        _lock_path(folder).unlink(missing_ok=True)
    os.close(lock)


def free_bytes(folder: Path) -> int:
    """Return the bytes that can be staged now, by the file system and, for a folder in memory, the memory limit."""
    free = shutil.disk_usage(folder).free
    if is_in_memory(folder) and (memory := free_memory_bytes()) is not None:
        free = min(free, memory)
    return free


def is_in_memory(folder: Path) -> bool:
    """Return whether the files of a folder are in memory."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0] in _MEMORY
    return False


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove_stale(base: Path) -> None:
    """Remove the staging folders that no process holds."""
    for folder in {path.with_suffix("") for path in base.glob(f"{_PREFIX}*")}:
        path = _lock_path(folder)
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
