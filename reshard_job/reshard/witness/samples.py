"""Read elements of tensors one by one, and compare them bit by bit."""

from __future__ import annotations

import itertools
import os

import numpy as np
import numpy.typing as npt

from reshard.storage.files import File, open_file
from reshard.system.file_handles import Handles
from reshard.witness.table import Ints, Table

Bytes = npt.NDArray[np.uint8]

_WHOLE_BYTES = 1 << 20
"""A file that is not larger is read at once."""

_KEPT_BYTES = 64 << 20
"""Content of small files that is kept in memory."""

_GAP_BYTES = 4096
"""Elements that are not further apart are read at once."""


class ElementReader:
    """Reads elements of a checkpoint's files, of which a bounded number stays open until `close`."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._files = Handles(self._open, lambda file: file.close())
        self._contents: dict[int, Bytes] = {}
        self._kept_bytes = 0

    def _open(self, number: int) -> File:
        return open_file(self._table.root / self._table.files[number], follow=True)

    def read(self, files: Ints, positions: Ints, item_bytes: int) -> Bytes:
        """Return the bytes of elements, [elements, item_bytes].

        Args:
            files: number of the file of each element, [elements].
            positions: first byte of each element, [elements].
            item_bytes: bytes of an element.
        """
        found = np.zeros((len(files), item_bytes), dtype=np.uint8)
        for number in np.unique(files).tolist():
            own = np.flatnonzero(files == number)
            found[own] = self._read_file(number, positions[own], item_bytes)
        return found

    def _read_file(self, number: int, positions: Ints, item_bytes: int) -> Bytes:
        if number not in self._contents:
            with self._files.borrow(number) as file:
                if file.is_remote or file.num_bytes > _WHOLE_BYTES or self._kept_bytes > _KEPT_BYTES:
                    return _read_ranges(file, positions, item_bytes)
                self._contents[number] = np.frombuffer(file.read(file.num_bytes, 0), dtype=np.uint8)
                self._kept_bytes += file.num_bytes
        found: Bytes = self._contents[number][positions[:, None] + np.arange(item_bytes)]
        return found

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def __enter__(self) -> ElementReader:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _read_ranges(file: File, positions: Ints, item_bytes: int) -> Bytes:
    """Read elements; those that are near each other at once."""
    order = np.argsort(positions, kind="stable")
    ordered = positions[order]
    found = np.zeros((len(positions), item_bytes), dtype=np.uint8)
    breaks = np.flatnonzero(np.diff(ordered) > _GAP_BYTES) + 1
    bounds = [0, *breaks.tolist(), len(ordered)]
    for first, stop in itertools.pairwise(bounds):
        start = int(ordered[first])
        block = np.frombuffer(file.read(int(ordered[stop - 1]) + item_bytes - start, start), dtype=np.uint8)
        found[order[first:stop]] = block[(ordered[first:stop] - start)[:, None] + np.arange(item_bytes)]
    return found


def draw(num_elements: int, count: int, corners: Ints) -> Ints:
    """Return elements to compare: all if there are few, else corners of pieces and others at random."""
    if num_elements <= count:
        return np.arange(num_elements)
    random = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    if len(corners) > count:
        corners = random.choice(corners, count, replace=False)
    rest = max(4, count - len(corners))
    return np.unique(np.concatenate((corners, random.integers(0, num_elements, rest))))


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
