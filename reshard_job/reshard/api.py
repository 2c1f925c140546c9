"""`reshard` as a library: index, plan, check, execute, verify, publish."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import resource
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from reshard.check import check_plan
from reshard.commit import Commit, CommittedFile, check_files, read_commit, sync_folder, write_commit
from reshard.contract import ExitCode, ReshardReport
from reshard.errors import SourceError, StorageFullError, TargetError, UncommittedError, VerificationError
from reshard.execute import Outcome, Progress, execute
from reshard.formats import read_checkpoint, writer_of
from reshard.layout import Index
from reshard.limits import default_num_threads
from reshard.plan import DEFAULT_MEMORY_BYTES, Plan, make_plan
from reshard.storage import free_bytes, target_errors
from reshard.topology import Topology
from reshard.verify import compare, digests, total


def index_of(source: Path, *, require_commit: bool = False) -> Index:
    """Index a checkpoint; one with a commit marker must have all files in their committed sizes.

    Raises:
        UncommittedError: there is no marker and `require_commit` asks for one.
        SourceError: damaged, or of no known format.
    """
    commit: Commit | None = None
    try:
        commit = read_commit(source)
        check_files(source, commit)
    except UncommittedError:
        if require_commit:
            raise
    return read_checkpoint(source, commit)


def plan_of(index: Index, target: Topology, *, memory_bytes: int = DEFAULT_MEMORY_BYTES, num_threads: int = 0) -> Plan:
    """Lay out, plan and prove a conversion; nothing is written.

    Raises:
        UnsupportedError: the conversion would need a guess.
        PlanError: the plan is not exact.
    """
    layout = writer_of(index.format).layout(index, target)
    plan = make_plan(index, layout, memory_bytes=memory_bytes, num_threads=num_threads or default_num_threads())
    check_plan(plan)
    return plan


def reshard(
    source: Path,
    target: Path,
    topology: Topology,
    *,
    attempt: int = 0,
    require_commit: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    num_threads: int = 0,
    reread: bool = False,
    progress: Progress | None = None,
    planned: Callable[[Plan], None] | None = None,
) -> ReshardReport:
    """Convert checkpoint folder `source` to `topology` in the new folder `target`.

    The target appears complete, verified and with its commit marker, or not at all. A target that was committed from
    the same source for the same topology before is left as it is.

    Args:
        source: folder of one checkpoint.
        target: folder to make; its parent is made if needed.
        topology: degrees of the target.
        attempt: recorded in the commit.
        require_commit: refuse a source without a commit marker.
        memory_bytes: for buffers.
        num_threads: 0 for the processors that this process may use.
        reread: read the whole result back through the format's reader before it is published.
        progress: told about bytes moved.
        planned: shown the plan before a byte moves.

    Raises:
        ReshardError: see `reshard.errors`.
    """
    started = time.monotonic()
    done = _already_done(source, target, topology)
    if done is not None:
        return _report(done, source, target, started, message="already converted, verified and committed")
    index = index_of(source, require_commit=require_commit)
    plan = plan_of(index, topology, memory_bytes=memory_bytes, num_threads=num_threads)
    if planned is not None:
        planned(plan)
    with _staging(target, plan) as staging:
        outcome = execute(plan, staging, progress=progress)
        commit = _commit(plan, source, outcome, attempt)
        if reread:
            _reread(staging, commit)
        with target_errors(staging, plan.bytes_to_write):
            write_commit(staging, commit)
        _publish(staging, target, source, topology)
    message = f"converted {index.topology} to {topology}, {len(outcome.digests)} tensors verified"
    return _report(commit, source, target, started, outcome=outcome, message=message)


def _already_done(source: Path, target: Path, topology: Topology) -> Commit | None:
    if not target.exists():
        return None
    with contextlib.suppress(SourceError):
        commit = read_commit(target)
        if commit.source == str(source) and commit.topology == topology:
            check_files(target, commit)
            return commit
    raise TargetError(
        "exists and is not the result of this conversion",
        path=str(target),
        hint="choose another folder or remove this one",
    )


@contextlib.contextmanager
def _staging(target: Path, plan: Plan) -> Iterator[Path]:
    """A hidden folder beside the target, in which the result grows; leftovers of killed runs are removed.

    The folder is locked while its run lives, so that a second run of the same conversion leaves it alone. File systems
    without locks on folders (NFS) cannot tell: there the later run wins, and the earlier one fails without harm.
    """
    parent = target.parent
    with target_errors(target, plan.bytes_to_write):
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(f".{target.name}.partial-*"):
            _remove_unless_locked(stale)
        free = free_bytes(parent)
        if free < plan.bytes_to_write:
            raise StorageFullError(
                f"{plan.bytes_to_write} bytes are needed, {free} bytes are free",
                path=str(parent),
                hint="free space on the volume, or keep fewer commits; nothing was written",
            )
        staging = parent / f".{target.name}.partial-{secrets.token_hex(4)}"
        staging.mkdir()
        descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(descriptor)


def _remove_unless_locked(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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


def _commit(plan: Plan, source: Path, outcome: Outcome, attempt: int) -> Commit:
    files = [
        CommittedFile(path=file.path, num_bytes=file.num_bytes, crc32=crc32)
        for file, crc32 in zip(plan.layout.files, outcome.file_crc32, strict=True)
    ]
    data = {}
    with contextlib.suppress(SourceError):
        data = dict(read_commit(source).data)
    return Commit(
        format=plan.layout.format,
        step=plan.index.step,
        samples=plan.index.samples,
        topology=plan.layout.topology,
        attempt=attempt,
        writer="reshard",
        files=files,
        digests=outcome.digests,
        data=data,
        model=plan.layout.model,
        source=str(source),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    )


def _reread(staging: Path, commit: Commit) -> None:
    """Read the result as any reader would. What is wrong with it is the target's fault, never the source's."""
    try:
        check_files(staging, commit, crc=True)
        compare(commit.digests, digests(read_checkpoint(staging, commit)))
    except SourceError as error:
        raise VerificationError(
            f"what was written reads back differently: nothing was published\n{error}", path=str(staging)
        ) from error


def _publish(staging: Path, target: Path, source: Path, topology: Topology) -> None:
    try:
        staging.rename(target)
    except OSError as error:
        # Another run of the same conversion may have been faster; its result is as good.
        if _already_done(source, target, topology) is None:
            raise TargetError(f"cannot be published: {error}", path=str(target)) from error
        return
    sync_folder(target.parent)


def _report(
    commit: Commit, source: Path, target: Path, started: float, *, message: str, outcome: Outcome | None = None
) -> ReshardReport:
    return ReshardReport(
        ok=True,
        exit_code=ExitCode.OK,
        message=message,
        source=str(source),
        target=str(target),
        step=commit.step,
        samples=commit.samples,
        bytes_read=outcome.bytes_read if outcome else 0,
        bytes_written=outcome.bytes_written if outcome else 0,
        num_files=len(commit.files),
        seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=peak_rss_bytes(),
        num_tensors=len(commit.digests),
        digest=total(commit.digests),
        verified=True,
    )


def failure_report(exit_code: ExitCode, message: str, source: Path, target: Path, seconds: float) -> ReshardReport:
    """The report of a conversion that failed."""
    return ReshardReport(
        ok=False,
        exit_code=exit_code,
        message=message,
        source=str(source),
        target=str(target),
        seconds=round(seconds, 3),
        peak_rss_bytes=peak_rss_bytes(),
    )


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far (ru_maxrss is in KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
