"""Cut tensors for the ranks: chunks as columns for `.metadata`, and as rows of the shard table."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from reshard.formats.dcp.chunks import Chunks, EntryChunks
from reshard.formats.dcp.metadata import Entry
from reshard.formats.dcp.naming import flat_name
from reshard.formats.dcp.writing.skeleton import RankFiles, RankItems, file_name
from reshard.formats.dcp.writing.target_tensors import TargetTensor
from reshard.tensors.geometry import whole
from reshard.tensors.shard_table import ShardTableBuilder


def split_rows(shape: tuple[int, ...], world_size: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Split a tensor along dim 0 into equal chunks, but for a shorter last one, as `torch.chunk` does.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_chunk_with_empty` (torch 2.13).

    Returns:
        At most two of (first rank, rank behind the last, size of each of their chunks, [ndim]). The chunk of rank r
        begins at r times the rows of rank 0.
    """
    if not shape or world_size == 1 or 0 in shape:
        yield 0, 1, shape
        return
    rows = -(-shape[0] // world_size)
    full, rest = divmod(shape[0], rows)
    yield 0, full, (rows, *shape[1:])
    if rest:
        yield full, full + 1, (rest, *shape[1:])


def cut_tensor(files: RankFiles, table: ShardTableBuilder, at: int, item: TargetTensor, world_size: int) -> Entry:
    """Add the chunks of a tensor to the ranks' files and to the shard table.

    Args:
        files: files to add items to.
        table: table to add rows to; chunks at the same place of consecutive files are a family.
        at: number of the tensor in the target.
        item: the tensor.
        world_size: number of ranks to cut it for.

    Returns:
        The entry of the tensor.
    """
    shape = item.tensor.shape
    placed = [
        (items, size)
        for first, last, size in split_rows(shape, world_size)
        for items in files.add_chunks(first, last, item.tensor.dtype, size)
    ]
    chunks = _build_chunks(placed, _list_file_names(world_size))
    for items, size in placed if item.tensor.num_elements else ():
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
            box, _ = chunks.chunk(items.first, len(shape))
            table.add(tensor=at, box=box, file=items.first, byte_offset=items.byte_offset)
    return Entry(
        key=flat_name(item.path),
        path=item.path,
        shape=shape,
        dtype=item.tensor.dtype,
        chunks=EntryChunks(chunks=chunks, first=0, last=len(chunks), ndim=len(shape)),
    )


def _build_chunks(placed: Sequence[tuple[RankItems, tuple[int, ...]]], names: tuple[str, ...]) -> Chunks:
    """Build the columns of one tensor's chunks, one chunk for each rank from 0 on."""
    counts = [items.last - items.first for items, _ in placed]
    sizes = np.array([size or (1,) for _, size in placed], dtype=np.int64)
    rank = np.arange(sum(counts), dtype=np.int64)
    offset = np.zeros((len(rank), sizes.shape[1]), dtype=np.int64)
    offset[:, 0] = rank * sizes[0, 0]
    return Chunks(
        names=names,
        offset=offset,
        size=np.repeat(sizes, counts, axis=0),
        file=rank,
        start=np.repeat(np.array([items.start for items, _ in placed], dtype=np.int64), counts),
        length=np.repeat(np.array([items.length for items, _ in placed], dtype=np.int64), counts),
    )


@functools.lru_cache(maxsize=1)
def _list_file_names(world_size: int) -> tuple[str, ...]:
    return tuple(map(file_name, range(world_size)))
