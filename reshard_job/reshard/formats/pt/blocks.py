"""Encode the opcodes of many records at once: a block has one row for each record, and a record joins several blocks.

`emit` writes records one after the other; this module writes the same bytes for millions of them. Source:
`pickletools` of Python 3.11.
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
    """Consecutive bytes of every record.

    Attributes:
        content: the bytes, padded to one width, [records or 1, width].
        length: number of bytes without the padding, [records or 1].
    """

    content: Bytes
    length: Int64Array


def constant_block(data: bytes) -> Block:
    """Build a block with the same bytes in every record."""
    return Block(np.frombuffer(data, dtype=np.uint8)[None], np.array([len(data)], dtype=np.int64))


def masked_block(data: bytes, where: Mask) -> Block:
    """Build a block with the same bytes in the records that are marked in `where`, [records], and none in others."""
    return Block(np.frombuffer(data, dtype=np.uint8)[None], np.where(where, len(data), 0))


def text_block(each: Sequence[bytes]) -> Block:
    """Build a block with the bytes `each[i]` in record i."""
    length = np.array([len(data) for data in each], dtype=np.int64)
    width = max(1, int(length.max(initial=0)))
    padded = b"".join(data.ljust(width, b"\0") for data in each)
    return Block(np.frombuffer(padded, dtype=np.uint8).reshape(len(each), width), length)


def reference_block(numbers: Int64Array) -> Block:
    """Build a block of the opcodes that push objects by their memo numbers, [records]."""
    little = np.ascontiguousarray(numbers, dtype="<u4").view(np.uint8).reshape(-1, 4)
    few = numbers < 1 << 8
    opcode = np.where(few, ord("h"), ord("j")).astype(np.uint8)
    return Block(np.concatenate((opcode[:, None], little), axis=1), np.where(few, 2, 5))


def replace_rows(block: Block, rows: Int64Array, others: Block) -> Block:
    """Return a copy of a block with `others`, [len(rows)], in place of the rows `rows`."""
    width = max(block.content.shape[1], others.content.shape[1])
    content = np.zeros((len(block.content), width), dtype=np.uint8)
    content[:, : block.content.shape[1]] = block.content
    content[rows, : others.content.shape[1]] = others.content
    length = block.length.copy()
    length[rows] = others.length
    return Block(content, length)


def integer_block(values: Int64Array) -> Block:
    """Build a block of the opcodes of integers that are not negative, [records], as `emit.encode_integer` does."""
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


def join_blocks(blocks: Sequence[Block], count: int) -> bytes:
    """Concatenate the bytes of `count` records, each with the bytes of all blocks in order."""
    content = [np.broadcast_to(block.content, (count, block.content.shape[1])) for block in blocks]
    kept = [
        np.broadcast_to(np.arange(block.content.shape[1]) < block.length[:, None], part.shape)
        for block, part in zip(blocks, content, strict=True)
    ]
    return np.concatenate(content, axis=1)[np.concatenate(kept, axis=1)].tobytes()
