"""Check that a reader of the target's format finds every tensor where the layout has put it.

The digests prove that every element that was read was written to the position that the layout names. They do not prove
that this is the position where the format's reader looks. So the reader, which does not know the plan, indexes the
finished files, and each box that it finds must be where the layout has put these elements of this tensor. The check
reads the metadata of the target and none of its tensors.
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
    """Boxes as the layout wrote them, or as the reader finds them.

    Attributes:
        tensors: tensors, by their number in the table.
        paths: paths of files, by their number in the table.
        table: the boxes.
    """

    tensors: Sequence[LogicalTensor]
    paths: Sequence[str]
    table: ShardTable


def check_placement(plan: Plan, index: Index) -> None:
    """Compare where the layout put tensors with where the format's reader finds them.

    The reader may find padding rows of a vocabulary that the source does not hold; they were not written and are zero.

    Args:
        plan: plan of the conversion.
        index: the reader's index of the finished target files.

    Raises:
        VerificationError: the reader does not find tensors where they were written; the error lists them.
    """
    written = _Side(plan.target_tensors, [file.path for file in plan.layout.files], plan.layout.shards)
    problems = _tensor_problems(written.tensors, index.tensors)
    if not problems:
        read = _Side(index.tensors, [file.path for file in index.files], index.shards)
        problems = _place_problems(written, _renumbered(read, written))
    if problems:
        raise VerificationError(
            f"{len(problems)} tensors are not where a reader looks for them: nothing was published",
            path=str(index.root),
            problems=problems[:20],
            hint="this is a bug of reshard: please report it with the command",
        )


def _tensor_problems(written: Sequence[LogicalTensor], read: Sequence[LogicalTensor]) -> list[str]:
    """Describe tensors that only one side has, or that differ in shape or type."""
    ours, theirs = ({tensor.key: tensor for tensor in side} for side in (written, read))
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
    """Renumber tensors and files of `side` as in `like`; those that `like` lacks get the next numbers."""
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
    table = _split_families(side.table, file_map)
    return _Side(tensors, paths, dataclasses.replace(table, tensor=tensor_map[table.tensor], file=file_map[table.file]))


def _split_families(table: ShardTable, file_map: Int64Array) -> ShardTable:
    """Replace families by their boxes if the other side numbers the files in another order."""
    is_shifted = len(file_map) > 1 and bool((np.diff(file_map) != 1).any())
    return table.boxes() if is_shifted and table.has_families else table


def _place_problems(written: _Side, read: _Side) -> list[str]:
    """Describe boxes that the reader finds where their tensor was not written, and boxes that it does not find."""
    unfound, unwritten = _only_in(written.table, read.table)
    if not len(unfound) and not len(unwritten):
        return []
    ours, theirs = written.table.take(unfound).boxes(), read.table.take(unwritten).boxes()
    problems = [*_outside(theirs, ours, read), *_outside(ours, theirs, written)]
    return list(dict.fromkeys(problems))


def _outside(boxes: ShardTable, others: ShardTable, side: _Side) -> Iterator[str]:
    """Describe boxes that the other side's boxes do not cover with the same bytes of the same tensor."""
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
    """Return True for padding rows that were not written, which the layout declares to be zero."""
    return PADDING in tensor.key.name and not candidates


def _common(one: ShardRow, other: ShardRow, item_bytes: int) -> int:
    """Count the elements that two boxes of a tensor hold in the same bytes of a file."""
    box = one.box.intersect(other.box)
    if box is None:
        return 0
    return box.num_elements if one.byte_ranges(box, item_bytes) == other.byte_ranges(box, item_bytes) else 0


def _only_in(one: ShardTable, other: ShardTable) -> tuple[Int64Array, Int64Array]:
    """Return the rows of each table that the other lacks, ignoring replica numbers."""
    dims = max(one.offset.shape[1], other.offset.shape[1])
    keys = [_keys(table, dims) for table in (one, other)]
    known = [set(own) for own in keys]
    return (
        np.array([at for at, key in enumerate(keys[0]) if key not in known[1]], dtype=np.int64),
        np.array([at for at, key in enumerate(keys[1]) if key not in known[0]], dtype=np.int64),
    )


def _keys(table: ShardTable, dims: int) -> list[bytes]:
    """Encode each row as bytes without its replica number; the stride of a dim of one element does not matter."""
    columns: list[Any] = [table.tensor, table.file, table.byte_offset, table.start, table.stop, table.chunk]
    matrices = [np.stack(columns, axis=1)]
    missing = dims - table.offset.shape[1]
    stride = np.where((table.size == 1) | (table.chunk[:, None] != 0), 0, table.stride)
    for matrix, filler in ((table.offset, 0), (table.size, 1), (stride, 0)):
        matrices.append(np.pad(matrix, ((0, 0), (0, missing)), constant_values=filler))
    whole = np.ascontiguousarray(np.concatenate(matrices, axis=1), dtype=np.int64)
    data, width = whole.tobytes(), whole.shape[1] * 8
    return [data[at : at + width] for at in range(0, len(data), width)]
