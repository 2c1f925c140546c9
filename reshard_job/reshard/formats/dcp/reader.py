"""Index a DCP checkpoint: a box for every chunk of every tensor, from `.metadata` and the items' zip directories."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from reshard.commits.commit import Commit
from reshard.errors import UnsupportedError
from reshard.formats.base import stated_topology
from reshard.formats.dcp.chunks import stack_chunks
from reshard.formats.dcp.groups import find_groups
from reshard.formats.dcp.items import Items
from reshard.formats.dcp.metadata import Entry, StatePath
from reshard.formats.dcp.naming import Naming, find_names, find_weights
from reshard.formats.dcp.several import read_entries
from reshard.formats.dcp.tables import TensorChunks, count_ranks, list_files, make_table
from reshard.tensors.layout import (
    Index,
    LogicalTensor,
    ParamGroup,
    TensorKey,
)

NAME = "dcp"
_STEP = "step"
_MAX_RAW_TENSOR_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DcpExtra:
    """Facts besides the tensors that the writer needs to keep the user's state dict.

    Attributes:
        paths: path of each logical tensor in the state dict.
        order: flat names of all entries, in the source's order.
        carried: entries that are copied: objects, numbers, and small tensors of neither model nor optimizer.
        naming: class of each entry.
    """

    format_name: ClassVar[str] = NAME
    paths: Mapping[TensorKey, StatePath]
    order: tuple[str, ...]
    carried: tuple[Entry, ...]
    naming: Naming


def read_index(folder: Path, commit: Commit | None, parts: Sequence[str] = ()) -> Index:
    """Index the checkpoint in `folder`.

    Args:
        folder: folder of the checkpoint.
        commit: its commit marker, if it has one.
        parts: folders in it that hold the checkpoint together, each saved by itself; empty for `folder` alone.

    Raises:
        CorruptSourceError, UnsafePickleError, UnsupportedError: see `reshard.formats.base`.
    """
    every = read_entries(folder, parts)
    names = list_files(every)
    naming, entries, unread = _find_names(every, str(folder))
    with Items(folder) as items:
        while True:
            scalars = _read_scalars(items, entries, naming)
            groups = _read_groups(items, entries, naming, scalars)
            moved = _find_logical_keys(entries, naming, scalars, groups)
            tensors, chunks = _build_logical(entries, moved)
            try:
                files, shards = make_table(items, names, tensors, chunks)
                break
            except UnsupportedError as error:  # such as states in tensors of a class of their own
                if unread is not None:
                    raise
                naming, entries, unread = _leave_optimizer_out(every, str(folder), error)
    carried = _select_carried(entries, set(moved), naming, folder)
    return Index(
        root=folder,
        format=NAME,
        # DCP records no mesh: assume one data-parallel rank for each file, sharded by FSDP.
        topology=stated_topology(str(folder), dp=count_ranks(names), zero=3) if commit is None else commit.topology,
        step=_find_step(scalars) if commit is None else commit.step,
        samples=0 if commit is None else commit.samples,
        tensors=tensors,
        files=files,
        shards=shards,
        groups=groups,
        extra=DcpExtra(
            paths={moved[entry.key]: entry.path for entry in entries if entry.key in moved},
            order=tuple(entry.key for entry in entries),
            carried=carried,
            naming=naming,
        ),
        notes=_list_notes(naming),
        unread=unread,
    )


def _find_names(entries: Sequence[Entry], where: str) -> tuple[Naming, tuple[Entry, ...], UnsupportedError | None]:
    """Classify the entries; if an optimizer is not understood, leave its entries out.

    Returns:
        The classes, the entries that are left, and the error about the optimizer, or None.
    """
    try:
        return find_names(entries, where), tuple(entries), None
    except UnsupportedError as error:
        return _leave_optimizer_out(entries, where, error)


def _leave_optimizer_out(
    entries: Sequence[Entry], where: str, error: UnsupportedError
) -> tuple[Naming, tuple[Entry, ...], UnsupportedError]:
    try:
        naming, outside = find_weights(entries, where)
    except UnsupportedError:
        raise error from None
    hint = "; ".join(filter(None, (error.hint, "--states weight takes the weights alone")))
    unread = copy.copy(error)
    unread.hint = hint
    return naming, tuple(outside), unread


def _list_notes(naming: Naming) -> tuple[str, ...]:
    if not naming.rest:
        return ()
    more = ", ..." if len(naming.rest) > 5 else ""
    return (f"{len(naming.rest)} entries of neither model nor optimizer: {', '.join(naming.rest[:5])}{more}",)


def _read_scalars(items: Items, entries: Iterable[Entry], naming: Naming) -> dict[str, dict[str, int | float]]:
    """Read the optimizer states that are one number: parameter -> state -> number."""
    numbers: dict[str, dict[str, int | float]] = {}
    scalars = [
        (entry, naming.values.get(entry.key) or naming.tensors[entry.key])
        for entry in entries
        if entry.key in naming.values
        or (entry.shape == () and naming.tensors.get(entry.key, TensorKey("weight", "")).state != "weight")
    ]
    for entry, key in sorted(scalars, key=lambda pair: pair[0].chunks[0][1]):
        numbers.setdefault(key.name, {})[key.state] = items.read_scalar(entry)
    return numbers


def _read_groups(
    items: Items, entries: Iterable[Entry], naming: Naming, scalars: Mapping[str, Mapping[str, int | float]]
) -> tuple[ParamGroup, ...]:
    listed: dict[tuple[int, str], Any] = {}
    named: dict[tuple[str, str], Any] = {}
    optional = [
        entry
        for entry in entries
        if entry.key in naming.grouped or entry.key in naming.named or entry.key == naming.groups
    ]
    values = {
        entry.key: items.read_scalar(entry) if entry.is_tensor else items.read_object(entry.key, entry.chunks[0][1])
        for entry in sorted(optional, key=lambda entry: entry.chunks[0][1])
    }
    for entry in optional:  # items were read in the order of the files; groups need the order of the checkpoint
        if entry.key == naming.groups:
            groups: Any = values[entry.key]
            listed |= {(at, key): item for at, group in enumerate(groups) for key, item in dict(group).items()}
        elif entry.key in naming.grouped:
            listed[naming.grouped[entry.key]] = values[entry.key]
        else:
            named[naming.named[entry.key]] = values[entry.key]
    second_of = {first: second for second, first in naming.halves.items()}
    for (name, option), value in list(named.items()):
        if name in second_of:  # an option that the second half has of its own stays
            named.setdefault((second_of[name], option), value)
    return find_groups(listed, named, scalars, str(items.folder))


def _find_logical_keys(
    entries: Iterable[Entry],
    naming: Naming,
    scalars: Mapping[str, Mapping[str, int | float]],
    groups: Iterable[ParamGroup],
) -> dict[str, TensorKey]:
    """Find the keys of entries that are logical tensors; a number that a whole group shares is stored in the group."""
    shared = {(name, state) for group in groups for name in group.names for state in group.scalars}
    return {
        entry.key: key
        for entry in entries
        if (key := naming.tensors.get(entry.key)) is not None
        and not ((key.name, key.state) in shared and key.state in scalars.get(key.name, {}))
    }


def _build_logical(
    entries: Iterable[Entry], moved: Mapping[str, TensorKey]
) -> tuple[tuple[LogicalTensor, ...], TensorChunks]:
    """Build the logical tensors and the table of their chunks."""
    chosen = [entry for entry in entries if entry.key in moved]
    tensors = tuple(LogicalTensor(key=moved[entry.key], shape=entry.shape or (), dtype=entry.dtype) for entry in chosen)
    number = np.repeat(np.arange(len(chosen)), [len(entry.chunks) for entry in chosen])
    chunks = stack_chunks(entry.chunks for entry in chosen)
    nothing = np.zeros(len(chosen), dtype=np.int64)
    return tensors, TensorChunks(tensor=number, entry=number, entries=chosen, chunks=chunks, drop=nothing)


def _select_carried(entries: Iterable[Entry], moved: set[str], naming: Naming, folder: Path) -> tuple[Entry, ...]:
    """Select the entries that are copied as they are.

    Raises:
        UnsupportedError: one of them is a large tensor of neither model nor optimizer.
    """
    carried = tuple(entry for entry in entries if entry.key not in moved)
    rest = set(naming.rest)
    problems = [
        f"{entry.key} {entry.dtype} {list(entry.shape or ())} in {len(entry.chunks)} chunks"
        for entry in carried
        if entry.is_tensor
        and entry.key in rest
        and (len(entry.chunks) != 1 or entry.chunks[0][1].length > _MAX_RAW_TENSOR_BYTES)
    ]
    if problems:
        raise UnsupportedError(
            "has tensors of neither model nor optimizer that are cut, or larger than "
            f"{_MAX_RAW_TENSOR_BYTES >> 20} MiB",
            path=str(folder),
            problems=problems[:20],
            hint="save them under the names of the weights that they belong to, or in another checkpoint",
        )
    return carried


def _find_step(scalars: Mapping[str, Mapping[str, int | float]]) -> int:
    """Return the number of steps of the parameter that took part in most steps."""
    return int(max((states.get(_STEP, 0) for states in scalars.values()), default=0))
