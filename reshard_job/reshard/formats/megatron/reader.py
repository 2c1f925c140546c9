"""Index a Megatron-Core `torch_dist` checkpoint: DCP's container with keys of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from reshard.commit import Commit
from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.dcp.items import Items
from reshard.formats.dcp.metadata import Entry, read_metadata
from reshard.formats.dcp.tables import CONFIG_FILE, Part, backend_of, check_files, make_table, num_ranks
from reshard.formats.megatron.common import COMMON_KEY, Common, differing, find_groups, read_common
from reshard.formats.megatron.example import Extra, Home
from reshard.formats.megatron.names import Named, find_names, layers_of
from reshard.geometry import Box
from reshard.layout import Index, LogicalTensor, TensorKey
from reshard.topology import Topology

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
        files, shards = make_table(items, entries, tensors, parts)
    if not tensors:
        raise CorruptSourceError("holds no weights", path=str(folder))
    trained = [tensor.key.name for tensor in tensors if tensor.key.state == "fp32"]
    if commit is not None:
        topology, step, samples = commit.topology, commit.step, commit.samples
    else:
        topology = common.topology or Topology(dp=num_ranks(entries), zero=0)
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
        extra=Extra(
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
) -> tuple[tuple[LogicalTensor, ...], list[Part], dict[TensorKey, Home]]:
    """Logical tensors, their chunks, and where each is in the folder."""
    tensors: list[LogicalTensor] = []
    parts: list[Part] = []
    homes: dict[TensorKey, Home] = {}
    for entry in entries:
        key = named.tensors.get(entry.key)
        if key is None:
            continue
        for layer, (name, drop, chunks) in enumerate(layers_of(entry, key.name, where)):
            shape = (entry.shape or ())[drop:]
            parts += [
                Part(
                    tensor=len(tensors),
                    box=Box(box.offset[drop:], box.size[drop:]),
                    entry=entry,
                    chunk=box,
                    place=place,
                )
                for box, place in chunks
            ]
            found = LogicalTensor(key=TensorKey(key.state, name), shape=shape, dtype=entry.dtype)
            tensors.append(found)
            homes[found.key] = Home(
                key=entry.key,
                layer=layer if drop else None,
                shape=shape,
                dtype=entry.dtype,
                counts=tuple(len({box.offset[drop + dim] for box, _ in chunks}) for dim in range(len(shape))),
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
