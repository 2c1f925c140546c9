"""Was everything written where a reader of the target's format will look for it?

The digests prove that every element that was read was written, to the place that the layout names. Whether that is the
right place is asked of the finished files themselves: the format's reader, which knows nothing of the plan, indexes
them, and each box that it finds must be where the layout has put the elements of that very tensor. This costs the
metadata of the target and none of its tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import VerificationError
from reshard.planning.plan import Plan
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import PADDING, Index, LogicalTensor
from reshard.tensors.shard_table import ShardRow, ShardTable


class _Side(NamedTuple):
    """Boxes of one side, in numbers that both sides share.

    Attributes:
        tensors: by the number that the table has.
        paths: of files, likewise.
        table: the boxes.
    """

    tensors: Sequence[LogicalTensor]
    paths: Sequence[str]
    table: ShardTable


def check_placement(plan: Plan, found: Index) -> None:
    """Compare where the layout put tensors with where the format's reader finds them.

    Padding rows of a vocabulary that the source does not hold are found by the reader, and stay zero.

    Args:
        plan: what was written.
        found: index of the target's files as they are.

    Raises:
        VerificationError: with every tensor that is not where it is looked for.
    """
    written = _Side(plan.target_tensors, [file.path for file in plan.layout.files], plan.layout.shards)
    problems = _tensor_problems(written.tensors, found.tensors)
    if not problems:
        read = _Side(found.tensors, [file.path for file in found.files], found.shards)
        problems = _place_problems(written, _renumbered(read, written))
    if problems:
        raise VerificationError(
            f"{len(problems)} tensors are not where a reader looks for them: nothing was published",
            path=str(found.root),
            problems=problems[:20],
            hint="this is a bug of reshard: please report it with the command",
        )


def _tensor_problems(written: Sequence[LogicalTensor], found: Sequence[LogicalTensor]) -> list[str]:
    """Tensors that only one side has, or that differ in shape or type."""
    ours, theirs = ({tensor.key: tensor for tensor in side} for side in (written, found))
    problems = [
        f"{key}: was written, and is not found" for key, item in ours.items() if key not in theirs and item.num_elements
    ]
    for key, tensor in theirs.items():
        own = ours.get(key)
        if own is None and PADDING not in key.name:
            problems.append(f"{key}: is found, and was not written")
        elif own is not None and (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
            problems.append(
                f"{key}: {own.dtype} {list(own.shape)} was written, {tensor.dtype} {list(tensor.shape)} is found"
            )
    return problems


def _renumbered(side: _Side, like: _Side) -> _Side:
    """The same boxes with the other side's numbers of tensors and files; what that lacks follows behind."""
    numbers = {tensor.key: at for at, tensor in enumerate(like.tensors)}
    tensors = list(like.tensors)
    for tensor in side.tensors:
        if tensor.key not in numbers:
            numbers[tensor.key] = len(tensors)
            tensors.append(tensor)
    files = {path: at for at, path in enumerate(like.paths)}
    paths = list(like.paths)
    for path in side.paths:
        if path not in files:
            files[path] = len(paths)
            paths.append(path)
    tensor_map = np.array([numbers[tensor.key] for tensor in side.tensors], dtype=np.int64)
    file_map = np.array([files[path] for path in side.paths], dtype=np.int64)
    table = _consecutive(side.table, file_map)
    return _Side(tensors, paths, dataclasses.replace(table, tensor=tensor_map[table.tensor], file=file_map[table.file]))


def _consecutive(table: ShardTable, file_map: Int64Array) -> ShardTable:
    """The table with single boxes in the place of families, where files are in another order than on the other side."""
    is_shifted = len(file_map) > 1 and bool((np.diff(file_map) != 1).any())
    return table.boxes() if is_shifted and table.has_families else table


def _place_problems(written: _Side, read: _Side) -> list[str]:
    """Boxes that the reader finds where their tensor was not written, and those that it does not find."""
    unfound, unwritten = _only_in(written.table, read.table)
    if not len(unfound) and not len(unwritten):
        return []
    ours, theirs = written.table.take(unfound).boxes(), read.table.take(unwritten).boxes()
    problems = [*_outside(theirs, ours, read), *_outside(ours, theirs, written)]
    return list(dict.fromkeys(problems))


def _outside(boxes: ShardTable, others: ShardTable, side: _Side) -> Iterator[str]:
    """Boxes that are not covered by those of the other side, at the same bytes of the same tensor."""
    by_place: dict[tuple[int, int], list[int]] = {}
    for at, place in enumerate(zip(others.tensor.tolist(), others.file.tolist(), strict=True)):
        by_place.setdefault(place, []).append(at)
    for at in range(len(boxes)):
        tensor = side.tensors[int(boxes.tensor[at])]
        row = boxes.row(at, len(tensor.shape))
        candidates = by_place.get((row.tensor, row.file), ())
        seen = sum(_common(row, others.row(other, len(tensor.shape)), tensor.item_bytes) for other in candidates)
        if seen != row.box.num_elements and not _is_free_padding(tensor, candidates):
            where = f"{side.paths[row.file]}, byte {row.byte_offset}"
            yield f"{tensor.key} {row.box}: {where}: {seen} of {row.box.num_elements} elements are where they belong"


def _is_free_padding(tensor: LogicalTensor, candidates: Sequence[int]) -> bool:
    """Padding rows that were not written, of which the layout says that they are zero."""
    return PADDING in tensor.key.name and not candidates


def _common(one: ShardRow, other: ShardRow, item_bytes: int) -> int:
    """Elements that two boxes of a tensor have at the same bytes of a file."""
    part = one.box.intersect(other.box)
    if part is None:
        return 0
    (first, length), (second, other_length) = one.runs(part, item_bytes), other.runs(part, item_bytes)
    return part.num_elements if (first, length) == (second, other_length) else 0


def _only_in(one: ShardTable, other: ShardTable) -> tuple[Int64Array, Int64Array]:
    """Rows of either table that the other lacks, whatever the numbers of their copies."""
    dims = max(one.offset.shape[1], other.offset.shape[1])
    keys = [_keys(table, dims) for table in (one, other)]
    known = [set(own) for own in keys]
    return (
        np.array([at for at, key in enumerate(keys[0]) if key not in known[1]], dtype=np.int64),
        np.array([at for at, key in enumerate(keys[1]) if key not in known[0]], dtype=np.int64),
    )


def _keys(table: ShardTable, dims: int) -> list[bytes]:
    """What each row says, as bytes; the stride of a dim of one element means nothing."""
    columns: list[Any] = [table.tensor, table.file, table.byte_offset, table.start, table.stop, table.chunk]
    parts = [np.stack(columns, axis=1)]
    missing = dims - table.offset.shape[1]
    stride = np.where((table.size == 1) | (table.chunk[:, None] != 0), 0, table.stride)
    for matrix, filler in ((table.offset, 0), (table.size, 1), (stride, 0)):
        parts.append(np.pad(matrix, ((0, 0), (0, missing)), constant_values=filler))
    whole = np.ascontiguousarray(np.concatenate(parts, axis=1), dtype=np.int64)
    data, width = whole.tobytes(), whole.shape[1] * 8
    return [data[at : at + width] for at in range(0, len(data), width)]
