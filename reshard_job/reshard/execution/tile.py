"""Move one tile from the source boxes that touch it to the target boxes that touch it, and digest both sides.

A tile that is one range of a source file is used directly from the page cache, without a copy. A tile is processed in
slices that fit the processor's cache, so that checksum, copy and write of the same bytes load them from memory once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import CrcRange
from reshard.checksums.digest import Tally, digest_term
from reshard.errors import CorruptSourceError
from reshard.execution.averages import read_mean
from reshard.execution.scan import find_touching, gather, view_elements
from reshard.execution.source_checks import check_files
from reshard.execution.unit_records import UnitRecord
from reshard.planning.plan import Plan
from reshard.profile.clock import CHECKSUM, COPY, OTHER, POPULATE, READ, WRITE, PhaseClock
from reshard.storage.files import Bytes
from reshard.storage.source_reader import SourceReader
from reshard.storage.target_writer import TargetWriter
from reshard.tensors.cast import UNSIGNED, Bits, cast
from reshard.tensors.geometry import Box
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import ITEM_BYTES, LogicalTensor
from reshard.tensors.shard_table import ShardRow

SLICE_BYTES = 1 << 20
"""Bytes of a tile that are copied and added to the digest at a time, while they are in the processor's cache."""

BATCH_BYTES = 128 << 10
"""Bytes of ranges whose checksums are computed before they are written, while they are in the processor's cache."""

SMALLEST_BOX_BYTES = 256 << 10
"""Smallest mean size of boxes that are moved as tiles of their own; smaller boxes are faster to copy into one tile."""

_RowBox = tuple[ShardRow, Box]
"""A row of a table, and the box that the row and a tile have in common."""


@dataclasses.dataclass(slots=True)
class _TargetBox:
    """The box that a target row and a tile have in common, while it is written.

    Attributes:
        row: row of the target's table.
        index: index of the box in the tile's array, without the tile's first dims of one element.
        positions: first byte of each of its ranges in the file.
        range_bytes: bytes of each range.
        tally: term of the elements that were written.
        written_bytes: bytes that were written.
    """

    row: ShardRow
    index: tuple[slice, ...]
    positions: list[int]
    range_bytes: int
    tally: Tally
    written_bytes: int = 0


