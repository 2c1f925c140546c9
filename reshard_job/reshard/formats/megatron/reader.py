"""Index a Megatron-Core `torch_dist` checkpoint: DCP's container with keys of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from reshard.commits.commit import Commit
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.base import stated_topology
from reshard.formats.dcp.chunks import in_columns
from reshard.formats.dcp.items import Items
from reshard.formats.dcp.metadata import Entry, read_metadata
from reshard.formats.dcp.tables import (
    CONFIG_FILE,
    Parts,
    backend_of,
    check_files,
    make_table,
    names_of,
    num_ranks,
)
from reshard.formats.megatron.common import COMMON_KEY, Common, differing, find_groups, read_common
from reshard.formats.megatron.example import Home, MegatronExtra
from reshard.formats.megatron.names import Named, find_names, layers_of
from reshard.tensors.layout import Index, LogicalTensor, TensorKey

NAME = "megatron"
_BACKEND = "torch_dist"


def read_index(folder: Path, commit: Commit | None) -> Index:
    """Index the checkpoint in `folder`: all weights, and optimizer states that are laid out like weights.

    Raises:
        CorruptSourceError, UnsafePickleError, UnsupportedError: see `reshard.formats.base`.
    """
    if (backend := backend_of(folder)) != _BACKEND:
        raise UnsupportedError(
            f"sharded_backend {backend!r}: only {_BACKEND!r} is read",
            path=str(folder / CONFIG_FILE),
            hint="load and save it with a current Megatron-Core and --ckpt-format torch_dist",
        )
    entries = read_metadata(folder)
    check_files(folder, entries)
    named = find_names(entries, str(folder))
    objects = set(named.objects) - {COMMON_KEY}
    with Items(folder) as items:
        common = read_common(folder, entries, items)
        tensors, parts, homes = _logical(entries, named, str(folder))
        files, shards = make_table(items, names_of(entries), tensors, parts)
    if not tensors:
        raise CorruptSourceError("holds no weights", path=str(folder))
    trained = [tensor.key.name for tensor in tensors if tensor.key.state == "fp32"]
    if commit is not None:
        topology, step, samples = commit.topology, commit.step, commit.samples
    else:
        topology = common.topology or stated_topology(str(folder), dp=num_ranks(names_of(entries)), zero=0)
        step, samples = common.step or 0, common.samples
    return Index(
        root=folder,
        format=NAME,
        topology=topology,
        step=step,
        samples=samples,
        tensors=tensors,
        files=files,
        shards=shards,
        groups=find_groups(common.settings, trained),
        extra=MegatronExtra(
            homes=homes,
            order=tuple(entry.key for entry in entries),
            objects=tuple(entry for entry in entries if entry.key in objects),
            common=next((entry for entry in entries if entry.key == COMMON_KEY), None),
            buckets=bool(named.buckets),
        ),
        notes=_notes(named, common),
    )


def _logical(
    entries: Iterable[Entry], named: Named, where: str
) -> tuple[tuple[LogicalTensor, ...], Parts, dict[TensorKey, Home]]:
    """Logical tensors, their chunks, and where each is in the folder."""
    tensors: list[LogicalTensor] = []
    homes: dict[TensorKey, Home] = {}
    chosen = [entry for entry in entries if entry.key in named.tensors]
    drops: list[int] = []
    numbers = [np.zeros(0, dtype=np.int64)]
    for entry in chosen:
        key = named.tensors[entry.key]
        chunks = in_columns((entry.chunks,))
        drop, names = layers_of(entry, key.name, chunks, where)
        layer = chunks.offset[:, 0] if drop else np.zeros(len(chunks), dtype=np.int64)
        drops.append(drop)
        numbers.append(len(tensors) + layer)
        shape = (entry.shape or ())[drop:]
        for at, name in enumerate(names):
            own = chunks.offset[layer == at][:, drop : drop + len(shape)]
            found = LogicalTensor(key=TensorKey(key.state, name), shape=shape, dtype=entry.dtype)
            tensors.append(found)
            homes[found.key] = Home(
                key=entry.key,
                layer=at if drop else None,
                shape=shape,
                dtype=entry.dtype,
                counts=tuple(len(set(column.tolist())) for column in own.T),
            )
    parts = Parts(
        tensor=np.concatenate(numbers),
        entry=np.repeat(np.arange(len(chosen)), [len(entry.chunks) for entry in chosen]),
        entries=chosen,
        chunks=in_columns(entry.chunks for entry in chosen),
        drop=np.array(drops, dtype=np.int64),
    )
    return tuple(tensors), parts, homes


def _notes(named: Named, common: Common) -> tuple[str, ...]:
    notes = []
    if named.buckets:
        kind = f" ({common.sharding})" if common.sharding else ""
        notes.append(
            f"the optimizer's states are laid out for its own buffers{kind} and are left behind: save with "
            "--dist-ckpt-optim-fully-reshardable to take them along"
        )
    if apart := differing(common.settings):
        notes.append(
            f"the optimizer has {len(common.settings)} parameter groups, and the files do not say which parameter is "
            f"in which: settings that are not the same for all are left behind ({', '.join(apart)})"
        )
    if named.objects:
        notes.append(f"{len(named.objects)} objects are left behind: {', '.join(named.objects[:3])}")
    return tuple(notes)
