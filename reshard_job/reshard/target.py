"""The target of a conversion: the commit that is there already, the claim on a staging folder, and publication."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from reshard.commits.commit import (
    Commit,
    CommittedFile,
    check_files,
    is_vacant,
    path_to_text,
    read_commit,
    taken_error,
    write_commit,
)
from reshard.commits.latest import write_latest
from reshard.commits.staging import FINISH_FILE, Sharing, staging
from reshard.contract import COMMIT_FILE
from reshard.conversion import PLAN, Conversion, RunOptions
from reshard.errors import SourceError, TargetError
from reshard.execution.executor import Outcome
from reshard.execution.journal import FOLDER as JOURNAL_FOLDER
from reshard.execution.origin import check_origin, origin_of, refuse_other_content
from reshard.execution.resume import NOTHING, Moved, Work, note_kept_work
from reshard.planning.plan import Plan
from reshard.profile.collector import timed
from reshard.storage.durable import sync_folder
from reshard.storage.target_writer import target_errors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A target that is published.

    Attributes:
        commit: of the target.
        message: what happened, for the report.
        moved: bytes that this run moved for it.
        is_published_here: this run published it, and not another run.
    """

    commit: Commit
    message: str
    moved: Moved = NOTHING
    is_published_here: bool = False

    @classmethod
    def by_other_run(cls, commit: Commit, plan: Plan, sharing: Sharing, work: Work) -> Done:
        """Describe a target that another run published while this one did `work` for it."""
        message = f"converted together with other workers: {work.share(plan)} by this one"
        if sharing is not Sharing.TOGETHER:
            message = "converted by another run, which was faster; what this one had done is removed"
        return cls(commit=commit, message=message, moved=work.moved)


def find_commit_without_source(conversion: Conversion) -> Commit | None:
    """Return the target's commit if the source was removed and the target is an intact result of this conversion."""
    with contextlib.suppress(SourceError, OSError):
        if conversion.source.exists():
            return None
        commit = read_commit(conversion.target)
        zero = commit.topology.zero if conversion.keeps_stage else conversion.topology.zero
        if conversion.has_made(commit, dataclasses.replace(conversion.topology, zero=zero)):
            check_files(conversion.target, commit)
            return commit
    return None


def find_commit(conversion: Conversion, plan: Plan, *, crc: bool = False) -> Commit | None:
    """Return the target's commit if this plan made it and all its files are there; None if the target is free.

    Args:
        conversion: source, target and what to do.
        plan: of the conversion; a plan of other source or target files is another one.
        crc: also compare the checksums of the target's files.

    Raises:
        TargetTakenError: the target holds something else.
        SourceChangedError: the target holds the result of this command for an earlier content of the source.
    """
    if is_vacant(conversion.target):
        return None
    commit = None
    with contextlib.suppress(SourceError):
        commit = read_commit(conversion.target)
        if commit.options == {**conversion.options, PLAN: plan.fingerprint}:
            check_files(conversion.target, commit, crc=crc)
            return commit
    if commit is not None and conversion.has_made(commit, plan.layout.topology):
        refuse_other_content(commit, plan, conversion.target)
    raise taken_error(conversion.target)


@contextlib.contextmanager
def claim_target(
    conversion: Conversion, plan: Plan, options: RunOptions, *, check_source: Callable[[], None]
) -> Iterator[Done | Path]:
    """Claim the target: yield the result that is there already, or a staging folder to make it in.

    Args:
        conversion: source, target and what to do.
        plan: of the conversion.
        options: say who may share the staging folder, and whether to read a result that is there.
        check_source: called before a staging folder is made, and not where the result is there.

    Raises:
        TargetTakenError: the target holds something else.
        SourceChangedError: the target holds the result of what the source was before.
        TargetError: no staging folder can be made, or another run works in it.
    """
    commit = find_commit(conversion, plan, crc=options.reread)
    if commit is not None:
        check_origin(commit, plan, conversion.target)
        yield Done(commit=commit, message="already converted and committed")
        return
    check_source()
    sharing = options.sharing
    with (
        staging(conversion.target, plan.fingerprint, plan.bytes_to_write, sharing) as folder,
        note_kept_work(folder, plan, sharing),
    ):
        commit = find_commit(conversion, plan)  # another worker may have published it while this one checked the source
        if commit is None:
            yield folder
            return
        shutil.rmtree(folder, ignore_errors=True)
        yield Done.by_other_run(commit, plan, sharing, Work())


def make_commit(plan: Plan, conversion: Conversion, outcome: Outcome) -> Commit:
    """Return the commit of a verified result."""
    files = [
        CommittedFile(path=file.path, num_bytes=file.num_bytes, crc32=crc32)
        for file, crc32 in zip(plan.layout.files, outcome.file_crc32, strict=True)
    ]
    data = {}
    with contextlib.suppress(SourceError):
        data = dict(read_commit(conversion.source).data)
    return Commit(
        format=plan.layout.format,
        step=plan.index.step,
        samples=plan.index.samples,
        topology=plan.layout.topology,
        attempt=conversion.attempt,
        writer="reshard",
        files=files,
        digests=outcome.digests,
        data=data,
        model=plan.layout.model,
        source=path_to_text(conversion.source),
        options={**conversion.options, PLAN: plan.fingerprint},
        origin=origin_of(plan, outcome),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        owner=conversion.owner,
    )


@timed("publish")
def publish(folder: Path, conversion: Conversion, plan: Plan, commit: Commit, pointer: Path | None) -> Commit:
    """Write the commit marker, rename the staging folder to the target, and let the file `pointer` name the target.

    Returns:
        The target's commit: `commit`, or that of another run which was faster.
    """
    with target_errors(folder, commit.num_bytes):
        shutil.rmtree(folder / JOURNAL_FOLDER, ignore_errors=True)
        for draft in folder.glob(f".{COMMIT_FILE}.*"):  # a run that was killed while it wrote the marker left these
            draft.unlink(missing_ok=True)
        write_commit(folder, commit)
    try:
        folder.rename(conversion.target)
    except OSError as error:
        # Another run of the same conversion may have been faster; its result is as good.
        other = find_commit(conversion, plan)
        if other is None:
            raise TargetError(f"cannot be published: {error}", path=str(conversion.target)) from error
        commit = other
    else:
        # A worker that came late may have begun a new journal; nobody finds the folder by its old name any more.
        shutil.rmtree(conversion.target / JOURNAL_FOLDER, ignore_errors=True)
        sync_folder(conversion.target.parent)
    if pointer is not None:
        write_latest(pointer, conversion.target)
    # Workers that come late wait for this file: remove it only when the pointer is written.
    (conversion.target / FINISH_FILE).unlink(missing_ok=True)
    return commit


def name_latest(pointer: Path | None, target: Path, sharing: Sharing) -> str:
    """Let the file `pointer` name a target that was there already; return the file's path, or "" if it does not.

    Of several workers, the one that publishes writes the file. A worker may come so late that training has gone on from
    the target and has named newer checkpoints: it leaves the file alone, unless the worker that published died before
    it wrote the file.
    """
    if pointer is None:
        if sharing is not Sharing.TOGETHER:  # a run that was killed after the rename left the file
            (target / FINISH_FILE).unlink(missing_ok=True)
        return ""
    if sharing is Sharing.TOGETHER and pointer.exists() and not (target / FINISH_FILE).exists():
        return ""
    write_latest(pointer, target)
    (target / FINISH_FILE).unlink(missing_ok=True)
    return str(pointer)
