"""Virtual mode: write a commit that says where the bytes are, instead of holding them.

Only metadata is written. When ranks load, `elastic_trainer` makes the files that the ranks of its node open
(`reshard.virtual.load`), and unmodified DeepSpeed reads those files. The source must stay as long as the virtual
commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from reshard.api import Conversion, plan_conversion
from reshard.commits.commit import (
    VIRTUAL,
    Commit,
    CommittedFile,
    check_files,
    is_vacant,
    read_commit,
    taken_error,
    write_commit,
)
from reshard.commits.staging import Sharing, staging
from reshard.contract import ExitCode, ReshardReport
from reshard.errors import SourceError, TargetError, UnsupportedError
from reshard.execution.origin import check_unread_origin, unread_origin
from reshard.execution.report import peak_rss_bytes
from reshard.execution.source_checks import check_settings, find_touched_files
from reshard.planning.averages import name_few
from reshard.planning.plan import Plan
from reshard.storage.durable import sync_folder
from reshard.storage.target_writer import target_errors
from reshard.system.limits import DEFAULT_MEMORY_BYTES
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Checksum, SourceFile
from reshard.virtual.auto_mode import Choice, Loader, choose
from reshard.virtual.manifest import Manifest, commit_crc32, encode
from reshard.virtual.needs import compute_needs
from reshard.virtual.ranks import FORMATS, files_by_rank


def choose_mode(plan: Plan, loader: Loader | None) -> Choice:
    """Choose the mode of a conversion for `--mode auto`.

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
    return choose(loader, compute_needs(plan, ranks, loader.ranks_per_node))


def prepare(
    conversion: Conversion,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    on_plan: Callable[[Plan], None] | None = None,
    plan: Plan | None = None,
) -> ReshardReport:
    """Write a virtual commit: `reshard run --mode virtual`.

    The target appears complete or not at all. A target that the same conversion made before stays as it is.

    Args:
        conversion: source, target and what to do.
        memory_bytes: for buffers of a plan; only metadata is read, and committed files whose metadata only the commit
            proves.
        on_plan: called with the plan before the manifest is written.
        plan: of the conversion; None to plan it here.

    Raises:
        UnsupportedError: a target whose ranks have no files of their own.
        ReshardError: see `reshard.errors`.
    """
    started = time.monotonic()
    plan = plan or plan_conversion(conversion, memory_bytes=memory_bytes, num_threads=1)
    conversion = with_topology_of(plan, conversion)
    commit = find_commit(conversion)
    if commit is not None:
        check_unread_origin(commit, plan.index, conversion.target)
        return _report(commit, conversion, started, 0, "already prepared and committed")
    check_settings(plan.index, is_loaded_later=True)
    if on_plan is not None:
        on_plan(plan)
    contents = manifest_files(plan)
    num_bytes = sum(map(len, contents.values()))
    with staging(conversion.target, plan.fingerprint, num_bytes, Sharing.ALONE) as folder:
        commit = _commit(plan, conversion, contents)
        with target_errors(folder, num_bytes):
            _write_files(folder, contents)
            find_touched_files(plan.index)  # raises where the manifest describes files that are no longer there
            write_commit(folder, commit)
        _publish(folder, conversion)
    message = (
        f"prepared {plan.index.topology} to {plan.layout.topology}; its bytes are read where they are, when loaded"
    )
    return _report(commit, conversion, started, num_bytes, message)


def _write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        with open(folder / name, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())


