"""Lay out a folder for unmodified `megatron.core.dist_checkpointing.load`.

An example defines the keys, the stacked layers, the objects and the common part. The example is the source, if that is
a Megatron-Core checkpoint with its own names, else `Request.like`. Megatron-Core loads chunks of any shape at any
degrees; tensors are cut as in the example, for the target's tensor parallelism. The only files that are read are small
objects that are copied from the example.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from pathlib import Path

from reshard.errors import UnsupportedError
from reshard.formats.base import Request
from reshard.formats.dcp.metadata import Entry, Place
from reshard.formats.dcp.tables import CONFIG_FILE
from reshard.formats.dcp.writing.metadata_file import build_metadata_file
from reshard.formats.dcp.writing.objects import copy_entries
from reshard.formats.dcp.writing.skeleton import RankFiles
from reshard.formats.megatron.amend import Progress, add_common_object, build_common_file
from reshard.formats.megatron.example import MegatronExtra, TensorLocation
from reshard.formats.megatron.names import NAME, is_optimizer_key
from reshard.formats.megatron.placing import PlacedTensor, Placement, place_tensors
from reshard.storage.files import open_file
from reshard.tensors.geometry import Box
from reshard.tensors.layout import Index, TargetFile, TargetLayout
from reshard.tensors.shard_table import ShardTableBuilder

_MAX_CONFIG_BYTES = 1 << 20


def lay_out(index: Index, request: Request) -> TargetLayout:
    """Lay out the tensors of `index` in files for all ranks of `request.topology`.

    Raises:
        UnsupportedError: there is no example, it does not fit, or the optimizer's step is not known.
        CorruptSourceError: an object of the example is damaged.
    """
    example = request.like or index
    extra = example.extra
    if not isinstance(extra, MegatronExtra):
        raise UnsupportedError(
            _explain_no_example(example, named=example is not index),
            path=str(example.root),
            hint="name a Megatron-Core checkpoint of the same model with --like",
        )
    placing = place_tensors(index, extra, request.weight_dtype, str(example.root))
    if placing.optimizer and extra.settings is not None and not extra.settings:
        raise UnsupportedError(
            "its groups of ranks have no settings of the optimizer, or different ones",
            path=str(example.root),
            hint="name with --like a Megatron-Core checkpoint of the same model, or take the weights alone "
            "(--states weight)",
        )
    progress, notes = _find_progress(index, example, placing)
    files, table = RankFiles(request.topology.world_size), ShardTableBuilder()
    entries = _cut_tensors(files, table, placing.tensors, example.topology.tp, request)
    objects = [entry for entry in extra.objects if placing.optimizer or not is_optimizer_key(entry.key)]
    entries += copy_entries(files, example.root, objects)
    others = [_copy_file(example.root / CONFIG_FILE)]
    if extra.common is not None:
        entries.append(add_common_object(example.root, extra.common, files, progress))
    else:
        others.append(build_common_file(example.root, progress, extra.settings))
    order = {key: at for at, key in enumerate(extra.order)}
    entries.sort(key=lambda entry: order[entry.key])
    return TargetLayout(
        format=NAME,
        topology=request.topology,
        files=(*files.build(), *others, build_metadata_file(entries)),
        shards=table.build(),
        zeros=files.zeros(),
        tensors=tuple(item.tensor for item in placing.tensors),
        origins=tuple(item.origin for item in placing.tensors),
        notes=(*placing.notes, *notes),
    )


def _explain_no_example(example: Index, *, named: bool) -> str:
    if example.format == NAME:
        return "has other names than a Megatron-Core folder, which does not say what else such a folder holds"
    if named:
        return f"is of the format {example.format}, not {NAME}"
    return f"the source is of the format {example.format}, which does not say what else a Megatron-Core folder holds"


def _copy_file(path: Path) -> TargetFile:
    with open_file(path) as file:
        data = file.read(_MAX_CONFIG_BYTES, 0)
    return TargetFile(path=path.name, num_bytes=len(data), fixed=((0, data),))


def _find_progress(index: Index, example: Index, placing: Placement) -> tuple[Progress, tuple[str, ...]]:
    """Find the values of the common part that differ from the example, and notes about the rest."""
    if example is index:
        return Progress(optimizer=placing.optimizer), ()
    steps = {int(group.scalars["step"]) for group in index.groups if "step" in group.scalars}
    if placing.optimizer and (len(steps) > 1 or (not steps and index.step != example.step)):
        problem = f"its groups have done {sorted(steps)} steps" if steps else "it does not say how many steps that did"
        raise UnsupportedError(
            f"Megatron-Core has one count of steps for the whole optimizer, and of the source's {problem}",
            path=str(index.root),
            hint="take the weights alone (--states weight), or name with --like a checkpoint of the source's step "
            f"({index.step})",
        )
    same = index.step == example.step
    notes = [f"arguments, settings, learning-rate schedule and objects are those of {example.root}"]
    if not index.samples and index.step and not same:
        notes.append("the source does not say how many samples were consumed: args.consumed_train_samples is as there")
    return Progress(
        step=index.step,
        samples=index.samples if index.samples or not index.step else None,
        optimizer_step=next(iter(steps), None) if placing.optimizer else None,
        optimizer=placing.optimizer,
    ), tuple(notes)


def _cut_tensors(
    files: RankFiles, table: ShardTableBuilder, placed: tuple[PlacedTensor, ...], tp: int, request: Request
) -> list[Entry]:
    """Add each chunk to the file that is the shortest so far; return the entries of the tensors."""
    lengths = [(0, rank) for rank in range(request.topology.world_size)]
    chunks: dict[str, list[tuple[Box, Place]]] = {}
    last: dict[str, PlacedTensor] = {}
    for at, item in enumerate(placed):
        front = () if item.location.layer is None else (item.location.layer,)
        for box in _split_boxes(item.tensor.shape, count_chunks(item.location, tp, request.topology.tp)):
            stored = Box((*front, *box.offset), (*(1 for _ in front), *box.size))
            rank = lengths[0][1]
            where, byte_offset = files.add_chunk(rank, item.tensor.dtype, stored.size)
            heapq.heapreplace(lengths, (where.offset + where.length, rank))
            chunks.setdefault(item.location.key, []).append((stored, where))
            if box.num_elements:
                table.add(tensor=at, box=box, file=rank, byte_offset=byte_offset)
        last[item.location.key] = item
    return [
        Entry(
            key=key,
            path=(key,),
            shape=item.tensor.shape if item.location.layer is None else (item.location.layer + 1, *item.tensor.shape),
            dtype=item.tensor.dtype,
            chunks=tuple(chunks[key]),
        )
        for key, item in last.items()
    ]


def count_chunks(location: TensorLocation, tp: int, target_tp: int) -> tuple[int, ...]:
    """Count the chunks along each dim at tensor parallelism `target_tp`, from those of an example at `tp`.

    A tensor that the example cuts along one dim (several times per rank if gate and up are separate) is cut along the
    same dim. An example without tensor parallelism does not show the dim: matrices are cut along dim 0, vectors are not
    cut.
    """
    cut = [dim for dim, count in enumerate(location.counts) if count > 1]
    if not cut and tp == 1 and len(location.shape) > 1:
        return (target_tp, *location.counts[1:])
    if len(cut) == 1 and location.counts[cut[0]] % tp == 0:
        return tuple(count // tp * target_tp if dim == cut[0] else count for dim, count in enumerate(location.counts))
    return location.counts


def _split_boxes(shape: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes of a grid with `counts` boxes along each dim; the last may be shorter. Yield one if empty."""
    if 0 in shape:
        yield Box((0,) * len(shape), shape)
        return
    steps = [-(-size // count) for size, count in zip(shape, counts, strict=True)]
    for offset in itertools.product(*(range(0, size, step) for size, step in zip(shape, steps, strict=True))):
        yield Box(offset, tuple(min(step, size - low) for step, size, low in zip(steps, shape, offset, strict=True)))
