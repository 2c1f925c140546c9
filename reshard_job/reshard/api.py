"""`reshard` as a library: index, plan, check, execute, verify, publish."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reshard.commits.commit import (
    VIRTUAL,
    Commit,
    CommittedFile,
    check_files,
    plain,
    read_commit,
    source_of,
    taken,
    vacant,
    write_commit,
)
from reshard.commits.latest import latest_file, point
from reshard.commits.staging import FINISH_FILE, Sharing, only_one, staging
from reshard.contract import COMMIT_FILE, ReshardReport
from reshard.conversion import PLAN, Conversion
from reshard.errors import (
    PlanError,
    ReshardError,
    SourceError,
    TargetError,
    UncommittedError,
    UsageError,
)
from reshard.execution.executor import Mover, Outcome, Progress
from reshard.execution.journal import FOLDER as JOURNAL_FOLDER
from reshard.execution.journal import Journal
from reshard.execution.origin import (
    Origin,
    check_origin,
    join,
    origin_of,
    refuse_changed,
    refuse_other_content,
    with_identities,
)
from reshard.execution.read_back import read_back
from reshard.execution.report import done_report
from reshard.execution.resume import Moved, Resumed, Work, do, kept
from reshard.execution.source_checks import (
    check_digests,
    check_matches_commit,
    check_metadata,
    check_settings,
    damage_first,
    places_digest,
)
from reshard.formats import format_of, read_checkpoint
from reshard.formats.base import Request
from reshard.formats.deepspeed import FORMAT as DEEPSPEED
from reshard.formats.pt.trust import trusting
from reshard.planning.check import check_plan
from reshard.planning.plan import Plan, make_plan
from reshard.storage.durable import sync_folder
from reshard.storage.files import identity_at, noting_opened
from reshard.storage.object_store import RemotePath, location
from reshard.storage.source_reader import changed
from reshard.storage.target_writer import target_errors
from reshard.system.limits import DEFAULT_MEMORY_BYTES, default_num_threads
from reshard.tensors.layout import Index
from reshard.tensors.views import select_states
from reshard.topology import Topology

__all__ = ("Conversion", "convert", "index_of", "plan_conversion", "plan_of", "reshard", "view_of")

_REMOTE_THREADS = 8
_BY_ANOTHER = "converted by another run, which was faster; what this one had done is removed"


def index_of(source: Path, *, require_commit: bool = False, patterns: Path | None = None) -> Index:
    """Index a checkpoint; one with a commit marker must have all files in their committed sizes, and match the marker.

    Args:
        source: folder of one checkpoint.
        require_commit: refuse one without a marker.
        patterns: file that says how tensor parallelism cut a DeepSpeed checkpoint which does not say it.

    Raises:
        UsageError: the patterns cannot be read, or the source needs none.
        UncommittedError: there is no marker and `require_commit` asks for one.
        SourceError: damaged, or of no known format.
    """
    marker = None
    with contextlib.suppress(UncommittedError):
        marker = read_commit(source)
    if marker is not None and marker.format == VIRTUAL:  # its bytes, and all that is known of them, are where it leads
        check_files(source, marker)
        source, require_commit = source_of(source, marker), False
    if isinstance(source, RemotePath):
        source.forget()
    with noting_opened() as opened:
        with contextlib.suppress(OSError):  # it has no marker
            opened[f"{source}/{COMMIT_FILE}"] = identity_at(source / COMMIT_FILE)
        commit = _checked_commit(source, require_commit=require_commit)
        index = read_source(source, commit, patterns)
    index = with_identities(index, opened, commit)
    if commit is not None:
        check_matches_commit(index, commit, told=patterns is not None)
    return index


def _checked_commit(source: Path, *, require_commit: bool) -> Commit | None:
    try:
        commit = read_commit(source)
        check_files(source, commit)
    except UncommittedError:
        if require_commit:
            raise
        return None
    return commit


def read_source(source: Path, commit: Commit | None, patterns: Path | None = None) -> Index:
    """Index a checkpoint whose marker is known; see `index_of`."""
    if patterns is None:
        return read_checkpoint(source, commit)
    from reshard.formats.deepspeed.tensor_parallel import pattern_file
    from reshard.formats.universal import FORMAT as UNIVERSAL  # most commands name no patterns

    told = pattern_file.load(patterns)
    if UNIVERSAL.sniff(source) is None:
        return UNIVERSAL.read(source, commit, told)
    if (reason := DEEPSPEED.sniff(source)) is not None:
        raise UsageError(f"patterns are for DeepSpeed's checkpoints: {reason}", path=str(source))
    return DEEPSPEED.read(source, commit, told)


def plan_of(
    index: Index,
    target: Topology | Request,
    *,
    target_format: str = "",
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    num_threads: int = 0,
    agreement: bool = True,
) -> Plan:
    """Lay out, plan and prove a conversion; nothing is written.

    Args:
        index: the source.
        target: what it shall become; a topology alone keeps everything else.
        target_format: name of a format; empty for the source's.
        memory_bytes: for buffers.
        num_threads: 0 for the processors that this process may use.
        agreement: compare what the source holds twice: copies of a tensor, and weights with their masters.

    Raises:
        UnsupportedError: the conversion would need a guess.
        PlanError: the plan is not exact.
    """
    if index.unread is not None:
        raise index.unread
    request = Request(topology=target) if isinstance(target, Topology) else target
    layout = format_of(target_format or index.format).layout(index, request)
    if request.like is not None and layout.format == index.format:
        note = f"settings, schedule and all that is not tensors are those of {request.like.root}, not of the source"
        layout = dataclasses.replace(layout, notes=(*layout.notes, note))
    if layout.zeros is None:
        raise PlanError(f"the format {layout.format} does not say which bytes of its files are padding")
    plan = make_plan(
        index,
        layout,
        memory_bytes=memory_bytes,
        num_threads=num_threads or _num_threads(index),
        agreement=agreement,
    )
    check_plan(plan)
    return plan


def _num_threads(index: Index) -> int:
    """A store answers many requests at a time, whatever processors there are here."""
    return _REMOTE_THREADS if isinstance(index.root, RemotePath) else default_num_threads()


def view_of(index: Index, *, states: tuple[str, ...] = (), names: Path | None = None) -> Index:
    """A checkpoint as it shall be seen: only some states, in other names.

    Raises:
        UsageError: the name map cannot be read.
        UnsupportedError: a state that is not there, or a name map that does not fit.
    """
    index = select_states(index, states)
    if names is None:
        return index
    from reshard.names import load, rename  # by those who need them: see `reshard.cli.commands`

    return rename(index, load(names))


def plan_conversion(wanted: Conversion, *, memory_bytes: int = DEFAULT_MEMORY_BYTES, num_threads: int = 0) -> Plan:
    """Index the source and plan the conversion; nothing is written.

    Raises:
        ReshardError: see `reshard.errors`.
    """
    with trusting(wanted.allow_globals), damage_first():
        index = index_of(wanted.source, require_commit=wanted.require_commit, patterns=wanted.patterns)
        request = Request(
            topology=_topology(index, wanted),
            weight_dtype=wanted.weight_dtype,
            like=None if wanted.like is None else _example(wanted.like),
            file_bytes=wanted.file_bytes,
        )
        return plan_of(
            view_of(index, states=wanted.states, names=wanted.names),
            request,
            target_format=wanted.target_format,
            memory_bytes=memory_bytes,
            num_threads=num_threads,
            agreement=not wanted.allow_differences,
        )


def _example(folder: Path) -> Index:
    """The checkpoint that says what the source cannot: all that it says must be what was committed."""
    index = index_of(folder)
    check_settings(index)
    return index


def _topology(index: Index, wanted: Conversion) -> Topology:
    if wanted.keeps_stage and index.format == DEEPSPEED.name and wanted.target_format in ("", DEEPSPEED.name):
        return dataclasses.replace(wanted.topology, zero=index.topology.zero)
    return wanted.topology


def convert(
    wanted: Conversion,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    num_threads: int = 0,
    reread: bool = False,
    sync: bool = True,
    bytes_per_second: float | None = None,
    sharing: Sharing = Sharing.ALONE,
    worker: tuple[int, int] = (0, 1),
    latest: bool = False,
    progress: Progress | None = None,
    planned: Callable[[Plan], None] | None = None,
    resumed: Callable[[Resumed], None] | None = None,
    plan: Plan | None = None,
) -> ReshardReport:
    """Convert a checkpoint.

    The target appears complete, verified and with its commit marker, or not at all. A target that was committed by
    the same conversion before is left as it is.

    Args:
        wanted: source, target and what to do.
        memory_bytes: for buffers.
        num_threads: 0 for the processors that this process may use.
        reread: read the whole result back through the format's reader before it is published.
        sync: have every file on stable storage before it is published.
        bytes_per_second: read no faster than that, all threads together.
        sharing: alone, resumable after a failure, or together with other workers.
        worker: which of how many workers, from 0.
        latest: let the file in which the framework looks for a checkpoint name the target, see `_name_latest`.
        progress: told about bytes moved.
        planned: shown the plan before a byte moves.
        resumed: told what an earlier run had done, where a run may go on with that.
        plan: of the conversion with these buffers and threads, where it is known already.

    Raises:
        ReshardError: see `reshard.errors`.
    """
    report = functools.partial(done_report, source=wanted.source, target=wanted.target, started=time.monotonic())
    if (done := done_without_source(wanted)) is not None:
        named = _name_latest(latest_file(wanted.target, done.format) if latest else None, wanted.target, sharing)
        what = "already converted and committed; the source is gone"
        return report(done, message=what, latest=named)
    plan = plan or plan_conversion(wanted, memory_bytes=memory_bytes, num_threads=num_threads)
    pointer = latest_file(wanted.target, plan.layout.format) if latest else None
    done = already_done(wanted, plan, crc=reread)
    if done is not None:
        check_origin(done, plan, wanted.target)
        named = _name_latest(pointer, wanted.target, sharing)
        return report(done, message="already converted and committed", latest=named)
    origin = Origin.of(plan.index, wanted.request)
    if sharing is not Sharing.ALONE:
        refuse_changed(origin, wanted.source, wanted.target)
    checked = check_metadata(plan.index)
    if planned is not None:
        planned(plan)
    with staging(wanted.target, plan.fingerprint, plan.bytes_to_write, sharing) as folder, kept(folder, plan, sharing):
        outcome: Outcome | None = None
        work = Work()
        done = already_done(wanted, plan)  # by another worker, while this one planned
        if done is None:
            join(origin, wanted.source, folder, sharing)
            with Mover(plan, folder, sync=sync, bytes_per_second=bytes_per_second, progress=progress) as mover:
                work = do(mover, folder, sharing, worker, resumed)
                with only_one(folder):
                    done = already_done(wanted, plan)
                    if done is None:
                        records = work.records if sharing is Sharing.ALONE else Journal(folder).records()
                        touched = join(origin, wanted.source, folder, sharing)
                        outcome = mover.finish(records, fresh=sharing is Sharing.ALONE, touched=touched)
                        if outcome.touched:
                            _check_indexed_alike(wanted, plan, outcome)
                        check_digests(plan, outcome.digests, told=wanted.patterns is not None)
                        commit = _commit(plan, wanted, outcome)
                        with ThreadPoolExecutor(1) as pool, trusting(wanted.allow_globals):
                            synced = pool.submit(mover.sync)  # the storage works while the result is read back
                            read_back(folder, plan, commit, reread=reread)
                            synced.result()
                        done = _publish(folder, wanted, plan, commit, pointer)
        if outcome is None:
            shutil.rmtree(folder, ignore_errors=True)
            named = _name_latest(pointer, wanted.target, sharing)
            what = f"converted together with other workers: {work.share(plan)} by this one"
            what = what if sharing is Sharing.TOGETHER else _BY_ANOTHER
            return report(done, message=what, moved=work.moved, latest=named)
    tensors = "1 tensor" if len(outcome.digests) == 1 else f"{len(outcome.digests)} tensors"
    message = f"converted {_what(plan)}, {tensors} verified{work.resumed}"
    moved = Moved(outcome.bytes_read + checked, outcome.bytes_written).less(work.before)
    return report(done, moved=moved, message=message, latest="" if pointer is None else str(pointer))


def _check_indexed_alike(wanted: Conversion, plan: Plan, outcome: Outcome) -> None:
    """Files that somebody touched say the same of what lies where as before.

    Raises:
        SourceChangedError: they do not.
    """
    with contextlib.suppress(ReshardError):
        again = plan_conversion(wanted, memory_bytes=plan.memory_bytes, num_threads=plan.num_threads)
        if again.fingerprint == plan.fingerprint and places_digest(again.index) == places_digest(plan.index):
            return
    raise changed(
        [f"{path}: is not the file that was indexed" for path in sorted(outcome.touched)], str(plan.index.root)
    )


def _what(plan: Plan) -> str:
    """What becomes what, in words."""
    if plan.index.format == plan.layout.format:
        return f"{plan.index.topology} to {plan.layout.topology}"
    return f"{plan.index.format} {plan.index.topology} to {plan.layout.format}"


def reshard(source: Path | str, target: Path | str, topology: Topology | str, *, reread: bool = False) -> ReshardReport:
    """Convert checkpoint folder `source` to `topology` in the new folder `target`: `convert` with all defaults.

    Texts mean what they mean on a command line: a source may be a URL, a topology without a ZeRO stage keeps it.

    Raises:
        ReshardError: see `reshard.errors`.
    """
    wanted = Conversion(
        source=location(source).absolute() if isinstance(source, str) else source,
        target=Path(target).absolute() if isinstance(target, str) else target,
        topology=Topology.parse(topology) if isinstance(topology, str) else topology,
        keeps_stage=isinstance(topology, str) and "zero" not in topology,
    )
    return convert(wanted, reread=reread)


def done_without_source(wanted: Conversion) -> Commit | None:
    """The target's commit where the source is gone since, if it is intact and of this conversion."""
    with contextlib.suppress(SourceError, OSError):
        if wanted.source.exists():
            return None
        commit = read_commit(wanted.target)
        zero = commit.topology.zero if wanted.keeps_stage else wanted.topology.zero
        if wanted.has_made(commit, dataclasses.replace(wanted.topology, zero=zero)):
            check_files(wanted.target, commit)
            return commit
    return None


