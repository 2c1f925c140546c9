"""`reshard` as a library: index a checkpoint, plan a conversion, convert."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reshard.commits.commit import VIRTUAL, Commit, check_files, read_commit, source_of
from reshard.commits.latest import is_training_folder, latest_file
from reshard.commits.staging import Sharing, hold_finish_lock
from reshard.contract import COMMIT_FILE, ReshardReport
from reshard.conversion import Conversion, RunOptions
from reshard.errors import PlanError, ReshardError, UncommittedError, UsageError
from reshard.execution.averages import describe_differences
from reshard.execution.executor import Mover, Outcome, Progress, can_fork
from reshard.execution.journal import Journal
from reshard.execution.origin import Origin, add_identities, refuse_changed, register_run
from reshard.execution.read_back import read_back
from reshard.execution.report import done_report
from reshard.execution.resume import Moved, Resumed, Work, do_units
from reshard.execution.source_checks import (
    check_digests,
    check_matches_commit,
    check_metadata,
    check_settings,
    places_digest,
    report_damage_first,
)
from reshard.folders import lay_out, read_checkpoint
from reshard.formats import format_of
from reshard.formats.base import Request
from reshard.formats.pt.trust import trusting
from reshard.planning.check import check_plan
from reshard.planning.plan import Plan, make_plan
from reshard.profile.collector import collected, timed
from reshard.storage.files import identity_at, record_opened_files
from reshard.storage.object_store import RemotePath, location
from reshard.storage.source_reader import source_changed_error
from reshard.system.limits import DEFAULT_MEMORY_BYTES, default_num_threads
from reshard.target import (
    Done,
    claim_target,
    find_commit,
    find_commit_without_source,
    make_commit,
    name_latest,
    publish,
)
from reshard.tensors.layout import Index
from reshard.tensors.views import select_states
from reshard.topology import Topology
from reshard.witnessed import Witness, ask, witness_of

__all__ = (
    "Conversion",
    "Hooks",
    "RunOptions",
    "convert",
    "index_of",
    "plan_conversion",
    "plan_of",
    "reshard",
    "view_of",
)

_REMOTE_THREADS = 4
"""Threads that each fetch the ranges of a unit at the same time: a store answers many requests at a time, however few
processors this machine has."""


@timed("index")
def index_of(
    source: Path, *, require_commit: bool = False, patterns: Path | None = None, ds_config: Path | None = None
) -> Index:
    """Index a checkpoint from its metadata.

    If the checkpoint has a commit marker, all its files must have their committed sizes and match the marker. A virtual
    commit is followed to its source.

    Args:
        source: folder of one checkpoint, or a training folder with one inside (`reshard.folders`).
        require_commit: refuse a checkpoint without a marker.
        patterns: file that says how tensor parallelism cut a DeepSpeed checkpoint which does not say it.
        ds_config: DeepSpeed's configuration of the run that saved an elastic checkpoint.

    Raises:
        UsageError: a file cannot be read, or the source takes none.
        UncommittedError: there is no marker and `require_commit` asks for one.
        SourceError: damaged, or of no known format.

    >>> index = index_of(Path("ckpt/global_step2"))
    >>> index.format, str(index.topology), len(index.tensors)
    ('deepspeed', 'tp=1,pp=1,dp=3,zero=2', 29)
    """
    marker = None
    with contextlib.suppress(UncommittedError):
        marker = read_commit(source)
    if marker is not None and marker.format == VIRTUAL:  # its bytes, and all that is known of them, are in its source
        check_files(source, marker)
        source, require_commit = source_of(source, marker), False
    if isinstance(source, RemotePath):
        source.forget()
    with record_opened_files() as opened:
        with contextlib.suppress(OSError):  # a checkpoint without a marker
            opened[f"{source}/{COMMIT_FILE}"] = identity_at(source / COMMIT_FILE)
        commit = _checked_commit(source, require_commit=require_commit)
        index = read_checkpoint(source, commit, patterns, ds_config)
    index = add_identities(index, opened, commit)
    if commit is not None:
        check_matches_commit(index, commit, has_patterns=patterns is not None)
    return index


def _checked_commit(source: Path, *, require_commit: bool) -> Commit | None:
    """Read a source's commit marker and compare the sizes of its files; return None if there is no marker."""
    try:
        commit = read_commit(source)
        check_files(source, commit)
    except UncommittedError:
        if require_commit:
            raise
        return None
    return commit


