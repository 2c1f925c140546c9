"""Opcodes of many records at once: each is a block of rows, and rows of several blocks are joined to records.

What `emit` writes of one record after the other, for millions of them. Source: `pickletools` of Python 3.11.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reshard.storage.files import Bytes
from reshard.tensors.intervals import Int64Array

Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A part of every record.

    Attributes:
        content: bytes, [records or 1, width].
        length: how many of them count, from the first, [records or 1].
    """

    content: Bytes
    length: Int64Array


def constant(data: bytes) -> Block:
    """The same bytes in every record."""
    return Block(np.frombuffer(data, dtype=np.uint8)[None], np.array([len(data)], dtype=np.int64))


def some(data: bytes, where: Mask) -> Block:
    """Bytes that only the records have that are marked, [records]."""
    return Block(np.frombuffer(data, dtype=np.uint8)[None], np.where(where, len(data), 0))


def texts(each: Sequence[bytes]) -> Block:
    """Bytes of their own for every record."""
    length = np.array([len(data) for data in each], dtype=np.int64)
    width = max(1, int(length.max(initial=0)))
    padded = b"".join(data.ljust(width, b"\0") for data in each)
    return Block(np.frombuffer(padded, dtype=np.uint8).reshape(len(each), width), length)


def references(numbers: Int64Array) -> Block:
    """What puts objects on the stack that were written before, by their memo numbers, [records]."""
    little = np.ascontiguousarray(numbers, dtype="<u4").view(np.uint8).reshape(-1, 4)
    few = numbers < 1 << 8
    opcode = np.where(few, ord("h"), ord("j")).astype(np.uint8)
    return Block(np.concatenate((opcode[:, None], little), axis=1), np.where(few, 2, 5))


def replaced(block: Block, rows: Int64Array, others: Block) -> Block:
    """The same with other rows, [len(rows)], in the place of some."""
    width = max(block.content.shape[1], others.content.shape[1])
    content = np.zeros((len(block.content), width), dtype=np.uint8)
    content[:, : block.content.shape[1]] = block.content
    content[rows, : others.content.shape[1]] = others.content
    length = block.length.copy()
    length[rows] = others.length
    return Block(content, length)


def integers(values: Int64Array) -> Block:
    """Opcodes of integers, [records], none of them negative: as `emit.integer` writes them."""
    little = np.ascontiguousarray(values, dtype="<i8").view(np.uint8).reshape(-1, 8)
    sizes = [values < 1 << 8, values < 1 << 16, values < 1 << 31]
    narrow = bool(sizes[2].all())
    content = np.zeros((len(values), 5 if narrow else 10), dtype=np.uint8)
    content[:, 0] = np.select(sizes, list(b"KMJ"), 0x8A)
    content[:, 1:5] = little[:, :4]
    length = np.select(sizes, [2, 3, 5], 0)
    if not narrow:
        wide = np.flatnonzero(~sizes[2])
        num_bytes = 5 + sum((values[wide] >= 1 << bits).astype(np.int64) for bits in (39, 47, 55))
        content[wide, 1] = num_bytes
        content[wide, 2:] = little[wide]
        length[wide] = 2 + num_bytes
    return Block(content, length)


def joined(blocks: Sequence[Block], count: int) -> bytes:
    """So many records, each the bytes of all blocks one behind the other."""
    content = [np.broadcast_to(block.content, (count, block.content.shape[1])) for block in blocks]
    kept = [
        np.broadcast_to(np.arange(block.content.shape[1]) < block.length[:, None], part.shape)
        for block, part in zip(blocks, content, strict=True)
    ]
    return np.concatenate(content, axis=1)[np.concatenate(kept, axis=1)].tobytes()
