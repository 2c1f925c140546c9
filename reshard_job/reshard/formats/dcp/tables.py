"""Rows of a shard table from chunks: what DCP and the formats that use its container have in common."""

from __future__ import annotations

import dataclasses
import json
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from reshard.check import cover_problems
from reshard.errors import CorruptSourceError
from reshard.files import open_file
from reshard.formats.dcp.items import Items
from reshard.formats.dcp.metadata import Entry, Place
from reshard.geometry import Box
from reshard.layout import Checksum, LogicalTensor, ShardTable, ShardTableBuilder, SourceFile

SUFFIX = ".distcp"
CONFIG_FILE = "metadata.json"
"""Of Megatron-Core, beside `.metadata`."""

_MAX_CONFIG_BYTES = 1 << 20  # torch_dist's has a hundred
_RANK = re.compile(r"^__(\d+)_\d+\.distcp$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A chunk that is part of a logical tensor.

    Attributes:
        tensor: position of the logical tensor.
        box: of the logical tensor.
        entry: that the chunk belongs to.
        chunk: of the entry; may have leading dims of size 1 that the logical tensor does not have.
        place: of the chunk's item.
    """

    tensor: int
    box: Box
    entry: Entry
    chunk: Box
    place: Place


def check_files(folder: Path, entries: Iterable[Entry]) -> None:
    """Every file that is named is there and long enough, and no other file of a rank is.

    Raises:
        CorruptSourceError: with every file that is not as it should be.
    """
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


def backend_of(folder: Path) -> str | None:
    """`sharded_backend` of Megatron-Core's `metadata.json`; None where there is no such thing."""
    try:
        with open_file(folder / CONFIG_FILE) as file:
            value = json.loads(file.read(_MAX_CONFIG_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return None
    backend = value.get("sharded_backend") if isinstance(value, dict) else None
    return backend if isinstance(backend, str) else None


def make_table(
    items: Items, entries: Iterable[Entry], tensors: Sequence[LogicalTensor], parts: Iterable[Part]
) -> tuple[tuple[SourceFile, ...], ShardTable]:
    """Files with their checksums, and rows; chunks are looked up in the order of the files.

    Raises:
        CorruptSourceError: an item is not what `.metadata` says, or parts do not cover a tensor exactly.
    """
    names = sorted({place.file for entry in entries for _, place in entry.chunks}, key=_by_rank)
    numbers = {name: at for at, name in enumerate(names)}
    checksums: dict[str, list[Checksum]] = {name: [] for name in names}
    table = ShardTableBuilder()
    for part in sorted(parts, key=lambda part: (numbers[part.place.file], part.place.offset)):
        if not part.box.num_elements:
            continue
        found = items.chunk(part.entry, part.chunk, part.place)
        if found.checksum is not None:
            checksums[part.place.file].append(found.checksum)
        table.add(
            tensor=part.tensor,
            box=part.box,
            file=numbers[part.place.file],
            byte_offset=found.byte_offset,
            strides=found.strides[len(found.strides) - part.box.ndim :],
        )
    shards = table.build()
    problems = cover_problems(tensors, shards, np.arange(len(shards)), side="chunks of")
    held = set(shards.tensor.tolist())
    problems += [f"{item.key} has no chunk" for at, item in enumerate(tensors) if item.num_elements and at not in held]
    if problems:
        raise CorruptSourceError(
            f"chunks do not cover {len(problems)} tensors exactly", path=str(items.folder), problems=problems[:20]
        )
    files = tuple(
        SourceFile(path=name, num_bytes=items.file_bytes(name), checksums=tuple(sorted(checksums[name], key=_start)))
        for name in names
    )
    return files, shards


def num_ranks(entries: Iterable[Entry]) -> int:
    """Ranks that wrote a file; at least 1."""
    ranks = [int(match[1]) for entry in entries for _, place in entry.chunks if (match := _RANK.match(place.file))]
    return max(ranks, default=0) + 1


def _start(checksum: Checksum) -> int:
    return checksum.start


def _by_rank(name: str) -> tuple[int, str]:
    match = _RANK.match(name)
    return (int(match[1]) if match else -1, name)
