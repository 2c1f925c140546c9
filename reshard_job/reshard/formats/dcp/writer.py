"""Lay out a DCP checkpoint for unmodified `torch.distributed.checkpoint.load`.

From a DCP source the state dict stays as its user made it. From another format it gets the names that torch's
`get_model_state_dict` and `get_optimizer_state_dict` make under `model` and `optim`, with parameter groups both by
group and by parameter (`flatten_optimizer_state_dict`), as either form may be asked for. Pure but for small objects
that are copied from a DCP source.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from reshard.errors import UnsupportedError
from reshard.formats.base import Request
from reshard.formats.dcp.items import Items
from reshard.formats.dcp.metadata import Entry, Path_
from reshard.formats.dcp.naming import dotted
from reshard.formats.dcp.reader import NAME, Extra
from reshard.formats.dcp.skeleton import RankFiles, metadata_file
from reshard.formats.pt.objects import new_tensor
from reshard.geometry import Box, whole
from reshard.layout import (
    Index,
    LogicalTensor,
    ParamGroup,
    Plain,
    ShardTableBuilder,
    TargetLayout,
    TensorKey,
)

_MODEL, _OPTIMIZER = "model", "optim"
_FLOATS = frozenset(("float64", "float32", "float16", "bfloat16"))
_PADDING = "#padding"  # of a vocabulary: rows that other formats need and a torch model of the true size does not have


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A tensor of the target: where it is in the state dict, and the source tensor that it is made of."""

    path: Path_
    tensor: LogicalTensor
    origin: int


def lay_out(index: Index, request: Request) -> TargetLayout:
    """Lay out the tensors of `index`, cut along dim 0 for all ranks of `request.topology` like FSDP2.

    Raises:
        UnsupportedError: two tensors of one name, or nothing to write.
        CorruptSourceError: a small object of the source is damaged.
    """
    if request.topology.world_size < 1:
        raise UnsupportedError(f"{request.topology} has no ranks")
    files, table = RankFiles(request.topology.world_size), ShardTableBuilder()
    extra = index.extra if index.format == NAME and isinstance(index.extra, Extra) else None
    own = extra is not None and all(tensor.key in extra.paths for tensor in index.tensors)
    if extra is not None and own:
        wanted = list(_own_tensors(index, request, extra))
        notes: tuple[str, ...] = ()
        objects = _carried(files, index.root, extra.carried)
        order = {key: at for at, key in enumerate(extra.order)}
    else:
        wanted, notes = _named_tensors(index, request), _notes(index, request, extra)
        objects = [*_numbers(files, index), *_options(files, index.groups)]
        order = {}
    entries = [*(_cut(files, table, at, item, request.topology.world_size) for at, item in enumerate(wanted)), *objects]
    _check_names(entries, index)
    entries.sort(key=lambda entry: order.get(entry.key, 0))
    return TargetLayout(
        format=NAME,
        topology=request.topology,
        files=(*files.build(), metadata_file(entries)),
        shards=table.build(),
        tensors=tuple(item.tensor for item in wanted),
        origins=tuple(item.origin for item in wanted),
        notes=notes,
    )


