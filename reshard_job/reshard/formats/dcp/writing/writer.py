"""Lay out a DCP checkpoint for unmodified `torch.distributed.checkpoint.load`.

A DCP source keeps its state dict. Tensors of another format get the names that torch's `get_model_state_dict` and
`get_optimizer_state_dict` give them under `model` and `optim`, with parameter groups both by group and by parameter
(`flatten_optimizer_state_dict`), because a loader may use either form. With `Request.like` they get the names of that
checkpoint. The only files that are read are those of small objects that are copied from a DCP checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from reshard.errors import UnsupportedError
from reshard.formats.base import Request
from reshard.formats.dcp.metadata import Entry
from reshard.formats.dcp.naming import flat_name
from reshard.formats.dcp.reader import NAME, DcpExtra
from reshard.formats.dcp.writing.cutting import cut_tensor
from reshard.formats.dcp.writing.metadata_file import build_metadata_file
from reshard.formats.dcp.writing.objects import add_numbers, add_objects_like, add_options, copy_entries
from reshard.formats.dcp.writing.rank_bound import select_entries
from reshard.formats.dcp.writing.skeleton import RankFiles
from reshard.formats.dcp.writing.target_tensors import (
    TargetTensor,
    has_only_weights,
    keep_tensors,
    list_notes,
    name_tensors,
    place_like,
)
from reshard.tensors.layout import Index, TargetLayout
from reshard.tensors.shard_table import ShardTableBuilder


def lay_out(index: Index, request: Request) -> TargetLayout:
    """Lay out the tensors of `index`, cut along dim 0 for all ranks of `request.topology` like FSDP2.

    Raises:
        UnsupportedError: two tensors of one name, nothing to write, or `request.like` does not fit.
        CorruptSourceError: a small object of the source is damaged.
    """
    files, table = RankFiles(request.topology.world_size), ShardTableBuilder()
    tensors, objects, order, notes = _choose_content(files, index, request)
    entries = [
        *(cut_tensor(files, table, at, item, request.topology.world_size) for at, item in enumerate(tensors)),
        *objects,
    ]
    _check_names(entries, index)
    entries.sort(key=lambda entry: order.get(entry.key, 0))
    return TargetLayout(
        format=NAME,
        topology=request.topology,
        files=(*files.build(), build_metadata_file(entries)),
        shards=table.build(),
        zeros=files.zeros(),
        tensors=tuple(item.tensor for item in tensors),
        origins=tuple(item.origin for item in tensors),
        notes=notes,
    )


def _choose_content(
    files: RankFiles, index: Index, request: Request
) -> tuple[list[TargetTensor], list[Entry], Mapping[str, int], tuple[str, ...]]:
    """Choose tensors and add other entries; return both, the order of all entries by key, and notes."""
    extra = _find_extra(index)
    if request.like is not None:
        like = _find_extra(request.like)
        if like is None:
            raise UnsupportedError(f"is of the format {request.like.format}, not {NAME}", path=str(request.like.root))
        tensors = place_like(name_tensors(index, request), index, request.like, like)
        names = {flat_name(item.path) for item in tensors}
        if has_only_weights(index) and any(key.state != "weight" for key in like.paths):
            note = f"the source has weights alone: all that {request.like.root} holds besides is left out"
            return tensors, [], _number_keys(like), (*list_notes(index, request), note)
        carried, left_out = select_entries(like.carried, request.like.topology, request.topology)
        like = dataclasses.replace(like, carried=carried)
        objects, notes = add_objects_like(files, index, request.like, like, names)
        return tensors, objects, _number_keys(like), (*list_notes(index, request), *notes, *left_out)
    if extra is not None and all(tensor.key in extra.paths for tensor in index.tensors):
        tensors = list(keep_tensors(index, request, extra))
        if has_only_weights(index) and any(key.state != "weight" for key in extra.paths):  # the optimizer was left out
            return tensors, [], _number_keys(extra), _note_left_behind(extra)
        carried, notes = select_entries(extra.carried, index.topology, request.topology)
        return tensors, copy_entries(files, index.root, carried), _number_keys(extra), notes
    objects = [*add_numbers(files, index), *add_options(files, index.groups)]
    return name_tensors(index, request), objects, {}, list_notes(index, request, extra)


def _find_extra(index: Index) -> DcpExtra | None:
    return index.extra if isinstance(index.extra, DcpExtra) else None


def _number_keys(extra: DcpExtra) -> Mapping[str, int]:
    return {key: at for at, key in enumerate(extra.order)}


def _note_left_behind(extra: DcpExtra) -> tuple[str, ...]:
    """Note the other entries that are left out with the optimizer: they are about its run's progress."""
    few = ", ".join(extra.naming.rest[:5]) + (", ..." if len(extra.naming.rest) > 5 else "")
    return (f"left behind with the optimizer: {few}",) if few else ()


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
