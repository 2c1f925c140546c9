"""The copy process of a node: `python -m elastic_trainer.saving.copy_process PARENT`.

It reads orders, one a line, from its standard input. For each one it waits until all ranks of the node have written
their files into the staging folder. It then copies them to the checkpoint volume, computes their CRC-32 in passing,
syncs them, writes the node's report and removes the staged files. It ends with the process that started it: the kernel
kills it, and its input ends.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from elastic_trainer.saving.reports import FILES, CopyOrder, NodeReport, deliver, read_notes, read_report
from elastic_trainer.saving.reuse import SPARES, is_used
from elastic_trainer.saving.staging import is_in_memory
from reshard.checksums.crc import crc32
from reshard.commits.commit import CommittedFile
from reshard.storage.durable import make_folder, sync_folder
from reshard.system.children import bind_to_parent

_log = logging.getLogger(__name__)
_BLOCK_BYTES = 4 << 20
_SYNC_BYTES = 256 << 20
"""Bytes after which a file is synced, so that memory holds little that is not on the volume yet."""

_THREADS = 4
_POLL_SECONDS = 0.02
_NICE = 10
"""The training goes first."""


def main() -> int:
    """Carry out the orders of the parent until it ends."""
    parent = int(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides when a save is given up
    if not bind_to_parent(parent):
        return 1
    os.nice(_NICE)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    for line in sys.stdin:
        order = CopyOrder.from_json(line)
        carry_out(order)
    return 0


def carry_out(order: CopyOrder) -> None:
    """Copy one save, and report what was copied or why not.

    Raises:
        OSError: the report cannot be written.
    """
    if order.done.exists():
        return
    report = read_report(order.local_report) or _copy(order)
    deliver(order, report)
    written = order.staged / FILES / order.tag
    if is_used(written) and is_in_memory(order.staged):
        spares = order.staged.with_name(SPARES)
        shutil.rmtree(spares, ignore_errors=True)
        with contextlib.suppress(OSError):
            written.rename(spares)
    shutil.rmtree(order.staged, ignore_errors=True)
    order.local_report.rename(order.done)


def _copy(order: CopyOrder) -> NodeReport:
    """Copy one save when all ranks of the node have staged it; return the report."""
    while (errors := read_notes(order.staged, order.local_ranks)) is None:
        time.sleep(_POLL_SECONDS)
    started = time.monotonic()
    host = os.uname().nodename
    try:
        if problems := [error for error in errors if error]:
            raise OSError("; ".join(problems))
        files, beside = _copy_files(order)
        return NodeReport(node=order.node, host=host, files=files, beside=beside, seconds=time.monotonic() - started)
    except OSError as error:
        _log.error("cannot copy %s to %s: %s", order.tag, order.target, error)
        _remove_copies(order)
        return NodeReport(node=order.node, host=host, error=str(error))


def _remove_copies(order: CopyOrder) -> None:
    """Remove what this node has written of a failed save, so that a full volume has room for the report."""
    with contextlib.suppress(OSError):
        for name in _walk(order.staged / FILES / order.tag):
            (order.target / order.tag / name).unlink(missing_ok=True)


def _copy_files(order: CopyOrder) -> tuple[list[CommittedFile], list[str]]:
    """Copy all staged files; return those in the commit's folder and the names of those beside it.

    Raises:
        OSError: a file cannot be read or written, or is a link or a special file.
    """
    source, prefix = order.staged / FILES, f"{order.tag}/"
    names = list(_walk(source))
    inside = [name for name in names if name.startswith(prefix)]
    beside = [name for name in names if not name.startswith(prefix)]
    for folder in sorted({(order.target / name).parent for name in names}):
        make_folder(folder)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        copies = pool.map(lambda name: _copy_file(source / name, order.target / name), inside)
        files = [
            CommittedFile(path=name.removeprefix(prefix), num_bytes=num_bytes, crc32=crc)
            for name, (num_bytes, crc) in zip(inside, copies, strict=True)
        ]
    for folder in {(order.target / name).parent for name in inside}:
        sync_folder(folder)
    for name in beside:  # last, as `latest` names the folder; other saves may read it meanwhile
        draft = (order.target / name).with_name(f".{Path(name).name}.{order.node}")
        _copy_file(source / name, draft)
        draft.rename(order.target / name)
    return files, beside


def _walk(folder: Path) -> Iterator[str]:
    """Return the paths of all files below a folder, relative to it.

    Raises:
        OSError: something is neither a file nor a folder.
    """
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                yield path.relative_to(folder).as_posix()
            elif not stat.S_ISDIR(mode):
                raise OSError(f"{path.relative_to(folder)} is a link or a special file: a save has files and folders")


def _copy_file(source: Path, target: Path) -> tuple[int, int]:
    """Copy a file and sync the copy; return its size and CRC-32."""
    crc, total, unsynced = 0, 0, 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with open(source, "rb", buffering=0) as reader, open(target, "wb") as writer:
        while count := reader.readinto(buffer):
            block = buffer[:count]
            crc = crc32(block, crc)
            writer.write(block)
            total += count
            unsynced += count
            if unsynced >= _SYNC_BYTES:
                writer.flush()
                os.fdatasync(writer.fileno())
                unsynced = 0
        writer.flush()
        os.fsync(writer.fileno())
    return total, crc


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