@timed("plan")
def plan_of(
    index: Index,
    target: Topology | Request,
    *,
    target_format: str = "",
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    num_threads: int = 0,
    agreement: bool = True,
) -> Plan:
    """Lay out the target, plan the conversion and prove the plan exact; write nothing.

    Args:
        index: the source.
        target: what the source shall become; a topology alone keeps everything else.
        target_format: name of a format; empty for the source's.
        memory_bytes: for buffers.
        num_threads: 0 for the processors that this process may use.
        agreement: compare what the source holds twice: copies of a tensor, and weights with their masters.

    Raises:
        UnsupportedError: the conversion would need a guess.
        PlanError: the plan is not exact.

    >>> plan = plan_of(index_of(Path("ckpt/global_step2")), Topology(dp=2, zero=2))
    >>> [file.path for file in plan.layout.files][-1]
    'zero_pp_rank_1_mp_rank_00_optim_states.pt'
    """
    if index.unread is not None:
        raise index.unread
    request = Request(topology=target) if isinstance(target, Topology) else target
    layout = lay_out(index, request, target_format)
    if request.like is not None and layout.format == index.format:
        note = f"settings, schedule and all that is not tensors are those of {request.like.root}, not of the source"
        layout = dataclasses.replace(layout, notes=(*layout.notes, note))
    if layout.zeros is None:
        raise PlanError(f"the format {layout.format} does not say which bytes of its files are padding")
    plan = make_plan(
        index,
        layout,
        memory_bytes=memory_bytes,
        num_threads=num_threads or _default_num_threads(index),
        agreement=agreement,
    )
    check_plan(plan)
    return plan


def _default_num_threads(index: Index) -> int:
    return _REMOTE_THREADS if isinstance(index.root, RemotePath) else default_num_threads()


def view_of(index: Index, *, states: tuple[str, ...] = (), names: Path | None = None) -> Index:
    """Return a checkpoint's index with only some states, in other names.

    Args:
        index: the checkpoint.
        states: states to keep; empty for all.
        names: file with a name map (`reshard.names`), or None to keep the names.

    Raises:
        UsageError: the name map cannot be read.
        UnsupportedError: the checkpoint has no such state, or the name map does not fit it.

    >>> index = view_of(index_of(Path("ckpt/global_step2")), states=("weight",))
    >>> {tensor.key.state for tensor in index.tensors}
    {'weight'}
    """
    index = select_states(index, states)
    if names is None:
        return index
    from reshard.names import load, rename  # only conversions with a name map pay for this import

    return rename(index, load(names))


def plan_conversion(conversion: Conversion, *, memory_bytes: int = DEFAULT_MEMORY_BYTES, num_threads: int = 0) -> Plan:
    """Index the source and plan the conversion; write nothing.

    Raises:
        ReshardError: see `reshard.errors`.

    >>> source, target = Path("ckpt/global_step2"), Path("out/weights")
    >>> conversion = Conversion(source=source, target=target, topology=Topology(), target_format="safetensors")
    >>> plan_conversion(conversion).summary()["files_to_write"]
    1
    """
    with trusting(conversion.allow_globals), report_damage_first():
        index = index_of(
            conversion.source,
            require_commit=conversion.require_commit,
            patterns=conversion.patterns,
            ds_config=conversion.source_config,
        )
        request = Request(
            topology=_topology(index, conversion),
            weight_dtype=conversion.weight_dtype,
            like=None if conversion.like is None else _template(conversion.like),
            model=conversion.model,
            ds_config=None if conversion.model is None else conversion.ds_config,
            keeps_stage=conversion.keeps_stage,
            file_bytes=conversion.file_bytes,
        )
        return plan_of(
            view_of(index, states=conversion.states, names=conversion.names),
            request,
            target_format=conversion.target_format,
            memory_bytes=memory_bytes,
            num_threads=num_threads,
            agreement=not conversion.allow_differences,
        )


def _template(folder: Path) -> Index:
    """Index the checkpoint that says what the source cannot, and compare its settings with its commit."""
    index = index_of(folder)
    check_settings(index)
    return index


