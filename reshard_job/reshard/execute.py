"""Move the bytes: every source byte is read once, every target byte written once, in bounded memory.

Work is cut into tiles, parts of one logical tensor that fit the memory budget. A tile is gathered from the source boxes
that touch it and scattered to the target boxes that touch it; both sides are digested with their own coordinates, so
that equal digests mean that every element arrived in every copy exactly once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reshard.digest import MODULUS, box_digest, to_hex
from reshard.errors import VerificationError
from reshard.geometry import Box, tiles
from reshard.layout import Int64Array, ShardRow, ShardTable
from reshard.plan import Plan
from reshard.storage import Source, Target

Progress = Callable[[int], None]
"""Called with the number of bytes moved since the last call."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Elements = npt.NDArray[np.unsignedinteger]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened.

    Attributes:
        digests: logical tensor to digest in hex; source and target agree.
        total_digest: sum of all digests, in hex.
        file_crc32: CRC-32 of every target file, in the layout's order.
        bytes_read: from the source.
        bytes_written: to the target.
    """

    digests: dict[str, str]
    total_digest: str
    file_crc32: tuple[int, ...]
    bytes_read: int
    bytes_written: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Moved:
    """Digests of one tile: of what was read, and of what was written to each replica."""

    tensor: int
    source: int
    target: dict[int, int]
    num_bytes: int


def execute(plan: Plan, folder: Path, *, progress: Progress | None = None) -> Outcome:
    """Convert into `folder`, which exists, is empty, and is published by the caller afterwards.

    Raises:
        CorruptSourceError: the source ended early or does not match its own checksums.
        StorageFullError: no space left for the target.
        VerificationError: the digests of source and target differ.
    """
    source = Source(plan.index.root, plan.index.files)
    target = Target(folder, plan.layout.files)
    try:
        moved = _move_all(plan, source, target, progress)
        source.check_sums()
        digests = _compare(plan, moved)
        sums = target.finish()
        return Outcome(
            digests={str(plan.index.tensors[number].key): to_hex(value) for number, value in digests.items()},
            total_digest=to_hex(sum(digests.values()) % MODULUS),
            file_crc32=tuple(sums),
            bytes_read=source.bytes_read,
            bytes_written=target.bytes_written,
        )
    finally:
        source.close()
        target.close()


def _move_all(plan: Plan, source: Source, target: Target, progress: Progress | None) -> list[_Moved]:
    pool = ThreadPoolExecutor(plan.num_threads, thread_name_prefix="reshard")
    moved: list[_Moved] = []
    try:
        futures: list[Future[_Moved]] = []
        for number in plan.needed:
            tensor = plan.index.tensors[number]
            futures.extend(
                pool.submit(_move_tile, plan, source, target, number, tile)
                for tile in tiles(tensor.shape, plan.tile_bytes // tensor.item_bytes)
            )
        for future in as_completed(futures):
            moved.append(future.result())
            if progress is not None:
                progress(moved[-1].num_bytes)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return moved


def _move_tile(plan: Plan, source: Source, target: Target, number: int, tile: Box) -> _Moved:
    tensor = plan.index.tensors[number]
    ndim = len(tensor.shape)
    buffer: Elements = np.empty(tile.size, dtype=_UNSIGNED[tensor.item_bytes])
    source_digest = 0
    for row, part in touching(plan.index.shards, plan.source_rows[number], tile, ndim):
        elements = _read_part(source, row, part, tensor.item_bytes)
        source_digest += box_digest(elements, part, tensor.shape)
        buffer[_slices(part, tile)] = elements
    target_digests: dict[int, int] = {}
    for row, part in touching(plan.layout.shards, plan.target_rows[number], tile, ndim):
        elements = np.ascontiguousarray(buffer[_slices(part, tile)])
        digest = box_digest(elements, part, tensor.shape)
        target_digests[row.replica] = (target_digests.get(row.replica, 0) + digest) % MODULUS
        _write_part(target, row, part, elements)
    return _Moved(number, source_digest % MODULUS, target_digests, tile.num_elements * tensor.item_bytes)


def touching(shards: ShardTable, rows: Int64Array, tile: Box, ndim: int) -> Iterator[tuple[ShardRow, Box]]:
    """Rows whose boxes touch the tile, each with the common region."""
    low, size = shards.offset[rows, :ndim], shards.size[rows, :ndim]
    hit = ((low < np.array(tile.end)) & (low + size > np.array(tile.offset))).all(axis=1)
    for index in rows[hit]:
        row = shards.row(int(index), ndim)
        part = row.box.intersect(tile)
        if part is not None:
            yield row, part


def _slices(part: Box, tile: Box) -> tuple[slice, ...]:
    return tuple(
        slice(low - base, low - base + size)
        for low, base, size in zip(part.offset, tile.offset, part.size, strict=True)
    )


def runs(row: ShardRow, part: Box) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Cut a part of a row's box into pieces that are consecutive in the file.

    Yields:
        (distance of the piece's first element from the box's first element in the file, in elements; index of the piece
        in the leading dims of the part). A part that is consecutive as a whole has one piece with an empty index.
    """
    start = sum((p - b) * s for p, b, s in zip(part.offset, row.box.offset, row.strides, strict=True))
    dim, expected = part.ndim, 1
    while dim > 0 and (part.size[dim - 1] == 1 or row.strides[dim - 1] == expected):
        dim -= 1
        expected *= part.size[dim]
    for index in np.ndindex(*part.size[:dim]):
        yield start + sum(i * s for i, s in zip(index, row.strides[:dim], strict=True)), index


def _read_part(source: Source, row: ShardRow, part: Box, item_bytes: int) -> Elements:
    elements: Elements = np.empty(part.size, dtype=_UNSIGNED[item_bytes])
    for distance, index in runs(row, part):
        piece = elements[index] if index else elements
        source.read_into(row.file, row.byte_offset + distance * item_bytes, piece.reshape(-1).view(np.uint8))
    return elements


def _write_part(target: Target, row: ShardRow, part: Box, elements: Elements) -> None:
    for distance, index in runs(row, part):
        piece = elements[index] if index else elements
        position = row.byte_offset + distance * elements.dtype.itemsize
        target.write(row.file, position, piece.reshape(-1).view(np.uint8))


def _compare(plan: Plan, moved: Sequence[_Moved]) -> dict[int, int]:
    """Digest of every tensor; every target replica must have the source's."""
    sources: dict[int, int] = {}
    targets: dict[tuple[int, int], int] = {}
    for tile in moved:
        sources[tile.tensor] = (sources.get(tile.tensor, 0) + tile.source) % MODULUS
        for replica, digest in tile.target.items():
            key = (tile.tensor, replica)
            targets[key] = (targets.get(key, 0) + digest) % MODULUS
    problems = [
        f"{plan.index.tensors[number].key}, copy {replica}: source {to_hex(sources[number])}, target {to_hex(digest)}"
        for (number, replica), digest in sorted(targets.items())
        if digest != sources[number]
    ]
    if problems:
        raise VerificationError(
            f"{len(problems)} tensors did not arrive as they were: nothing was published", problems=problems[:20]
        )
    return sources


def row_digest(source: Source, row: ShardRow, shape: tuple[int, ...], item_bytes: int, max_elements: int) -> int:
    """Digest of one row of a source, read in parts of at most `max_elements`."""
    total = 0
    for tile in tiles(row.box.size, max_elements):
        part = tile.shift(row.box.offset)
        total += box_digest(_read_part(source, row, part, item_bytes), part, shape)
    return total % MODULUS
