"""Virtual mode: a commit that says where the bytes are, instead of holding them.

Nothing but metadata is written. `elastic_trainer` makes the files that its node's ranks open when they load them
(`reshard.virtual.load`), and unmodified DeepSpeed reads those. The source must live as long as the virtual commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from reshard.api import Conversion, plan_conversion
from reshard.commits.commit import VIRTUAL, Commit, CommittedFile, check_files, read_commit, taken, vacant, write_commit
from reshard.commits.staging import Sharing, staging
from reshard.contract import ExitCode, ReshardReport
from reshard.errors import SourceError, TargetError, UnsupportedError
from reshard.execution.origin import check_unread_origin, unread_origin
from reshard.execution.report import peak_rss_bytes
from reshard.execution.source_checks import check_settings, touched_files
from reshard.planning.plan import Plan
from reshard.storage.durable import sync_folder
from reshard.storage.target_writer import target_errors
from reshard.system.limits import DEFAULT_MEMORY_BYTES
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Checksum, SourceFile
from reshard.virtual.auto_mode import Choice, Loader, choose
from reshard.virtual.manifest import Manifest, commit_crc32, encode
from reshard.virtual.needs import needs_of
from reshard.virtual.ranks import FORMATS, files_by_rank


def choose_mode(plan: Plan, loader: Loader | None) -> Choice:
    """What `--mode auto` means for a conversion.

    Args:
        plan: of the conversion.
        loader: who will load the target, or None for anybody.
    """
    if plan.layout.format not in FORMATS:
        why = f"virtual is refused: a rank may open any file of the format {plan.layout.format}"
        return choose(loader, None, refused=why)
    if loader is None:
        return choose(None, None)
    try:
        ranks = ranks_of(plan)
    except UnsupportedError as error:
        return choose(loader, None, refused=f"virtual is refused: {error}")
    return choose(loader, needs_of(plan, ranks, loader.ranks_per_node))


def prepare(
    wanted: Conversion,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    planned: Callable[[Plan], None] | None = None,
    plan: Plan | None = None,
) -> ReshardReport:
    """Write a virtual commit: `reshard run --mode virtual`.

    The target appears complete or not at all. One that was made by the same conversion before is left as it is.

    Args:
        wanted: source, target and what to do.
        memory_bytes: for buffers of a plan; nothing is read but metadata, and committed files whose metadata only the
            commit proves.
        planned: shown the plan before the manifest is written.
        plan: of the conversion, where it is known already.

    Raises:
        UnsupportedError: a target whose ranks have no files of their own.
        ReshardError: see `reshard.errors`.
    """
    started = time.monotonic()
    plan = plan or plan_conversion(wanted, memory_bytes=memory_bytes, num_threads=1)
    wanted = settled(wanted, plan)
    commit = already_done(wanted)
    if commit is not None:
        check_unread_origin(commit, plan.index, wanted.target)
        return _report(commit, wanted, started, 0, "already prepared and committed")
    check_settings(plan.index, is_loaded_later=True)
    if planned is not None:
        planned(plan)
    contents = manifest_files(plan)
    num_bytes = sum(map(len, contents.values()))
    with staging(wanted.target, plan.fingerprint, num_bytes, Sharing.ALONE) as folder:
        commit = _commit(plan, wanted, contents)
        with target_errors(folder, num_bytes):
            for name, content in contents.items():
                with open(folder / name, "xb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
            touched_files(plan.index)  # raises where the manifest describes files that are no longer there
            write_commit(folder, commit)
        _publish(folder, wanted)
    what = f"prepared {plan.index.topology} to {plan.layout.topology}; its bytes are read where they are, when loaded"
    return _report(commit, wanted, started, num_bytes, what)


def manifest_files(plan: Plan) -> dict[str, bytes]:
    """Names and contents of all that a virtual commit consists of, besides its marker.

    Raises:
        UnsupportedError: see `ranks_of`.
    """
    source_commit = commit_crc32(plan.index.root)
    index = dataclasses.replace(plan.index, files=tuple(_with_stated(file) for file in plan.index.files))
    stated = dataclasses.replace(plan, index=index)
    return encode(
        Manifest(plan=stated, fingerprint=plan.fingerprint, ranks=ranks_of(plan), source_commit=source_commit)
    )


def _with_stated(file: SourceFile) -> SourceFile:
    """A file whose container states no checksums with that of its commit, so that loading can prove what was read."""
    if file.crc32 is None or file.checksums:
        return file
    return dataclasses.replace(file, checksums=(Checksum(start=0, num_bytes=file.num_bytes, crc32=file.crc32),))


def ranks_of(plan: Plan) -> tuple[Int64Array, ...]:
    """Files of the target that each rank opens, [ranks][files].

    Raises:
        UnsupportedError: that is not known, or the source is a folder of links: a manifest names its own files only.
    """
    if linked := [file.path for file in plan.index.files if file.path.startswith("../")]:
        raise UnsupportedError(
            f"--mode virtual needs files of the source's own folder, and {linked[0]} is a blob of a download cache",
            path=str(plan.index.root),
            hint="choose --mode materialize, or copy the folder with what it links to: cp -rL",
        )
    return files_by_rank(plan.layout)


def settled(wanted: Conversion, plan: Plan) -> Conversion:
    """With the topology that the plan came to."""
    return dataclasses.replace(wanted, topology=plan.layout.topology, keeps_stage=False)


def _options(wanted: Conversion) -> dict[str, str]:
    return {**wanted.options, "mode": VIRTUAL}


def already_done(wanted: Conversion) -> Commit | None:
    """The target's commit, if this conversion prepared it.

    Raises:
        TargetTakenError: there is something else.
    """
    if vacant(wanted.target):
        return None
    with contextlib.suppress(SourceError):
        commit = read_commit(wanted.target)
        same = commit.format == VIRTUAL and commit.source == str(wanted.source) and commit.topology == wanted.topology
        if same and {**commit.options, "plan": ""} == {**_options(wanted), "plan": ""}:
            check_files(wanted.target, commit, crc=True)
            return commit
    raise taken(wanted.target)


def _commit(plan: Plan, wanted: Conversion, contents: dict[str, bytes]) -> Commit:
    data = {}
    with contextlib.suppress(SourceError):
        data = dict(read_commit(wanted.source).data)
    return Commit(
        format=VIRTUAL,
        step=plan.index.step,
        samples=plan.index.samples,
        topology=plan.layout.topology,
        attempt=wanted.attempt,
        writer="reshard",
        files=[
            CommittedFile(path=name, num_bytes=len(content), crc32=zlib.crc32(content))
            for name, content in contents.items()
        ],
        data=data,
        model=plan.layout.model,
        source=str(wanted.source),
        options={**_options(wanted), "plan": plan.fingerprint},
        origin=unread_origin(plan.index),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        owner=wanted.owner,
    )


def _publish(folder: Path, wanted: Conversion) -> None:
    try:
        folder.rename(wanted.target)
    except OSError as error:
        if already_done(wanted) is None:
            raise TargetError(f"cannot be published: {error}", path=str(wanted.target)) from error
        return
    sync_folder(wanted.target.parent)


def _report(commit: Commit, wanted: Conversion, started: float, written: int, message: str) -> ReshardReport:
    return ReshardReport(
        ok=True,
        exit_code=ExitCode.OK,
        message=message,
        source=str(wanted.source),
        target=str(wanted.target),
        step=commit.step,
        samples=commit.samples,
        mode=VIRTUAL,
        bytes_written=written,
        num_files=len(commit.files),
        seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=peak_rss_bytes(),
    )