def already_done(wanted: Conversion, plan: Plan, *, crc: bool = False) -> Commit | None:
    """The target's commit, if this very plan made it (same source files, same target files) and its files are there.

    Raises:
        TargetTakenError: there is something else.
        SourceChangedError: there is what this command made of the source when that was another one.
    """
    if vacant(wanted.target):
        return None
    commit = None
    with contextlib.suppress(SourceError):
        commit = read_commit(wanted.target)
        if commit.options == {**wanted.options, PLAN: plan.fingerprint}:
            check_files(wanted.target, commit, crc=crc)
            return commit
    if commit is not None and wanted.has_made(commit, plan.layout.topology):
        refuse_other_content(commit, plan, wanted.target)
    raise taken(wanted.target)


def _commit(plan: Plan, wanted: Conversion, outcome: Outcome) -> Commit:
    files = [
        CommittedFile(path=file.path, num_bytes=file.num_bytes, crc32=crc32)
        for file, crc32 in zip(plan.layout.files, outcome.file_crc32, strict=True)
    ]
    data = {}
    with contextlib.suppress(SourceError):
        data = dict(read_commit(wanted.source).data)
    return Commit(
        format=plan.layout.format,
        step=plan.index.step,
        samples=plan.index.samples,
        topology=plan.layout.topology,
        attempt=wanted.attempt,
        writer="reshard",
        files=files,
        digests=outcome.digests,
        data=data,
        model=plan.layout.model,
        source=plain(wanted.source),
        options={**wanted.options, PLAN: plan.fingerprint},
        origin=origin_of(plan, outcome),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        owner=wanted.owner,
    )


