"""Add the rows of a shard table for shards, flat partitions and ZeRO-3 slots of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.errors import CorruptSourceError
from reshard.formats.deepspeed.flat import Span
from reshard.formats.deepspeed.logical import Param
from reshard.formats.deepspeed.slots import Chunks, RankRange, find_chunks
from reshard.formats.deepspeed.tensor_parallel.rules import BoxPair
from reshard.formats.pt.objects import Tensor
from reshard.tensors.geometry import Box, flat_interval_to_boxes, strides_of
from reshard.tensors.layout import ITEM_BYTES, PADDING, LogicalTensor, TensorKey
from reshard.tensors.shard_table import ShardRow, ShardTable, ShardTableBuilder


class Place(NamedTuple):
    """Owner and position of a shard.

    Attributes:
        tp: tensor-parallel degree.
        rank: tensor-parallel rank.
        copy: number of the pipeline stage among those that hold a tied parameter; 0 for other parameters.
        file: index of the file.
        byte_offset: position in the file.
    """

    tp: int
    rank: int
    copy: int
    file: int
    byte_offset: int


class _Part(NamedTuple):
    """The elements of a box of a shard that lie in one tensor.

    Attributes:
        is_padding: the tensor is the padding of a vocabulary.
        inside: position of the first element behind the box's first element, in elements.
        box: the elements in the tensor.
    """

    is_padding: bool
    inside: int
    box: Box


class _Shard(NamedTuple):
    """The shard of a parameter that a tensor-parallel rank holds.

    Attributes:
        param: the parameter.
        shape: of the shard, [ndim].
        strides: of the shard as a row-major array, [ndim].
        pairs: the boxes of the parameter that the shard consists of.
    """

    param: Param
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    pairs: tuple[BoxPair, ...]


class Rows:
    """Collects logical tensors and the rows of their shard table.

    Attributes:
        tensors: in the order in which they were added first.
    """

    def __init__(self) -> None:
        self.tensors: list[LogicalTensor] = []
        self._ids: dict[TensorKey, int] = {}
        self._builder = ShardTableBuilder()
        self._shards: dict[tuple[int, int, int], _Shard] = {}  # by identity of the parameter, which each keeps alive

    def build(self) -> ShardTable:
        """Build the shard table of all rows."""
        return self._builder.build()

    def add_flat(self, state: str, param: Param, place: Place, *, dtype: str, start: int, stop: int) -> None:
        """Add elements `start:stop` of a flattened shard, which lie at the place."""
        self.add_span(
            param, place, Span(index=0, start=start, stop=stop, offset=0), [(state, dtype, place.byte_offset)]
        )

    def add_span(self, param: Param, place: Place, span: Span, partitions: Iterable[tuple[str, str, int]]) -> None:
        """Add a span of a flattened shard, which lies in several partitions of one file.

        Args:
            param: the parameter.
            place: owner of the shard and the file; its position is ignored.
            span: elements of the shard, and their position in each partition.
            partitions: state, type and position in the file of each partition.
        """
        shard = self._shard(param, place)
        strides = shard.strides
        boxes = [
            (part, first - span.start + span.offset)
            for box, first in flat_interval_to_boxes(shard.shape, span.start, span.stop)
            for part in _locate_box(shard, box, strides)
        ]
        for state, dtype, byte_offset in partitions:
            for part, first in boxes:
                self._add_part(state, param, place, dtype, part, byte_offset + first * ITEM_BYTES[dtype], strides)

    def add_shard(self, state: str, param: Param, place: Place, *, dtype: str, strides: Sequence[int]) -> None:
        """Add a whole shard, which lies at the place with `strides` in elements."""
        shard = self._shard(param, place)
        box = Box((0,) * len(shard.shape), shard.shape)
        for part in _locate_box(shard, box, tuple(strides)) if box.num_elements else ():
            self._add_part(state, param, place, dtype, part, place.byte_offset, tuple(strides))

    def add_slots(
        self, state: str, param: Param, place: Place, ranges: Sequence[RankRange], *, dtype: str, offset: int, size: int
    ) -> None:
        """Add a flattened shard of which every rank of ZeRO-3 holds `size` elements, and the last ranks fewer or none.

        Args:
            state: of the tensor.
            param: its parameter.
            place: owner of the shard; its file and position are ignored.
            ranges: where the ranks' sub-groups lie.
            dtype: of the tensor.
            offset: of the slot, in elements of the sub-group.
            size: of the slot.
        """
        _, shard, strides, _ = own = self._shard(param, place)
        item_bytes = ITEM_BYTES[dtype]
        ranges = (
            [ranks._replace(byte_offset=ranks.byte_offset + offset * item_bytes) for ranks in ranges] if size else []
        )
        boxes = list(_split_box(own, Box((0,) * len(shard), shard)))
        if not all(_is_contiguous(local, strides) for _, local, _ in boxes):  # cut along several dims: box by box
            for ranks in ranges:
                for rank in range(ranks.first, ranks.last):
                    start, stop = min(rank * size, math.prod(shard)), min((rank + 1) * size, math.prod(shard))
                    at = place._replace(file=ranks.file + rank - ranks.first, byte_offset=ranks.byte_offset)
                    self.add_flat(state, param, at, dtype=dtype, start=start, stop=stop)
            return
        for is_padding, local, box in boxes:
            begin = sum(at * stride for at, stride in zip(local.offset, strides, strict=True))
            chunks = [
                (ranks, chunk)
                for ranks in ranges
                for chunk in find_chunks(ranks, size, begin, begin + local.num_elements)
            ]
            tensor = self._tensor(state, param, is_padding, dtype) if chunks else None
            if tensor is None:
                self._leave_out_chunks(chunks, item_bytes)
                continue
            for ranks, chunk in chunks:
                self._builder.add_family(
                    tensor=tensor,
                    box=box,
                    start=chunk.start - begin,
                    stop=chunk.stop - begin,
                    chunk=chunk.size,
                    file=chunk.file,
                    byte_offset=ranks.byte_offset + chunk.skipped * item_bytes,
                    item_bytes=item_bytes,
                    replica=_number_replica(param, place),
                )

    def _shard(self, param: Param, place: Place) -> _Shard:
        """Return the shard of a rank, which is computed once for all of its spans and copies."""
        key = id(param), place.tp, place.rank
        if key not in self._shards:
            shape = param.rule.shard_shape(param.name, param.shape, place.tp, place.rank)
            pairs = param.rule.box_pairs(param.shape, place.tp, place.rank)
            self._shards[key] = _Shard(param, shape, strides_of(shape), pairs)
        return self._shards[key]

    def _add_part(  # noqa: PLR0917
        self, state: str, param: Param, place: Place, dtype: str, part: _Part, byte_offset: int,
        strides: tuple[int, ...],
    ) -> None:  # fmt: skip
        tensor = self._tensor(state, param, part.is_padding, dtype)
        at, replica = byte_offset + part.inside * ITEM_BYTES[dtype], _number_replica(param, place)
        if tensor is None:
            self._leave_out(ShardRow(-1, replica, part.box, place.file, at, strides), ITEM_BYTES[dtype])
            return
        self._builder.add(
            tensor=tensor, box=part.box, file=place.file, byte_offset=at, strides=strides, replica=replica
        )

    def _leave_out(self, row: ShardRow, item_bytes: int) -> None:
        """Ignore a box that belongs to no tensor; a target overrides this."""

    def _leave_out_chunks(self, chunks: Sequence[tuple[RankRange, Chunks]], item_bytes: int) -> None:
        """Ignore elements in the files of consecutive ranks that belong to no tensor; a target overrides this."""

    def _identity(self, state: str, param: Param, is_padding: bool) -> tuple[TensorKey, tuple[int, ...]]:
        """Return key and shape of a parameter's tensor; a padded vocabulary has two tensors."""
        shape = param.shape
        if param.rows is not None:
            shape = (shape[0] - param.rows if is_padding else param.rows, *shape[1:])
        return TensorKey(state, param.name + PADDING if is_padding else param.name), shape

    def _append(self, tensor: LogicalTensor) -> int:
        self._ids[tensor.key] = len(self.tensors)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _tensor(self, state: str, param: Param, is_padding: bool, dtype: str) -> int | None:
        """Return the position of a tensor, which is added if it is new; None if its rows are to be left out."""
        key, shape = self._identity(state, param, is_padding)
        if key not in self._ids:
            return self._append(LogicalTensor(key=key, shape=shape, dtype=dtype))
        known = self.tensors[self._ids[key]]
        if known.shape != shape or known.dtype != dtype:
            raise CorruptSourceError(f"{key} is {dtype} {shape} in one file and {known.dtype} {known.shape} in another")
        return self._ids[key]


