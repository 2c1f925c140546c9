"""Entries without shards: options, numbers, and other objects that are copied from a DCP checkpoint."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.dcp.items import Items
from reshard.formats.dcp.metadata import Entry, StatePath
from reshard.formats.dcp.naming import flat_name
from reshard.formats.dcp.reader import DcpExtra
from reshard.formats.dcp.writing.skeleton import RankFiles
from reshard.formats.dcp.writing.target_tensors import OPTIMIZER
from reshard.formats.pt.objects import new_tensor
from reshard.tensors.geometry import Box
from reshard.tensors.layout import Index, ParamGroup, Plain

_CODES = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}
_ABSENT = object()


def copy_entries(files: RankFiles, folder: Path, chosen: Iterable[Entry]) -> list[Entry]:
    """Copy entries to rank 0's file; each is read, checked and written anew, so that no unknown bytes are copied."""
    entries = []
    with Items(folder) as items:
        for entry in sorted(chosen, key=lambda entry: entry.chunks[0][1]):
            box, place = entry.chunks[0]
            moved = files.add_copy(0, items.read_whole(entry.key, place))
            entries.append(dataclasses.replace(entry, chunks=((box, moved),)))
    return entries


def add_numbers(files: RankFiles, index: Index) -> list[Entry]:
    """Add the states that are one number for a group, once for each parameter with a state, as torch stores `step`."""
    with_state = {tensor.key.name for tensor in index.tensors if tensor.key.state not in ("weight", "fp32")}
    entries = []
    for group in index.groups:
        for name in group.names:
            for state, value in group.scalars.items() if name in with_state else ():
                path: StatePath = (OPTIMIZER, f"state.{name}.{state}")
                entries.append(_add_number(files, path, "float32", value))
    return entries


def add_options(files: RankFiles, groups: Iterable[ParamGroup]) -> list[Entry]:
    """Add the options of `param_groups`, both by group and by parameter."""
    values: list[tuple[StatePath, Plain]] = []
    for number, group in enumerate(groups):
        where: StatePath = (OPTIMIZER, "param_groups", number)
        values += [((*where, option), value) for option, value in group.options.items()]
        values.append(((*where, "params"), list(group.names)))
        values += [
            ((OPTIMIZER, f"param_groups.{name}.{option}"), value)
            for name in group.names
            for option, value in group.options.items()
        ]
    return [
        Entry(key=flat_name(path), path=path, shape=None, dtype="", chunks=((None, files.add_object(0, value)),))
        for path, value in values
    ]


def _add_number(files: RankFiles, path: StatePath, dtype: str, value: float) -> Entry:
    place = files.add_object(0, new_tensor(dtype, (), struct.pack(_CODES[dtype], value)))
    return Entry(key=flat_name(path), path=path, shape=(), dtype=dtype, chunks=((Box((), ()), place),))


def add_objects_like(
    files: RankFiles, index: Index, like: Index, extra: DcpExtra, without: Collection[str]
) -> tuple[list[Entry], tuple[str, ...]]:
    """Add the entries of `like` that are not tensors, with the options and numbers of the source if it has them.

    Args:
        files: files to add items to.
        index: the source.
        like: a DCP checkpoint of the same model.
        extra: facts about `like`.
        without: flat names of entries that the target has already.

    Returns:
        The entries, and notes about options that are copied from `like`.

    Raises:
        UnsupportedError: parameters of one group of `like` have different options in the source.
    """
    known = _find_source_values(index, like, extra)
    entries: list[Entry] = []
    copied: set[str] = set()  # options and keys
    for entry in extra.carried:
        value = known.get(entry.key, _ABSENT)
        if entry.key in without:
            continue
        if value is _ABSENT:
            entries += copy_entries(files, like.root, [entry])
            if entry.key not in extra.naming.grouped or extra.naming.grouped[entry.key][1] != "params":
                copied.add(extra.naming.named.get(entry.key, ("", entry.key))[1])
        elif entry.is_tensor:
            if entry.dtype not in _CODES or not isinstance(value, int | float):
                raise UnsupportedError(
                    f"{entry.key} of type {entry.dtype} cannot be {value!r:.80}", path=str(like.root)
                )
            entries.append(_add_number(files, entry.path, entry.dtype, value))
        else:
            entries.append(dataclasses.replace(entry, chunks=((None, files.add_object(0, value)),)))
    paths = {tensor.key: extra.paths[tensor.key] for tensor in like.tensors if tensor.shape == ()}
    scalars = {name: group.scalars for group in index.groups for name in group.names}
    for key, path in paths.items():
        if flat_name(path) not in without and key.state in scalars.get(key.name, {}):
            entries.append(_add_number(files, path, "float32", scalars[key.name][key.state]))
    few = ", ".join(sorted(copied)[:8])
    return entries, (f"taken from {like.root}, as the source does not say: {few}",) if copied else ()


def _find_source_values(index: Index, like: Index, extra: DcpExtra) -> Mapping[str, Any]:
    """Find the values that the source has for entries of `like`, by flat name."""
    group_of = {name: group for group in index.groups for name in group.names}
    known: dict[str, Any] = {}
    for key, (name, option) in extra.naming.named.items():
        if name in group_of and option in group_of[name].options:
            known[key] = group_of[name].options[option]
    for key, (number, option) in extra.naming.grouped.items():
        values = [
            group_of[name].options[option]
            for name in like.groups[number].names
            if name in group_of and option in group_of[name].options
        ]
        if any(value != values[0] for value in values):
            raise UnsupportedError(
                f"{key}: the source has different values for the parameters of that group",
                path=str(like.root),
                hint="name with --like a checkpoint with the source's parameter groups",
            )
        if values:
            known[key] = values[0]
    for key, (state, name) in (*extra.naming.values.items(), *extra.naming.tensors.items()):
        if name in group_of and state in group_of[name].scalars:
            known[key] = group_of[name].scalars[state]
    return known
