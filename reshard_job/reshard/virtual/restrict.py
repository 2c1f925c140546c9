"""Restrict a plan to some of the target's files, and to what these need of the source. Pure.

What the files hold of a tensor becomes a few tensors of their own, the *cells*. The result is an ordinary plan: exact
cover is proved for it, the executor reads every element once, and the digests of source and target are compared for
every copy. A cell is a box of the tensor. Where both sides are families, it is an interval of the flattened tensor,
which is one row however many ranks there are.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from reshard.execution.scan import find_touching
from reshard.planning.plan import Plan, make_plan
from reshard.tensors.geometry import Box, whole
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import LogicalTensor, TensorKey
from reshard.tensors.shard_table import ShardRow, ShardTable, ShardTableBuilder
from reshard.virtual.cells import join_cells, split_into_cells


def restrict(plan: Plan, files: Collection[int]) -> Plan:
    """Return the plan that writes only some files, byte for byte the same.

    Args:
        plan: of a whole conversion.
        files: positions in `plan.layout.files`; those of the result are in ascending order.

    Returns:
        A plan whose tensors are cells, named `parameter[first:last, ...]` where they are parts of a tensor.
    """
    kept = np.array(sorted(set(files)), dtype=np.int64)
    shards = select_files(plan.layout.shards, kept)
    builder = _CellBuilder(plan, shards)
    origins = plan.origins[shards.tensor]
    order = np.argsort(origins, kind="stable")
    bounds = np.searchsorted(origins[order], np.arange(len(plan.index.tensors) + 1))
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        builder.add(number, order[bounds[number] : bounds[number + 1]])
    index = dataclasses.replace(
        plan.index,
        tensors=tuple(builder.sources),
        shards=builder.source_rows.build(),
        groups=(),
        aliases={},
        extra=None,
        averaged={},
    )
    layout = dataclasses.replace(
        plan.layout,
        files=tuple(plan.layout.files[file] for file in kept.tolist()),
        shards=builder.target_rows.build(),
        tensors=tuple(builder.targets),
        origins=tuple(builder.origins),
    )
    return make_plan(index, layout, memory_bytes=plan.memory_bytes, num_threads=plan.num_threads)


def select_files(shards: ShardTable, files: Int64Array) -> ShardTable:
    """Return the rows that lie in some files, which are numbered anew from 0.

    Args:
        shards: of any files.
        files: numbers of the wanted ones, ascending, [files].

    Returns:
        Rows as they were, and families of fewer parts: one for each sequence of consecutive wanted files.
    """
    place = np.searchsorted(files, shards.file)
    wanted = np.append(files, -1)[place] == shards.file
    plain = np.flatnonzero(wanted & (shards.chunk == 0))
    tables = [dataclasses.replace(shards.take(plain), file=place[plain])]
    family = np.flatnonzero(shards.chunk != 0)
    few, parts = shards.take(family), shards.num_chunks[family]
    borders = [*np.flatnonzero(np.diff(files, prepend=-2) != 1).tolist(), len(files)]
    for begin, end in itertools.pairwise(borders) if len(family) else ():
        first, last = int(files[begin]), int(files[end - 1]) + 1
        touched = np.flatnonzero((few.file < last) & (few.file + parts > first))
        some = few.take(touched)
        left_out: Int64Array = np.maximum(0, first - some.file)
        stop: Int64Array = np.minimum(some.stop, some.start + (last - some.file) * some.chunk)
        tables.append(
            dataclasses.replace(
                some,
                file=some.file + left_out - first + begin,
                start=some.start + left_out * some.chunk,
                stop=stop,
            )
        )
    columns = [field.name for field in dataclasses.fields(ShardTable)]
    return ShardTable(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in columns})


class _CellBuilder:
    """Collects cells, and the rows that are cut along them."""

    def __init__(self, plan: Plan, shards: ShardTable) -> None:
        self._plan = plan
        self._shards = shards
        self.sources: list[LogicalTensor] = []
        self.targets: list[LogicalTensor] = []
        self.origins: list[int] = []
        self.source_rows, self.target_rows = ShardTableBuilder(), ShardTableBuilder()

    def add(self, number: int, rows: Int64Array) -> None:
        """Cut source tensor `number` into the cells that `rows` of the target need."""
        tensor, source, own = self._plan.index.tensors[number], self._plan.index.shards, self._plan.source_rows[number]
        if _are_whole(source, own, tensor) and _are_whole(self._shards, rows, tensor):
            self._add_intervals(tensor, source.take(own), self._shards.take(rows))
        else:
            self._add_boxes(tensor, own, self._shards.take(rows).boxes())

    def _add_boxes(self, tensor: LogicalTensor, own: Int64Array, target: ShardTable) -> None:
        source, every = self._plan.index.shards, np.arange(len(target))
        rows = [target.row(row, len(tensor.shape)) for row in every.tolist()]
        copies = [((row.tensor, row.replica), row.box) for row in rows]
        for cell in join_cells(split_into_cells(box for _, box in copies), copies):
            name = None if cell == whole(tensor.shape) else str(cell)
            overlaps = list(find_touching(target, every, cell))
            origin, numbers = self._begin(tensor, name, cell.size, (row.tensor for row, _ in overlaps))
            for row, part in find_touching(source, own, cell):
                _add(self.source_rows, row, part, cell, tensor.item_bytes, tensor=origin)
            for row, part in overlaps:
                item_bytes = self._plan.target_tensors[row.tensor].item_bytes
                _add(self.target_rows, row, part, cell, item_bytes, tensor=numbers[row.tensor])

    def _add_intervals(self, tensor: LogicalTensor, source: ShardTable, target: ShardTable) -> None:
        borders = sorted({*target.start.tolist(), *target.stop.tolist()})
        for low, high in itertools.pairwise(borders):
            touched = target.take(np.flatnonzero((target.start <= low) & (target.stop >= high)))
            if not len(touched):
                continue
            owners = touched.tensor.tolist()
            origin, numbers = self._begin(tensor, f"[flat {low}:{high}]", (high - low,), owners)
            _add_intervals(self.source_rows, source, low, high, [origin] * len(source))
            _add_intervals(self.target_rows, touched, low, high, [numbers[owner] for owner in owners])

    def _begin(
        self, tensor: LogicalTensor, name: str | None, size: tuple[int, ...], targets: Iterable[int]
    ) -> tuple[int, dict[int, int]]:
        """Add a cell (all of the tensor if `name` is None) for the source and for each target tensor made of it.

        Returns:
            Number of the source's cell, and the number of the target's cell by target tensor.
        """
        origin = len(self.sources)
        self.sources.append(_cell_of(tensor, name, size))
        numbers: dict[int, int] = {}
        for number in dict.fromkeys(targets):
            numbers[number] = len(self.targets)
            self.targets.append(_cell_of(self._plan.target_tensors[number], name, size))
            self.origins.append(origin)
        return origin, numbers


def _are_whole(shards: ShardTable, rows: Int64Array, tensor: LogicalTensor) -> bool:
    """Return True if the rows are families of all of the tensor."""
    size = np.ones(shards.size.shape[1], dtype=np.int64)
    size[: len(tensor.shape)] = tensor.shape
    return bool((shards.chunk[rows] != 0).all() and (shards.size[rows] == size).all())


def _cell_of(tensor: LogicalTensor, name: str | None, size: tuple[int, ...]) -> LogicalTensor:
    if name is None:
        return tensor
    return dataclasses.replace(tensor, key=TensorKey(tensor.key.state, f"{tensor.key.name}{name}"), shape=size)


def _add(rows: ShardTableBuilder, row: ShardRow, part: Box, cell: Box, item_bytes: int, *, tensor: int) -> None:
    """Add the part of a row that lies in a cell, in the cell's coordinates."""
    first = sum((p - b) * s for p, b, s in zip(part.offset, row.box.offset, row.strides, strict=True))
    rows.add(
        tensor=tensor,
        box=part.shift([-low for low in cell.offset]),
        file=row.file,
        byte_offset=row.byte_offset + first * item_bytes,
        strides=row.strides,
        replica=row.replica,
    )


