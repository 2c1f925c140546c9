"""Rows of a shard table from shards and flat partitions of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.errors import CorruptSourceError
from reshard.formats.deepspeed.flat import Span
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.slots import Chunks, Run, chunks_of
from reshard.formats.deepspeed.tensor_parallel.rules import Piece
from reshard.formats.pt.objects import Tensor
from reshard.tensors.geometry import Box, flat_interval_to_boxes, strides_of
from reshard.tensors.layout import ITEM_BYTES, PADDING, LogicalTensor, TensorKey
from reshard.tensors.shard_table import ShardRow, ShardTable, ShardTableBuilder


class Place(NamedTuple):
    """Whose shard it is and where it lies.

    Attributes:
        tp: tensor-parallel degree.
        rank: tensor-parallel rank.
        copy: 0, or counts the pipeline stages that hold a tied parameter.
        file: index of the file.
        byte_offset: position in it.
    """

    tp: int
    rank: int
    copy: int
    file: int
    byte_offset: int


class Rows:
    """Collects logical tensors and rows.

    Attributes:
        tensors: in the order in which they were first seen.
    """

    def __init__(self) -> None:
        self.tensors: list[LogicalTensor] = []
        self._ids: dict[TensorKey, int] = {}
        self._builder = ShardTableBuilder()

    def build(self) -> ShardTable:
        """The table."""
        return self._builder.build()

    def add_flat(self, state: str, param: Param, place: Place, *, dtype: str, start: int, stop: int) -> None:
        """Elements `start:stop` of a flattened shard lie at the place."""
        shard = param.rule.shard_shape(param.name, param.shape, place.tp, place.rank)
        strides = strides_of(shard)
        for box, first in flat_interval_to_boxes(shard, start, stop):
            at = place.byte_offset + (first - start) * ITEM_BYTES[dtype]
            self._add_box(state, param, place._replace(byte_offset=at), dtype, box, strides)

    def add_shard(self, state: str, param: Param, place: Place, *, dtype: str, strides: Sequence[int]) -> None:
        """A whole shard lies at the place, with `strides` in elements."""
        shard = param.rule.shard_shape(param.name, param.shape, place.tp, place.rank)
        box = Box((0,) * len(shard), shard)
        if box.num_elements:
            self._add_box(state, param, place, dtype, box, tuple(strides))

    def add_slots(
        self, state: str, param: Param, place: Place, runs: Sequence[Run], *, dtype: str, offset: int, size: int
    ) -> None:
        """Every rank of ZeRO-3 holds `size` elements of a flattened shard, the last ones fewer or none.

        Args:
            state: of the tensor.
            param: its parameter.
            place: whose shard it is; its file and position do not matter.
            runs: where the ranks' sub-groups lie.
            dtype: of the tensor.
            offset: of the slot, in elements of the sub-group.
            size: of the slot.
        """
        shard = param.rule.shard_shape(param.name, param.shape, place.tp, place.rank)
        item_bytes, strides = ITEM_BYTES[dtype], strides_of(shard)
        runs = [run._replace(byte_offset=run.byte_offset + offset * item_bytes) for run in runs] if size else []
        found = list(_pieces(param, place, Box((0,) * len(shard), shard)))
        if not all(_is_run(part, strides) for _, part, _ in found):  # cut along several dims: box by box
            for run in runs:
                for rank in range(run.first, run.last):
                    start, stop = min(rank * size, math.prod(shard)), min((rank + 1) * size, math.prod(shard))
                    at = place._replace(file=run.file + rank - run.first, byte_offset=run.byte_offset)
                    self.add_flat(state, param, at, dtype=dtype, start=start, stop=stop)
            return
        for is_padding, part, box in found:
            begin = sum(at * stride for at, stride in zip(part.offset, strides, strict=True))
            chunks = [(run, chunk) for run in runs for chunk in chunks_of(run, size, begin, begin + part.num_elements)]
            tensor = self._tensor(state, param, is_padding, dtype) if chunks else None
            if tensor is None:
                self._leave_out_chunks(chunks, item_bytes)
                continue
            for run, chunk in chunks:
                self._builder.add_family(
                    tensor=tensor,
                    box=box,
                    start=chunk.start - begin,
                    stop=chunk.stop - begin,
                    chunk=chunk.size,
                    file=chunk.file,
                    byte_offset=run.byte_offset + chunk.skipped * item_bytes,
                    item_bytes=item_bytes,
                    replica=_replica(param, place),
                )

    def _add_box(  # noqa: PLR0917
        self, state: str, param: Param, place: Place, dtype: str, box: Box, strides: tuple[int, ...]
    ) -> None:
        for is_padding, part, whole in _pieces(param, place, box):
            tensor = self._tensor(state, param, is_padding, dtype)
            inside = sum((at - low) * stride for at, low, stride in zip(part.offset, box.offset, strides, strict=True))
            row = ShardRow(
                tensor=-1 if tensor is None else tensor,
                replica=_replica(param, place),
                box=whole,
                file=place.file,
                byte_offset=place.byte_offset + inside * ITEM_BYTES[dtype],
                strides=strides,
            )
            if tensor is None:
                self._leave_out(row, ITEM_BYTES[dtype])
                continue
            self._builder.add(
                tensor=tensor,
                box=whole,
                file=row.file,
                byte_offset=row.byte_offset,
                strides=strides,
                replica=row.replica,
            )

    def _leave_out(self, row: ShardRow, item_bytes: int) -> None:
        """A box belongs to no tensor."""

    def _leave_out_chunks(self, chunks: Sequence[tuple[Run, Chunks]], item_bytes: int) -> None:
        """Elements in the files of consecutive ranks belong to no tensor."""

    def _identity(self, state: str, param: Param, is_padding: bool) -> tuple[TensorKey, tuple[int, ...]]:
        """Key and shape of a parameter's tensor; a padded vocabulary has two."""
        shape = param.shape
        if param.rows is not None:
            shape = (shape[0] - param.rows if is_padding else param.rows, *shape[1:])
        return TensorKey(state, param.name + PADDING if is_padding else param.name), shape

    def _append(self, tensor: LogicalTensor) -> int:
        self._ids[tensor.key] = len(self.tensors)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _tensor(self, state: str, param: Param, is_padding: bool, dtype: str) -> int | None:
        """Position of a tensor; None if its rows are to be left out."""
        key, shape = self._identity(state, param, is_padding)
        if key not in self._ids:
            return self._append(LogicalTensor(key=key, shape=shape, dtype=dtype))
        known = self.tensors[self._ids[key]]
        if known.shape != shape or known.dtype != dtype:
            raise CorruptSourceError(f"{key} is {dtype} {shape} in one file and {known.dtype} {known.shape} in another")
        return self._ids[key]


