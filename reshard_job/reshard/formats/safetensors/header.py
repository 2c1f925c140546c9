"""Parse the header of a safetensors file strictly, and write it.

Source: the format's specification (huggingface/safetensors, README.md "Format" and safetensors/src/tensor.rs, 0.8.0)::

    8 bytes    length N of the header, unsigned little-endian, at most 100 MB
    N bytes    JSON in UTF-8, begins with `{`, may end in spaces:
               {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {"k": "v"}}
    the rest   the tensors' bytes, row-major and little-endian; offsets count from here and leave no hole
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.tensors.layout import ITEM_BYTES

MAX_HEADER_BYTES = 100_000_000
PREFIX_BYTES = 8
METADATA = "__metadata__"

_ALIGNMENT_BYTES = 8
_MAX_NDIM = 64  # as torch
_MAX_SIZE = 2**63 - 1
_KEYS = {"dtype", "shape", "data_offsets"}

DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
"""Name of a type in a header -> torch's name of it."""

_CODES = {name: code for code, name in DTYPES.items()}
_HINT = "the file is damaged, or no safetensors file: get it again"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file.

    Attributes:
        name: name of the tensor.
        dtype: a key of `reshard.tensors.layout.ITEM_BYTES`.
        shape: shape, [ndim].
        start: first byte, counted from the end of the header.
        num_bytes: its length.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Parsed header of a file.

    Attributes:
        entries: all tensors, in the order of their bytes.
        metadata: free text by key.
        data_start: position in the file of the first tensor's bytes.
    """

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    data_start: int


def parse_length(prefix: bytes, file_bytes: int, path: str) -> int:
    """Parse the length of the header from the first 8 bytes of a file.

    Raises:
        CorruptSourceError: truncated, or longer than the format allows.
    """
    if len(prefix) < PREFIX_BYTES:
        raise CorruptSourceError(
            f"has {file_bytes} bytes, a safetensors file has at least {PREFIX_BYTES}: truncated", path=path, hint=_HINT
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CorruptSourceError(
            f"states a header of {length} bytes, the format allows {MAX_HEADER_BYTES}", path=path, hint=_HINT
        )
    if length > file_bytes - PREFIX_BYTES:
        raise CorruptSourceError(
            f"states a header of {length} bytes and has {file_bytes} bytes in all: truncated", path=path, hint=_HINT
        )
    return length


def parse(text: bytes, file_bytes: int, path: str) -> Header:
    """Parse a header and check that its tensors fill the file exactly.

    Args:
        text: the header without the 8 bytes before it.
        file_bytes: size of the whole file.
        path: for messages.

    Raises:
        CorruptSourceError: lists the tensors that are described wrongly.
        UnsupportedError: lists the tensors whose dtype or form is not supported.
    """
    value = _parse_json(text, path)
    metadata = value.pop(METADATA, None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(item, str) for item in metadata.values()):
        raise CorruptSourceError(f"its {METADATA} is not a map from text to text", path=path, hint=_HINT)
    data_start = PREFIX_BYTES + len(text)
    entries: list[Entry] = []
    problems: list[str] = []
    unknown: list[str] = []
    for name, described in value.items():
        problem = _find_problem(described, file_bytes - data_start)
        if problem is not None:
            problems.append(f"tensor {name!r}: {problem}")
        elif strange := _find_unknown(described):
            unknown.append(f"tensor {name!r} {strange}")
        else:
            start, end = described["data_offsets"]
            dtype = DTYPES[described["dtype"]]
            entries.append(
                Entry(name=name, dtype=dtype, shape=tuple(described["shape"]), start=start, num_bytes=end - start)
            )
    if not problems:
        _raise_unknown(unknown, path)
        entries.sort(key=lambda entry: (entry.start, entry.num_bytes))
        problems += [wrong for entry in entries if (wrong := _find_size_problem(entry))]
        problems += _find_cover_problems(entries, file_bytes - data_start)
    if problems:
        raise CorruptSourceError(
            f"{len(problems)} problems in its header", path=path, problems=problems[:20], hint=_HINT
        )
    return Header(entries=tuple(entries), metadata=metadata, data_start=data_start)


def dump(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Encode the 8 bytes of the length and the header, padded with spaces so that tensors begin at a multiple of 8.

    Raises:
        UnsupportedError: more tensors than fit the header of one file.
    """
    value: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for entry in entries:
        value[entry.name] = _describe(entry.dtype, entry.shape, entry.start, entry.start + entry.num_bytes)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedError(f"a header of {len(text)} bytes: the format allows {MAX_HEADER_BYTES}")
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def max_entry_bytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the most bytes that the description of a tensor can take in a header."""
    value = {name: _describe(dtype, shape, _MAX_SIZE, _MAX_SIZE)}
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def build_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict of the pairs of a JSON object, as an `object_pairs_hook` of `json`.

    Raises:
        ValueError: names the first key that occurs twice.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice")
        found[key] = value
    return found


def _describe(dtype: str, shape: Sequence[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}


def _parse_json(text: bytes, path: str) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise CorruptSourceError(
            f"its header begins with {text[:1]!r}, expected '{{': not a safetensors file", path=path, hint=_HINT
        )

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=build_unique, parse_constant=refuse)
        if b"\\u" in text:  # an escaped half of a surrogate pair is not a character, and could not be written again
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CorruptSourceError(f"its header is no valid JSON: {error}", path=path, hint=_HINT) from error
    assert isinstance(value, dict)  # it begins with `{`
    return value


def _find_problem(described: Any, data_bytes: int) -> str | None:
    """Return what is wrong with the description of a tensor, or None; the dtype is not looked up."""
    if not isinstance(described, dict) or not described.keys() >= _KEYS:
        return f"expected {', '.join(sorted(_KEYS))}, found {str(described)[:80]}"
    shape, offsets = described["shape"], described["data_offsets"]
    if not isinstance(described["dtype"], str):
        return f"dtype {str(described['dtype'])[:80]} is not text"
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in shape):
        return f"shape {str(shape)[:80]} is not a list of sizes"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(at) is int for at in offsets):
        return f"data_offsets {str(offsets)[:80]} are not two positions"
    if not 0 <= offsets[0] <= offsets[1] <= data_bytes:
        return f"data_offsets {offsets} lie outside of the {data_bytes} bytes behind the header: truncated"
    return None


def _find_unknown(described: dict[str, Any]) -> str | None:
    """Return what is not converted of a description without a problem, or None."""
    if more := sorted(described.keys() - _KEYS):
        return f"has unknown fields: {', '.join(more)[:80]}"
    if (num_dims := len(described["shape"])) > _MAX_NDIM:
        return f"has {num_dims} dims, at most {_MAX_NDIM} are known"
    return None if described["dtype"] in DTYPES else f"is of type {described['dtype']}"


def _find_size_problem(entry: Entry) -> str | None:
    expected = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
    if expected == entry.num_bytes:
        return None
    return f"tensor {entry.name!r}: {entry.dtype} {list(entry.shape)} takes {expected} bytes, it has {entry.num_bytes}"


def _find_cover_problems(entries: Sequence[Entry], data_bytes: int) -> list[str]:
    position = 0
    for entry in entries:
        if entry.start != position:
            what = "overlaps its neighbour" if entry.start < position else "leaves a hole before it"
            return [f"tensor {entry.name!r} begins at byte {entry.start}, expected {position}: {what}"]
        position += entry.num_bytes
    if position != data_bytes:
        return [f"its tensors end at byte {position}, {data_bytes} bytes are there"]
    return []


def _raise_unknown(unknown: Sequence[str], path: str) -> None:
    if unknown:
        raise UnsupportedError(
            f"{len(unknown)} tensors are of types or forms that are not converted",
            path=path,
            problems=unknown[:20],
            hint=f"known types are {', '.join(DTYPES)}",
        )