class Carrier:
    """Moves tiles of a plan, in one thread.

    Attributes:
        clock: measures the phases of this thread.
        tile_bytes: size of the buffer for tiles, at least the largest tile; see `use_tile_bytes`.
    """

    def __init__(self, plan: Plan, source: SourceReader, target: TargetWriter, clock: PhaseClock) -> None:
        self._plan, self._source, self._target = plan, source, target
        self.clock = clock
        self.tile_bytes = plan.tile_bytes
        self._scratch: Bytes = np.empty(0, dtype=np.uint8)

    def use_tile_bytes(self, tile_bytes: int) -> None:
        """Expect tiles of at most this size from now on, and give a larger buffer back."""
        self.tile_bytes = tile_bytes
        if len(self._scratch) > tile_bytes:
            self._scratch = np.empty(0, dtype=np.uint8)

    def move(self, record: UnitRecord, number: int, tile: Box, rows: tuple[Int64Array, Int64Array, Int64Array]) -> None:
        """Move a tile, and record the ranges that were read and written and the terms of both sides.

        Args:
            record: record of the unit.
            number: position of the tensor in `Index.tensors`.
            tile: box of that tensor.
            rows: rows of the source, of the target, and of other copies in the source that may touch the tile.

        Raises:
            CorruptSourceError: the source cannot be read, or another copy in it differs.
            StorageFullError: no space left for the target.
            TargetError: the target cannot be written.
            VerificationError: a target box did not get all of its elements.
        """
        tensor = self._plan.index.tensors[number]
        sources = list(find_touching(self._plan.index.shards, rows[0], tile))
        if number in self._plan.averages:
            self._move_from(record, number, tile, sources, rows[1])
            return
        for box, own in self._split(sources, tile, tensor):
            elements = self._move_from(record, number, box, own, rows[1])
            if elements is not None and len(rows[2]):
                self._compare(record, tensor, (box, elements), own, rows[2])

    def _split(
        self, sources: Sequence[_RowBox], tile: Box, tensor: LogicalTensor
    ) -> list[tuple[Box, Sequence[_RowBox]]]:
        """Split a tile into the boxes of its sources if each can be used without a copy; else return it whole."""
        is_large = len(sources) * SMALLEST_BOX_BYTES <= tile.num_elements * tensor.item_bytes
        if (
            len(sources) > 1
            and is_large
            and self._source.may_map
            and all(box.is_consecutive(tensor.shape) for _, box in sources)
        ):
            return [(box, [(row, box)]) for row, box in sources]
        return [(tile, sources)]

    def _move_from(
        self, record: UnitRecord, number: int, tile: Box, sources: Sequence[_RowBox], target_rows: Int64Array
    ) -> Bits | None:
        """Move a tile that these sources cover; return its elements, or None if no target box touches it."""
        tensor = self._plan.index.tensors[number]
        targets: dict[str, list[_TargetBox]] = defaultdict(list)
        for row, box in find_touching(self._plan.layout.shards, target_rows, tile):
            target_tensor = self._plan.target_tensors[row.tensor]
            targets[target_tensor.dtype].append(_target_box(row, box, tile, tensor.shape, target_tensor.item_bytes))
        if not targets:
            return None
        rounded = self._plan.rounded_types.get(number)
        if rounded is not None:
            targets[rounded] += ()  # without boxes to write, so that only the term in that type is computed
        row, box = sources[0]
        is_averaged = number in self._plan.averages
        may_view = box == tile and not is_averaged
        self.clock.lap(OTHER)
        mapped = view_elements(self._source, row, tile, tensor.item_bytes) if may_view else None
        if is_averaged:
            elements, terms = self._average(record, number, tile, tuple(targets))
            self._write(record, elements, tensor.dtype, targets, {})
        elif mapped is not None:
            position, elements = mapped
            self.clock.lap(POPULATE, elements.nbytes, row.file)
            tallies = {dtype: Tally(tile, tensor.shape, ITEM_BYTES[dtype]) for dtype in targets}
            crc32 = self._write(record, elements, tensor.dtype, targets, tallies)
            record.read[row.file].append(CrcRange(position, elements.nbytes, crc32))
            terms = {dtype: tally.term for dtype, tally in tallies.items()}
        else:
            elements, terms = self._collect(record, sources, tile, tensor, tuple(targets))
            self._write(record, elements, tensor.dtype, targets, {})
        for target in itertools.chain(*targets.values()):
            record.target[target.row.tensor, target.row.replica] ^= target.tally.term
        dtypes = {target.row.tensor: dtype for dtype, boxes in targets.items() for target in boxes}
        for target_number, dtype in dtypes.items():
            record.source[target_number] ^= terms[dtype]
        if rounded is not None:
            record.rounded[number] ^= terms[rounded]
        return elements

    def _compare(
        self,
        record: UnitRecord,
        tensor: LogicalTensor,
        tile: tuple[Box, Bits],
        sources: Sequence[_RowBox],
        copy_rows: Int64Array,
    ) -> None:
        """Read the other copies of a tile, and compare them with its elements.

        Raises:
            CorruptSourceError: a copy differs; the error names the tensor and the files of both copies.
        """
        tile_box, elements = tile
        for row, box in find_touching(self._plan.index.shards, copy_rows, tile_box):
            self.clock.lap(OTHER)
            mapped = view_elements(self._source, row, box, tensor.item_bytes)
            if mapped is not None:
                position, other = mapped
                self.clock.lap(POPULATE, other.nbytes, row.file)
                record.read[row.file].append(CrcRange(position, other.nbytes, crc.crc32(_flat(other).data)))
                self.clock.lap(CHECKSUM, other.nbytes)
            else:
                other = np.empty(box.size, dtype=elements.dtype)
                record.read[row.file] += gather(self._source, row, box, other, self.clock)
            inside: tuple[Any, ...] = (*_index_in(box, tile_box), ...)
            expected = np.ascontiguousarray(elements[inside])
            if np.array_equal(_flat(expected), _flat(other)):
                continue
            unequal = (_flat(expected) != _flat(other)).reshape(-1, tensor.item_bytes).any(axis=1)
            place = np.unravel_index(int(unequal.argmax()), box.size)
            first = tuple(int(at) + low for at, low in zip(place, box.offset, strict=True))
            self._refuse_copies(tensor, first, int(unequal.sum()), sources, row)

    def _refuse_copies(
        self, tensor: LogicalTensor, first: tuple[int, ...], count: int, sources: Sequence[_RowBox], other: ShardRow
    ) -> NoReturn:
        """Raise for copies that differ, or for the file of one if its commit proves it damaged.

        Args:
            tensor: whose copies they are.
            first: first element that differs, in the tensor.
            count: number of elements that differ.
            sources: boxes that the first copy was read from.
            other: row of the other copy.

        Raises:
            CorruptSourceError: always.
        """
        element, files = Box(first, (1,) * len(first)), self._plan.index.files
        own = next((row.file for row, box in sources if box.contains(element)), sources[0][0].file)
        check_files(self._plan.index.root, [files[number] for number in {own, other.file}])
        elements = f"{count} element{'' if count == 1 else 's'} of a box"
        where = f"{files[own].path} and {files[other.file].path} differ in {elements}, the first at {list(first)}"
        raise CorruptSourceError(
            "copies of one tensor differ: nothing was published",
            path=str(self._plan.index.root),
            problems=[f"{tensor.key}: {where}"],
            hint="ranks wrote different values, or a file is damaged: use an earlier checkpoint, or convert the first"
            " copies with --allow-differences",
        )

    def _average(
        self, record: UnitRecord, number: int, tile: Box, dtypes: Sequence[str]
    ) -> tuple[Bits, dict[str, int]]:
        """Read all copies of a tile, and return their mean and its terms in each type."""
        tensor = self._plan.index.tensors[number]
        mean = read_mean(self._source, self._plan.index, number, self._plan.averages[number], tile)
        self.clock.lap(READ, sum(item.num_bytes for ranges in mean.ranges.values() for item in ranges))
        for file, ranges in mean.ranges.items():
            record.read[file] += ranges
        if mean.difference is not None:
            record.averaged[number] = max(mean.difference, record.averaged.get(number, 0.0))
        terms = {dtype: digest_term(cast(mean.elements, tensor.dtype, dtype), tile, tensor.shape) for dtype in dtypes}
        return mean.elements, terms

    def _collect(
        self,
        record: UnitRecord,
        sources: Sequence[_RowBox],
        tile: Box,
        tensor: LogicalTensor,
        dtypes: Sequence[str],
    ) -> tuple[Bits, dict[str, int]]:
        """Read a tile from its sources, and return its elements and their terms in each type."""
        num_bytes = tile.num_elements * tensor.item_bytes
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(max(num_bytes, self.tile_bytes), dtype=np.uint8)
        buffer: Bits = self._scratch[:num_bytes].view(UNSIGNED[tensor.item_bytes]).reshape(tile.size)
        terms = dict.fromkeys(dtypes, 0)
        for row, box in sources:
            index: tuple[Any, ...] = (*_index_in(box, tile), ...)  # the dots make a view, of a scalar too
            view = buffer[index]
            elements: Bits = view if view.flags.c_contiguous else np.empty(box.size, dtype=view.dtype)
            ranges = gather(self._source, row, box, elements, self.clock)
            record.read[row.file] += ranges
            if elements is not view:
                view[...] = elements
                self.clock.lap(COPY, elements.nbytes)
            for dtype in dtypes:
                known = ranges[0].crc32 if len(ranges) == 1 and dtype == tensor.dtype else None
                terms[dtype] ^= digest_term(cast(elements, tensor.dtype, dtype), box, tensor.shape, known_crc32=known)
            self.clock.lap(CHECKSUM)
        return buffer, terms

    def _write(
        self,
        record: UnitRecord,
        elements: Bits,
        source_dtype: str,
        targets: Mapping[str, Sequence[_TargetBox]],
        tallies: Mapping[str, Tally],
    ) -> int:
        """Write a tile to its target boxes, slice by slice; with `tallies`, digest the tile and return its CRC-32.

        Args:
            record: record of the unit.
            elements: elements of the tile.
            source_dtype: type of the elements.
            targets: target boxes by their type.
            tallies: tallies of the tile by type; empty if its terms are known.
        """
        lead = _num_ones(elements.shape)
        rows = elements.reshape(elements.shape[lead:] or (1,))
        step = max(1, SLICE_BYTES * len(rows) // max(1, rows.nbytes))
        crc32 = 0
        for first in range(0, len(rows), step):
            tile_slice = rows[first : first + step]
            own = crc.crc32(tile_slice.reshape(-1).view(np.uint8).data) if tallies else None
            if own is not None:
                crc32 = crc.combine(crc32, own, tile_slice.nbytes)
            for dtype, boxes in targets.items():
                if not boxes and not tallies:  # nothing to write, and the term is known
                    continue
                converted = cast(tile_slice, source_dtype, dtype)
                if converted is not tile_slice:
                    self.clock.lap(COPY, converted.nbytes)
                known = own if dtype == source_dtype else None
                if tallies:
                    tallies[dtype].add(converted, known)
                    self.clock.lap(CHECKSUM, converted.nbytes)
                for target in boxes:
                    self._write_slice(record, target, converted, first, known)
        return crc32

    def _write_slice(
        self, record: UnitRecord, target: _TargetBox, tile_slice: Bits, first: int, known: int | None
    ) -> None:
        """Write the elements of a slice that lie in a target box.

        Args:
            record: record of the unit.
            target: the target box.
            tile_slice: rows of the tile, in the target's type.
            first: number of the first row.
            known: CRC-32 of the slice, if it is known.
        """
        low, high = max(first, target.index[0].start), min(first + len(tile_slice), target.index[0].stop)
        if low >= high:
            return
        common = tile_slice[(slice(low - first, high - first), *target.index[1:])]
        crc32 = known if common.size == tile_slice.size else None
        clock, file = self.clock, target.row.file
        if common.size == tile_slice.size:
            elements = tile_slice
        else:
            elements = np.ascontiguousarray(common)
            clock.lap(COPY, elements.nbytes)
        flat: Bytes = elements.reshape(-1).view(np.uint8)
        if len(target.positions) == 1:
            if crc32 is None:
                crc32 = crc.crc32(flat.data)
                clock.lap(CHECKSUM, len(flat))
            written = [self._target.write(file, target.positions[0] + target.written_bytes, flat, crc32)]
            clock.lap(WRITE, len(flat), file)
        else:
            written = self._write_ranges(target, flat)
        record.written[file] += written
        target.tally.add(elements, crc32)  # its time is given to the checksums of the next slice
        target.written_bytes += len(flat)

    def _write_ranges(self, target: _TargetBox, flat: Bytes) -> list[CrcRange]:
        """Write the next bytes of a target box of several ranges, a batch after the other."""
        clock, file, length = self.clock, target.row.file, target.range_bytes
        at = target.written_bytes // length
        contents = flat.reshape(-1, length)
        step = max(1, BATCH_BYTES // length)
        written: list[CrcRange] = []
        for first in range(0, len(contents), step):
            batch = contents[first : first + step]
            sums = [crc.crc32(content.data) for content in batch]
            clock.lap(CHECKSUM, batch.nbytes)
            positions = target.positions[at + first : at + first + step]
            written += [
                self._target.write(file, position, content, crc32)
                for position, content, crc32 in zip(positions, batch, sums, strict=True)
            ]
            clock.lap(WRITE, batch.nbytes, file)
        return written


def _target_box(row: ShardRow, box: Box, tile: Box, shape: tuple[int, ...], item_bytes: int) -> _TargetBox:
    positions, range_bytes = row.byte_ranges(box, item_bytes)
    return _TargetBox(
        row=row,
        index=_index_in(box, tile)[_num_ones(tile.size) :] or (slice(0, 1),),
        positions=positions,
        range_bytes=range_bytes,
        tally=Tally(box, shape, item_bytes),
    )


def _flat(elements: Bits) -> Bytes:
    """Return the bytes of contiguous elements."""
    return elements.reshape(-1).view(np.uint8)


def _num_ones(size: Sequence[int]) -> int:
    """Count the leading dims of one element."""
    return sum(1 for _ in itertools.takewhile(lambda count: count == 1, size))


def _index_in(box: Box, tile: Box) -> tuple[slice, ...]:
    """Return the index of a box in its tile's array, [ndim]."""
    within = (low - base for low, base in zip(box.offset, tile.offset, strict=True))
    return tuple(slice(low, low + size) for low, size in zip(within, box.size, strict=True))
