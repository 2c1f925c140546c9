"""Entries that are not tensors with a shard: options, numbers, and what a DCP source or an example has besides."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from reshard.errors import UnsupportedError
from reshard.formats.dcp.items import Items
from reshard.formats.dcp.metadata import Entry, Path_
from reshard.formats.dcp.naming import dotted
from reshard.formats.dcp.reader import DcpExtra
from reshard.formats.dcp.writing.skeleton import RankFiles
from reshard.formats.dcp.writing.target_tensors import OPTIMIZER
from reshard.formats.pt.objects import new_tensor
from reshard.tensors.geometry import Box
from reshard.tensors.layout import Index, ParamGroup, Plain

_CODES = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}
_ABSENT = object()


def carried(files: RankFiles, folder: Path, chosen: Iterable[Entry]) -> list[Entry]:
    """Copies of entries, written anew: nothing but what was read and accepted gets into the target."""
    entries = []
    with Items(folder) as items:
        for entry in sorted(chosen, key=lambda entry: entry.chunks[0][1]):
            box, place = entry.chunks[0]
            moved = files.add_copy(0, items.whole(entry.key, place))
            entries.append(dataclasses.replace(entry, chunks=((box, moved),)))
    return entries


def numbers(files: RankFiles, index: Index) -> list[Entry]:
    """States that are one number for a group, for each parameter that has a state: `step` as torch keeps it."""
    having = {tensor.key.name for tensor in index.tensors if tensor.key.state not in ("weight", "fp32")}
    entries = []
    for group in index.groups:
        for name in group.names:
            for state, value in group.scalars.items() if name in having else ():
                path: Path_ = (OPTIMIZER, f"state.{name}.{state}")
                entries.append(_number(files, path, "float32", value))
    return entries


def options(files: RankFiles, groups: Iterable[ParamGroup]) -> list[Entry]:
    """`param_groups` by group and by parameter."""
    found: list[tuple[Path_, Plain]] = []
    for number, group in enumerate(groups):
        where: Path_ = (OPTIMIZER, "param_groups", number)
        found += [((*where, option), value) for option, value in group.options.items()]
        found.append(((*where, "params"), list(group.names)))
        found += [
            ((OPTIMIZER, f"param_groups.{name}.{option}"), value)
            for name in group.names
            for option, value in group.options.items()
        ]
    return [
        Entry(key=dotted(path), path=path, shape=None, dtype="", chunks=((None, files.add_object(0, value)),))
        for path, value in found
    ]


def _number(files: RankFiles, path: Path_, dtype: str, value: float) -> Entry:
    place = files.add_object(0, new_tensor(dtype, (), struct.pack(_CODES[dtype], value)))
    return Entry(key=dotted(path), path=path, shape=(), dtype=dtype, chunks=((Box((), ()), place),))


def objects_like(
    files: RankFiles, index: Index, like: Index, extra: DcpExtra, without: Collection[str]
) -> tuple[list[Entry], tuple[str, ...]]:
    """Entries of `like` that are no tensors, with the source's options and numbers where the source knows them.

    Args:
        files: to add items to.
        index: the source.
        like: a DCP checkpoint of the same model.
        extra: of `like`.
        without: flat names of entries that the target has already.

    Returns:
        The entries, and notes about what is taken from `like`.

    Raises:
        UnsupportedError: parameters of one group of `like` have different options in the source.
    """
    known = _known(index, like, extra)
    entries: list[Entry] = []
    taken: set[str] = set()
    for entry in extra.carried:
        value = known.get(entry.key, _ABSENT)
        if entry.key in without:
            continue
        if value is _ABSENT:
            entries += carried(files, like.root, [entry])
            if entry.key not in extra.naming.grouped or extra.naming.grouped[entry.key][1] != "params":
                taken.add(extra.naming.named.get(entry.key, ("", entry.key))[1])
        elif entry.is_tensor:
            if entry.dtype not in _CODES or not isinstance(value, int | float):
                raise UnsupportedError(
                    f"{entry.key} of type {entry.dtype} cannot be {value!r:.80}", path=str(like.root)
                )
            entries.append(_number(files, entry.path, entry.dtype, value))
        else:
            entries.append(dataclasses.replace(entry, chunks=((None, files.add_object(0, value)),)))
    numbers_ = {tensor.key: extra.paths[tensor.key] for tensor in like.tensors if tensor.shape == ()}
    scalars = {name: group.scalars for group in index.groups for name in group.names}
    for key, path in numbers_.items():
        if dotted(path) not in without and key.state in scalars.get(key.name, {}):
            entries.append(_number(files, path, "float32", scalars[key.name][key.state]))
    few = ", ".join(sorted(taken)[:8])
    return entries, (f"taken from {like.root}, as the source does not say: {few}",) if taken else ()


def _known(index: Index, like: Index, extra: DcpExtra) -> Mapping[str, Any]:
    """What the source says about entries of `like`, by flat name."""
    group_of = {name: group for group in index.groups for name in group.names}
    found: dict[str, Any] = {}
    for key, (name, option) in extra.naming.named.items():
        if name in group_of and option in group_of[name].options:
            found[key] = group_of[name].options[option]
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
            found[key] = values[0]
    for key, (state, name) in (*extra.naming.values.items(), *extra.naming.tensors.items()):
        if name in group_of and state in group_of[name].scalars:
            found[key] = group_of[name].scalars[state]
    return found