def _replica(param: Param, place: Place) -> int:
    """Which copy of the tensor the shard is part of."""
    return place.copy * place.tp + place.rank if param.rule.dim is None else place.copy


def _pieces(param: Param, place: Place, box: Box) -> Iterator[tuple[bool, Box, Box]]:
    """A box of a shard by the tensors and pieces that it is of: padding or not, in the shard, in the whole tensor."""
    for piece in param.rule.pieces(param.shape, place.tp, place.rank):
        found = box.intersect(Box(piece.local, piece.size))
        for is_padding, part in _split_rows(found, piece, param.rows) if found is not None else ():
            yield is_padding, part, _in_whole(part, piece, param.rows if is_padding else 0)


def _is_run(part: Box, strides: Sequence[int]) -> bool:
    """The elements of a box follow each other in an array with these strides."""
    last = sum((size - 1) * stride for size, stride in zip(part.size, strides, strict=True))
    return last + 1 == part.num_elements


def _in_whole(part: Box, piece: Piece, first_row: int | None) -> Box:
    """From rows of the shard to rows of the whole tensor, counted from `first_row`."""
    shift = [whole - local for whole, local in zip(piece.whole, piece.local, strict=True)]
    if first_row:
        shift[0] -= first_row
    return part.shift(shift)


def _split_rows(box: Box, piece: Piece, rows: int | None) -> list[tuple[bool, Box]]:
    """Cut a box of a shard into true rows and padding rows of the vocabulary."""
    if rows is None:
        return [(False, box)]
    border = rows - piece.whole[0] + piece.local[0]  # first padding row, in rows of the shard
    low, high = box.offset[0], box.offset[0] + box.size[0]
    parts: list[tuple[bool, Box]] = []
    if low < border:
        parts.append((False, Box(box.offset, (min(high, border) - low, *box.size[1:]))))
    if high > border:
        first = max(low, border)
        parts.append((True, Box((first, *box.offset[1:]), (high - first, *box.size[1:]))))
    return parts


def add_span(rows: Rows, param: Param, tensors: Mapping[str, Tensor], span: Span, place: Place) -> None:
    """Part of each of a rank's partitions is part of a parameter's shard; `place` is the file's."""
    for key, tensor in tensors.items():
        at = tensor.file_offset + span.offset * ITEM_BYTES[tensor.dtype]
        rows.add_flat(key, param, place._replace(byte_offset=at), dtype=tensor.dtype, start=span.start, stop=span.stop)
