"""A stranger to safetensors files: a length, a header in JSON, and the tensors behind it."""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path

from reshard.witness.archives import open_for_reading
from reshard.witness.table import Key, Piece, Storage, Table, Tensor, row_major

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_INDEX = "model.safetensors.index.json"


def read(root: Path, *, is_target: bool = False) -> Table:
    """Read the tensors of a folder of safetensors files."""
    table = Table(root)
    names = {item.name for item in root.iterdir()}
    files = sorted(name for name in names if name.endswith(".safetensors"))
    if _INDEX in names:
        table.add_file(_INDEX)
        with open_for_reading(root / _INDEX) as file:
            placed: dict[str, str] = json.loads(file.read(file.num_bytes, 0))["weight_map"]
        files = sorted(set(placed.values()))
    for text in [_read_file(table, name, is_target=is_target) for name in files]:
        for second, first in text.items():
            if Key("weight", first) in table.tensors and Key("weight", second) not in table.tensors:
                table.aliases[second] = first
    return table


def _read_file(table: Table, name: str, *, is_target: bool) -> dict[str, str]:
    """Add the tensors of a file, and return its `__metadata__`."""
    number = table.add_file(name)
    with open_for_reading(table.root / name) as file:
        (length,) = struct.unpack("<Q", file.read(8, 0))
        header = json.loads(file.read(length, 8))
        num_bytes = file.num_bytes
    metadata: dict[str, str] = header.pop("__metadata__", None) or {}
    end = 0
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        shape, first, count = tuple(entry["shape"]), 8 + length + start, stop - start
        storage = Storage(number, functools.partial(_pair, first, count), _DTYPES[entry["dtype"]])
        zero = (0,) * len(shape)
        piece = Piece(zero, shape, storage, 0, row_major(shape), shape)
        table.tensors[Key("weight", key)] = Tensor(shape, storage.dtype, [[piece]])
        table.storages.append(storage)
        if start > end:
            table.filler.setdefault(number, []).append((8 + length + end, 8 + length + start))
        end = max(end, stop)
    if is_target and 8 + length + end < num_bytes:
        table.filler.setdefault(number, []).append((8 + length + end, num_bytes))
    return metadata


def _pair(first: int, count: int) -> tuple[int, int]:
    return first, count
