"""A stranger to torch's distributed checkpoints (DCP), and to Megatron-Core's, which are of the same form.

`.metadata` lists the tensors, the chunks of each, and the item of a file that holds each chunk. An item is an archive
of torch.save. Sources: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13,
megatron/core/dist_checkpointing of Megatron-Core 0.16.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reshard.witness import pickles
from reshard.witness.archives import open_for_reading
from reshard.witness.megatron_buckets import Bucket, add_states, is_bucket
from reshard.witness.opened import OpenedFile
from reshard.witness.pickles import Inert, NotWitnessedError, StoredTensor
from reshard.witness.table import Key, Piece, Storage, Table, Tensor

_METADATA = ".metadata"
_MOST_METADATA_BYTES = 32 << 20
_MEGATRON_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_MEGATRON_REST = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_MEGATRON_BUCKET = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_STACKED = re.compile(r"((?:.*\.)?layers\.)(?!\d+(?:\.|$))(.+)")
_MEGATRON_FILES = ("metadata.json", "common.pt")
_OPTIONS = ("param_groups", "param_to_group_meta")
_MOST_MODULES = 3
_STATES = {"fp32_param": "fp32", "param": "fp32"}


class _Item(NamedTuple):
    """A part of a file that holds a chunk, or an object."""

    path: str
    start: int
    num_bytes: int


class _Entry(NamedTuple):
    """A tensor in `.metadata`: shape, type, and the chunks (offset, size) with their items."""

    shape: tuple[int, ...]
    dtype: str
    chunks: list[tuple[tuple[int, ...], tuple[int, ...], _Item]]


def read(root: Path, *, is_megatron: bool = False, is_target: bool = False) -> Table:
    """Read the tensors of a distributed checkpoint.

    Args:
        root: folder of the checkpoint.
        is_megatron: names are those of Megatron-Core.
        is_target: every byte of the files will be accounted for.

    Raises:
        NotWitnessedError: there is too much metadata, or it is not clear which tensors are the weights.
    """
    table = Table(root)
    folders = _find_folders(root)
    numbers = {f"{folder}{_METADATA}": table.add_file(f"{folder}{_METADATA}") for folder in folders}
    if is_megatron:
        listed = {item.name for item in root.iterdir()}
        numbers |= {name: table.add_file(name) for name in _MEGATRON_FILES if name in listed}
    entries: dict[str, _Entry] = {}
    items: list[_Item] = []
    paths: dict[str, Any] = {}
    for folder in folders:
        metadata = _load_metadata(root / f"{folder}{_METADATA}")
        own_entries, own_items = _read_entries(metadata, folder)
        if entries.keys() & own_entries.keys():
            raise NotWitnessedError("several folders have an entry of the same name")
        entries |= own_entries
        items += own_items
        paths |= metadata.field("planner_data") or {}
    for path in sorted({item.path for item in items}):
        numbers[path] = table.add_file(path)
    if is_target:
        _add_gaps(table, items, numbers)
    keys = dict(_megatron_keys(entries)) if is_megatron else _find_keys(entries, paths)
    for name, key in keys.items():
        entry = entries[name]
        pieces = [
            _piece(table, entry.shape, chunk, numbers, is_target=is_target)
            for chunk in entry.chunks
            if math.prod(chunk[1])
        ]
        _add_tensor(table, key, entry, pieces, is_megatron=is_megatron)
    buckets = [name for name in entries if is_megatron and _MEGATRON_BUCKET.match(name)]
    if buckets and "common.pt" in numbers and all(map(is_bucket, buckets)):  # others are never converted
        common = OpenedFile(table, "common.pt", is_target=False, number=numbers["common.pt"])
        args = common.find("args")
        add_states(
            table,
            buckets,
            lambda name: _read_bucket(table, entries[name], numbers, is_target=is_target),
            is_sequential=isinstance(args, Inert) and args.field("moe_grouped_gemm") is False,
        )
    return table


def _read_bucket(table: Table, entry: _Entry, numbers: Mapping[str, int], *, is_target: bool) -> Bucket:
    """Return the chunks of a flat tensor, in order."""
    chunks = []
    for chunk in sorted(entry.chunks, key=lambda chunk: chunk[0]):
        piece = _piece(table, entry.shape, chunk, numbers, is_target=is_target)
        if not isinstance(piece.holder, Storage) or piece.strides != (1,):
            raise NotWitnessedError("a bucket with gaps between its elements")
        chunks.append((piece.low[0], piece.size[0], piece.holder, piece.start))
    return Bucket(entry.shape[0], entry.dtype, chunks)


def _find_folders(root: Path) -> list[str]:
    """Return what stands before `.metadata`: nothing, or the names of the folders that hold the checkpoint together.

    Raises:
        NotWitnessedError: there is none.
    """
    if (root / _METADATA).is_file():
        return [""]
    folders = sorted(f"{item.name}/" for item in root.iterdir() if item.is_dir() and (item / _METADATA).is_file())
    if not folders:
        raise NotWitnessedError("there is no .metadata")
    return folders


def _load_metadata(path: Path) -> Inert:
    with open_for_reading(path) as file:
        if file.num_bytes > _MOST_METADATA_BYTES:
            raise NotWitnessedError(f".metadata has more than {_MOST_METADATA_BYTES >> 20} MiB")
        metadata: Inert = pickles.load(file.read(file.num_bytes, 0))
        return metadata


def _read_entries(metadata: Inert, folder: str) -> tuple[dict[str, _Entry], list[_Item]]:
    """Return the tensors of a folder's `.metadata` by name, and all items of all its files."""
    placed: dict[tuple[str, tuple[int, ...] | None], _Item] = {}
    for index, info in metadata.field("storage_data").items():
        offset = index.field("offset")
        item = _Item(folder + info.field("relative_path"), info.field("offset"), info.field("length"))
        placed[index.field("fqn"), None if offset is None else tuple(offset)] = item
    entries: dict[str, _Entry] = {}
    for name, entry in metadata.field("state_dict_metadata").items():
        size = entry.field("size")
        if size is None:
            continue
        boxes = [(tuple(chunk.field("offsets")), tuple(chunk.field("sizes"))) for chunk in entry.field("chunks")]
        chunks = [(low, extent, placed[name, low]) for low, extent in boxes]
        entries[name] = _Entry(tuple(size), _dtype(entry.field("properties")), chunks)
    return entries, list(placed.values())


