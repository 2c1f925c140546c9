"""Move one tile: from the source boxes that touch it to the target boxes that touch it, both sides digested.

A tile that is one run of a source file is not read but looked at where the kernel holds it. It passes in bands that the
processor's cache holds, so that checksums, copies and writes of the same bytes fetch them from memory once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.checksums import crc
from reshard.checksums.crc import Piece
from reshard.checksums.digest import Tally, box_term
from reshard.errors import CorruptSourceError
from reshard.execution.unit_records import UnitRecord
from reshard.planning.plan import Plan
from reshard.storage.files import Bytes
from reshard.storage.source_reader import SourceReader
from reshard.storage.target_writer import TargetWriter
from reshard.tensors.cast import UNSIGNED, Bits, cast
from reshard.tensors.geometry import Box
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import ITEM_BYTES, LogicalTensor
from reshard.tensors.shard_table import ShardRow, ShardTable

_BAND_BYTES = 1 << 20
_SMALLEST_PART_BYTES = 256 << 10
"""Shorter parts are cheaper to put together than to map."""

_GATHER_BYTES = 4 << 20
"""Of a file are mapped at a time to copy runs out of them."""

_LARGEST_SPAN = 64
"""Times the bytes that are wanted of it may be mapped."""

_Part = tuple[ShardRow, Box]
"""A box of a table, and what of it lies in a tile."""


def touching(shards: ShardTable, rows: Int64Array, tile: Box) -> Iterator[tuple[ShardRow, Box]]:
    """Boxes of rows that touch the tile, each with the common region."""
    for row in shards.within(rows, tile):
        part = row.box.intersect(tile)
        if part is not None:
            yield row, part


def cut(row: ShardRow, part: Box, elements: Bits) -> Iterator[tuple[int, Bytes]]:
    """Pieces of a part of a row's box that are consecutive in the file: position there, and the bytes in `elements`."""
    flat = elements.reshape(-1).view(np.uint8)
    positions, length = row.runs(part, elements.dtype.itemsize)
    for number, position in enumerate(positions):
        yield position, flat[number * length : (number + 1) * length]


