"""Lay out a DCP checkpoint for unmodified `torch.distributed.checkpoint.load`.

From a DCP source the state dict stays as its user made it. From another format it gets the names that torch's
`get_model_state_dict` and `get_optimizer_state_dict` make under `model` and `optim`, with parameter groups both by
group and by parameter (`flatten_optimizer_state_dict`), as either form may be asked for; with `Request.like`, those of
that checkpoint. Pure but for small objects that are copied from a DCP checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from reshard.errors import UnsupportedError
from reshard.formats.base import Request
from reshard.formats.dcp.metadata import Entry
from reshard.formats.dcp.naming import dotted
from reshard.formats.dcp.reader import NAME, DcpExtra
from reshard.formats.dcp.writing.cutting import cut
from reshard.formats.dcp.writing.metadata_file import metadata_file
from reshard.formats.dcp.writing.objects import carried, numbers, objects_like, options
from reshard.formats.dcp.writing.skeleton import RankFiles
from reshard.formats.dcp.writing.target_tensors import (
    Wanted,
    named_tensors,
    notes_on,
    own_tensors,
    placed_like,
    weights_alone,
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
    wanted, objects, order, notes = _content(files, index, request)
    entries = [*(cut(files, table, at, item, request.topology.world_size) for at, item in enumerate(wanted)), *objects]
    _check_names(entries, index)
    entries.sort(key=lambda entry: order.get(entry.key, 0))
    return TargetLayout(
        format=NAME,
        topology=request.topology,
        files=(*files.build(), metadata_file(entries)),
        shards=table.build(),
        zeros=files.zeros(),
        tensors=tuple(item.tensor for item in wanted),
        origins=tuple(item.origin for item in wanted),
        notes=notes,
    )


def _content(
    files: RankFiles, index: Index, request: Request
) -> tuple[list[Wanted], list[Entry], Mapping[str, int], tuple[str, ...]]:
    """Tensors, other entries, order of the entries, and notes."""
    extra = _extra(index)
    if request.like is not None:
        like = _extra(request.like)
        if like is None:
            raise UnsupportedError(f"is of the format {request.like.format}, not {NAME}", path=str(request.like.root))
        wanted = placed_like(named_tensors(index, request), index, request.like, like)
        taken = {dotted(item.path) for item in wanted}
        if weights_alone(index) and any(key.state != "weight" for key in like.paths):
            note = f"the source has weights alone: all that {request.like.root} holds besides is left out"
            return wanted, [], _positions(like), (*notes_on(index, request), note)
        objects, notes = objects_like(files, index, request.like, like, taken)
        return wanted, objects, _positions(like), (*notes_on(index, request), *notes)
    if extra is not None and all(tensor.key in extra.paths for tensor in index.tensors):
        wanted = list(own_tensors(index, request, extra))
        if weights_alone(index) and any(key.state != "weight" for key in extra.paths):  # the optimizer was left out
            return wanted, [], _positions(extra), _left_behind(extra)
        return wanted, carried(files, index.root, extra.carried), _positions(extra), ()
    objects = [*numbers(files, index), *options(files, index.groups)]
    return named_tensors(index, request), objects, {}, notes_on(index, request, extra)


def _extra(index: Index) -> DcpExtra | None:
    return index.extra if index.format == NAME and isinstance(index.extra, DcpExtra) else None


def _positions(extra: DcpExtra) -> Mapping[str, int]:
    return {key: at for at, key in enumerate(extra.order)}


def _left_behind(extra: DcpExtra) -> tuple[str, ...]:
    """Words about a run's progress: it belongs to the optimizer, and its tensors could be taken for weights."""
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
