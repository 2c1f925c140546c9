"""Index a Megatron-Core `torch_dist` checkpoint: DCP's container with keys of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reshard.commits.commit import Commit
from reshard.errors import UnsupportedError
from reshard.formats.base import stated_topology
from reshard.formats.dcp.chunks import stack_chunks
from reshard.formats.dcp.items import Items
from reshard.formats.dcp.metadata import Entry, read_metadata
from reshard.formats.dcp.tables import (
    CONFIG_FILE,
    TensorChunks,
    check_files,
    count_ranks,
    list_files,
    make_table,
    read_backend,
)
from reshard.formats.megatron.buckets import BucketStates, PlacingError, number_chunks, place_states
from reshard.formats.megatron.common import (
    COMMON_KEY,
    Common,
    find_differing,
    find_groups,
    read_bucket_settings,
    read_common,
)
from reshard.formats.megatron.example import MegatronExtra, TensorLocation
from reshard.formats.megatron.names import NAME, EntryNames, find_names, split_layers
from reshard.tensors.layout import Index, LogicalTensor, TensorKey

_BACKEND = "torch_dist"


def read_index(folder: Path, commit: Commit | None) -> Index:
    """Index the checkpoint in `folder`: all weights, and optimizer states that are laid out like weights.

    Raises:
        CorruptSourceError, UnsafePickleError, UnsupportedError: see `reshard.formats.base`.
    """
    if (backend := read_backend(folder)) != _BACKEND:
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
        tensors, parts, locations = _build_logical(entries, named, str(folder))
        states, reason = _find_states(entries, named, locations, common)
        settings: Mapping[Any, Any] | None = None
        if states is not None:
            settings, every = read_bucket_settings(entries, items)
            common = dataclasses.replace(common, settings=every)
        flat = () if states is None else number_chunks(states.chunks, len(tensors))
        tensors += () if states is None else states.tensors
        files, shards = make_table(items, list_files(entries), tensors, parts, flat)
    if states is not None:
        locations |= states.locations
    if not tensors:
        raise UnsupportedError("holds no weights", path=str(folder))
    trained = [tensor.key.name for tensor in tensors if tensor.key.state == "fp32"]
    if commit is not None:
        topology, step, samples = commit.topology, commit.step, commit.samples
    else:
        topology = common.topology or stated_topology(str(folder), dp=count_ranks(list_files(entries)), zero=0)
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
            locations=locations,
            order=tuple(dict.fromkeys([*(entry.key for entry in entries), *(at.key for at in locations.values())])),
            objects=tuple(entry for entry in entries if entry.key in objects),
            common=next((entry for entry in entries if entry.key == COMMON_KEY), None),
            buckets=bool(named.buckets) and states is None,
            settings=settings,
        ),
        notes=_list_notes(named, common, states, reason),
        has_rounded_weights=states is not None,
    )


def _find_states(
    entries: Iterable[Entry], named: EntryNames, locations: Mapping[TensorKey, TensorLocation], common: Common
) -> tuple[BucketStates | None, str]:
    """Find the states in the optimizer's buckets; None and why, if they cannot be told."""
    if not named.buckets:
        return None, ""
    if any(entry.key == COMMON_KEY for entry in entries):
        return None, "a later Megatron-Core saved them, of which the order of parameters is not known"
    chosen = set(named.buckets)
    stored = [entry for entry in entries if entry.key in chosen and entry.is_tensor]
    try:
        weights = {key.name: location for key, location in locations.items()}
        return place_states(stored, weights, has_sequential_experts=common.has_sequential_experts), ""
    except PlacingError as error:
        return None, str(error)


def _build_logical(
    entries: Iterable[Entry], named: EntryNames, where: str
) -> tuple[tuple[LogicalTensor, ...], TensorChunks, dict[TensorKey, TensorLocation]]:
    """Build the logical tensors, the table of their chunks, and the location of each in the folder."""
    tensors: list[LogicalTensor] = []
    locations: dict[TensorKey, TensorLocation] = {}
    chosen = [entry for entry in entries if entry.key in named.tensors]
    drops: list[int] = []
    numbers = [np.zeros(0, dtype=np.int64)]
    for entry in chosen:
        key = named.tensors[entry.key]
        chunks = stack_chunks((entry.chunks,))
        drop, names = split_layers(entry, key.name, chunks, where)
        layer = chunks.offset[:, 0] if drop else np.zeros(len(chunks), dtype=np.int64)
        drops.append(drop)
        numbers.append(len(tensors) + layer)
        shape = (entry.shape or ())[drop:]
        for at, name in enumerate(names):
            offsets = chunks.offset[layer == at][:, drop : drop + len(shape)]
            logical = LogicalTensor(key=TensorKey(key.state, name), shape=shape, dtype=entry.dtype)
            tensors.append(logical)
            locations[logical.key] = TensorLocation(
                key=entry.key,
                layer=at if drop else None,
                shape=shape,
                dtype=entry.dtype,
                counts=tuple(len(set(column.tolist())) for column in offsets.T),
            )
    parts = TensorChunks(
        tensor=np.concatenate(numbers),
        entry=np.repeat(np.arange(len(chosen)), [len(entry.chunks) for entry in chosen]),
        entries=chosen,
        chunks=stack_chunks(entry.chunks for entry in chosen),
        drop=np.array(drops, dtype=np.int64),
    )
    return tuple(tensors), parts, locations


def _list_notes(named: EntryNames, common: Common, states: BucketStates | None, reason: str) -> tuple[str, ...]:
    notes = []
    kind = f" ({common.sharding})" if common.sharding else ""
    if states is not None:
        notes.append(
            f"the optimizer's states are found in its own buffers{kind}, in the order of a layer with {states.order}; "
            "the run compares them with the weights, if it converts both"
        )
    elif named.buckets:
        notes.append(
            f"the optimizer's states are laid out for its own buffers{kind} and are left behind: {reason}. Save with "
            "--dist-ckpt-optim-fully-reshardable to take them along"
        )
    if apart := find_differing(common.settings):
        notes.append(
            f"the optimizer has {len(common.settings)} parameter groups, and the files do not say which parameter is "
            f"in which: settings that are not the same for all are left behind ({', '.join(apart)})"
        )
    if named.objects:
        notes.append(f"{len(named.objects)} objects are left behind: {', '.join(named.objects[:3])}")
    return tuple(notes)