def gather(source: SourceReader, row: ShardRow, part: Box, elements: Bits) -> list[Piece]:
    """Fill `elements` with a part of a row: runs that lie close together are copied out of one mapping."""
    pieces = list(cut(row, part, elements))
    if len(pieces) < 2:
        return [source.read_into(row.file, position, piece) for position, piece in pieces]
    step = max(1, _GATHER_BYTES * len(pieces) // _extent(pieces)[1])
    found: list[Piece] = []
    for first in range(0, len(pieces), step):
        some = pieces[first : first + step]
        low, num_bytes = _extent(some)
        near = len(some) > 1 and num_bytes <= min(2 * _GATHER_BYTES, _LARGEST_SPAN * len(some) * len(some[0][1]))
        window = source.view(row.file, low, num_bytes) if near else None
        for position, piece in some:
            if window is None:
                found.append(source.read_into(row.file, position, piece))
            else:
                piece[:] = window[position - low : position - low + len(piece)]
                found.append(Piece(position, len(piece), crc.crc32(piece.data)))
    return found


def _extent(pieces: Sequence[tuple[int, Bytes]]) -> tuple[int, int]:
    """First byte and number of bytes from there to the last end; pieces have one length."""
    positions = [position for position, _ in pieces]
    low = min(positions)
    return low, max(positions) - low + len(pieces[0][1])


def look(source: SourceReader, row: ShardRow, part: Box, item_bytes: int) -> tuple[int, Bits] | None:
    """A part of a row that is one run of its file: position there, and the elements where they are, not copied.

    None where it must be read.
    """
    positions, num_bytes = row.runs(part, item_bytes)
    found = source.view(row.file, positions[0], num_bytes) if len(positions) == 1 else None
    return None if found is None else (positions[0], found.view(UNSIGNED[item_bytes]).reshape(part.size))


@dataclasses.dataclass(slots=True)
class _Parcel:
    """A part of a target box on its way.

    Attributes:
        row: the target box.
        index: of the part in the tile, without the tile's first dims of one element.
        positions: where its runs begin in the file.
        run_bytes: of each of them.
        tally: of what has been sent.
        sent_bytes: so far.
    """

    row: ShardRow
    index: tuple[slice, ...]
    positions: list[int]
    run_bytes: int
    tally: Tally
    sent_bytes: int = 0


class Carrier:
    """Moves tiles of a plan, in one thread."""

    def __init__(self, plan: Plan, source: SourceReader, target: TargetWriter) -> None:
        self._plan, self._source, self._target = plan, source, target
        self._scratch: Bytes = np.empty(0, dtype=np.uint8)

    def move(self, record: UnitRecord, number: int, tile: Box, rows: tuple[Int64Array, Int64Array, Int64Array]) -> None:
        """Move a tile, and note what was read and written and the terms of both sides.

        Args:
            record: of the unit.
            number: of the tensor, its position in `Index.tensors`.
            tile: in that tensor.
            rows: of source, target, and other copies in the source that may touch the tile.

        Raises:
            CorruptSourceError: it cannot be read, or another copy in the source differs.
            StorageFullError, TargetError: it cannot be written.
            VerificationError: a target box did not get all of its elements.
        """
        tensor = self._plan.index.tensors[number]
        sources = list(touching(self._plan.index.shards, rows[0], tile))
        for part, own in self._apart(sources, tile, tensor):
            elements = self._pass(record, number, part, own, rows[1])
            if elements is not None and len(rows[2]):
                self._compare(record, tensor, (part, elements), own, rows[2])

    def _apart(self, sources: Sequence[_Part], tile: Box, tensor: LogicalTensor) -> list[tuple[Box, Sequence[_Part]]]:
        """The parts of a tile that can each be looked at, as tiles of their own; else the tile, to be put together."""
        long = len(sources) * _SMALLEST_PART_BYTES <= tile.num_elements * tensor.item_bytes
        if len(sources) > 1 and long and self._source.may_map and all(part.is_run(tensor.shape) for _, part in sources):
            return [(part, [(row, part)]) for row, part in sources]
        return [(tile, sources)]

    def _pass(
        self, record: UnitRecord, number: int, tile: Box, sources: Sequence[_Part], target_rows: Int64Array
    ) -> Bits | None:
        """Move a tile that is made of these sources; its elements, or None if the target has none of it."""
        tensor = self._plan.index.tensors[number]
        parcels: dict[str, list[_Parcel]] = defaultdict(list)
        for row, part in touching(self._plan.layout.shards, target_rows, tile):
            wanted = self._plan.target_tensors[row.tensor]
            parcels[wanted.dtype].append(_parcel(row, part, tile, tensor.shape, wanted.item_bytes))
        if not parcels:
            return None
        rounded = self._plan.rounded_types.get(number)
        if rounded is not None:
            parcels[rounded] += ()  # nothing to send, and the term in that type
        row, part = sources[0]
        found = look(self._source, row, tile, tensor.item_bytes) if part == tile else None
        if found is not None:
            position, elements = found
            came = {dtype: Tally(tile, tensor.shape, ITEM_BYTES[dtype]) for dtype in parcels}
            crc32 = self._send(record, elements, tensor.dtype, parcels, came)
            record.read[row.file].append(Piece(position, elements.nbytes, crc32))
            terms = {dtype: tally.term for dtype, tally in came.items()}
        else:
            elements, terms = self._collect(record, sources, tile, tensor, tuple(parcels))
            self._send(record, elements, tensor.dtype, parcels, {})
        for parcel in itertools.chain(*parcels.values()):
            record.target[parcel.row.tensor, parcel.row.replica] ^= parcel.tally.term
        for target, dtype in {parcel.row.tensor: dtype for dtype, found in parcels.items() for parcel in found}.items():
            record.source[target] ^= terms[dtype]
        if rounded is not None:
            record.rounded[number] ^= terms[rounded]
        return elements

    def _compare(
        self,
        record: UnitRecord,
        tensor: LogicalTensor,
        tile: tuple[Box, Bits],
        sources: Sequence[_Part],
        copy_rows: Int64Array,
    ) -> None:
        """Read the other copies of a tile, and compare them with its elements.

        Raises:
            CorruptSourceError: one differs, with the tensor and the files of both.
        """
        region, elements = tile
        for row, part in touching(self._plan.index.shards, copy_rows, region):
            found = look(self._source, row, part, tensor.item_bytes)
            if found is not None:
                position, other = found
                record.read[row.file].append(Piece(position, other.nbytes, crc.crc32(_flat(other).data)))
            else:
                other = np.empty(part.size, dtype=elements.dtype)
                record.read[row.file] += gather(self._source, row, part, other)
            inside: tuple[Any, ...] = (*_slices(part, region), ...)
            expected = np.ascontiguousarray(elements[inside])
            if np.array_equal(_flat(expected), _flat(other)):
                continue
            unequal = (_flat(expected) != _flat(other)).reshape(-1, tensor.item_bytes).any(axis=1)
            place = np.unravel_index(int(unequal.argmax()), part.size)
            first = tuple(int(at) + low for at, low in zip(place, part.offset, strict=True))
            raise self._differs(tensor, first, int(unequal.sum()), sources, row)

    def _differs(
        self, tensor: LogicalTensor, first: tuple[int, ...], count: int, sources: Sequence[_Part], other: ShardRow
    ) -> CorruptSourceError:
        """What to raise where copies differ: element `first` is in one of the sources and in another copy."""
        element, files = Box(first, (1,) * len(first)), self._plan.index.files
        own = next((row.file for row, part in sources if part.contains(element)), sources[0][0].file)
        elements = f"{count} element{'' if count == 1 else 's'} of a part"
        where = f"{files[own].path} and {files[other.file].path} differ in {elements}, the first at {list(first)}"
        return CorruptSourceError(
            "copies of one tensor differ: nothing was published",
            path=str(self._plan.index.root),
            problems=[f"{tensor.key}: {where}"],
            hint="ranks wrote different values, or a file is damaged: use an earlier checkpoint, or convert the first"
            " copies with --allow-differences",
        )

    def _collect(
        self,
        record: UnitRecord,
        sources: Sequence[_Part],
        tile: Box,
        tensor: LogicalTensor,
        dtypes: Sequence[str],
    ) -> tuple[Bits, dict[str, int]]:
        """The elements of a tile, put together from its sources, and their terms as elements of each type."""
        num_bytes = tile.num_elements * tensor.item_bytes
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(max(num_bytes, self._plan.tile_bytes), dtype=np.uint8)
        buffer: Bits = self._scratch[:num_bytes].view(UNSIGNED[tensor.item_bytes]).reshape(tile.size)
        terms = dict.fromkeys(dtypes, 0)
        for row, part in sources:
            index: tuple[Any, ...] = (*_slices(part, tile), ...)  # with the dots a view, of scalars too
            view = buffer[index]
            elements: Bits = view if view.flags.c_contiguous else np.empty(part.size, dtype=view.dtype)
            pieces = gather(self._source, row, part, elements)
            record.read[row.file] += pieces
            if elements is not view:
                view[...] = elements
            for dtype in dtypes:
                known = pieces[0].crc32 if len(pieces) == 1 and dtype == tensor.dtype else None
                terms[dtype] ^= box_term(cast(elements, tensor.dtype, dtype), part, tensor.shape, known_crc32=known)
        return buffer, terms

    def _send(
        self,
        record: UnitRecord,
        elements: Bits,
        source_dtype: str,
        parcels: Mapping[str, Sequence[_Parcel]],
        came: Mapping[str, Tally],
    ) -> int:
        """Send all parts of a tile on their way, band by band; with `came`, tally the tile and return its CRC-32."""
        lead = _num_ones(elements.shape)
        rows = elements.reshape(elements.shape[lead:] or (1,))
        step = max(1, _BAND_BYTES * len(rows) // max(1, rows.nbytes))
        crc32 = 0
        for first in range(0, len(rows), step):
            band = rows[first : first + step]
            own = crc.crc32(band.reshape(-1).view(np.uint8).data) if came else None
            if own is not None:
                crc32 = crc.combine(crc32, own, band.nbytes)
            for dtype, found in parcels.items():
                if not found and not came:  # the term is known
                    continue
                converted = cast(band, source_dtype, dtype)
                known = own if dtype == source_dtype else None
                if came:
                    came[dtype].add(converted, known)
                for parcel in found:
                    self._send_band(record, parcel, converted, first, known)
        return crc32

    def _send_band(self, record: UnitRecord, parcel: _Parcel, band: Bits, first: int, known: int | None) -> None:
        """Send what a parcel wants of a band of rows from `first`, whose CRC-32 may be known."""
        low, high = max(first, parcel.index[0].start), min(first + len(band), parcel.index[0].stop)
        if low >= high:
            return
        wanted = band[(slice(low - first, high - first), *parcel.index[1:])]
        crc32 = known if wanted.size == band.size else None
        piece = band if wanted.size == band.size else np.ascontiguousarray(wanted)
        flat: Bytes = piece.reshape(-1).view(np.uint8)
        if len(parcel.positions) == 1:
            written = [self._target.write(parcel.row.file, parcel.positions[0] + parcel.sent_bytes, flat, crc32)]
            crc32 = written[0].crc32
        else:
            at = parcel.sent_bytes // parcel.run_bytes
            positions = parcel.positions[at : at + len(flat) // parcel.run_bytes]
            runs = zip(positions, flat.reshape(-1, parcel.run_bytes), strict=True)
            written = [self._target.write(parcel.row.file, position, run) for position, run in runs]
        record.written[parcel.row.file] += written
        parcel.tally.add(piece, crc32)
        parcel.sent_bytes += len(flat)


def _parcel(row: ShardRow, part: Box, tile: Box, shape: tuple[int, ...], item_bytes: int) -> _Parcel:
    positions, run_bytes = row.runs(part, item_bytes)
    return _Parcel(
        row=row,
        index=_slices(part, tile)[_num_ones(tile.size) :] or (slice(0, 1),),
        positions=positions,
        run_bytes=run_bytes,
        tally=Tally(part, shape, item_bytes),
    )


def _flat(elements: Bits) -> Bytes:
    """Bytes of contiguous elements."""
    return elements.reshape(-1).view(np.uint8)


def _num_ones(size: Sequence[int]) -> int:
    """First dims of one element."""
    return sum(1 for _ in itertools.takewhile(lambda count: count == 1, size))


def _slices(part: Box, tile: Box) -> tuple[slice, ...]:
    """Index of a part in its tile's array, [ndim]."""
    within = (low - base for low, base in zip(part.offset, tile.offset, strict=True))
    return tuple(slice(low, low + size) for low, size in zip(within, part.size, strict=True))
