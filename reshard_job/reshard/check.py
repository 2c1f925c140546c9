"""Proof that a plan is exact, before a byte moves: every copy covers its tensor, no hole, no overlap, no stray byte."""

from __future__ import annotations

import numpy as np

from reshard.errors import PlanError
from reshard.layout import Int64Array, LogicalTensor, ShardTable
from reshard.plan import Plan

_PAIRS_AT_ONCE = 1 << 22


def check_plan(plan: Plan) -> None:
    """Check source cover, target cover and the target files' byte ranges.

    Raises:
        PlanError: with every problem found, each naming the tensor or file.
    """
    problems: list[str] = []
    tensors = plan.index.tensors
    for number in plan.needed:
        problems += cover_problems(tensors[number], plan.index.shards, plan.source_rows[number], side="source")
        problems += cover_problems(tensors[number], plan.layout.shards, plan.target_rows[number], side="target")
    problems += _file_problems(plan)
    if problems:
        raise PlanError(f"{len(problems)} problems: nothing was written", problems=problems[:20])


def cover_problems(tensor: LogicalTensor, shards: ShardTable, rows: Int64Array, *, side: str) -> list[str]:
    """What is wrong with the cover of one tensor: volume, bounds and overlaps, for each replica."""
    problems = []
    shape = np.ones(shards.size.shape[1], dtype=np.int64)
    shape[: len(tensor.shape)] = tensor.shape
    for replica in np.unique(shards.replica[rows]):
        own = rows[shards.replica[rows] == replica]
        where = f"{side} {tensor.key} {list(tensor.shape)}, copy {replica}"
        offset, size = shards.offset[own], shards.size[own]
        outside = np.flatnonzero(((offset + size) > shape).any(axis=1))
        if len(outside):
            row = shards.row(int(own[outside[0]]), len(tensor.shape))
            problems.append(f"{where}: box {row.box} lies outside")
            continue
        volume = int(size.prod(axis=1).sum())
        pair = _overlap(offset, size)
        if pair is not None:
            first, second = (shards.row(int(own[i]), len(tensor.shape)).box for i in pair)
            problems.append(f"{where}: boxes {first} and {second} overlap")
        elif volume != tensor.num_elements:
            problems.append(f"{where}: {volume} of {tensor.num_elements} elements are covered")
    return problems


def _overlap(offset: Int64Array, size: Int64Array) -> tuple[int, int] | None:
    """Positions of two boxes that overlap, or None; offset and size are [boxes, ndim]."""
    count = len(offset)
    if count < 2:
        return None
    order = np.lexsort(offset.T[::-1])
    low, high = offset[order], (offset + size)[order]
    # Boxes that start behind the end of box i in the first dim cannot overlap it: compare with those before only.
    reach = np.searchsorted(low[:, 0], high[:, 0], side="left")
    step = max(1, _PAIRS_AT_ONCE // count)
    for first in range(0, count, step):
        last = min(count, first + step)
        stop = int(reach[first:last].max())
        if stop <= first + 1:
            continue
        a, b = slice(first, last), slice(first, stop)
        hit = np.asarray(((low[a, None] < high[None, b]) & (low[None, b] < high[a, None])).all(axis=2))
        np.fill_diagonal(hit, False)
        if hit.any():
            i, j = np.argwhere(hit)[0]
            return int(order[first + i]), int(order[first + j])
    return None


def _file_problems(plan: Plan) -> list[str]:
    """Ranges of target files that lie outside, or are written twice."""
    shards, problems = plan.layout.shards, []
    item = np.array([tensor.item_bytes for tensor in plan.index.tensors], dtype=np.int64)
    extent = (((shards.size - 1) * shards.stride).sum(axis=1) + 1) * item[shards.tensor]
    order = np.argsort(shards.file, kind="stable")
    bounds = np.searchsorted(shards.file[order], np.arange(len(plan.layout.files) + 1))
    for number, file in enumerate(plan.layout.files):
        rows = order[bounds[number] : bounds[number + 1]]
        dense = rows[shards.size[rows].prod(axis=1) * item[shards.tensor[rows]] == extent[rows]]
        ranges = [(int(shards.byte_offset[row]), int(extent[row])) for row in dense]
        ranges += [(start, len(content)) for start, content in file.fixed]
        ranges.sort()
        end = 0
        for start, length in ranges:
            if start < end:
                problems.append(f"target file {file.path}: bytes {start}:{min(end, start + length)} are written twice")
                break
            end = start + length
        last = max([end, *(int(shards.byte_offset[row] + extent[row]) for row in rows)])
        if last > file.num_bytes:
            problems.append(f"target file {file.path}: {file.num_bytes} bytes, but byte {last - 1} is written")
    return problems
