"""Bytes of target files that are known before a tensor is read; thousands of files may differ only in their names.

The ranks of ZeRO-3 write model files of a hundred kilobytes each that are equal except for the name of their archive.
Such files share a `BytesTemplate`, and their bytes are made on access. The files of a DCP checkpoint's ranks hold no
names: they share the same bytes as `SharedRanges`. Files that are carried unchanged from the source have
`CarriedRanges`, whose bytes are read on access, one block at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from reshard.errors import CorruptSourceError, make_read_error
from reshard.storage.files import Bytes, open_file
from reshard.tensors.intervals import Int64Array

_BLOCK_BYTES = 4 << 20
_SMALL_BYTES = 16 << 20

FixedRange = tuple[int, bytes]
"""Position in the file, and the bytes from there."""


@dataclasses.dataclass(frozen=True, eq=False)
class BytesTemplate:
    """Fixed bytes with gaps for a text.

    Attributes:
        ranges: position in the file and bytes; the bytes in the gaps have no meaning.
        gaps: positions of the gaps in the file, [gaps], each inside one of the ranges.
        num_bytes: length of the text.
    """

    ranges: tuple[FixedRange, ...]
    gaps: Int64Array
    num_bytes: int

    @functools.cached_property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """Return position and length of every range."""
        return tuple((position, len(content)) for position, content in self.ranges)

    @functools.cached_property
    def digest(self) -> bytes:
        """Compute the SHA-256 of ranges and gaps."""
        return _digest(self.gaps.astype("<i8").tobytes(), self.ranges)

    def digest_with(self, text: bytes) -> bytes:
        """Compute the digest that a template with the same gaps would have if this text stood in them."""
        joined, gaps = self._joined
        filled = joined.copy()
        filled[gaps[:, None] + np.arange(len(text))] = np.frombuffer(text, dtype=np.uint8)
        return hashlib.sha256(filled.data).digest()

    @functools.cached_property
    def _joined(self) -> tuple[Bytes, Int64Array]:
        """Return the bytes that `digest` is computed of, and the positions of the gaps among them."""
        joined, moved = bytearray(self.gaps.astype("<i8").tobytes()), self.gaps.copy()
        for position, content in self.ranges:
            head = _encode_head(position, content)
            inside = (self.gaps >= position) & (self.gaps < position + len(content))
            moved[inside] += len(joined) + len(head) - position
            joined += head + content
        return np.frombuffer(joined, dtype=np.uint8), moved

    def fill(self, text: bytes) -> tuple[FixedRange, ...]:
        """Return the ranges with a text in all gaps.

        Raises:
            ValueError: the text does not have the length of the gaps.
        """
        if len(text) != self.num_bytes:
            raise ValueError(f"expected a text of {self.num_bytes} bytes for the gaps, found {len(text)} bytes")
        letters, steps = np.frombuffer(text, dtype=np.uint8), np.arange(len(text))
        filled: list[FixedRange] = []
        for position, content in self.ranges:
            own = self.gaps[(self.gaps >= position) & (self.gaps < position + len(content))] - position
            changed = np.frombuffer(content, dtype=np.uint8).copy()
            changed[own[:, None] + steps] = letters
            filled.append((position, changed.tobytes()))
        return tuple(filled)


class FilledTemplate(Sequence[FixedRange]):
    """The ranges of a template with a text in its gaps; they are made anew on every access.

    Args:
        template: the template.
        text: for the gaps.
        is_own: `identity_bytes` digests the ranges with their own text, instead of the text that the template holds.
    """

    __slots__ = ("is_own", "template", "text")

    def __init__(self, template: BytesTemplate, text: bytes, *, is_own: bool = False) -> None:
        self.template = template
        self.text = text
        self.is_own = is_own

    @overload
    def __getitem__(self, at: int) -> FixedRange: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[FixedRange, ...]: ...
    def __getitem__(self, at: int | slice) -> FixedRange | tuple[FixedRange, ...]:
        return self.template.fill(self.text)[at]

    def __iter__(self) -> Iterator[FixedRange]:
        return iter(self.template.fill(self.text))

    def __len__(self) -> int:
        return len(self.template.ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class SharedRanges(tuple[FixedRange, ...]):
    """Fixed ranges that many files have in common, as one object."""

    @functools.cached_property
    def digest(self) -> bytes:
        """Compute the SHA-256 of positions, lengths and bytes."""
        return _digest(b"", self)


class CarriedRanges(Sequence[FixedRange]):
    """The content of a file of the source in blocks; each is read when it is accessed, so that memory stays bounded.

    Args:
        root: folder of the source.
        path: path of the file, relative to it.
        num_bytes: size of the file when it was indexed.
    """

    __slots__ = ("num_bytes", "path", "positions", "root")

    def __init__(self, root: Path, path: str, num_bytes: int) -> None:
        self.root, self.path, self.num_bytes = root, path, num_bytes
        starts = range(0, num_bytes, _BLOCK_BYTES)
        self.positions = tuple((start, min(_BLOCK_BYTES, num_bytes - start)) for start in starts)

    @overload
    def __getitem__(self, at: int) -> FixedRange: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[FixedRange, ...]: ...
    def __getitem__(self, at: int | slice) -> FixedRange | tuple[FixedRange, ...]:
        if isinstance(at, slice):
            return tuple(map(self._read, self.positions[at]))
        return self._read(self.positions[at])

    def __len__(self) -> int:
        return len(self.positions)

    def identity_bytes(self) -> bytes:
        """Return bytes that tell the file from others: the digest of its content, of a large file its size only."""
        if self.num_bytes > _SMALL_BYTES:
            return self.num_bytes.to_bytes(8, "little")
        return _digest(b"", self)

    def _read(self, place: tuple[int, int]) -> FixedRange:
        """Read a block.

        Raises:
            CorruptSourceError: the file cannot be read, or is shorter than it was.
        """
        start, length = place
        try:
            with open_file(self.root / self.path, root=self.root) as file:
                content = file.read(length, start)
        except OSError as error:
            raise make_read_error(error, str(self.root / self.path)) from error
        if len(content) != length:
            raise CorruptSourceError(
                f"has fewer than the {self.num_bytes} bytes that it had when it was indexed",
                path=str(self.root / self.path),
            )
        return start, content


def _digest(head: bytes, ranges: Sequence[FixedRange]) -> bytes:
    sha256 = hashlib.sha256(head)
    for position, content in ranges:
        sha256.update(_encode_head(position, content) + content)
    return sha256.digest()


def _encode_head(position: int, content: bytes) -> bytes:
    return position.to_bytes(8, "little") + len(content).to_bytes(8, "little")


def identity_bytes(fixed: Sequence[FixedRange]) -> Iterator[bytes]:
    """Yield bytes that tell these ranges from others; a filled template yields its digest and text only."""
    if isinstance(fixed, SharedRanges):
        yield fixed.digest
        return
    if isinstance(fixed, CarriedRanges):
        yield fixed.identity_bytes()
        return
    if isinstance(fixed, FilledTemplate):
        yield (fixed.template.digest_with(fixed.text) if fixed.is_own else fixed.template.digest) + fixed.text
        return
    for position, content in fixed:
        yield position.to_bytes(8, "little") + content


def list_positions(fixed: Sequence[FixedRange]) -> tuple[tuple[int, int], ...]:
    """Return position and length of every range."""
    if isinstance(fixed, FilledTemplate):
        return fixed.template.positions
    if isinstance(fixed, CarriedRanges):
        return fixed.positions
    return tuple((position, len(content)) for position, content in fixed)


def have_same_positions(one: Sequence[FixedRange], other: Sequence[FixedRange]) -> bool:
    """Return True if both have ranges at the same positions and of the same lengths."""
    if one is other:
        return True
    if isinstance(one, FilledTemplate) and isinstance(other, FilledTemplate) and one.template is other.template:
        return True
    return list_positions(one) == list_positions(other)