def _number_replica(param: Param, place: Place) -> int:
    """Return the number of the copy of the tensor that the shard belongs to."""
    return place.copy * place.tp + place.rank if param.rule.dim is None else place.copy


def _locate_box(shard: _Shard, box: Box, strides: tuple[int, ...]) -> Iterator[_Part]:
    """Split a box of a shard as `_split_box` does, and yield where each part lies."""
    for is_padding, local, whole in _split_box(shard, box):
        inside = sum((at - low) * stride for at, low, stride in zip(local.offset, box.offset, strides, strict=True))
        yield _Part(is_padding, inside, whole)


def _split_box(shard: _Shard, box: Box) -> Iterator[tuple[bool, Box, Box]]:
    """Split a box of a shard at the borders of fused tensors and of the vocabulary's padding.

    Yields:
        Whether the box is padding, the box in the shard, and the box in the whole tensor.
    """
    rows = shard.param.rows
    for pair in shard.pairs:
        common = box.intersect(Box(pair.local, pair.size))
        for is_padding, local in _split_rows(common, pair, rows) if common is not None else ():
            yield is_padding, local, _move_to_whole(local, pair, rows if is_padding else 0)


def _is_contiguous(box: Box, strides: Sequence[int]) -> bool:
    """Return whether the elements of a box are consecutive in an array with these strides."""
    last = sum((size - 1) * stride for size, stride in zip(box.size, strides, strict=True))
    return last + 1 == box.num_elements


