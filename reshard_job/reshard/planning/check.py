"""Prove that a plan is exact before a byte moves: every copy covers its tensor without holes, overlaps or stray bytes.

Exact cover is proved for all tensors at once, in time linear in the rows. With a random number `r(d, x)` for every dim
`d` and coordinate `x`, a box has the value `prod_d (r(d, end_d) - r(d, start_d))`. The value is additive: a box that is
cut into boxes has the sum of their values. So the boxes of a copy are taken to cover the tensor exactly once if their
values add up to the value of the whole tensor. Both sides are polynomials in the random numbers, of degree `ndim`. They
are the same polynomial only if every element is covered once (write the value of a box as the sum of the values of its
elements). Different polynomials agree at a random point modulo p with probability at most `ndim / p` (Schwartz 1980,
Zippel 1979). Two draws modulo 2^31 - 1 make that less than 2^-55 for each tensor of up to 8 dims.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from reshard.errors import PlanError
from reshard.planning.constant_bytes import have_same_positions, list_positions
from reshard.planning.plan import Plan
from reshard.tensors.cast import can_cast
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import PADDING, LogicalTensor, TargetFile, TensorKey
from reshard.tensors.shard_table import Ranges, ShardTable, ranges_of

_PAIRS_AT_ONCE = 1 << 22
_PRIME = np.uint64((1 << 31) - 1)
_DRAWS = 2
_ROUNDED = {"weight", "fp32"}
UInt64Array = npt.NDArray[np.uint64]


def check_plan(plan: Plan) -> None:
    """Check source cover, target cover, types, names, and that every byte of the target files is accounted for.

    Raises:
        PlanError: the plan is not exact; the error lists the problems with their tensor or file.
    """
    index, layout = plan.index, plan.layout
    problems = _type_problems(plan)
    problems += _family_problems(index.tensors, index.shards, len(index.files), side="source")
    problems += _family_problems(plan.target_tensors, layout.shards, len(layout.files), side="target")
    if not problems:
        masters = [rows for average in plan.averages.values() for rows in average.masters]
        source_rows = [rows for rows in (*plan.source_rows, *plan.copy_rows, *masters) if len(rows)]
        if source_rows:
            rows = np.flatnonzero(np.bincount(np.concatenate(source_rows)))  # np.unique would import all of numpy.ma
            problems += cover_problems(plan.index.tensors, plan.index.shards, rows, side="source")
        target = plan.layout.shards
        problems += cover_problems(plan.target_tensors, target, np.arange(len(target)), side="target")
        problems += _absent_tensors(plan)
        problems += _file_problems(plan)
    if problems:
        raise PlanError(f"{len(problems)} problems: nothing was written", problems=problems[:20])


def _type_problems(plan: Plan) -> list[str]:
    """Describe target tensors whose name, shape or type cannot be made from those of their source tensor."""
    names = _FirstNames(plan.index.aliases, plan.layout.aliases)
    problems = []
    for tensor, origin in zip(plan.target_tensors, plan.origins.tolist(), strict=True):
        source = plan.index.tensors[origin]
        if tensor.key != source.key and not names.may_become(source.key, tensor.key):
            problems.append(f"target {tensor.key} is made of {source.key}")
        elif tensor.shape != source.shape:
            problems.append(f"target {tensor.key} {list(tensor.shape)} is made of {source.key} {list(source.shape)}")
        elif not can_cast(source.dtype, tensor.dtype):
            problems.append(f"target {tensor.key}: {source.dtype} cannot become {tensor.dtype}")
    return problems


class _FirstNames:
    """Maps all names of a tied weight to one of them."""

    def __init__(self, *aliases: Mapping[str, str]) -> None:
        self._first: dict[str, str] = {}
        for second, first in itertools.chain.from_iterable(known.items() for known in aliases):
            one, other = self._of(first), self._of(second)
            if one != other:
                self._first[other] = one

    def _of(self, name: str) -> str:
        while name in self._first:
            name = self._first[name]
        return name

    def may_become(self, source: TensorKey, target: TensorKey) -> bool:
        """Return True if `target` can be made of `source`: the same parameter and state, or a weight and its master."""
        states = {source.state, target.state}
        return (len(states) == 1 or states == _ROUNDED) and self._name(source) == self._name(target)

    def _name(self, key: TensorKey) -> tuple[str, bool]:
        return self._of(key.name.removesuffix(PADDING)), key.name.endswith(PADDING)


def _absent_tensors(plan: Plan) -> list[str]:
    """Describe target tensors that no row of the layout writes."""
    present = np.zeros(len(plan.target_tensors), dtype=np.bool_)
    present[plan.layout.shards.tensor] = True
    return [
        f"target {plan.target_tensors[at].key} {list(plan.target_tensors[at].shape)}: is written nowhere"
        for at in np.flatnonzero(~present).tolist()
        if plan.target_tensors[at].num_elements
    ][:20]


def cover_problems(tensors: Sequence[LogicalTensor], shards: ShardTable, rows: Int64Array, *, side: str) -> list[str]:
    """Describe each copy of a tensor that its rows do not cover exactly once."""
    if not len(rows):
        return []
    boxes = shards.take(rows).covers()  # a family counts as one interval, because its chunks always cover it exactly
    order = np.lexsort((boxes.replica, boxes.tensor))
    tensor, replica = boxes.tensor[order], boxes.replica[order]
    first = np.flatnonzero(np.r_[True, (np.diff(tensor) != 0) | (np.diff(replica) != 0)])
    shape = np.ones((len(tensors), boxes.size.shape[1]), dtype=np.int64)
    for number, item in enumerate(tensors):
        shape[number, : len(item.shape)] = item.shape[: shape.shape[1]]
    low, high, limit = boxes.offset[order], boxes.offset[order] + boxes.size[order], shape[tensor]
    bad = np.add.reduceat((high > limit).any(axis=1).astype(np.int64), first) > 0
    for _ in range(_DRAWS):
        seed = np.uint64(int.from_bytes(os.urandom(8), "little"))
        values = np.add.reduceat(_values(low, high, seed), first) % _PRIME
        bad |= values != _values(np.zeros_like(limit[first]), limit[first], seed)
    bounds = np.r_[first, len(order)]
    problems: list[str] = []
    for group in np.flatnonzero(bad)[:20]:
        own = order[bounds[group] : bounds[group + 1]]
        problems.append(_explain(tensors[int(tensor[bounds[group]])], boxes, own, side))
    return problems


def _family_problems(tensors: Sequence[LogicalTensor], shards: ShardTable, num_files: int, *, side: str) -> list[str]:
    """Describe families whose elements are not in their box, have another type, or are in files that do not exist."""
    at = np.flatnonzero(shards.chunk != 0)
    if not len(at):
        return []
    item = np.array([tensor.item_bytes for tensor in tensors], dtype=np.int64)
    few = shards.take(at)
    good = (few.chunk > 0) & (few.start >= 0) & (few.start < few.stop) & (few.stop <= few.size.prod(axis=1))
    good &= (few.item_bytes == item[few.tensor]) & (few.file >= 0) & (few.file + few.num_chunks <= num_files)
    return [
        f"{side} {tensors[few.tensor[row]].key}: elements {few.start[row]}:{few.stop[row]} of {few.item_bytes[row]}"
        f" bytes in chunks of {few.chunk[row]}, in file {few.file[row]} and the next of {num_files}"
        for row in np.flatnonzero(~good)[:20].tolist()
    ]


def _values(low: Int64Array, high: Int64Array, seed: np.uint64) -> UInt64Array:
    """Compute the values of boxes modulo the prime; `low` and `high` are [boxes, ndim], the result [boxes]."""
    value = np.ones(len(low), dtype=np.uint64)
    for dim in range(low.shape[1]):
        side = (_random(high[:, dim], dim, seed) + _PRIME - _random(low[:, dim], dim, seed)) % _PRIME
        value = value * side % _PRIME
    return value


def _random(coordinate: Int64Array, dim: int, seed: np.uint64) -> UInt64Array:
    """Compute `r(dim, coordinate)` modulo the prime: splitmix64 (Steele et al. 2014) of both and a secret seed."""
    with np.errstate(over="ignore"):
        value = coordinate.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + seed
        value ^= np.uint64(dim + 1) * np.uint64(0xD1B54A32D192ED03)
        value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (value ^ value >> np.uint64(31)) % _PRIME


def _explain(tensor: LogicalTensor, shards: ShardTable, own: Int64Array, side: str) -> str:
    """Describe why a copy that failed the check does not cover its tensor exactly."""
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
    """Find the positions of two boxes that overlap, or None; offset and size are [boxes, ndim]."""
    count = len(offset)
    if count < 2:
        return None
    order = np.lexsort(offset.T[::-1])
    low, high = offset[order], (offset + size)[order]
    # A box that starts behind the end of box i in the first dim cannot overlap it, so only earlier ones are compared.
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
    """Describe bytes of target files that are written behind the end, written twice, or not accounted for.

    Consecutive files that hold the same ranges, such as those of ZeRO-3's ranks, are checked together as one group.
    """
    shards, files = plan.layout.shards, plan.layout.files
    item = np.array([tensor.item_bytes for tensor in plan.target_tensors], dtype=np.int64)[shards.tensor]
    ranges, gaps = shards.ranges(item)  # rows with gaps interleave with their neighbours
    fixed, zeros = _fixed_ranges(files), layout_zeros(plan)
    dense = _concatenate(_concatenate(ranges, fixed), zeros)
    borders = np.concatenate(([0, len(files)], dense.first, dense.last, shards.file[gaps], shards.file[gaps] + 1))
    border = np.array(sorted(set(borders.tolist())))  # np.unique would import all of numpy.ma
    sizes = np.array([file.num_bytes for file in files], dtype=np.int64)
    low, high = np.searchsorted(border, dense.first), np.searchsorted(border, dense.last)
    row = np.repeat(np.arange(len(low)), high - low)
    group = np.arange(len(row)) - np.repeat(np.cumsum(high - low) - high, high - low)
    order = np.lexsort((dense.start[row], group))
    group, start, end = group[order], dense.start[row][order], dense.stop[row][order]
    twice = np.flatnonzero((group[1:] == group[:-1]) & (start[1:] < end[:-1]))
    problems = [
        f"target file {files[border[group[at]]].path}: bytes {start[at + 1]}:{min(end[at], end[at + 1])}"
        " are written twice"
        for at in twice[:20].tolist()
    ]
    behind = np.zeros(len(border), dtype=np.int64)
    spanned = (((shards.size[gaps] - 1) * shards.stride[gaps]).sum(axis=1) + 1) * item[gaps]
    np.maximum.at(behind, np.searchsorted(border, shards.file[gaps]), shards.byte_offset[gaps] + spanned)
    np.maximum.at(behind, group, end)
    last = np.repeat(behind[:-1], np.diff(border))
    problems += [
        f"target file {files[at].path}: {sizes[at]} bytes, but byte {last[at] - 1} is written"
        for at in np.flatnonzero(last > sizes)[:20].tolist()
    ]
    if not problems and plan.layout.zeros is not None:
        known = shards.bytes_by_file(item, len(files)) + bytes_by_file(fixed, len(files))
        known += bytes_by_file(zeros, len(files))
        problems = [
            f"target file {files[at].path}: {sizes[at] - known[at]} of {sizes[at]} bytes are neither of a tensor, nor"
            " constant, nor padding"
            for at in np.flatnonzero(known != sizes)[:20].tolist()
        ]
    return problems


def layout_zeros(plan: Plan) -> Ranges:
    """Return the ranges of the target that stay zero on purpose; no ranges if they are not known."""
    return ranges_of(()) if plan.layout.zeros is None else plan.layout.zeros


def bytes_by_file(ranges: Ranges, num_files: int) -> Int64Array:
    """Return the bytes of ranges in each file, [num_files]."""
    step = np.zeros(num_files + 1, dtype=np.int64)
    np.add.at(step, ranges.first, ranges.stop - ranges.start)
    np.add.at(step, ranges.last, ranges.start - ranges.stop)
    return np.cumsum(step)[:-1]


def _fixed_ranges(files: Sequence[TargetFile]) -> Ranges:
    """Return the ranges of fixed bytes, once for consecutive files that have them at the same positions."""
    rows: list[tuple[int, int, int, int]] = []
    first = 0
    for at in range(1, len(files) + 1):
        if at == len(files) or not have_same_positions(files[first].fixed, files[at].fixed):
            rows += [
                (first, at, start, start + length) for start, length in list_positions(files[first].fixed) if length
            ]
            first = at
    return ranges_of(rows)


def _concatenate(one: Ranges, other: Ranges) -> Ranges:
    return Ranges(*map(np.concatenate, zip(one, other, strict=True)))
