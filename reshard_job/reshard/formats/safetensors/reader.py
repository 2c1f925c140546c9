"""Index a safetensors checkpoint: every tensor of every file is one box, the state `weight` of its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from reshard.commits.commit import Commit
from reshard.errors import CorruptSourceError
from reshard.formats.safetensors.source import SHARDING, WeightFile, open_source
from reshard.tensors.geometry import whole
from reshard.tensors.layout import Index, LogicalTensor, SourceFile, TensorKey
from reshard.tensors.shard_table import ShardTableBuilder
from reshard.topology import Topology

NAME = "safetensors"
STEP = "reshard.step"
SAMPLES = "reshard.samples"
_NOT_CARRIED = frozenset((STEP, SAMPLES, SHARDING, "DCP_VERSION"))
TOPOLOGY = Topology(zero=0)
"""Of files without a commit, which are laid out for no ranks: whole tensors, nothing partitioned."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsExtra:
    """What the writer of this format takes over.

    Attributes:
        metadata: the user's `__metadata__`, of all files that agree about a key.
    """

    metadata: Mapping[str, str]


def read_index(folder: Path, commit: Commit | None) -> Index:
    """Index the checkpoint in `folder`.

    Raises:
        CorruptSourceError, UnsupportedError: see `reshard.formats.base`.
    """
    files = open_source(folder)
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
    stated = _merge(files)
    names = {tensor.key.name for tensor in tensors}
    aliases = {key: value for key, value in stated.items() if key not in names and value in names}
    return Index(
        root=folder,
        format=NAME,
        topology=TOPOLOGY if commit is None else commit.topology,
        step=_number(stated, STEP, folder) if commit is None else commit.step,
        samples=_number(stated, SAMPLES, folder) if commit is None else commit.samples,
        tensors=tuple(tensors),
        files=tuple(SourceFile(path=file.place, num_bytes=file.num_bytes) for file in files),
        shards=builder.build(),
        aliases=aliases,
        extra=SafetensorsExtra(
            metadata={key: value for key, value in stated.items() if key not in {*_NOT_CARRIED, *aliases}}
        ),
    )


def _merge(files: Sequence[WeightFile]) -> dict[str, str]:
    """`__metadata__` of all files, without keys about which they differ."""
    found: dict[str, set[str]] = {}
    for file in files:
        for key, value in file.header.metadata.items():
            found.setdefault(key, set()).add(value)
    return {key: next(iter(values)) for key, values in found.items() if len(values) == 1}


def _number(stated: Mapping[str, str], key: str, folder: Path) -> int:
    text = stated.get(key, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise CorruptSourceError(f"its metadata {key} is {text[:80]!r}, expected a number", path=str(folder))
    return int(text)