def _dtype(properties: Any) -> str:
    """Return the type of a tensor; torch pickles its properties as a tuple that begins with it."""
    state = properties.state
    first = state[0] if isinstance(state, tuple) else (state or {}).get("dtype")
    if not isinstance(first, str):
        raise NotWitnessedError("a type that the stranger does not know")
    return first


def _piece(
    table: Table, whole: tuple[int, ...], chunk: tuple[tuple[int, ...], tuple[int, ...], _Item],
    numbers: Mapping[str, int], *, is_target: bool,
) -> Piece:  # fmt: skip
    low, size, item = chunk
    number = numbers[item.path]
    file = OpenedFile(table, item.path, is_target=is_target, start=item.start, num_bytes=item.num_bytes, number=number)
    stored = file.value
    if not isinstance(stored, StoredTensor) or stored.shape != size:
        raise NotWitnessedError(f"an item of {item.path} is not the chunk that .metadata describes")
    return Piece(low, size, file.storage_of(stored), stored.offset, stored.stride, whole)


def _add_tensor(table: Table, key: Key, entry: _Entry, pieces: list[Piece], *, is_megatron: bool) -> None:
    """Add a tensor; Megatron-Core stacks the layers of a model along a dim of their own."""
    stacked = _STACKED.fullmatch(key.name) if is_megatron and entry.shape else None
    if stacked is None:
        table.tensors[key] = Tensor(entry.shape, entry.dtype, [pieces])
        return
    for layer in range(entry.shape[0]):
        rows = [part for piece in pieces if (part := piece.rows(layer, layer + 1)) is not None]
        name = f"{stacked[1]}{layer}.{stacked[2]}"
        own = [part.without_first_dim() for part in rows]
        table.tensors[Key(key.state, name)] = Tensor(entry.shape[1:], entry.dtype, [own])