def _publish(folder: Path, wanted: Conversion, plan: Plan, commit: Commit, pointer: Path | None) -> Commit:
    """Commit the result, let it appear under its name, and let the file `pointer` name it."""
    with target_errors(folder, commit.num_bytes):
        shutil.rmtree(folder / JOURNAL_FOLDER, ignore_errors=True)
        for draft in folder.glob(f".{COMMIT_FILE}.*"):  # of a run that was killed as it wrote the marker
            draft.unlink(missing_ok=True)
        write_commit(folder, commit)
    try:
        folder.rename(wanted.target)
    except OSError as error:
        # Another run of the same conversion may have been faster; its result is as good.
        done = already_done(wanted, plan)
        if done is None:
            raise TargetError(f"cannot be published: {error}", path=str(wanted.target)) from error
    else:
        done = commit
        # A worker that came late may have begun a journal again; by its old name nobody finds the folder any more.
        shutil.rmtree(wanted.target / JOURNAL_FOLDER, ignore_errors=True)
        sync_folder(wanted.target.parent)
    if pointer is not None:
        point(pointer, wanted.target)
    (wanted.target / FINISH_FILE).unlink(missing_ok=True)  # not before: workers that come late wait for it
    return done


def _name_latest(pointer: Path | None, target: Path, sharing: Sharing) -> str:
    """Let the file name a target that was there already; the file, if it does now.

    Of several workers the one that publishes does it. Another may come so late that training goes on from the target
    and names newer checkpoints: it leaves the file alone, unless the one that published has died before it did it.
    """
    if pointer is None:
        if sharing is not Sharing.TOGETHER:  # of a run that was killed behind the rename
            (target / FINISH_FILE).unlink(missing_ok=True)
        return ""
    if sharing is Sharing.TOGETHER and pointer.exists() and not (target / FINISH_FILE).exists():
        return ""
    point(pointer, target)
    (target / FINISH_FILE).unlink(missing_ok=True)
    return str(pointer)
