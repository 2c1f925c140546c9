"""A part of a plan: only some of the target's files, and of the source only what those are made of. Pure.

What some files hold of a tensor are boxes. Each box that they need becomes a tensor of its own, a *cell*, so that what
is left is an ordinary plan: exact cover is proved for it, the executor reads every element of it once, and the digests
of source and target are compared for every copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from reshard.execute import touching
from reshard.geometry import Box, whole
from reshard.layout import Int64Array, LogicalTensor, ShardRow, ShardTableBuilder, TensorKey
from reshard.plan import Plan, make_plan


def restrict(plan: Plan, files: Collection[int]) -> Plan:
    """The plan that writes only some files, the same byte for byte.

    Args:
        plan: of a whole conversion.
        files: positions in `plan.layout.files`; those of the result are in ascending order.

    Returns:
        A plan whose tensors are cells, named `parameter[first:last, ...]` where they are parts of a tensor.
    """
    plan, kept = plan.in_boxes(), sorted(set(files))
    new_file = np.full(len(plan.layout.files), -1, dtype=np.int64)
    new_file[kept] = np.arange(len(kept))
    cut = _Cut(plan, new_file)
    for number, rows in enumerate(plan.target_rows):
        wanted = rows[new_file[plan.layout.shards.file[rows]] >= 0]
        if len(wanted):
            cut.add(number, wanted)
    index = dataclasses.replace(
        plan.index, tensors=tuple(cut.sources), shards=cut.source_rows.build(), groups=(), aliases={}, extra=None
    )
    layout = dataclasses.replace(
        plan.layout,
        files=tuple(plan.layout.files[file] for file in kept),
        shards=cut.target_rows.build(),
        tensors=tuple(cut.targets),
        origins=tuple(cut.origins),
    )
    return make_plan(index, layout, memory_bytes=plan.memory_bytes, num_threads=plan.num_threads)


class _Cut:
    """Cells so far, and the rows that are cut along them."""

    def __init__(self, plan: Plan, new_file: Int64Array) -> None:
        self._plan = plan
        self._new_file = new_file
        self.sources: list[LogicalTensor] = []
        self.targets: list[LogicalTensor] = []
        self.origins: list[int] = []
        self.source_rows, self.target_rows = ShardTableBuilder(), ShardTableBuilder()

    def add(self, number: int, rows: Int64Array) -> None:
        """Cut source tensor `number` into the cells that `rows` of the target need."""
        tensor, shards = self._plan.index.tensors[number], self._plan.layout.shards
        ndim = len(tensor.shape)
        for cell in cells(shards.row(int(row), ndim).box for row in rows):
            origin = len(self.sources)
            self.sources.append(_cell_of(tensor, tensor, cell))
            for source, part in touching(self._plan.index.shards, self._plan.source_rows[number], cell):
                _add(self.source_rows, source, part, cell, tensor.item_bytes, tensor=origin, file=source.file)
            numbers: dict[int, int] = {}
            for target, part in touching(shards, rows, cell):
                found = self._plan.target_tensors[target.tensor]
                if target.tensor not in numbers:
                    numbers[target.tensor] = len(self.targets)
                    self.targets.append(_cell_of(found, tensor, cell))
                    self.origins.append(origin)
                file = int(self._new_file[target.file])
                _add(self.target_rows, target, part, cell, found.item_bytes, tensor=numbers[target.tensor], file=file)


def _cell_of(tensor: LogicalTensor, source: LogicalTensor, cell: Box) -> LogicalTensor:
    if cell == whole(source.shape):
        return tensor
    return dataclasses.replace(tensor, key=TensorKey(tensor.key.state, f"{tensor.key.name}{cell}"), shape=cell.size)


def _add(
    rows: ShardTableBuilder, row: ShardRow, part: Box, cell: Box, item_bytes: int, *, tensor: int, file: int
) -> None:
    """The part of a row that lies in a cell, in the cell's coordinates."""
    first = sum((p - b) * s for p, b, s in zip(part.offset, row.box.offset, row.strides, strict=True))
    rows.add(
        tensor=tensor,
        box=part.shift([-low for low in cell.offset]),
        file=file,
        byte_offset=row.byte_offset + first * item_bytes,
        strides=row.strides,
        replica=row.replica,
    )


def cells(boxes: Iterable[Box]) -> list[Box]:
    """Disjoint boxes with the same union, each inside or outside of every one of `boxes`.

    Boxes that are equal or do not touch, as almost all are, stay whole.
    """
    found: list[Box] = []
    for box in sorted(set(boxes), key=lambda item: (item.offset, item.size)):
        if box.num_elements == 0:
            continue
        rest, refined = [box], []
        for cell in found:
            common = cell.intersect(box)
            if common is None:
                refined.append(cell)
                continue
            refined += [common, *subtract(cell, common)]
            rest = [part for piece in rest for part in subtract(piece, common)]
        found = refined + rest
    return found


def subtract(box: Box, other: Box) -> Iterator[Box]:
    """Disjoint boxes that are `box` without `other`; cut along the first dims first, so that rows stay whole."""
    common = box.intersect(other)
    if common is None:
        yield box
        return
    low, size = list(box.offset), list(box.size)
    for dim in range(box.ndim):
        before, after = common.offset[dim] - low[dim], low[dim] + size[dim] - common.end[dim]
        if before:
            yield Box(tuple(low), (*size[:dim], before, *size[dim + 1 :]))
        if after:
            yield Box((*low[:dim], common.end[dim], *low[dim + 1 :]), (*size[:dim], after, *size[dim + 1 :]))
        low[dim], size[dim] = common.offset[dim], common.size[dim]
