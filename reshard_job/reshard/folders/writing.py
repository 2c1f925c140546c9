"""Lay out the target of a conversion: a plain checkpoint, or the folder of a training stack with the files beside it.

The checkpoint inside is laid out by its format as if it were alone. Then its files get the name of its folder in front
of theirs, and the stack's files follow, with the bytes of the source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from reshard.commits.latest import FILES
from reshard.errors import UnsupportedError
from reshard.folders.stacks import Stack, stack_of
from reshard.formats import format_of
from reshard.formats.base import Request
from reshard.planning.constant_bytes import CarriedRanges
from reshard.tensors.layout import Index, SourceFile, TargetFile, TargetLayout, TrainingFolder
from reshard.topology import Topology

_MOST_NAMES = 6


def wrap(index: Index, root: Path, folder: TrainingFolder) -> Index:
    """Return the index of a training folder, from that of the checkpoint inside."""
    if index.root == root:  # several parts, whose names the files have already
        return dataclasses.replace(index, folder=folder)
    files = tuple(dataclasses.replace(file, path=f"{folder.parts[0]}/{file.path}") for file in index.files)
    return dataclasses.replace(index, root=root, files=files, folder=folder)


def unwrap(index: Index) -> Index:
    """Return the index of the checkpoint inside a training folder; other indexes are returned as they are."""
    if index.folder is None:
        return index
    if stack_of(index.folder.stack).tag is None:
        return dataclasses.replace(index, folder=None)
    prefix = f"{index.folder.parts[0]}/"
    files = tuple(dataclasses.replace(file, path=file.path.removeprefix(prefix)) for file in index.files)
    return dataclasses.replace(index, root=index.root / index.folder.parts[0], files=files, folder=None)


def lay_out(index: Index, request: Request, target_format: str = "") -> TargetLayout:
    """Lay out the tensors of `index` in a format, and around them the training folder that they come from, if any.

    A target of another format is a plain checkpoint, and so is one with some states only or other names: the stack
    would not load it.

    Args:
        index: the source.
        request: what it shall become.
        target_format: name of a format; empty for the source's, and for the whole training folder.

    Raises:
        UnsupportedError: a folder of several parts shall become one with other names or states only.
        ReshardError: see `reshard.formats.base.Format.layout`.
    """
    if index.folder is not None and stack_of(index.folder.stack).tag is None and not target_format:
        return _lay_out_parts(index, request, index.folder)
    if request.like is not None:
        request = dataclasses.replace(request, like=unwrap(request.like))
    layout = format_of(target_format or index.format).layout(unwrap(index), request)
    folder = index.folder
    if folder is None:
        return layout
    is_whole = layout.format == index.format and not index.left_out and not index.renamed
    if is_whole and stack_of(folder.stack).tag is not None:
        return _lay_out_folder(layout, index, folder)
    if not folder.side_files:
        return layout
    note = (
        f"the files beside {' and '.join(folder.parts)} are not carried, because {folder.stack} would not load the"
        f" result as a whole: {_list_names([file.path for file in folder.side_files])}"
    )
    return dataclasses.replace(layout, notes=(*layout.notes, note))


def _lay_out_parts(index: Index, request: Request, folder: TrainingFolder) -> TargetLayout:
    """Lay out a training folder whose checkpoint several subfolders hold together.

    Raises:
        UnsupportedError: the stack would not load the result.
    """
    from reshard.formats.dcp import lay_out_parts  # only such folders pay for this import

    if index.unread is not None:
        raise index.unread
    if index.left_out or index.renamed or request.weight_dtype is not None:
        raise UnsupportedError(
            f"a folder of {folder.stack} is converted with all its states, names and types, or {folder.stack} would not"
            " load it",
            path=str(index.root),
            hint="leave --states, --names and --dtype out; or say --format: dcp puts model and optimizer in one folder",
        )
    layout = lay_out_parts(unwrap(index), request, folder.parts)
    has_same_ranks = _has_same_ranks(index.topology, layout.topology)
    side_files, notes = _choose_side_files(
        folder, stack_of(folder.stack), index.topology.world_size, has_same_ranks=has_same_ranks
    )
    carried = (_carry(index.root, file) for file in side_files)
    return dataclasses.replace(
        layout, files=(*layout.files, *carried), notes=(*layout.notes, *notes), parts=folder.parts
    )


def _lay_out_folder(layout: TargetLayout, index: Index, folder: TrainingFolder) -> TargetLayout:
    stack = stack_of(folder.stack)
    has_same_ranks = _has_same_ranks(index.topology, layout.topology)
    side_files, notes = _choose_side_files(folder, stack, index.topology.world_size, has_same_ranks=has_same_ranks)
    inner = folder.parts[0]
    latest = inner.encode()
    files = (
        *(dataclasses.replace(file, path=f"{inner}/{file.path}") for file in layout.files),
        TargetFile(path=FILES[stack.format], num_bytes=len(latest), fixed=((0, latest),)),
        *(_carry(index.root, file) for file in side_files),
    )
    return dataclasses.replace(layout, files=files, notes=(*layout.notes, *notes), folder=inner)


def _has_same_ranks(source: Topology, target: Topology) -> bool:
    """Return True if each rank has the same place in both; the ZeRO stage does not matter."""
    return dataclasses.replace(source, zero=0) == dataclasses.replace(target, zero=0)


def _choose_side_files(
    folder: TrainingFolder, stack: Stack, num_ranks: int, *, has_same_ranks: bool
) -> tuple[list[SourceFile], list[str]]:
    """Return the files to carry, and notes for the user about those that are left out or that no longer fit."""
    rank_files = [file for file in folder.side_files if stack.rank_file and stack.rank_file.fullmatch(file.path)]
    is_complete = len(rank_files) == num_ranks
    keeps_rank_files = has_same_ranks and is_complete
    notes = []
    if rank_files and not keeps_rank_files:
        names = _list_names([file.path for file in rank_files])
        why = "random states fit only the ranks that saved them"
        if not is_complete:
            why = f"there are {len(rank_files)} files of random states for {num_ranks} ranks"
        notes.append(f"{names}: left out, {why}; {stack.without_rank_files}")
    counts = [
        file.path for file in folder.side_files if stack.per_rank_files and stack.per_rank_files.fullmatch(file.path)
    ]
    if counts and not has_same_ranks:
        notes.append(
            f"{_list_names(counts)}: carried unchanged, and {stack.name} counts a schedule's steps once for each of the"
            f" {num_ranks} ranks that saved it: on another number of ranks, the learning rate differs from the first"
            " step on, unless the script scales the schedule (docs/trainers.md) or uses split_batches=True"
        )
    kept = [file for file in folder.side_files if keeps_rank_files or file not in rank_files]
    return kept, notes


def _carry(root: Path, file: SourceFile) -> TargetFile:
    fixed = CarriedRanges(root, file.path, file.num_bytes)
    return TargetFile(path=file.path, num_bytes=file.num_bytes, fixed=fixed)


def describe(folder: TrainingFolder) -> str:
    """Say what a training folder is, for people."""
    beside = _list_names([file.path for file in folder.side_files]) or "nothing"
    return f"a folder of {folder.stack}: the checkpoint {' and '.join(folder.parts)}, and beside it {beside}"


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
