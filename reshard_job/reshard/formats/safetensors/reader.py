"""Index a safetensors checkpoint: every tensor is one box with the state `weight`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from reshard.commits.commit import Commit
from reshard.errors import UnsupportedError
from reshard.formats.safetensors.file_names import NAME
from reshard.formats.safetensors.source import SHARDING, WeightFile, read_files
from reshard.tensors.geometry import whole
from reshard.tensors.layout import Index, LogicalTensor, SourceFile, TensorKey
from reshard.tensors.shard_table import ShardTableBuilder
from reshard.topology import Topology

STEP = "reshard.step"
SAMPLES = "reshard.samples"
_NOT_CARRIED = frozenset((STEP, SAMPLES, SHARDING, "DCP_VERSION"))
TOPOLOGY = Topology(zero=0)
"""Topology of files without a commit: whole tensors for one rank, nothing partitioned."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsExtra:
    """Facts besides the tensors that the writer of this format copies.

    Attributes:
        metadata: the user's `__metadata__`; keys about which files differ are left out.
    """

    format_name: ClassVar[str] = NAME
    metadata: Mapping[str, str]


def read_index(folder: Path, commit: Commit | None) -> Index:
    """Index the checkpoint in `folder`.

    Raises:
        CorruptSourceError, UnsupportedError: see `reshard.formats.base`.
    """
    files = read_files(folder)
    tensors: list[LogicalTensor] = []
    builder = ShardTableBuilder()
    for number, file in enumerate(files):
        for entry in file.header.entries:
            if entry.num_bytes:
                builder.add(
                    tensor=len(tensors),
                    box=whole(entry.shape),
                    file=number,
                    byte_offset=file.header.data_start + entry.start,
                )
            tensors.append(LogicalTensor(key=TensorKey("weight", entry.name), shape=entry.shape, dtype=entry.dtype))
    metadata = _merge_metadata(files)
    names = {tensor.key.name for tensor in tensors}
    aliases = {key: value for key, value in metadata.items() if key not in names and value in names}
    return Index(
        root=folder,
        format=NAME,
        topology=TOPOLOGY if commit is None else commit.topology,
        step=_parse_number(metadata, STEP, folder) if commit is None else commit.step,
        samples=_parse_number(metadata, SAMPLES, folder) if commit is None else commit.samples,
        tensors=tuple(tensors),
        files=tuple(SourceFile(path=file.place, num_bytes=file.num_bytes) for file in files),
        shards=builder.build(),
        aliases=aliases,
        extra=SafetensorsExtra(
            metadata={key: value for key, value in metadata.items() if key not in {*_NOT_CARRIED, *aliases}}
        ),
    )


def _merge_metadata(files: Sequence[WeightFile]) -> dict[str, str]:
    """Merge the `__metadata__` of all files, without keys about which they differ."""
    values_of: dict[str, set[str]] = {}
    for file in files:
        for key, value in file.header.metadata.items():
            values_of.setdefault(key, set()).add(value)
    return {key: next(iter(values)) for key, values in values_of.items() if len(values) == 1}


def _parse_number(metadata: Mapping[str, str], key: str, folder: Path) -> int:
    text = metadata.get(key, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise UnsupportedError(f"its metadata {key} is {text[:80]!r}, expected a number", path=str(folder))
    return int(text)
