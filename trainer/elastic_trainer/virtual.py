"""Load a virtual commit: make this node's files in memory, let the framework read them, and remove them.

The first process of a node makes the files that all its ranks open, each byte of the source read once; the others wait
for it at a lock. Files in memory stay while any process of the node holds the lock shared, and what a killed process
left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from reshard.contract import MANIFEST_VERSIONS, VirtualLoader
from reshard.errors import ReshardError, TargetError
from reshard.system.limits import default_num_threads, free_memory_bytes
from reshard.virtual.load import Loaded, Ranges, check_source, prove
from reshard.virtual.manifest import Manifest, decode
from reshard.virtual.process import load_files_apart

_log = logging.getLogger(__name__)
_READY = ".ready"
_RETRY_SECONDS = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A virtual commit whose files are there.

    Attributes:
        folder: with the files of this node's ranks; its name is the virtual commit's.
        manifest: that they were made from.
        loaded: what was read to make them, in the process that made them; else None.
    """

    folder: Path
    manifest: Manifest
    loaded: Loaded | None


@contextlib.contextmanager
def opened(commit: Path, *, ranks: range, scratch: Path = Path("/dev/shm")) -> Iterator[Opened]:
    """The files that a node's ranks open, as long as this lasts.

    Args:
        commit: folder of the virtual commit.
        ranks: global ranks of the processes on this node; every one of them gives the same.
        scratch: folder in memory, on this node.

    Raises:
        CorruptSourceError: the manifest or the source is damaged.
        StorageFullError: the files do not fit into memory.
        TargetError: the scratch folder cannot be used.
    """
    manifest = decode(commit, num_threads=default_num_threads())
    base = _private_folder(scratch)
    identity = f"{commit.resolve()} {manifest.fingerprint} {ranks}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    _remove_stale(base, name)
    lock = _lock(base / f"{name}.lock", base / name / _READY)
    try:
        folder = base / name / commit.name
        loaded = None
        if not (base / name / _READY).exists():
            shutil.rmtree(base / name, ignore_errors=True)
            folder.mkdir(parents=True)
            check_source(manifest)
            try:
                loaded = load_files_apart(manifest, ranks, folder)
            except BaseException:
                shutil.rmtree(base / name, ignore_errors=True)
                raise
            (base / name / _READY).touch()
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield Opened(folder=folder, manifest=manifest, loaded=loaded)
    finally:
        _remove_if_last(base / name, lock)


def loader(scratch: Path) -> VirtualLoader:
    """That this trainer loads virtual commits, and with how much memory on this node as it is now."""
    free = [] if (known := free_memory_bytes()) is None else [known]
    with contextlib.suppress(OSError):
        free.append(shutil.disk_usage(scratch).free)
    return VirtualLoader(manifests=MANIFEST_VERSIONS, memory_bytes=min(free, default=0))


def damage(manifest: Manifest, read: Sequence[Ranges]) -> list[str]:
    """What the source's own checksums say against what all nodes have read together."""
    try:
        found = prove(manifest.plan.index.files, read, manifest.plan.index.root)
    except ReshardError as error:
        return [str(error)]
    _log.info("%d checksums of the source hold, %d ranges were read in part only", found.proved, found.open)
    return []


def _private_folder(scratch: Path) -> Path:
    """A folder of this user alone: the scratch folder may be everybody's.

    Raises:
        TargetError: it cannot be made, or is somebody else's.
    """
    folder = scratch / f"elastic-trainer-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise TargetError(
            f"cannot be made: {error.strerror}", path=str(folder), hint="set ETJ_SCRATCH to a folder in memory"
        ) from error
    if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise TargetError("is not a folder of this user alone", path=str(folder), hint="remove it, or set ETJ_SCRATCH")
    return folder


def _lock(path: Path, ready: Path) -> int:
    """Descriptor of the lock file: exclusively locked, for the one that makes the files, or shared once they are ready.

    Waits while another process makes them. The last user removes the lock file, maybe while this waits.
    """
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            usable = True
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            usable = ready.exists()  # else the maker has failed, or all have left: try again
        with contextlib.suppress(FileNotFoundError):
            if usable and path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)
        time.sleep(_RETRY_SECONDS)


def _remove_if_last(folder: Path, lock: int) -> None:
    """Remove the files unless another process uses them; gives the lock back."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)
    finally:
        os.close(lock)


def _remove_stale(base: Path, name: str) -> None:
    """Remove what processes left that were killed while they loaded another commit."""
    for path in base.glob("*.lock"):
        if path.stem == name:
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