def manifest_files(plan: Plan) -> dict[str, bytes]:
    """Return the files of a virtual commit, without its marker: content by name.

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
    """Give a file without checksums of its own the one in its commit, so that loading can prove what was read."""
    if file.crc32 is None or file.checksums:
        return file
    return dataclasses.replace(file, checksums=(Checksum(start=0, num_bytes=file.num_bytes, crc32=file.crc32),))


def ranks_of(plan: Plan) -> tuple[Int64Array, ...]:
    """Return which files of the target each rank opens, [ranks][files].

    Raises:
        UnsupportedError: it is not known which; or the source is a folder of links, and a manifest names only files
            that lie in the source's own folder; or the target would hold means of copies.
    """
    if inner := plan.layout.folder or " and ".join(plan.layout.parts):
        raise UnsupportedError(
            f"--mode virtual makes a commit of one checkpoint, and not of a whole training folder with the files beside"
            f" {inner}",
            path=str(plan.index.root),
            hint=f"choose --mode materialize, or name the checkpoint inside: {plan.index.root / plan.layout.folder}",
        )
    if linked := [file.path for file in plan.index.files if file.path.startswith("../")]:
        raise UnsupportedError(
            f"--mode virtual needs files of the source's own folder, and {linked[0]} is a blob of a download cache",
            path=str(plan.index.root),
            hint="choose --mode materialize, or copy the folder with what it links to: cp -rL",
        )
    if plan.averages:
        named = name_few([str(plan.index.tensors[number].key) for number in plan.averages])
        raise UnsupportedError(
            f"--mode virtual names bytes of the source, and the mean of copies that may differ stands nowhere: {named}",
            path=str(plan.index.root),
            hint="choose --mode materialize",
        )
    return files_by_rank(plan.layout)


def with_topology_of(plan: Plan, conversion: Conversion) -> Conversion:
    """Return the conversion with the target topology of its plan, ZeRO stage included."""
    return dataclasses.replace(conversion, topology=plan.layout.topology, keeps_stage=False)


def _options(conversion: Conversion) -> dict[str, str]:
    return {**conversion.options, "mode": VIRTUAL}


def find_commit(conversion: Conversion) -> Commit | None:
    """Return the target's virtual commit if this conversion prepared it; None if the target is free.

    Raises:
        TargetTakenError: the target holds something else.
    """
    if is_vacant(conversion.target):
        return None
    with contextlib.suppress(SourceError):
        commit = read_commit(conversion.target)
        same = (
            commit.format == VIRTUAL
            and commit.source == str(conversion.source)
            and commit.topology == conversion.topology
        )
        if same and {**commit.options, "plan": ""} == {**_options(conversion), "plan": ""}:
            check_files(conversion.target, commit, crc=True)
            return commit
    raise taken_error(conversion.target)


def _commit(plan: Plan, conversion: Conversion, contents: dict[str, bytes]) -> Commit:
    data = {}
    with contextlib.suppress(SourceError):
        data = dict(read_commit(conversion.source).data)
    return Commit(
        format=VIRTUAL,
        step=plan.index.step,
        samples=plan.index.samples,
        topology=plan.layout.topology,
        attempt=conversion.attempt,
        writer="reshard",
        files=[
            CommittedFile(path=name, num_bytes=len(content), crc32=zlib.crc32(content))
            for name, content in contents.items()
        ],
        data=data,
        model=plan.layout.model,
        source=str(conversion.source),
        options={**_options(conversion), "plan": plan.fingerprint},
        origin=unread_origin(plan.index),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        owner=conversion.owner,
    )


def _publish(folder: Path, conversion: Conversion) -> None:
    try:
        folder.rename(conversion.target)
    except OSError as error:
        if find_commit(conversion) is None:
            raise TargetError(f"cannot be published: {error}", path=str(conversion.target)) from error
        return
    sync_folder(conversion.target.parent)


def _report(commit: Commit, conversion: Conversion, started: float, written: int, message: str) -> ReshardReport:
    return ReshardReport(
        ok=True,
        exit_code=ExitCode.OK,
        message=message,
        source=str(conversion.source),
        target=str(conversion.target),
        step=commit.step,
        samples=commit.samples,
        mode=VIRTUAL,
        bytes_written=written,
        num_files=len(commit.files),
        seconds=round(time.monotonic() - started, 3),
        peak_rss_bytes=peak_rss_bytes(),
    )
