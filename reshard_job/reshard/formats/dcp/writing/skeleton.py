"""The bytes of a DCP checkpoint's files that are not tensor data: items inside the ranks' files.

The files of most ranks hold items of the same sizes at the same places: they are laid out once, and share the result.
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
from reshard.planning.constant_bytes import Piece, Shared
from reshard.tensors.layout import ChecksumField, TargetFile
from reshard.tensors.shard_table import Ranges, ranges_of

_STEM = "archive"  # torch.save's prefix where it writes into a stream
_ALIGNMENT = 64
"""Items begin at multiples of this, so that payloads are aligned in the file and not only in their archive."""


class Items(NamedTuple):
    """One item in each of consecutive ranks' files, at the same place.

    Attributes:
        first: first of the ranks.
        last: rank behind the last.
        start: first byte of the item.
        length: bytes of the item.
        byte_offset: of the first element, in the file.
    """

    first: int
    last: int
    start: int
    length: int
    byte_offset: int


class _Layout(NamedTuple):
    """What an item for a chunk is but for its elements, from its own first byte."""

    fixed: tuple[Piece, ...]
    num_bytes: int
    slot: Slot


@dataclasses.dataclass(slots=True, kw_only=True)
class _Alike:
    """The files so far of consecutive ranks, equal but for elements and checksums."""

    first: int
    end: int = 0
    fixed: list[Piece] = dataclasses.field(default_factory=list)
    zeros: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    checksums: list[ChecksumField] = dataclasses.field(default_factory=list)

    def align(self) -> int:
        """Where the next item begins; zeros lead there."""
        start = self.end + -self.end % _ALIGNMENT
        if start > self.end:
            self.zeros.append((self.end, start))
        return start


class RankFiles:
    """The files `__<rank>_0.distcp` of a checkpoint that is being laid out."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._alike = [_Alike(first=0)]  # in the order of the ranks, and together all of them
        self._layouts: dict[tuple[str, tuple[int, ...]], _Layout] = {}
        self._contents: dict[tuple[str, str], bytes] = {}

    def add_raw(self, rank: int, data: bytes) -> Place:
        """An item whose bytes are known."""
        file = self._alike[self._cut(rank, rank + 1).start]
        start = file.align()
        file.fixed.append((start, data))
        file.end = start + len(data)
        return Place(file_name(rank), start, len(data))

    def add_object(self, rank: int, value: Any) -> Place:
        """An item for plain data, or for a tensor whose bytes are known."""
        alike = (type(value).__name__, repr(value))  # the same settings come for every parameter
        if alike not in self._contents or isinstance(value, Tensor):
            self._contents[alike] = _content(value)
        return self.add_raw(rank, self._contents[alike])

    def add_copy(self, rank: int, value: Any) -> Place:
        """An item for whatever object a reader makes, its tensors' bytes known; every pickle of the target is ours."""
        return self.add_raw(rank, _content(value))

    def add_chunk(self, rank: int, dtype: str, shape: tuple[int, ...]) -> tuple[Place, int]:
        """An item for a chunk; also the position of its first element in the file."""
        (items,) = self.add_chunks(rank, rank + 1, dtype, shape)
        return Place(file_name(rank), items.start, items.length), items.byte_offset

    def add_chunks(self, first: int, last: int, dtype: str, shape: tuple[int, ...]) -> list[Items]:
        """An item for a chunk of this shape in the file of every rank `first:last`, in the order of the ranks."""
        layout = self._layout(dtype, shape)
        slot, found = layout.slot, []
        for at in self._cut(first, last):
            file = self._alike[at]
            start = file.align()
            file.fixed += [(start + offset, data) for offset, data in layout.fixed]
            if slot.num_bytes:
                positions = tuple(start + position for position in slot.crc_positions)
                file.checksums.append(
                    ChecksumField(start=start + slot.offset, num_bytes=slot.num_bytes, positions=positions)
                )
            file.end = start + layout.num_bytes
            found.append(Items(file.first, self._last(at), start, layout.num_bytes, start + slot.offset))
        return found

    def _layout(self, dtype: str, shape: tuple[int, ...]) -> _Layout:
        """There are as many chunks as ranks, of few shapes."""
        if (dtype, shape) not in self._layouts:
            tensor = new_tensor(dtype, shape)
            found = lay_out_pt(_STEM, tensor)
            self._layouts[dtype, shape] = _Layout(tuple(found.fixed), found.num_bytes, found.slots[tensor.storage])
        return self._layouts[dtype, shape]

    def build(self) -> tuple[TargetFile, ...]:
        """One file per rank; the last ranks have none if there is nothing for them."""
        files: list[TargetFile] = []
        for at, file in enumerate(self._alike):
            if not file.end:  # chunks go to the first ranks, so only the last can be without
                continue
            fixed, checksums = Shared(file.fixed), tuple(file.checksums)
            files += [
                TargetFile(path=file_name(rank), num_bytes=file.end, fixed=fixed, checksums=checksums)
                for rank in range(file.first, self._last(at))
            ]
        return tuple(files)

    def zeros(self) -> Ranges:
        """Bytes between items, in the files that `build` makes."""
        return ranges_of(
            [(file.first, self._last(at), *pair) for at, file in enumerate(self._alike) for pair in file.zeros]
        )

    def _last(self, at: int) -> int:
        """Rank behind the last of those that are alike."""
        return self._alike[at + 1].first if at + 1 < len(self._alike) else self._world_size

    def _cut(self, first: int, last: int) -> range:
        """Positions in `_alike` of ranks `first:last`, which differ from their neighbours from now on."""
        return range(self._cut_at(first), self._cut_at(last))

    def _cut_at(self, rank: int) -> int:
        if rank == self._world_size:
            return len(self._alike)
        at = bisect.bisect_right(self._alike, rank, key=lambda file: file.first) - 1
        found = self._alike[at]
        if found.first == rank:
            return at
        copied = dataclasses.replace(
            found, first=rank, fixed=found.fixed[:], zeros=found.zeros[:], checksums=found.checksums[:]
        )
        self._alike.insert(at + 1, copied)
        return at + 1


def _content(value: Any) -> bytes:
    layout = lay_out_pt(_STEM, value)
    content = bytearray(layout.num_bytes)
    for offset, data in layout.fixed:
        content[offset : offset + len(data)] = data
    return bytes(content)


def file_name(rank: int) -> str:
    """The only file of a rank, as `FileSystemWriter` names it."""
    return f"__{rank}_0.distcp"