def cuts(shape: tuple[int, ...], world_size: int) -> Iterator[tuple[int, Box]]:
    """(rank, box) of a tensor's chunks: even along dim 0 but for the last, as `torch.chunk` cuts.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_chunk_with_empty` (torch 2.13).
    """
    if not shape or world_size == 1 or not Box((0,) * len(shape), shape).num_elements:
        yield 0, whole(shape)
        return
    rows = -(-shape[0] // world_size)
    for rank, first in enumerate(range(0, shape[0], rows)):
        count = min(rows, shape[0] - first)
        yield rank, Box((first, *(0,) * (len(shape) - 1)), (count, *shape[1:]))


def _cut(files: RankFiles, table: ShardTableBuilder, at: int, item: _Wanted, world_size: int) -> Entry:
    chunks = []
    for rank, box in cuts(item.tensor.shape, world_size):
        place, byte_offset = files.add_chunk(rank, item.tensor.dtype, box.size)
        chunks.append((box, place))
        if box.num_elements:
            table.add(tensor=at, box=box, file=rank, byte_offset=byte_offset)
    return Entry(
        key=dotted(item.path),
        path=item.path,
        shape=item.tensor.shape,
        dtype=item.tensor.dtype,
        chunks=tuple(chunks),
    )


def _own_tensors(index: Index, request: Request, extra: Extra) -> Iterator[_Wanted]:
    for at, tensor in enumerate(index.tensors):
        dtype = tensor.dtype
        if tensor.key.state == "weight" and dtype in _FLOATS:
            dtype = request.weight_dtype or dtype
        yield _Wanted(path=extra.paths[tensor.key], tensor=dataclasses.replace(tensor, dtype=dtype), origin=at)


def _carried(files: RankFiles, folder: Path, carried: Iterable[Entry]) -> list[Entry]:
    entries = []
    with Items(folder) as items:
        for entry in sorted(carried, key=lambda entry: entry.chunks[0][1]):
            box, place = entry.chunks[0]
            moved = files.add_raw(0, items.raw(entry.key, place))
            entries.append(dataclasses.replace(entry, chunks=((box, moved),)))
    return entries


def _named_tensors(index: Index, request: Request) -> list[_Wanted]:
    at = {tensor.key: number for number, tensor in enumerate(index.tensors)}
    names = dict.fromkeys(key.name for key in at if key.state in ("weight", "fp32") and not _is_padding(key))
    second: dict[str, list[str]] = {}
    for other, name in index.aliases.items():
        second.setdefault(name, []).append(other)
    wanted: list[_Wanted] = []
    for name in names:
        origin, dtype = _weight(index, at, name, request.weight_dtype)
        for known in (name, *second.get(name, ())):
            tensor = dataclasses.replace(index.tensors[origin], key=TensorKey("weight", known), dtype=dtype)
            wanted.append(_Wanted(path=(_MODEL, known), tensor=tensor, origin=origin))
    for key, number in at.items():
        if key.state not in ("weight", "fp32") and not _is_padding(key):
            path: Path_ = (_OPTIMIZER, f"state.{key.name}.{key.state}")
            wanted.append(_Wanted(path=path, tensor=index.tensors[number], origin=number))
    return wanted


def _weight(index: Index, at: dict[TensorKey, int], name: str, asked: str | None) -> tuple[int, str]:
    """Source tensor and type of a weight: the master weight where there is one, as FSDP2 keeps its parameters."""
    weight, master = at.get(TensorKey("weight", name)), at.get(TensorKey("fp32", name))
    if weight is not None and (master is None or index.tensors[weight].dtype == asked):
        dtype = index.tensors[weight].dtype
        return weight, asked if asked is not None and dtype in _FLOATS else dtype
    assert master is not None
    return master, asked or index.tensors[master].dtype


def _is_padding(key: TensorKey) -> bool:
    return key.name.endswith(_PADDING)


def _numbers(files: RankFiles, index: Index) -> list[Entry]:
    """States that are one number for a group, for each parameter that has a state: `step` as torch keeps it."""
    having = {tensor.key.name for tensor in index.tensors if tensor.key.state not in ("weight", "fp32")}
    entries = []
    for group in index.groups:
        for name in group.names:
            for state, value in group.scalars.items() if name in having else ():
                path: Path_ = (_OPTIMIZER, f"state.{name}.{state}")
                tensor = new_tensor("float32", (), struct.pack("<f", value))
                place = files.add_object(0, tensor)
                entries.append(
                    Entry(key=dotted(path), path=path, shape=(), dtype="float32", chunks=((Box((), ()), place),))
                )
    return entries


def _options(files: RankFiles, groups: Iterable[ParamGroup]) -> list[Entry]:
    """`param_groups` by group and by parameter."""
    found: list[tuple[Path_, Plain]] = []
    for number, group in enumerate(groups):
        where: Path_ = (_OPTIMIZER, "param_groups", number)
        found += [((*where, option), value) for option, value in group.options.items()]
        found.append(((*where, "params"), list(group.names)))
        found += [
            ((_OPTIMIZER, f"param_groups.{name}.{option}"), value)
            for name in group.names
            for option, value in group.options.items()
        ]
    return [
        Entry(key=dotted(path), path=path, shape=None, dtype="", chunks=((None, files.add_object(0, value)),))
        for path, value in found
    ]


def _notes(index: Index, request: Request, extra: Extra | None) -> tuple[str, ...]:
    notes = []
    keys = {tensor.key: tensor.dtype for tensor in index.tensors}
    rounded = [
        key
        for key, dtype in keys.items()
        if key.state == "weight" and keys.get(TensorKey("fp32", key.name), dtype) != dtype
    ]
    if rounded and keys[rounded[0]] != request.weight_dtype:
        notes.append(
            f"{len(rounded)} weights of type {keys[rounded[0]]} are left behind: model.* holds the fp32 master weights "
            "that they are rounded from, as FSDP2 keeps fp32 parameters under mixed precision"
        )
    if padding := sorted({key.name.removesuffix(_PADDING) for key in keys if _is_padding(key)}):
        notes.append(f"padding rows of {', '.join(padding)} are left behind: the target has the vocabulary's true size")
    if not any(group.options for group in index.groups) and any(key.state not in ("weight", "fp32") for key in keys):
        notes.append("the source says nothing of the optimizer's settings: optim.param_groups of the target has none")
    if extra is not None and extra.objects:
        notes.append(f"left behind, as tensors have other names than in the source: {', '.join(index.notes)}")
    return tuple(notes)


def _check_names(entries: Iterable[Entry], index: Index) -> None:
    seen: set[str] = set()
    twice = [entry.key for entry in entries if entry.key in seen or seen.add(entry.key)]  # type: ignore[func-returns-value]
    if twice:
        raise UnsupportedError(
            f"{len(twice)} entries would have the same name, such as {twice[0]}",
            path=str(index.root),
            problems=twice[:20],
        )
    if not seen:
        raise UnsupportedError("there is no tensor to write", path=str(index.root))
