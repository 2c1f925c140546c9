"""Proof that a plan is exact, before a byte moves: every copy covers its tensor, no hole, no overlap, no stray byte.

Exact cover is proved for all tensors at once, in time linear in the rows. With a random number `r(d, x)` for every dim
`d` and coordinate `x`, a box has the value `prod_d (r(d, end_d) - r(d, start_d))`. The value is additive: boxes that
are put together exactly have the sum of their values. So the boxes of a copy cover the tensor exactly once if their
values add up to the value of the whole tensor: both sides are polynomials in the random numbers, of degree `ndim`,
that are the same polynomial only if every element is covered once (write the box's value as the sum of its elements').
Different polynomials agree at a random point modulo p with probability at most `ndim / p` (Schwartz 1980, Zippel
1979). Two draws modulo 2^31 - 1 make that less than 2^-55 for tensors of up to 8 dims, for each tensor.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reshard.cast import can_cast
from reshard.errors import PlanError
from reshard.layout import Int64Array, LogicalTensor, ShardTable
from reshard.plan import Plan

_PAIRS_AT_ONCE = 1 << 22
_PRIME = np.uint64((1 << 31) - 1)
_DRAWS = 2
UInt64Array = npt.NDArray[np.uint64]


def check_plan(plan: Plan) -> None:
    """Check source cover, target cover, types, and the target files' byte ranges.

    Raises:
        PlanError: with every problem found, each naming the tensor or file.
    """
    problems = _type_problems(plan)
    if not problems:
        source_rows = [rows for rows in plan.source_rows if len(rows)]
        if source_rows:
            rows = np.concatenate(source_rows)
            problems += cover_problems(plan.index.tensors, plan.index.shards, rows, side="source")
        target = plan.layout.shards
        problems += cover_problems(plan.target_tensors, target, np.arange(len(target)), side="target")
        problems += _absent(plan)
        problems += _file_problems(plan)
    if problems:
        raise PlanError(f"{len(problems)} problems: nothing was written", problems=problems[:20])


def _type_problems(plan: Plan) -> list[str]:
    problems = []
    for tensor, origin in zip(plan.target_tensors, plan.origins.tolist(), strict=True):
        source = plan.index.tensors[origin]
        if tensor.shape != source.shape:
            problems.append(f"target {tensor.key} {list(tensor.shape)} is made of {source.key} {list(source.shape)}")
        elif not can_cast(source.dtype, tensor.dtype):
            problems.append(f"target {tensor.key}: {source.dtype} cannot become {tensor.dtype}")
    return problems


def _absent(plan: Plan) -> list[str]:
    """Target tensors that no row speaks of."""
    present = np.zeros(len(plan.target_tensors), dtype=np.bool_)
    present[plan.layout.shards.tensor] = True
    return [
        f"target {plan.target_tensors[at].key} {list(plan.target_tensors[at].shape)}: is written nowhere"
        for at in np.flatnonzero(~present).tolist()
        if plan.target_tensors[at].num_elements
    ][:20]


def cover_problems(tensors: Sequence[LogicalTensor], shards: ShardTable, rows: Int64Array, *, side: str) -> list[str]:
    """What is wrong with the cover of each tensor and copy that the rows speak of."""
    if not len(rows):
        return []
    order = rows[np.lexsort((shards.replica[rows], shards.tensor[rows]))]
    tensor, replica = shards.tensor[order], shards.replica[order]
    first = np.flatnonzero(np.r_[True, (np.diff(tensor) != 0) | (np.diff(replica) != 0)])
    shape = np.ones((len(tensors), shards.size.shape[1]), dtype=np.int64)
    for number, item in enumerate(tensors):
        shape[number, : len(item.shape)] = item.shape[: shape.shape[1]]
    low, high, limit = shards.offset[order], shards.offset[order] + shards.size[order], shape[tensor]
    bad = np.add.reduceat((high > limit).any(axis=1).astype(np.int64), first) > 0
    for _ in range(_DRAWS):
        seed = np.uint64(int.from_bytes(os.urandom(8), "little"))
        found = np.add.reduceat(_values(low, high, seed), first) % _PRIME
        bad |= found != _values(np.zeros_like(limit[first]), limit[first], seed)
    bounds = np.r_[first, len(order)]
    problems: list[str] = []
    for group in np.flatnonzero(bad)[:20]:
        own = order[bounds[group] : bounds[group + 1]]
        problems.append(_explain(tensors[int(tensor[bounds[group]])], shards, own, side))
    return problems


def _values(low: Int64Array, high: Int64Array, seed: np.uint64) -> UInt64Array:
    """Values of boxes modulo the prime; `low` and `high` are [boxes, ndim], the result [boxes]."""
    value = np.ones(len(low), dtype=np.uint64)
    for dim in range(low.shape[1]):
        side = (_random(high[:, dim], dim, seed) + _PRIME - _random(low[:, dim], dim, seed)) % _PRIME
        value = value * side % _PRIME
    return value


def _random(coordinate: Int64Array, dim: int, seed: np.uint64) -> UInt64Array:
    """`r(dim, coordinate)` modulo the prime: splitmix64 (Steele et al. 2014) of both and a secret seed."""
    with np.errstate(over="ignore"):
        value = coordinate.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + seed
        value ^= np.uint64(dim + 1) * np.uint64(0xD1B54A32D192ED03)
        value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (value ^ value >> np.uint64(31)) % _PRIME


def _explain(tensor: LogicalTensor, shards: ShardTable, own: Int64Array, side: str) -> str:
    """Name what is wrong with a copy that is known to be wrong."""
    ndim = len(tensor.shape)
    where = f"{side} {tensor.key} {list(tensor.shape)}, copy {shards.replica[own[0]]}"
    shape = np.ones(shards.size.shape[1], dtype=np.int64)
    shape[:ndim] = tensor.shape
    offset, size = shards.offset[own], shards.size[own]
    outside = np.flatnonzero(((offset + size) > shape).any(axis=1))
    if len(outside):
        return f"{where}: box {shards.row(int(own[outside[0]]), ndim).box} lies outside"
    pair = _overlap(offset, size)
    if pair is not None:
        first, second = (shards.row(int(own[at]), ndim).box for at in pair)
        return f"{where}: boxes {first} and {second} overlap"
    return f"{where}: {int(size.prod(axis=1).sum())} of {tensor.num_elements} elements are covered"


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
    shards, files = plan.layout.shards, plan.layout.files
    item = np.array([tensor.item_bytes for tensor in plan.target_tensors], dtype=np.int64)[shards.tensor]
    extent = (((shards.size - 1) * shards.stride).sum(axis=1) + 1) * item
    dense = shards.size.prod(axis=1) * item == extent  # strided rows interleave with their neighbours
    fixed = [(at, start, len(content)) for at, file in enumerate(files) for start, content in file.fixed if content]
    more = np.array(fixed, dtype=np.int64).reshape(-1, 3)
    number = np.r_[shards.file[dense], more[:, 0]]
    start = np.r_[shards.byte_offset[dense], more[:, 1]]
    end = start + np.r_[extent[dense], more[:, 2]]
    order = np.lexsort((start, number))
    number, start, end = number[order], start[order], end[order]
    twice = np.flatnonzero((number[1:] == number[:-1]) & (start[1:] < end[:-1]))
    problems = [
        f"target file {files[number[at]].path}: bytes {start[at + 1]}:{min(end[at], end[at + 1])} are written twice"
        for at in twice[:20].tolist()
    ]
    sizes = np.array([file.num_bytes for file in files], dtype=np.int64)
    behind = np.zeros(len(files), dtype=np.int64)
    np.maximum.at(behind, shards.file, shards.byte_offset + extent)
    np.maximum.at(behind, number, end)
    problems += [
        f"target file {files[at].path}: {sizes[at]} bytes, but byte {behind[at] - 1} is written"
        for at in np.flatnonzero(behind > sizes)[:20].tolist()
    ]
    return problems
