"""How tensors are cut for ranks: chunks of all of them at once, as columns for `.metadata` and as rows of shards."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from reshard.formats.dcp.chunks import Chunks, Pieces
from reshard.formats.dcp.metadata import Entry
from reshard.formats.dcp.naming import dotted
from reshard.formats.dcp.writing.skeleton import Items, RankFiles, file_name
from reshard.formats.dcp.writing.target_tensors import Wanted
from reshard.tensors.geometry import whole
from reshard.tensors.shard_table import ShardTableBuilder


def cuts(shape: tuple[int, ...], world_size: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """A tensor's chunks: even along dim 0 but for the last, as `torch.chunk` cuts.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_chunk_with_empty` (torch 2.13).

    Returns:
        At most two of (first rank, rank behind the last, size of each one's chunk, [ndim]). The chunk of rank r begins
        at r times the rows of rank 0.
    """
    if not shape or world_size == 1 or 0 in shape:
        yield 0, 1, shape
        return
    rows = -(-shape[0] // world_size)
    full, rest = divmod(shape[0], rows)
    yield 0, full, (rows, *shape[1:])
    if rest:
        yield full, full + 1, (rest, *shape[1:])


def cut(files: RankFiles, table: ShardTableBuilder, at: int, item: Wanted, world_size: int) -> Entry:
    """Give a tensor items in the ranks' files.

    Args:
        files: to add the items to.
        table: to add rows to; chunks that lie at the same place of consecutive files are a family.
        at: number of the tensor in the target.
        item: the tensor.
        world_size: ranks to cut it for.
    """
    shape = item.tensor.shape
    found = [
        (items, size)
        for first, last, size in cuts(shape, world_size)
        for items in files.add_chunks(first, last, item.tensor.dtype, size)
    ]
    chunks = _columns(found, _names(world_size))
    for items, size in found if item.tensor.num_elements else ():
        if items.last - items.first > 1:
            table.add_family(
                tensor=at,
                box=whole(shape),
                start=items.first * math.prod(size),
                stop=items.last * math.prod(size),
                chunk=math.prod(size),
                file=items.first,
                byte_offset=items.byte_offset,
                item_bytes=item.tensor.item_bytes,
            )
        else:
            box, _ = chunks.piece(items.first, len(shape))
            table.add(tensor=at, box=box, file=items.first, byte_offset=items.byte_offset)
    return Entry(
        key=dotted(item.path),
        path=item.path,
        shape=shape,
        dtype=item.tensor.dtype,
        chunks=Pieces(chunks=chunks, first=0, last=len(chunks), ndim=len(shape)),
    )


def _columns(found: Sequence[tuple[Items, tuple[int, ...]]], names: tuple[str, ...]) -> Chunks:
    """The chunks of one tensor, one for each rank from 0 on."""
    counts = [items.last - items.first for items, _ in found]
    sizes = np.array([size or (1,) for _, size in found], dtype=np.int64)
    rank = np.arange(sum(counts), dtype=np.int64)
    offset = np.zeros((len(rank), sizes.shape[1]), dtype=np.int64)
    offset[:, 0] = rank * sizes[0, 0]
    return Chunks(
        names=names,
        offset=offset,
        size=np.repeat(sizes, counts, axis=0),
        file=rank,
        start=np.repeat(np.array([items.start for items, _ in found], dtype=np.int64), counts),
        length=np.repeat(np.array([items.length for items, _ in found], dtype=np.int64), counts),
    )


@functools.lru_cache(maxsize=1)
def _names(world_size: int) -> tuple[str, ...]:
    return tuple(map(file_name, range(world_size)))
