"""Cut tensors into parts and put parts together: shapes, types and rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from reshard.names import boxes
from reshard.names.rules import Rule
from reshard.tensors.layout import LogicalTensor, TensorKey
from reshard.tensors.shard_table import ShardTable


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRows:
    """A tensor and its rows; the tensor number in the rows does not matter."""

    tensor: LogicalTensor
    rows: ShardTable


def cut(rule: Rule, sources: Sequence[TensorRows], keys: Sequence[TensorKey], *, scalar: bool) -> list[TensorRows]:
    """Cut one tensor into those called `keys`.

    Args:
        rule: how.
        sources: the one tensor to cut.
        keys: of the parts, `[parts]`.
        scalar: the tensor is a number that every part has.

    Raises:
        ValueError: the rule does not fit the tensor's shape.
    """
    (whole,) = sources
    if scalar:
        return [TensorRows(dataclasses.replace(whole.tensor, key=key), whole.rows) for key in keys]
    shape, dim, item_bytes = whole.tensor.shape, rule.dim, whole.tensor.item_bytes
    sizes = _sizes_of_cut(rule, whole.tensor)
    parts: list[list[ShardTable]] = [[] for _ in keys]
    for one in rule.cuts(sizes):
        parts[one.part].append(boxes.narrow(whole.rows, one, dim, item_bytes))
    targets = []
    for key, tables, size in zip(keys, parts, sizes, strict=True):
        rows = boxes.join(tables, whole.rows.size.shape[1])
        own = (*shape[:dim], size * rule.groups, *shape[dim + 1 :])
        if rule.stacked:
            rows, own = boxes.unstack(rows, dim), (*shape[:dim], *shape[dim + 1 :])
        targets.append(TensorRows(LogicalTensor(key=key, shape=own, dtype=whole.tensor.dtype), rows))
    return targets


def _sizes_of_cut(rule: Rule, tensor: LogicalTensor) -> tuple[int, ...]:
    """Return the size of each part in one group of a tensor that is cut."""
    total = _size(rule, tensor, len(tensor.shape))
    if rule.stacked:
        if total != rule.parts:
            raise ValueError(f"{tensor.key}: dim {rule.dim} has {total} steps, {rule} has {rule.parts} parts")
        return (1,) * rule.parts
    if rule.sizes is None:
        size, rest = divmod(total, rule.parts * rule.groups)
        if rest:
            raise ValueError(
                f"{tensor.key}: dim {rule.dim} has {total} elements, not a multiple of {rule.groups} groups of"
                f" {rule.parts} equal parts: {rule}"
            )
        return (size,) * rule.parts
    if sum(rule.sizes) * rule.groups != total:
        raise ValueError(
            f"{tensor.key}: dim {rule.dim} has {total} elements, {rule.groups} groups of the sizes {list(rule.sizes)}"
            f" are {sum(rule.sizes) * rule.groups}: {rule}"
        )
    return rule.sizes


def put_together(
    rule: Rule, sources: Sequence[TensorRows], keys: Sequence[TensorKey], *, scalar: bool
) -> list[TensorRows]:
    """Put tensors together to the one called `keys[0]`; the arguments are those of `cut`.

    Raises:
        ValueError: the parts do not fit each other or the rule.
    """
    (key,) = keys
    first = sources[0].tensor
    for source in sources:
        if source.tensor.dtype != first.dtype:
            raise ValueError(f"{source.tensor.key} is {source.tensor.dtype}, {first.key} is {first.dtype}: {rule}")
    if scalar:
        return [TensorRows(dataclasses.replace(first, key=key), _scalar_rows(sources))]
    sizes = _sizes_of_parts(rule, sources)
    dim, shape = rule.dim, first.shape
    copies = min((len(np.unique(source.rows.replica)) for source in sources if source.tensor.num_elements), default=0)
    tables = [_copies(source.rows, copies) for source in sources]
    if rule.stacked:
        tables = [boxes.stack(table, dim) for table in tables]
        whole = (*shape[:dim], len(sources), *shape[dim:])
    else:
        whole = (*shape[:dim], sum(sizes) * rule.groups, *shape[dim + 1 :])
    rows = [boxes.widen(tables[one.part], one, dim, first.item_bytes) for one in rule.cuts(sizes)]
    return [
        TensorRows(
            LogicalTensor(key=key, shape=whole, dtype=first.dtype),
            boxes.join(rows, max(table.size.shape[1] for table in rows)),
        )
    ]


def _sizes_of_parts(rule: Rule, sources: Sequence[TensorRows]) -> tuple[int, ...]:
    """Return the size of each part in one group of parts that are put together."""
    first = sources[0].tensor
    sizes: list[int] = []
    for source in sources:
        tensor = source.tensor
        total = _size(rule, tensor, len(tensor.shape) + rule.stacked)
        outer = tensor.shape if rule.stacked else (*tensor.shape[: rule.dim], *tensor.shape[rule.dim + 1 :])
        if outer != (first.shape if rule.stacked else (*first.shape[: rule.dim], *first.shape[rule.dim + 1 :])):
            raise ValueError(
                f"{tensor.key} {list(tensor.shape)} does not fit beside {first.key} {list(first.shape)}: {rule}"
            )
        size, rest = divmod(total, rule.groups)
        if rest:
            raise ValueError(f"{tensor.key}: dim {rule.dim} has {total} elements for {rule.groups} groups: {rule}")
        expected = rule.sizes[len(sizes)] if rule.sizes else sizes[0] if rule.equal and sizes else size
        if size != expected:
            raise ValueError(
                f"{tensor.key}: dim {rule.dim} has {total} elements, expected {expected * rule.groups}: {rule}"
            )
        sizes.append(size)
    return tuple(sizes)


def _size(rule: Rule, tensor: LogicalTensor, num_dims: int) -> int:
    """Return the number of elements along the rule's dim."""
    if rule.dim >= num_dims:
        raise ValueError(f"{tensor.key} {list(tensor.shape)} has no dim {rule.dim}: {rule}")
    return 1 if rule.stacked and rule.joins else tensor.shape[rule.dim]


def _copies(rows: ShardTable, count: int) -> ShardTable:
    """Return the rows of the first `count` copies, numbered from 0."""
    numbers, position = np.unique(rows.replica, return_inverse=True)
    if len(numbers) == count and count and int(numbers[-1]) == count - 1:
        return rows
    kept = boxes.select_rows(rows, np.flatnonzero(position < count))
    return dataclasses.replace(kept, replica=np.searchsorted(numbers, kept.replica).astype(np.int64))


def _scalar_rows(sources: Sequence[TensorRows]) -> ShardTable:
    """Return the rows of a number that every part holds: one copy for each place where its bytes are."""
    table = boxes.join([source.rows for source in sources], sources[0].rows.size.shape[1])
    places = np.stack([table.file, table.byte_offset], axis=1)
    _, first = np.unique(places, axis=0, return_index=True)
    kept = boxes.select_rows(table, np.sort(first))
    return dataclasses.replace(kept, replica=np.arange(len(kept), dtype=np.int64))
