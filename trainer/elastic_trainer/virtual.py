"""Loads a virtual commit: it writes this node's files to memory, lets the framework read them, and removes them.

The first process of a node writes the files for all ranks of the node, and reads each byte of the source once. The
other processes wait for it at a lock. The files stay while any process of the node holds the lock shared. The next
process removes the files that a killed process has left.
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

from elastic_trainer.scratch import private_folder
from reshard.contract import DCP, MANIFEST_VERSIONS, VirtualLoader
from reshard.errors import ReshardError
from reshard.system.limits import default_num_threads, free_memory_bytes
from reshard.virtual.load import Loaded, Ranges, check_source, prove
from reshard.virtual.manifest import Manifest, decode
from reshard.virtual.process import load_files_in_process

_log = logging.getLogger(__name__)
_READY = ".ready"
_RETRY_SECONDS = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenVirtualCommit:
    """A virtual commit whose files are in memory.

    Attributes:
        folder: folder with the files of this node's ranks; it has the name of the virtual commit.
        manifest: manifest from which the files were made.
        loaded: the ranges that were read, in the process that made the files; None in the other processes.
    """

    folder: Path
    manifest: Manifest
    loaded: Loaded | None


@contextlib.contextmanager
def open_virtual_commit(commit: Path, *, ranks: range, scratch: Path = Path("/dev/shm")) -> Iterator[OpenVirtualCommit]:
    """Make the files of a virtual commit for a node's ranks, and remove them at the end of the context.

    Args:
        commit: folder of the virtual commit.
        ranks: global ranks of the processes on this node; the same in all of them.
        scratch: folder in memory on this node.

    Raises:
        CorruptSourceError: the manifest or the source is damaged.
        StorageFullError: the files do not fit into memory.
        TargetError: the scratch folder cannot be used.
    """
    manifest = decode(commit, num_threads=default_num_threads())
    base = private_folder(scratch, variable="ETJ_SCRATCH")
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
                loaded = load_files_in_process(manifest, ranks, folder)
            except BaseException:
                shutil.rmtree(base / name, ignore_errors=True)
                raise
            (base / name / _READY).touch()
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield OpenVirtualCommit(folder=folder, manifest=manifest, loaded=loaded)
    finally:
        _remove_if_last(base / name, lock)


def describe_loader(scratch: Path) -> VirtualLoader:
    """Return what this trainer loads: manifest versions, formats in any topology; and the free memory of this node."""
    free = [] if (known := free_memory_bytes()) is None else [known]
    with contextlib.suppress(OSError):
        free.append(shutil.disk_usage(scratch).free)
    return VirtualLoader(manifests=MANIFEST_VERSIONS, memory_bytes=min(free, default=0), formats=(DCP,))


def find_damage(manifest: Manifest, read: Sequence[Ranges]) -> list[str]:
    """Compare the ranges that all nodes read with the source's own checksums; return what is damaged."""
    try:
        proof = prove(manifest.plan.index.files, read, manifest.plan.index.root)
    except ReshardError as error:
        return [str(error)]
    _log.info("%d checksums of the source hold, %d ranges were read in part only", proof.proved, proof.open)
    return []


def _lock(path: Path, ready: Path) -> int:
    """Open and lock the lock file; return its descriptor.

    The lock is exclusive if this process has to make the files, and shared if they are ready. The function waits while
    another process makes them. The last process removes the lock file, so the file may change while this one waits.
    """
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_usable = True
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            is_usable = ready.exists()  # otherwise the other process has failed, or all have finished: try again
        with contextlib.suppress(FileNotFoundError):
            if is_usable and path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)
        time.sleep(_RETRY_SECONDS)


def _remove_if_last(folder: Path, lock: int) -> None:
    """Remove the files unless another process uses them, and release the lock."""
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
    """Remove the files of processes that were killed while they loaded another commit."""
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
