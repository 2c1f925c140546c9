"""Read elements of tensors one by one, and compare them bit by bit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from reshard.errors import VerificationError
from reshard.witness.archives import Readable, open_for_reading
from reshard.witness.table import Ints, Table

Bytes = npt.NDArray[np.uint8]

_WHOLE_BYTES = 1 << 20
"""A file that is not larger is read at once."""

_NEIGHBOURS = np.arange(-4, 12)
"""Elements around a place that are compared, too; they cost no further read."""


_KEPT_BYTES = 64 << 20
"""Content of small files that is kept in memory."""

_REQUESTS_AT_A_TIME = 8
_GAP_BYTES = 4096
"""Elements that are not further apart are read at once."""


class ElementReader:
    """Reads elements of a checkpoint's files, one file after the other; the content of small ones is kept."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._contents: dict[int, Bytes] = {}
        self._kept_bytes = 0

    def read(self, files: Ints, positions: Ints, item_bytes: int) -> Bytes:
        """Return the bytes of elements, [elements, item_bytes].

        Args:
            files: number of the file of each element, [elements].
            positions: first byte of each element, [elements].
            item_bytes: bytes of an element.
        """
        if len(files) and int(files.min()) < 0:
            raise VerificationError("a witness finds a tensor with elements that no piece holds")
        if len(files) and int(files.min()) == int(files.max()):
            return self._read_file(int(files[0]), positions, item_bytes)
        found = np.zeros((len(files), item_bytes), dtype=np.uint8)
        order = np.argsort(files, kind="stable")
        borders = np.flatnonzero(np.diff(files[order])) + 1
        for own in np.split(order, borders):
            if len(own):
                found[own] = self._read_file(int(files[own[0]]), positions[own], item_bytes)
        return found

    def _read_file(self, number: int, positions: Ints, item_bytes: int) -> Bytes:
        if number not in self._contents:
            with open_for_reading(self._table.root / self._table.files[number]) as file:
                if file.num_bytes > _WHOLE_BYTES or self._kept_bytes > _KEPT_BYTES:
                    return _read_ranges(file, positions, item_bytes)
                self._contents[number] = np.frombuffer(file.read(file.num_bytes, 0), dtype=np.uint8)
                self._kept_bytes += file.num_bytes
        content = self._contents[number]
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) <= len(content) - item_bytes:
            raise VerificationError(f"a witness finds that {self._table.files[number]} is shorter than its tensors")
        found: Bytes = content[positions[:, None] + np.arange(item_bytes)]
        return found


def _read_ranges(file: Readable, positions: Ints, item_bytes: int) -> Bytes:
    """Read elements; those that are near each other at once."""
    order = np.argsort(positions, kind="stable")
    ordered = positions[order]
    breaks = np.flatnonzero(ordered[1:] - ordered[:-1] > _GAP_BYTES) + 1
    firsts = np.concatenate(([0], breaks))
    starts, stops = ordered[firsts], ordered[np.concatenate((breaks - 1, [len(ordered) - 1]))] + item_bytes
    blocks = b"".join(_read_blocks(file, starts.tolist(), stops.tolist()))
    lengths = stops - starts
    if len(blocks) != int(lengths.sum()):
        raise VerificationError("a witness finds a file that is shorter than its tensors")
    run = np.searchsorted(firsts, np.arange(len(ordered)), side="right") - 1
    inside = ordered - starts[run] + (np.cumsum(lengths) - lengths)[run]
    found = np.empty((len(positions), item_bytes), dtype=np.uint8)
    found[order] = np.frombuffer(blocks, dtype=np.uint8)[inside[:, None] + np.arange(item_bytes)]
    return found


def _read_blocks(file: Readable, starts: Sequence[int], stops: Sequence[int]) -> Iterator[bytes]:
    """Read ranges of a file; several at a time of an object in a store, which needs some time for each."""
    lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
    if not file.is_remote or len(starts) == 1:
        yield from map(file.read, lengths, starts)
        return
    with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as pool:
        yield from pool.map(file.read, lengths, starts)


def random_integers(count: int, below: int) -> Ints:
    """Return integers from 0 on that no two runs have alike; numpy.random would cost a conversion's start 12 ms."""
    drawn: Ints = (np.frombuffer(os.urandom(8 * count), dtype=np.uint64) % np.uint64(below)).astype(np.int64)
    return drawn


def draw(num_elements: int, num_places: int, corners: Ints) -> Ints:
    """Return elements to compare: runs of neighbours at corners of pieces, and at random places.

    Args:
        num_elements: of the tensor.
        num_places: about as many places are drawn; a tensor that is hardly larger is compared whole.
        corners: first and last elements of pieces.
    """
    if num_elements <= num_places * len(_NEIGHBOURS):
        return np.arange(num_elements)
    if len(corners) > num_places // 2:
        corners = corners[random_integers(num_places // 2, len(corners))]
    places = np.concatenate((corners, random_integers(num_places - len(corners), num_elements)))
    places.sort()
    elements: Ints = (places[:, None] + _NEIGHBOURS).reshape(-1)
    return elements[(elements >= 0) & (elements < num_elements)]


def convert(elements: Bytes, source: str, target: str) -> Bytes:
    """Return elements in another floating-point type, rounded to nearest even as torch does it.

    Args:
        elements: their bytes, [elements, item bytes of `source`].
        source: type of the elements.
        target: type to return them in.
    """
    if source == target:
        return elements
    values = widen(elements, source)
    with np.errstate(over="ignore", invalid="ignore"):
        if target == "float64":
            return np.ascontiguousarray(values.astype("<f8")).view(np.uint8).reshape(len(values), 8)
        single = values.astype("<f4")
        if target == "float32":
            return single.view(np.uint8).reshape(len(values), 4)
        if target == "float16":
            return single.astype("<f2").view(np.uint8).reshape(len(values), 2)
        if target != "bfloat16":
            raise ValueError(f"no conversion from {source} to {target}")
        bits = single.view("<u4").astype(np.uint64)
        half = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype("<u2")
        half[np.isnan(single)] = 0x7FC0
        return half.view(np.uint8).reshape(len(values), 2)


def widen(elements: Bytes, dtype: str) -> npt.NDArray[np.floating]:
    """Return elements of a floating-point type as float32 or float64 values, [elements]."""
    flat = np.ascontiguousarray(elements)
    if dtype == "bfloat16":
        return (flat.view("<u2").astype("<u4")[:, 0] << np.uint32(16)).view("<f4")
    kinds = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}
    if dtype not in kinds:
        raise ValueError(f"{dtype} is no floating-point type that is converted")
    return flat.view(kinds[dtype])[:, 0]
