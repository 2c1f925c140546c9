"""Lay out the items in the ranks' files of a DCP checkpoint: all bytes that are not tensor data.

The files of most ranks hold items of the same sizes at the same places. They are laid out once and share the result.
Source: torch/distributed/checkpoint/filesystem.py of torch 2.13 (file names and items of `FileSystemWriter`).
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any, NamedTuple

from reshard.formats.dcp.chunks import Place
from reshard.formats.pt.archive import Slot
from reshard.formats.pt.objects import Tensor, new_tensor
from reshard.formats.pt.writer import lay_out_pt
from reshard.planning.constant_bytes import FixedRange, SharedRanges
from reshard.tensors.layout import ChecksumField, TargetFile
from reshard.tensors.shard_table import Ranges, ranges_of

_STEM = "archive"  # the prefix that torch.save uses if it writes into a stream
_ALIGNMENT = 64
"""Items begin at multiples of this, so that payloads are aligned in the file as well as in their archive."""


class RankItems(NamedTuple):
    """One item in each of the files of consecutive ranks, at the same place.

    Attributes:
        first: first of the ranks.
        last: rank behind the last.
        start: first byte of the item.
        length: bytes of the item.
        byte_offset: byte offset of the first element in the file.
    """

    first: int
    last: int
    start: int
    length: int
    byte_offset: int


class _Layout(NamedTuple):
    """An item for a chunk without its elements; positions count from its first byte."""

    fixed: tuple[FixedRange, ...]
    num_bytes: int
    slot: Slot


@dataclasses.dataclass(slots=True, kw_only=True)
class _EqualFiles:
    """Files of consecutive ranks that are equal so far, but for elements and checksums."""

    first: int
    end: int = 0
    fixed: list[FixedRange] = dataclasses.field(default_factory=list)
    zeros: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    checksums: list[ChecksumField] = dataclasses.field(default_factory=list)

    def align(self) -> int:
        """Return the byte at which the next item begins, and fill the gap before it with zeros."""
        start = self.end + -self.end % _ALIGNMENT
        if start > self.end:
            self.zeros.append((self.end, start))
        return start


class RankFiles:
    """The files `__<rank>_0.distcp` of a checkpoint that is being laid out."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._alike = [_EqualFiles(first=0)]  # in the order of the ranks, and together all of them
        self._layouts: dict[tuple[str, tuple[int, ...]], _Layout] = {}
        self._contents: dict[tuple[str, str], bytes] = {}

    def add_raw(self, rank: int, data: bytes) -> Place:
        """Add an item whose bytes are known."""
        file = self._alike[self._split(rank, rank + 1).start]
        start = file.align()
        file.fixed.append((start, data))
        file.end = start + len(data)
        return Place(file_name(rank), start, len(data))

    def add_object(self, rank: int, value: Any) -> Place:
        """Add an item for plain data, or for a tensor whose bytes are known."""
        alike = (type(value).__name__, repr(value))  # the same settings come for every parameter
        if alike not in self._contents or isinstance(value, Tensor):
            self._contents[alike] = _build_item(value)
        return self.add_raw(rank, self._contents[alike])

    def add_copy(self, rank: int, value: Any) -> Place:
        """Add an item for any object that a reader returns; the bytes of its tensors must be known."""
        return self.add_raw(rank, _build_item(value))

    def add_chunk(self, rank: int, dtype: str, shape: tuple[int, ...]) -> tuple[Place, int]:
        """Add an item for a chunk; return its place, and the position of its first element in the file."""
        (items,) = self.add_chunks(rank, rank + 1, dtype, shape)
        return Place(file_name(rank), items.start, items.length), items.byte_offset

    def add_chunks(self, first: int, last: int, dtype: str, shape: tuple[int, ...]) -> list[RankItems]:
        """Add an item for a chunk of this shape to the file of every rank `first:last`.

        Returns:
            The items, in the order of the ranks.
        """
        layout = self._lay_out(dtype, shape)
        slot, ranges = layout.slot, []
        for at in self._split(first, last):
            file = self._alike[at]
            start = file.align()
            file.fixed += [(start + offset, data) for offset, data in layout.fixed]
            if slot.num_bytes:
                positions = tuple(start + position for position in slot.crc_positions)
                file.checksums.append(
                    ChecksumField(start=start + slot.offset, num_bytes=slot.num_bytes, positions=positions)
                )
            file.end = start + layout.num_bytes
            ranges.append(RankItems(file.first, self._end_rank(at), start, layout.num_bytes, start + slot.offset))
        return ranges

    def _lay_out(self, dtype: str, shape: tuple[int, ...]) -> _Layout:
        """Lay out an item for a chunk, once for each shape: there are as many chunks as ranks, of few shapes."""
        if (dtype, shape) not in self._layouts:
            tensor = new_tensor(dtype, shape)
            layout = lay_out_pt(_STEM, tensor)
            self._layouts[dtype, shape] = _Layout(tuple(layout.fixed), layout.num_bytes, layout.slots[tensor.storage])
        return self._layouts[dtype, shape]

    def build(self) -> tuple[TargetFile, ...]:
        """Build one file per rank; the last ranks have none if they have no items."""
        files: list[TargetFile] = []
        for at, file in enumerate(self._alike):
            if not file.end:  # chunks go to the first ranks, so only the last ranks can have no items
                continue
            fixed, checksums = SharedRanges(file.fixed), tuple(file.checksums)
            files += [
                TargetFile(path=file_name(rank), num_bytes=file.end, fixed=fixed, checksums=checksums)
                for rank in range(file.first, self._end_rank(at))
            ]
        return tuple(files)

    def zeros(self) -> Ranges:
        """Return the byte ranges between items, in the files that `build` returns."""
        return ranges_of(
            [(file.first, self._end_rank(at), *pair) for at, file in enumerate(self._alike) for pair in file.zeros]
        )

    def _end_rank(self, at: int) -> int:
        """Return the rank behind the last of a group of equal files."""
        return self._alike[at + 1].first if at + 1 < len(self._alike) else self._world_size

    def _split(self, first: int, last: int) -> range:
        """Split the groups at `first` and `last`, whose files differ from now on; return positions in `_alike`."""
        return range(self._split_at(first), self._split_at(last))

    def _split_at(self, rank: int) -> int:
        if rank == self._world_size:
            return len(self._alike)
        at = bisect.bisect_right(self._alike, rank, key=lambda file: file.first) - 1
        files = self._alike[at]
        if files.first == rank:
            return at
        copied = dataclasses.replace(
            files, first=rank, fixed=files.fixed[:], zeros=files.zeros[:], checksums=files.checksums[:]
        )
        self._alike.insert(at + 1, copied)
        return at + 1


def _build_item(value: Any) -> bytes:
    layout = lay_out_pt(_STEM, value)
    content = bytearray(layout.num_bytes)
    for offset, data in layout.fixed:
        content[offset : offset + len(data)] = data
    return bytes(content)


def file_name(rank: int) -> str:
    """Return the name that `FileSystemWriter` gives the only file of a rank."""
    return f"__{rank}_0.distcp"
