"""Columns of a manifest: named one- and two-dimensional arrays in one uncompressed zip file of `.npy` files.

The form is that of `numpy.savez`, with fixed times, so that equal columns give equal files. Reading executes nothing,
and no array can be larger than its file.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.errors import CorruptSourceError
from reshard.storage.files import Stream, open_file

Column = npt.NDArray[np.int64] | npt.NDArray[np.uint8]
INT64, UINT8 = np.dtype("<i8"), np.dtype("u1")
_BLOCK_BYTES = 1 << 20
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


def pack(columns: Mapping[str, Column]) -> bytes:
    """Return the content of a file that holds the columns."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, column in columns.items():
            content = io.BytesIO()
            kind = UINT8 if column.dtype == UINT8 else INT64
            np.lib.format.write_array(content, np.ascontiguousarray(column, dtype=kind), (1, 0), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", _LONG_AGO), content.getvalue())
    return buffer.getvalue()


def unpack(path: Path, expected: Mapping[str, tuple[np.dtype[Any], int]]) -> dict[str, Column]:
    """Read columns from a file.

    Args:
        path: of the file.
        expected: type and number of dims of every column.

    Raises:
        CorruptSourceError: not such a file, or other columns than expected.
    """
    columns: dict[str, Column] = {}
    try:
        with open_file(path) as file, zipfile.ZipFile(Stream(file)) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            if set(entries) != set(expected) or len(archive.infolist()) != len(expected):
                raise ValueError(f"holds the columns {sorted(entries)}, expected {sorted(expected)}")
            for name, (kind, ndim) in expected.items():
                entry = entries[name]
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > file.num_bytes:
                    raise ValueError(f"{name}: is compressed, expected it stored")
                content = io.BytesIO(archive.read(entry))
                column = np.lib.format.read_array(content, allow_pickle=False, max_header_size=4096)
                if column.dtype != kind or column.ndim != ndim or content.read(1):
                    raise ValueError(f"{name}: is {column.dtype} {list(column.shape)}, expected {kind}, {ndim} dims")
                columns[name] = column
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise CorruptSourceError(f"is not what a manifest's columns are: {error}", path=str(path)) from error
    return columns


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex; raises `OSError` if the file cannot be read."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        for position in range(0, file.num_bytes, _BLOCK_BYTES):
            digest.update(file.read(min(_BLOCK_BYTES, file.num_bytes - position), position))
    return digest.hexdigest()