def _topology(index: Index, conversion: Conversion) -> Topology:
    """Return the target's topology; it has the source's ZeRO stage if nobody asked for one and the format keeps it."""
    keeps_format = conversion.target_format in ("", index.format)
    if conversion.keeps_stage and keeps_format and format_of(index.format).keeps_zero_stage:
        return dataclasses.replace(conversion.topology, zero=index.topology.zero)
    return conversion.topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Functions that a conversion calls on its way.

    Attributes:
        on_plan: called with the plan before a byte moves.
        on_resume: called with what an earlier run had done, where this run may go on with it.
        on_progress: called with each number of bytes that was moved.
    """

    on_plan: Callable[[Plan], None] | None = None
    on_resume: Callable[[Resumed], None] | None = None
    on_progress: Progress | None = None


_DEFAULTS, _NO_HOOKS = RunOptions(), Hooks()


@collected
def convert(
    conversion: Conversion, options: RunOptions = _DEFAULTS, *, hooks: Hooks = _NO_HOOKS, plan: Plan | None = None
) -> ReshardReport:
    """Convert a checkpoint.

    The target appears complete, verified and with its commit marker, or not at all. A target that the same conversion
    committed before stays as it is.

    Args:
        conversion: source, target and what to do.
        options: how to do it.
        hooks: functions to call on the way.
        plan: of this conversion, with the buffers and threads of `options`; None to plan it here.

    Raises:
        ReshardError: see `reshard.errors`.

    >>> source, target = Path("ckpt/global_step2"), Path("out/weights")
    >>> conversion = Conversion(source=source, target=target, topology=Topology(), target_format="safetensors")
    >>> report = convert(conversion, RunOptions(reread=True))
    >>> report.message
    'converted deepspeed tp=1,pp=1,dp=3,zero=2 to safetensors, 8 tensors verified'
    """
    report = functools.partial(
        done_report, source=conversion.source, target=conversion.target, started=time.monotonic()
    )
    if (commit := find_commit_without_source(conversion)) is not None:
        pointer = _pointer(conversion, options, commit.format, is_training_folder=is_training_folder(commit))
        latest = name_latest(pointer, conversion.target, options.sharing)
        return report(commit, message="already converted and committed; the source is gone", latest=latest)
    if plan is None:
        plan = plan_conversion(conversion, memory_bytes=options.memory_bytes, num_threads=options.num_threads)
    run = _Run(conversion, options, hooks, plan)
    with claim_target(conversion, plan, options, check_source=run.check_source) as claim:
        done = claim if isinstance(claim, Done) else run.make(claim)
        latest = run.name_latest(done)
    return report(done.commit, message=done.message, moved=done.moved, latest=latest)


class _Run:
    """The steps of one conversion from its plan to its published target.

    Args:
        conversion: source, target and what to do.
        options: how to do it.
        hooks: functions to call on the way.
        plan: of the conversion.
    """

    def __init__(self, conversion: Conversion, options: RunOptions, hooks: Hooks, plan: Plan) -> None:
        self._conversion, self._options, self._hooks, self._plan = conversion, options, hooks, plan
        self._pointer = _pointer(conversion, options, plan.layout.format, is_training_folder=bool(plan.layout.folder))
        self._origin = Origin.of(plan.index, conversion.request)
        self._checked_bytes = 0

    @timed("check source")
    def check_source(self) -> None:
        """Refuse a source that changed since an unfinished run, or whose metadata is not what was committed."""
        if self._options.sharing is not Sharing.ALONE:
            refuse_changed(self._origin, self._conversion.source, self._conversion.target)
        self._checked_bytes = check_metadata(self._plan.index)
        if self._hooks.on_plan is not None:
            self._hooks.on_plan(self._plan)

    def make(self, folder: Path) -> Done:
        """Execute the plan in a staging folder, verify the result and publish it, unless another worker does."""
        plan, sharing = self._plan, self._options.sharing
        self._join(folder)
        witness = witness_of(plan, self._conversion, folder)
        sync, rate = self._options.sync, self._options.bytes_per_second
        with (
            witness.started(may_fork=sharing is not Sharing.TOGETHER and not plan.is_remote and can_fork()),
            Mover(
                plan,
                folder,
                sync=sync,
                bytes_per_second=rate,
                progress=self._hooks.on_progress,
                adapts=not self._options.num_threads,
            ) as mover,
        ):
            work = do_units(mover, folder, sharing, self._options.worker, self._hooks.on_resume)
            with hold_finish_lock(folder):
                commit = find_commit(self._conversion, plan)
                if commit is None:
                    outcome = self._finish(mover, folder, work)
                    commit = self._verify(mover, folder, outcome, witness)
                    commit = publish(folder, self._conversion, plan, commit, self._pointer)
                    return self._done(commit, outcome, work)
        shutil.rmtree(folder, ignore_errors=True)
        return Done.by_other_run(commit, plan, sharing, work)

    def name_latest(self, done: Done) -> str:
        """Return the path of the file that names the target as the latest checkpoint; empty if none does."""
        if done.is_published_here:
            return "" if self._pointer is None else str(self._pointer)
        return name_latest(self._pointer, self._conversion.target, self._options.sharing)

    def _join(self, folder: Path) -> set[str]:
        return register_run(self._origin, self._conversion.source, folder, self._options.sharing)

    @timed("prove")
    def _finish(self, mover: Mover, folder: Path, work: Work) -> Outcome:
        """Complete the files from the records of all workers."""
        is_alone = self._options.sharing is Sharing.ALONE
        records = work.records if is_alone else Journal(folder).records()
        if self._options.sharing is Sharing.TOGETHER:
            mover.collect_times(records)  # of all workers
        touched = self._join(folder)
        return mover.finish(records, fresh=is_alone, touched=touched)

    def _verify(self, mover: Mover, folder: Path, outcome: Outcome, witness: Witness) -> Commit:
        """Compare what was read and written with what the source states, and return the commit to publish."""
        if outcome.touched:
            self._check_touched(outcome)
        check_digests(self._plan, outcome.digests, has_patterns=self._conversion.patterns is not None)
        commit = make_commit(self._plan, self._conversion, outcome)
        ask(witness, commit, self._plan)  # it compares while the result is read back and the storage works
        with ThreadPoolExecutor(1) as pool, trusting(self._conversion.allow_globals):
            synced = pool.submit(mover.sync)
            read_back(folder, self._plan, commit, reread=self._options.reread)
            found = timed("witness")(witness.wait)()
            synced.result()
        return dataclasses.replace(commit, witness=found)

    def _check_touched(self, outcome: Outcome) -> None:
        """Index the source again: files that were touched during the run must still hold the same tensors in place.

        Raises:
            SourceChangedError: they do not.
        """
        plan = self._plan
        with contextlib.suppress(ReshardError):
            again = plan_conversion(self._conversion, memory_bytes=plan.memory_bytes, num_threads=plan.num_threads)
            if again.fingerprint == plan.fingerprint and places_digest(again.index) == places_digest(plan.index):
                return
        problems = [f"{path}: is not the file that was indexed" for path in sorted(outcome.touched)]
        raise source_changed_error(problems, str(plan.index.root))

    def _done(self, commit: Commit, outcome: Outcome, work: Work) -> Done:
        tensors = "1 tensor" if len(outcome.digests) == 1 else f"{len(outcome.digests)} tensors"
        averaged = "".join(f"; {text}" for text in (describe_differences(outcome.averaged),) if text)
        moved = Moved(outcome.bytes_read + self._checked_bytes, outcome.bytes_written).less(work.before)
        return Done(
            commit=commit,
            message=f"converted {_change(self._plan)}, {tensors} verified{averaged}{work.resumed}",
            moved=moved,
            is_published_here=True,
        )


def _pointer(
    conversion: Conversion, options: RunOptions, target_format: str, *, is_training_folder: bool
) -> Path | None:
    """Return the file that shall name the target as the latest checkpoint, or None if none shall.

    Raises:
        UsageError: the target cannot be named, see `latest_file`; or it is a training folder, which nobody looks for.
    """
    if options.latest and is_training_folder:
        raise UsageError(
            "--latest: the result is a whole training folder, whose own file names the checkpoint inside",
            path=str(conversion.target),
            hint="leave --latest out",
        )
    return latest_file(conversion.target, target_format) if options.latest else None


def _change(plan: Plan) -> str:
    """Say from which topology, and format if it changes, to which one a plan converts."""
    if plan.index.format == plan.layout.format:
        return f"{plan.index.topology} to {plan.layout.topology}"
    return f"{plan.index.format} {plan.index.topology} to {plan.layout.format}"


def reshard(source: Path | str, target: Path | str, topology: Topology | str, *, reread: bool = False) -> ReshardReport:
    """Convert checkpoint folder `source` to `topology` in the new folder `target`: `convert` with all defaults.

    Texts mean what they mean on a command line: a source may be a URL, a topology without a ZeRO stage keeps the
    source's.

    Args:
        source: folder of one checkpoint.
        target: folder to make.
        topology: degrees of the target, for instance `tp=2,dp=3`.
        reread: read the whole result back before it is published.

    Raises:
        ReshardError: see `reshard.errors`.

    >>> report = reshard("ckpt/global_step2", "out/global_step2", "dp=2")
    >>> report.message
    'converted tp=1,pp=1,dp=3,zero=2 to tp=1,pp=1,dp=2,zero=2, 29 tensors verified'
    """
    conversion = Conversion(
        source=location(source).absolute() if isinstance(source, str) else source,
        target=Path(target).absolute() if isinstance(target, str) else target,
        topology=Topology.parse(topology) if isinstance(topology, str) else topology,
        keeps_stage=isinstance(topology, str) and "zero" not in topology,
    )
    return convert(conversion, RunOptions(reread=reread))
