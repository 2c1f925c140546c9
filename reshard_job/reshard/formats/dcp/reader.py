"""Index a DCP checkpoint: every chunk of every tensor as a box, from `.metadata` and the items' zip directories."""

from __future__ import annotations

import dataclasses
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reshard.check import cover_problems
from reshard.commit import Commit
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.dcp.groups import find_groups
from reshard.formats.dcp.items import Items
from reshard.formats.dcp.metadata import Entry, Path_, read_metadata
from reshard.formats.dcp.naming import Naming, find_names
from reshard.layout import (
    Checksum,
    Index,
    LogicalTensor,
    ParamGroup,
    ShardTableBuilder,
    SourceFile,
    TensorKey,
)
from reshard.topology import Topology

NAME = "dcp"
SUFFIX = ".distcp"

_RANK = re.compile(r"^__(\d+)_\d+\.distcp$")
_STEP = "step"
_MAX_RAW_TENSOR_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What the writer needs besides the tensors, to leave a state dict as its user made it.

    Attributes:
        paths: where each logical tensor is in the state dict.
        order: flat names of all entries, in the source's order.
        carried: entries that travel as they are: objects, numbers, and small tensors of neither model nor optimizer.
        objects: flat names of carried entries that are of neither model nor optimizer.
    """

    paths: Mapping[TensorKey, Path_]
    order: tuple[str, ...]
    carried: tuple[Entry, ...]
    objects: tuple[str, ...]


def read_index(folder: Path, commit: Commit | None) -> Index:
    """Index the checkpoint in `folder`.

    Raises:
        CorruptSourceError, UnsafePickleError, UnsupportedError: see `reshard.formats.base`.
    """
    entries = read_metadata(folder)
    _check_files(folder, entries)
    naming = find_names(entries, str(folder))
    with Items(folder) as items:
        scalars = _scalars(items, entries, naming)
        groups = _groups(items, entries, naming, scalars)
        moved = _moved(entries, naming, scalars, groups)
        files, tensors, table = _tables(items, entries, moved, folder)
    known = {key for key, _ in moved.items()}
    return Index(
        root=folder,
        format=NAME,
        topology=_topology(entries) if commit is None else commit.topology,
        step=_step(scalars) if commit is None else commit.step,
        samples=0 if commit is None else commit.samples,
        tensors=tensors,
        files=files,
        shards=table.build(),
        groups=groups,
        extra=Extra(
            paths={moved[entry.key]: entry.path for entry in entries if entry.key in known},
            order=tuple(entry.key for entry in entries),
            carried=_carried(entries, known, naming, folder),
            objects=naming.rest,
        ),
    )


def _check_files(folder: Path, entries: Iterable[Entry]) -> None:
    """Every file that is named is there and long enough, and no other file of a rank is."""
    ends: dict[str, int] = {}
    for place in (place for entry in entries for _, place in entry.chunks):
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
    try:
        found = {item.name: item.lstat() for item in folder.iterdir()}
    except OSError as error:
        raise CorruptSourceError(f"cannot be listed: {error.strerror}", path=str(folder)) from error
    problems = []
    for name, end in sorted(ends.items()):
        if name not in found:
            problems.append(f"{name} is missing")
        elif not stat.S_ISREG(found[name].st_mode):
            problems.append(f"{name} is a link, or another thing that is not a file")
        elif found[name].st_size < end:
            problems.append(f"{name} is truncated: its items need {end} bytes, it has {found[name].st_size}")
    problems += [f"{name} is not named in .metadata" for name in sorted(found.keys() - ends) if name.endswith(SUFFIX)]
    if problems:
        raise CorruptSourceError(
            "its files do not fit its .metadata",
            path=str(folder),
            problems=problems[:20],
            hint="a file was lost, or another save went into the same folder (files that are not named may be removed)",
        )


def _scalars(items: Items, entries: Iterable[Entry], naming: Naming) -> dict[str, dict[str, int | float]]:
    """Parameter -> state -> number, for optimizer states that are one number."""
    found: dict[str, dict[str, int | float]] = {}
    wanted = [
        (entry, naming.values.get(entry.key) or naming.tensors[entry.key])
        for entry in entries
        if entry.key in naming.values
        or (entry.shape == () and naming.tensors.get(entry.key, TensorKey("weight", "")).state != "weight")
    ]
    for entry, key in sorted(wanted, key=lambda pair: pair[0].chunks[0][1]):
        found.setdefault(key.name, {})[key.state] = items.scalar(entry)
    return found


def _groups(
    items: Items, entries: Iterable[Entry], naming: Naming, scalars: Mapping[str, Mapping[str, int | float]]
) -> tuple[ParamGroup, ...]:
    listed: dict[tuple[int, str], Any] = {}
    named: dict[tuple[str, str], Any] = {}
    optional = [entry for entry in entries if entry.key in naming.grouped or entry.key in naming.named]
    values = {
        entry.key: items.scalar(entry) if entry.is_tensor else items.object(entry.key, entry.chunks[0][1])
        for entry in sorted(optional, key=lambda entry: entry.chunks[0][1])
    }
    for entry in optional:  # in the order of the checkpoint again
        if entry.key in naming.grouped:
            listed[naming.grouped[entry.key]] = values[entry.key]
        else:
            named[naming.named[entry.key]] = values[entry.key]
    return find_groups(listed, named, scalars, str(items.folder))


def _moved(
    entries: Iterable[Entry],
    naming: Naming,
    scalars: Mapping[str, Mapping[str, int | float]],
    groups: Iterable[ParamGroup],
) -> dict[str, TensorKey]:
    """Entries that are logical tensors. A number that a whole group shares is not: the group says it."""
    shared = {(name, state) for group in groups for name in group.names for state in group.scalars}
    return {
        entry.key: key
        for entry in entries
        if (key := naming.tensors.get(entry.key)) is not None
        and not ((key.name, key.state) in shared and key.state in scalars.get(key.name, {}))
    }


def _tables(
    items: Items, entries: Iterable[Entry], moved: Mapping[str, TensorKey], folder: Path
) -> tuple[tuple[SourceFile, ...], tuple[LogicalTensor, ...], ShardTableBuilder]:
    """Files, tensors and rows; chunks are looked up in the order of the files."""
    chosen = [entry for entry in entries if entry.key in moved]
    tensors = tuple(LogicalTensor(key=moved[entry.key], shape=entry.shape or (), dtype=entry.dtype) for entry in chosen)
    names = sorted({place.file for entry in entries for _, place in entry.chunks}, key=_by_rank)
    numbers = {name: at for at, name in enumerate(names)}
    checksums: dict[str, list[Checksum]] = {name: [] for name in names}
    table = ShardTableBuilder()
    places = [(place, box, at) for at, entry in enumerate(chosen) for box, place in entry.chunks if box is not None]
    for place, box, at in sorted(places, key=lambda item: (numbers[item[0].file], item[0].offset)):
        if not box.num_elements:
            continue
        chunk = items.chunk(chosen[at], box, place)
        if chunk.checksum is not None:
            checksums[place.file].append(chunk.checksum)
        table.add(tensor=at, box=box, file=numbers[place.file], byte_offset=chunk.byte_offset, strides=chunk.strides)
    shards = table.build()
    problems = cover_problems(tensors, shards, np.arange(len(shards)), side="chunks of")
    held = set(shards.tensor.tolist())
    problems += [f"{item.key} has no chunk" for at, item in enumerate(tensors) if item.num_elements and at not in held]
    if problems:
        raise CorruptSourceError(
            f"chunks do not cover {len(problems)} tensors exactly", path=str(folder), problems=problems[:20]
        )
    files = tuple(
        SourceFile(path=name, num_bytes=items.file_bytes(name), checksums=tuple(sorted(checksums[name], key=_start)))
        for name in names
    )
    return files, tensors, table


def _start(checksum: Checksum) -> int:
    return checksum.start


def _by_rank(name: str) -> tuple[int, str]:
    match = _RANK.match(name)
    return (int(match[1]) if match else -1, name)


def _carried(entries: Iterable[Entry], moved: set[str], naming: Naming, folder: Path) -> tuple[Entry, ...]:
    """Entries that are not logical tensors; a large tensor of unknown purpose is refused."""
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


def _topology(entries: Iterable[Entry]) -> Topology:
    """DCP records no mesh: as many data-parallel ranks as have files, cut like FSDP."""
    ranks = [int(match[1]) for entry in entries for _, place in entry.chunks if (match := _RANK.match(place.file))]
    return Topology(dp=max(ranks, default=0) + 1, zero=3)


def _step(scalars: Mapping[str, Mapping[str, int | float]]) -> int:
    """Of the parameter that took part in most steps."""
    return int(max((states.get(_STEP, 0) for states in scalars.values()), default=0))
