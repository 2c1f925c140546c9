"""The bytes of a DCP checkpoint's files that are not tensor data: items inside the ranks' files.

Source: torch/distributed/checkpoint/filesystem.py of torch 2.13 (file names and items of `FileSystemWriter`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from reshard.formats.dcp.metadata import Place
from reshard.formats.pt.archive import Slot
from reshard.formats.pt.objects import Tensor, new_tensor
from reshard.formats.pt.writer import PtLayout, lay_out_pt
from reshard.layout import ChecksumField, TargetFile

_STEM = "archive"  # torch.save's prefix where it writes into a stream
_ALIGNMENT = 64
"""Items begin at multiples of this, so that payloads are aligned in the file and not only in their archive."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _RankFile:
    """A file so far."""

    end: int = 0
    fixed: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)
    checksums: list[ChecksumField] = dataclasses.field(default_factory=list)


class RankFiles:
    """The files `__<rank>_0.distcp` of a checkpoint that is being laid out."""

    def __init__(self, world_size: int) -> None:
        self._files = [_RankFile() for _ in range(world_size)]
        self._layouts: dict[tuple[str, tuple[int, ...]], tuple[PtLayout, Slot]] = {}
        self._contents: dict[tuple[str, str], bytes] = {}

    def add_raw(self, rank: int, data: bytes) -> Place:
        """An item whose bytes are known."""
        file = self._files[rank]
        start = file.end + -file.end % _ALIGNMENT
        file.fixed.append((start, data))
        file.end = start + len(data)
        return Place(file_name(rank), start, len(data))

    def add_object(self, rank: int, value: Any) -> Place:
        """An item for plain data, or for a tensor whose bytes are known."""
        alike = (type(value).__name__, repr(value))  # the same settings come for every parameter
        if alike not in self._contents or isinstance(value, Tensor):
            layout = lay_out_pt(_STEM, value)
            content = bytearray(layout.num_bytes)
            for offset, data in layout.fixed:
                content[offset : offset + len(data)] = data
            self._contents[alike] = bytes(content)
        return self.add_raw(rank, self._contents[alike])

    def add_chunk(self, rank: int, dtype: str, shape: tuple[int, ...]) -> tuple[Place, int]:
        """An item for a chunk; also the position of its first element in the file."""
        file = self._files[rank]
        start = file.end + -file.end % _ALIGNMENT
        if (dtype, shape) not in self._layouts:  # there are as many chunks as ranks, of few shapes
            tensor = new_tensor(dtype, shape)
            laid_out = lay_out_pt(_STEM, tensor)
            self._layouts[dtype, shape] = (laid_out, laid_out.slots[tensor.storage])
        layout, slot = self._layouts[dtype, shape]
        file.fixed += [(start + offset, data) for offset, data in layout.fixed]
        if slot.num_bytes:
            positions = tuple(start + position for position in slot.crc_positions)
            file.checksums.append(
                ChecksumField(start=start + slot.offset, num_bytes=slot.num_bytes, positions=positions)
            )
        file.end = start + layout.num_bytes
        return Place(file_name(rank), start, layout.num_bytes), start + slot.offset

    def build(self) -> tuple[TargetFile, ...]:
        """One file per rank; the last ranks have none if there is nothing for them."""
        return tuple(
            TargetFile(
                path=file_name(rank),
                num_bytes=file.end,
                fixed=tuple(file.fixed),
                checksums=tuple(file.checksums),
            )
            for rank, file in enumerate(self._files)
            if file.end  # chunks go to the first ranks, so only the last can be without
        )


def file_name(rank: int) -> str:
    """The only file of a rank, as `FileSystemWriter` names it."""
    return f"__{rank}_0.distcp"
