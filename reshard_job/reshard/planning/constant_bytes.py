"""Bytes of target files that are known before a tensor is read; thousands of files may differ only in their names.

The ranks of ZeRO-3 write model files of a hundred kilobytes each that are equal but for the name of their archive.
Such files share a `Stencil`, and their bytes are made when somebody looks at them. The ranks' files of a DCP checkpoint
have no names inside: they are `Shared`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from reshard.tensors.intervals import Int64Array

Piece = tuple[int, bytes]
"""Position in the file, and the bytes from there."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stencil:
    """Bytes with gaps for a text.

    Attributes:
        pieces: position in the file and bytes; the gaps hold anything.
        gaps: positions in the file of the gaps, [gaps], each inside of one piece.
        num_bytes: length of the text.
    """

    pieces: tuple[Piece, ...]
    gaps: Int64Array
    num_bytes: int

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Position and length of every piece."""
        return tuple((position, len(content)) for position, content in self.pieces)

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of pieces and gaps."""
        return _digest(self.gaps.astype("<i8").tobytes(), self.pieces)

    def stamped(self, text: bytes) -> tuple[Piece, ...]:
        """The pieces with a text of the right length in all gaps."""
        if len(text) != self.num_bytes:
            raise ValueError(f"a text of {len(text)} bytes for gaps of {self.num_bytes}")
        letters, steps = np.frombuffer(text, dtype=np.uint8), np.arange(len(text))
        found: list[Piece] = []
        for position, content in self.pieces:
            own = self.gaps[(self.gaps >= position) & (self.gaps < position + len(content))] - position
            changed = np.frombuffer(content, dtype=np.uint8).copy()
            changed[own[:, None] + steps] = letters
            found.append((position, changed.tobytes()))
        return tuple(found)


class Stamped(Sequence[Piece]):
    """The pieces of a stencil with a text; made anew whenever they are asked for."""

    __slots__ = ("stencil", "text")

    def __init__(self, stencil: Stencil, text: bytes) -> None:
        self.stencil = stencil
        self.text = text

    @overload
    def __getitem__(self, at: int) -> Piece: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Piece, ...]: ...
    def __getitem__(self, at: int | slice) -> Piece | tuple[Piece, ...]:
        return self.stencil.stamped(self.text)[at]

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.stencil.stamped(self.text))

    def __len__(self) -> int:
        return len(self.stencil.pieces)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class Shared(tuple[Piece, ...]):
    """Pieces that many files have in common, as one object."""

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of positions, lengths and bytes."""
        return _digest(b"", self)


def _digest(head: bytes, pieces: Sequence[Piece]) -> bytes:
    found = hashlib.sha256(head)
    for position, content in pieces:
        found.update(position.to_bytes(8, "little") + len(content).to_bytes(8, "little") + content)
    return found.digest()


def identity(fixed: Sequence[Piece]) -> Iterator[bytes]:
    """Bytes that tell these pieces from others; of a stencil and a text without making the pieces."""
    if isinstance(fixed, Shared):
        yield fixed.digest
        return
    if isinstance(fixed, Stamped):
        yield fixed.stencil.digest + fixed.text
        return
    for position, content in fixed:
        yield position.to_bytes(8, "little") + content


def places(fixed: Sequence[Piece]) -> tuple[tuple[int, int], ...]:
    """Position and length of every piece."""
    if isinstance(fixed, Stamped):
        return fixed.stencil.places
    return tuple((position, len(content)) for position, content in fixed)


def same_places(one: Sequence[Piece], other: Sequence[Piece]) -> bool:
    """Both have pieces at the same positions, of the same lengths."""
    if one is other:
        return True
    if isinstance(one, Stamped) and isinstance(other, Stamped) and one.stencil is other.stencil:
        return True
    return places(one) == places(other)
