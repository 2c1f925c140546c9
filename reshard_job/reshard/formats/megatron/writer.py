"""Lay out a folder for unmodified `megatron.core.dist_checkpointing.load`.

Which keys there are, which layers are stacked, objects and the common part are those of an example: the source, if it
is a Megatron-Core checkpoint in its own names, else `Request.like`. Megatron-Core loads chunks of any shape, at any
degrees; they are cut as the example cuts them, for the target's tensor parallelism. Pure but for small objects that are
copied from the example.
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
from reshard.formats.dcp.writing.metadata_file import metadata_file
from reshard.formats.dcp.writing.objects import carried
from reshard.formats.dcp.writing.skeleton import RankFiles
from reshard.formats.megatron.amend import Progress, common_file, common_object
from reshard.formats.megatron.example import Home, MegatronExtra
from reshard.formats.megatron.names import is_of_optimizer
from reshard.formats.megatron.placing import Placed, Placing, place
from reshard.formats.megatron.reader import NAME
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
    if not isinstance(extra, MegatronExtra) or example.format != NAME:
        raise UnsupportedError(
            _no_example(example, named=example is not index),
            path=str(example.root),
            hint="name a Megatron-Core checkpoint of the same model with --like",
        )
    placing = place(index, extra, request.weight_dtype, str(example.root))
    progress, notes = _progress(index, example, placing)
    files, table = RankFiles(request.topology.world_size), ShardTableBuilder()
    entries = _cut(files, table, placing.tensors, example.topology.tp, request)
    objects = [entry for entry in extra.objects if placing.optimizer or not is_of_optimizer(entry.key)]
    entries += carried(files, example.root, objects)
    others = [_copy(example.root / CONFIG_FILE)]
    if extra.common is not None:
        entries.append(common_object(example.root, extra.common, files, progress))
    else:
        others.append(common_file(example.root, progress))
    order = {key: at for at, key in enumerate(extra.order)}
    entries.sort(key=lambda entry: order[entry.key])
    return TargetLayout(
        format=NAME,
        topology=request.topology,
        files=(*files.build(), *others, metadata_file(entries)),
        shards=table.build(),
        zeros=files.zeros(),
        tensors=tuple(item.tensor for item in placing.tensors),
        origins=tuple(item.origin for item in placing.tensors),
        notes=(*placing.notes, *notes),
    )


def _no_example(example: Index, *, named: bool) -> str:
    if example.format == NAME:
        return "has other names than a Megatron-Core folder, which does not say what else such a folder holds"
    if named:
        return f"is of the format {example.format}, not {NAME}"
    return f"the source is of the format {example.format}, which does not say what else a Megatron-Core folder holds"


def _copy(path: Path) -> TargetFile:
    with open_file(path) as file:
        data = file.read(_MAX_CONFIG_BYTES, 0)
    return TargetFile(path=path.name, num_bytes=len(data), fixed=((0, data),))


def _progress(index: Index, example: Index, placing: Placing) -> tuple[Progress, tuple[str, ...]]:
    """What the common part has to say other than in the example, and notes."""
    if example is index:
        return Progress(optimizer=placing.optimizer), ()
    steps = {int(group.scalars["step"]) for group in index.groups if "step" in group.scalars}
    if placing.optimizer and (len(steps) > 1 or (not steps and index.step != example.step)):
        found = f"its groups have done {sorted(steps)} steps" if steps else "it does not say how many steps that did"
        raise UnsupportedError(
            f"Megatron-Core has one count of steps for the whole optimizer, and of the source's {found}",
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


def _cut(
    files: RankFiles, table: ShardTableBuilder, placed: tuple[Placed, ...], tp: int, request: Request
) -> list[Entry]:
    """Entries of the tensors; each chunk goes to the file that is the shortest so far."""
    lengths = [(0, rank) for rank in range(request.topology.world_size)]
    chunks: dict[str, list[tuple[Box, Place]]] = {}
    last: dict[str, Placed] = {}
    for at, item in enumerate(placed):
        front = () if item.home.layer is None else (item.home.layer,)
        for box in _boxes(item.tensor.shape, pieces(item.home, tp, request.topology.tp)):
            stored = Box((*front, *box.offset), (*(1 for _ in front), *box.size))
            rank = lengths[0][1]
            where, byte_offset = files.add_chunk(rank, item.tensor.dtype, stored.size)
            heapq.heapreplace(lengths, (where.offset + where.length, rank))
            chunks.setdefault(item.home.key, []).append((stored, where))
            if box.num_elements:
                table.add(tensor=at, box=box, file=rank, byte_offset=byte_offset)
        last[item.home.key] = item
    return [
        Entry(
            key=key,
            path=(key,),
            shape=item.tensor.shape if item.home.layer is None else (item.home.layer + 1, *item.tensor.shape),
            dtype=item.tensor.dtype,
            chunks=tuple(chunks[key]),
        )
        for key, item in last.items()
    ]


def pieces(home: Home, tp: int, target_tp: int) -> tuple[int, ...]:
    """Along each dim, into how many pieces a tensor is cut at `target_tp`, from how an example at `tp` cuts it.

    What is cut along one dim (several times at one rank: gate and up are apart) is cut along it again. What an example
    without tensor parallelism does not cut, nobody knows how to: matrices are cut along dim 0, vectors are not.
    """
    cut = [dim for dim, count in enumerate(home.counts) if count > 1]
    if not cut and tp == 1 and len(home.shape) > 1:
        return (target_tp, *home.counts[1:])
    if len(cut) == 1 and home.counts[cut[0]] % tp == 0:
        return tuple(count // tp * target_tp if dim == cut[0] else count for dim, count in enumerate(home.counts))
    return home.counts


def _boxes(shape: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Box]:
    """A grid of so many pieces, all but the last along a dim of one size; whole where there are no elements."""
    if 0 in shape:
        yield Box((0,) * len(shape), shape)
        return
    steps = [-(-size // count) for size, count in zip(shape, counts, strict=True)]
    for offset in itertools.product(*(range(0, size, step) for size, step in zip(shape, steps, strict=True))):
        yield Box(offset, tuple(min(step, size - low) for step, size, low in zip(steps, shape, offset, strict=True)))