def _move_to_whole(box: Box, pair: BoxPair, first_row: int | None) -> Box:
    """Move a box of the shard to its position in the whole tensor, whose rows count from `first_row`."""
    shift = [whole - local for whole, local in zip(pair.whole, pair.local, strict=True)]
    if first_row:
        shift[0] -= first_row
    return box.shift(shift)


def _split_rows(box: Box, pair: BoxPair, rows: int | None) -> list[tuple[bool, Box]]:
    """Split a box of a shard into true rows and padding rows of the vocabulary."""
    if rows is None:
        return [(False, box)]
    border = rows - pair.whole[0] + pair.local[0]  # first padding row, in rows of the shard
    low, high = box.offset[0], box.offset[0] + box.size[0]
    boxes: list[tuple[bool, Box]] = []
    if low < border:
        boxes.append((False, Box(box.offset, (min(high, border) - low, *box.size[1:]))))
    if high > border:
        first = max(low, border)
        boxes.append((True, Box((first, *box.offset[1:]), (high - first, *box.size[1:]))))
    return boxes


def add_span(rows: Rows, param: Param, tensors: Mapping[str, Tensor], span: Span, place: Place) -> None:
    """Add a span of a parameter's shard for each of a rank's partitions; `place` has the file, without a position."""
    partitions = [(key, tensor.dtype, tensor.file_offset) for key, tensor in tensors.items()]
    rows.add_span(param, place, span, partitions)
