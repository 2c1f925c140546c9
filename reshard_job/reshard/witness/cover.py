"""Prove that pieces cover their tensors exactly, and that every byte of every file is accounted for."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from reshard.witness.archives import open_for_reading
from reshard.witness.samples import random_integers
from reshard.witness.table import Ints, Key, Piece, Storage, Table, Tensor

_MOST_CARRIED_BYTES = 16 << 20
"""Largest object that is no tensor of the model; larger ones are refused in client states."""

_FEW = 12
_PRIME = (1 << 31) - 1
_BLOCK_BYTES = 1 << 20


def find_cover_problems(key: Key, tensor: Tensor) -> Iterator[str]:
    """Describe copies whose pieces leave elements out, hold some twice, or reach beyond tensor or storage."""
    for number, pieces in enumerate(tensor.copies):
        where = f"{key}, copy {number}"
        count = sum(piece.num_elements for piece in pieces)
        if count != tensor.num_elements:
            yield f"{where}: its pieces hold {count} elements, expected {tensor.num_elements}"
            continue
        for piece in pieces:
            inside = all(
                low >= 0 and low + size <= end
                for low, size, end in zip(piece.low, piece.size, piece.whole, strict=True)
            )
            if not inside or math.prod(piece.whole) != tensor.num_elements:
                box = f"the box at {list(piece.low)} of {list(piece.size)}"
                yield f"{where}: {box} is not inside of {list(piece.whole)}"
            elif piece.num_elements and not (piece.start >= 0 and piece.last < piece.holder.num_elements):
                yield (f"{where}: elements {piece.start} to {piece.last} of a storage of {piece.holder.num_elements}")
        if len({piece.whole for piece in pieces}) == 1 and not _is_exact(pieces):
            yield f"{where}: its pieces overlap"


def _is_exact(pieces: list[Piece]) -> bool:
    """Return True if boxes inside of a whole, with as many elements as the whole, cover it.

    The value of a box is a product of differences of random numbers, one for each coordinate, so that values of
    disjoint boxes add up to that of the whole, and those of others do so by chance only (Schwartz 1980, Zippel 1979).
    """
    if len(pieces) <= _FEW:
        return not any(_overlap(one, other) for at, one in enumerate(pieces) for other in pieces[:at])
    low = np.array([piece.low for piece in pieces], dtype=np.int64)
    high = low + np.array([piece.size for piece in pieces], dtype=np.int64)
    for _ in range(2):
        values = np.ones(len(pieces), dtype=np.int64)
        total = 1
        for dim, size in enumerate(pieces[0].whole):
            points, at = np.unique(np.concatenate((low[:, dim], high[:, dim], [0, size])), return_inverse=True)
            drawn = random_integers(len(points), _PRIME)[at]
            count = len(pieces)
            values = values * ((drawn[count : 2 * count] - drawn[:count]) % _PRIME) % _PRIME
            total = total * int((drawn[-1] - drawn[-2]) % _PRIME) % _PRIME
        if int(values.sum() % _PRIME) != total:
            return False
    return True


def _overlap(one: Piece, other: Piece) -> bool:
    return all(
        low < other_low + other_size and other_low < low + size
        for low, size, other_low, other_size in zip(one.low, one.size, other.low, other.size, strict=True)
    )


def find_byte_problems(table: Table, files: Mapping[str, int | None]) -> Iterator[str]:
    """Describe bytes of files that are neither tensor, nor container, nor zero.

    Args:
        table: of the checkpoint.
        files: path of every file of the checkpoint -> its CRC-32 as it was written, or None.
    """
    yield from _find_changed(table, files)
    for path in sorted(set(files) - set(table.files)):
        yield f"{path}: is no file that a reader of this format opens"
    filler = [(number, *gap) for number, gaps in table.filler.items() for gap in gaps]
    used = _find_used(table)
    for storage in table.storages:
        if storage not in used:
            if storage.range[1] > _MOST_CARRIED_BYTES:
                yield f"{table.files[storage.file]}: {storage.range[1]} bytes at {storage.range[0]} are of no tensor"
            continue
        runs = np.concatenate(used[storage])
        runs = runs[np.argsort(runs[:, 0], kind="stable")]
        if (runs[1:, 0] < runs[:-1, 1]).any():
            at = int(runs[1:, 0][runs[1:, 0] < runs[:-1, 1]][0])
            yield f"{table.files[storage.file]}: two tensors, or two copies, hold element {at} of one storage"
        if len(runs) and int(runs[:, 1].max()) * storage.item_bytes > storage.range[1]:
            yield f"{table.files[storage.file]}: a tensor needs {runs[:, 1].max()} elements of a storage that has fewer"
            continue
        stops = np.concatenate(([0], runs[:, 1])) * storage.item_bytes
        starts = np.append(runs[:, 0] * storage.item_bytes, storage.range[1])
        filler += [
            (storage.file, storage.range[0] + int(stops[at]), storage.range[0] + int(starts[at]))
            for at in np.flatnonzero(stops < starts)
        ]
    for number, start, stop in filler:
        if not _is_zero(table, number, start, stop):
            yield f"{table.files[number]}: bytes {start} to {stop} belong to no tensor and are not zero"


def _find_changed(table: Table, files: Mapping[str, int | None]) -> Iterator[str]:
    """Describe small files that are not what was written: they hold more settings than tensors."""
    for path, crc32 in files.items():
        if crc32 is None or path not in table.files:
            continue
        with open_for_reading(table.root / path) as file:
            if file.num_bytes <= _BLOCK_BYTES and (found := zlib.crc32(file.read(file.num_bytes, 0))) != crc32:
                yield f"{path}: CRC-32 {crc32:08x} was written, the content has {found:08x}"


def count_places(table: Table) -> int:
    """Return how many pieces of files all tensors are in."""
    pieces = (piece for tensor in table.tensors.values() for copy in tensor.copies for piece in copy)
    return sum(piece.holder.num_places for piece in pieces)


def _find_used(table: Table) -> dict[Storage, list[Ints]]:
    """Return the intervals of elements that tensors use of each storage: arrays of (start, stop), [intervals, 2]."""
    by_holder: dict[int, list[Piece]] = {}
    for tensor in (*table.tensors.values(), *table.others):
        for piece in (piece for copy in tensor.copies for piece in copy):
            by_holder.setdefault(id(piece.holder), []).append(piece)
    used: dict[Storage, list[Ints]] = {}
    for pieces in by_holder.values():
        runs = np.concatenate([_runs(piece) for piece in pieces])
        for storage, offset, first, count in pieces[0].holder.places():
            low, high = np.maximum(runs[:, 0], first), np.minimum(runs[:, 1], first + count)
            some = low < high
            used.setdefault(storage, []).append(np.stack((low[some], high[some]), axis=1) - first + offset)
    return used


def _runs(piece: Piece) -> Ints:
    """Return the intervals of the holder's elements that a piece uses, [intervals, 2]."""
    inner, dims = 1, len(piece.size)
    while dims and (piece.size[dims - 1] == 1 or piece.strides[dims - 1] == inner):
        inner *= piece.size[dims - 1]
        dims -= 1
    starts = np.array([piece.start], dtype=np.int64)
    for size, stride in zip(piece.size[:dims], piece.strides[:dims], strict=True):
        starts = (starts[:, None] + np.arange(size) * stride).reshape(-1)
    return np.stack((starts, starts + (inner if piece.num_elements else 0)), axis=1)


def _is_zero(table: Table, number: int, start: int, stop: int) -> bool:
    with open_for_reading(table.root / table.files[number]) as file:
        blocks = (file.read(min(_BLOCK_BYTES, stop - at), at) for at in range(start, stop, _BLOCK_BYTES))
        return all(block == bytes(len(block)) for block in blocks)