def _add_intervals(rows: ShardTableBuilder, families: ShardTable, low: int, high: int, tensors: Sequence[int]) -> None:
    """Add what families of a flattened tensor hold of its elements `low:high`, a cell of one dim.

    Each family becomes at most two rows.

    Args:
        rows: to add to.
        families: of the whole tensor.
        low: first element of the cell.
        high: element behind its last.
        tensors: number that each family's tensor has among the cells.
    """
    cell = Box((0,), (high - low,))
    columns = (families.start, families.stop, families.chunk, families.file, families.byte_offset)
    others = (families.item_bytes.tolist(), families.replica.tolist(), tensors)
    for start, stop, chunk, file, byte_offset, item_bytes, replica, tensor in zip(
        *(column.tolist() for column in columns), *others, strict=True
    ):
        first, last = max(start, low), min(stop, high)
        if first >= last:
            continue
        part, skipped = divmod(first - start, chunk)
        if skipped:  # the cell begins inside of a part, which a family cannot begin with
            border = min(last, first + chunk - skipped)
            rows.add(
                tensor=tensor,
                box=Box((first - low,), (border - first,)),
                file=file + part,
                byte_offset=byte_offset + skipped * item_bytes,
                replica=replica,
            )
            first, part = border, part + 1
        if first < last:
            rows.add_family(
                tensor=tensor,
                box=cell,
                start=first - low,
                stop=last - low,
                chunk=chunk,
                file=file + part,
                byte_offset=byte_offset,
                item_bytes=item_bytes,
                replica=replica,
            )