def _add_gaps(table: Table, items: Sequence[_Item], numbers: Mapping[str, int]) -> None:
    """Add the ranges of the files that belong to no item."""
    for path, number in numbers.items():
        if path.rpartition("/")[2] in (_METADATA, *_MEGATRON_FILES):
            continue
        with open_for_reading(table.root / path) as file:
            num_bytes = file.num_bytes
        end = 0
        own = sorted({(item.start, item.num_bytes) for item in items if item.path == path})
        for start, count in [*own, (num_bytes, 0)]:
            if start < end:
                raise NotWitnessedError(f"items of {path} overlap")
            if start > end:
                table.filler.setdefault(number, []).append((end, start))
            end = start + count


def _megatron_keys(entries: Mapping[str, _Entry]) -> Iterator[tuple[str, Key]]:
    for name in entries:
        state = _MEGATRON_STATE.fullmatch(name)
        if state is not None:
            yield name, Key(_STATES.get(state[1], state[1]), state[2])
        elif not _MEGATRON_REST.match(name):
            yield name, Key("weight", name)


def _find_keys(entries: Mapping[str, _Entry], paths: Mapping[str, Any]) -> dict[str, Key]:
    """Tell weights from optimizer states by name: `PREFIX.state.NAME.STATE` is a state of the weight `MODEL.NAME`."""
    marks = [(name, mark) for name in paths for mark in _OPTIONS if mark in name.split(".")]
    prefixes = {name[: name.index(mark)] for name, mark in marks}
    wrapped = any(mark == _OPTIONS[1] for _, mark in marks)
    if len(prefixes) > 1:
        raise NotWitnessedError("several optimizers")
    prefix = next(iter(prefixes), None)
    inside = (
        {} if prefix is None else {name: name[len(prefix) :] for name in entries if name.startswith(f"{prefix}state.")}
    )
    containers: dict[tuple[Any, ...], dict[str, str]] = {}
    for name in entries:
        path = tuple(paths.get(name) or (name,))
        if name not in inside and (prefix is None or not name.startswith(tuple(prefix + mark for mark in _OPTIONS))):
            weight = ".".join(part for part in str(path[-1]).split(".") if part != "_orig_mod")
            containers.setdefault(path[:-1], {})[weight] = name
    fitting: dict[tuple[Any, ...], dict[str, str]] = {}
    for count in range(_MOST_MODULES + 1 if wrapped else 1):  # modules that only the optimizer goes through
        outer = f"state.{'module.' * count}"
        shorter = {name: rest.replace(outer, "state.", 1) for name, rest in inside.items()}
        fitting = {path: own for path, own in containers.items() if all(_split(rest, own) for rest in shorter.values())}
        if fitting:
            inside = shorter
            break
    named = {path: own for path, own in fitting.items() if path and path[-1] == "model"}
    chosen = named if len(fitting) > 1 else fitting
    if len(chosen) != 1:
        raise NotWitnessedError("it is not clear which tensors are the weights")
    weights = next(iter(chosen.values()))
    keys = {name: Key("weight", weight) for weight, name in weights.items()}
    for name, rest in inside.items():
        weight, state = _split(rest, weights) or ("", "")
        if entries[name].shape:  # numbers of an optimizer are settings, and are not compared
            keys[name] = Key(state, weight)
    return keys


def _split(rest: str, weights: Mapping[str, str]) -> tuple[str, str] | None:
    """Split `state.NAME.STATE` at the longest name of a weight."""
    parts = rest.split(".")[1:]
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        if name in weights:
            return name, ".".join(parts[count:])
    return None
