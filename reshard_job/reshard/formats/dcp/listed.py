"""Columns of what `.metadata` lists: chunks of tensors, and items with their places.

Whatever part of it is in columns already (`formats.pt.columns`) is taken as it is; the rest is looked at one by one.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py (`_StorageInfo`) of torch 2.13.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from reshard.formats.dcp.chunks import Place
from reshard.formats.pt.columns import Part, Run, records
from reshard.formats.pt.objects import Inert, Size
from reshard.formats.pt.template import IntHole, Template, TextHole
from reshard.tensors.intervals import Int64Array

METADATA_FILE = ".metadata"
MAX_DIMS = 64
"""Of a tensor, as torch has it."""

_MOST = 1 << 62
_FILE_NAME = re.compile(r"^[^/\\\0]+$")


class WrongError(Exception):
    """Something about one entry."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listed:
    """Boxes or items of entries, one row each.

    Attributes:
        entry: number of the entry, or -1 for none, [rows].
        order: by which those of an entry are sorted, [rows].
        ndim: of the offset; -1 where there is none, [rows].
        offset: first element, [rows, max_ndim].
        rest: of a box its size [rows, max_ndim]; of an item file number, first byte and length [rows, 3].
    """

    entry: Int64Array
    order: Int64Array
    ndim: Int64Array
    offset: Int64Array
    rest: Int64Array


class Rows:
    """Collects rows."""

    def __init__(self) -> None:
        self.single: list[tuple[int, tuple[int, ...] | None, tuple[int, ...]]] = []
        self.single_order: list[int] = []
        self.parts: dict[int, list[tuple[int, Part, int]]] = {}
        self.templates: dict[int, Template] = {}
        self.count = 0

    def add(self, entry: int, offset: tuple[int, ...] | None, rest: tuple[int, ...]) -> None:
        """One row."""
        self.single.append((entry, offset, rest))
        self.single_order.append(self.count)
        self.count += 1

    def add_part(self, entry: int, part: Part) -> None:
        """Rows of a part of a run, of which `skip` says when the next one begins."""
        self.templates[id(part.template)] = part.template
        self.parts.setdefault(id(part.template), []).append((entry, part, self.count))

    def skip(self, count: int) -> None:
        """All parts of a run of so many records were added."""
        self.count += count


def fields_of(value: Any, name: str) -> Mapping[str, Any]:
    """State of a recipe for torch's class `name`, wherever torch keeps it: the modules differ between releases."""
    if not isinstance(value, Inert) or value.target.name != name or not isinstance(value.state, Mapping):
        raise WrongError(f"expected a {name}, found {value!r:.100}")
    return value.state


def box_of(chunk: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and size of a chunk of a tensor.

    Raises:
        WrongError: it is none, or has other dims.
    """
    fields = fields_of(chunk, "ChunkStorageMetadata")
    offset, size = fields.get("offsets"), fields.get("sizes")
    if not isinstance(offset, Size) or not isinstance(size, Size) or not len(offset) == len(size) == len(shape):
        raise WrongError(f"a chunk at {offset!r:.80} of {size!r:.80}, the tensor is {list(shape)}")
    return tuple(offset), tuple(size)


def item_of(index: Any) -> tuple[str, tuple[int, ...] | None]:
    """Key and offset of an item.

    Raises:
        WrongError: there is no such thing.
    """
    name = fields_of(index, "MetadataIndex")
    key, offset = name.get("fqn"), name.get("offset")
    if not isinstance(key, str) or not (offset is None or isinstance(offset, Size)):
        raise WrongError(f"an index {key!r:.80} at {offset!r:.80}")
    if offset is not None and (len(offset) > MAX_DIMS or any(part >= _MOST for part in offset)):
        raise WrongError(f"{key}: an item at {list(offset[:8])!s:.200}")
    return key, None if offset is None else tuple(offset)


def place_of(key: str, fields: Mapping[str, Any]) -> Place:
    """Where an item lies.

    Raises:
        WrongError: nowhere in the folder.
    """
    name, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    if not isinstance(name, str) or not is_file_name(name):
        raise WrongError(f"{key}: file name {name!r:.80} is not that of a file in the folder")
    if type(offset) is not int or type(length) is not int or not 0 <= offset < _MOST or not 1 <= length < _MOST:
        raise WrongError(f"{key}: bytes {offset!r:.40} + {length!r:.40} of {name}")
    return Place(name, offset, length)


def is_file_name(name: str) -> bool:
    """A file in the folder itself, other than the metadata."""
    return _FILE_NAME.match(name) is not None and name not in (".", "..", METADATA_FILE)


def chunk_columns(template: Template) -> tuple[list[int], list[int]] | None:
    """Columns of offset and size, where records of the template are chunks."""
    try:
        fields = fields_of(template.tree[0], "ChunkStorageMetadata")
    except WrongError:
        return None
    offset, size = fields.get("offsets"), fields.get("sizes")
    if not isinstance(offset, Size) or not isinstance(size, Size) or len(offset) != len(size):
        return None
    return list(offset), list(size)


def item_columns(template: Template) -> tuple[int, list[int] | None, int, tuple[int, int]] | None:
    """Columns of key, offset, file, and first byte and length, where records of the template are items."""
    try:
        index, info = fields_of(template.tree[0], "MetadataIndex"), fields_of(template.tree[1], "_StorageInfo")
    except WrongError:
        return None
    key, offset = index.get("fqn"), index.get("offset")
    name, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if not isinstance(key, TextHole) or not isinstance(name, TextHole) or info.get("transform_descriptors"):
        return None
    if not isinstance(start, IntHole) or not isinstance(length, IntHole):
        return None
    if not (offset is None or isinstance(offset, Size)):
        return None
    return int(key), None if offset is None else list(offset), int(name), (int(start), int(length))


def add_records(
    rows: Rows, run: Run, entry: int, fits: Callable[[Template], bool], one: Callable[[tuple[Any, ...]], None]
) -> None:
    """Add the records of a run: parts that fit as they are, others one by one."""
    for part in run.parts:
        if fits(part.template):
            rows.add_part(entry, part)
        else:
            for _, found in records(run, part):
                one(found)
    rows.skip(run.count)


def built(
    rows: Rows,
    width: int,
    columns: Callable[[Template, Int64Array, Int64Array], tuple[Int64Array | None, Int64Array | None, Int64Array]],
    max_ndim: int,
) -> Listed:
    """The table.

    Args:
        rows: what was collected.
        width: columns of `rest`; those that a row lacks are 1.
        columns: (entry or None, offset or None, rest) of records of a template, from its integers and strings.
        max_ndim: of all offsets.
    """
    count = len(rows.single) + sum(len(part.lane) for parts in rows.parts.values() for _, part, _ in parts)
    found = Listed(
        entry=np.zeros(count, dtype=np.int64),
        order=np.zeros(count, dtype=np.int64),
        ndim=np.full(count, -1, dtype=np.int64),
        offset=np.zeros((count, max_ndim), dtype=np.int64),
        rest=np.ones((count, width), dtype=np.int64),
    )
    for row, (entry, offset, rest) in enumerate(rows.single):
        found.entry[row] = entry
        found.rest[row, : len(rest)] = rest
        if offset is not None:
            found.ndim[row] = len(offset)
            found.offset[row, : len(offset)] = offset
    found.order[: len(rows.single)] = rows.single_order
    first = len(rows.single)
    for key, parts in rows.parts.items():
        counts = np.array([len(part.lane) for _, part, _ in parts], dtype=np.int64)
        last = first + int(counts.sum())
        at = slice(first, last)
        ints = np.concatenate([part.ints for _, part, _ in parts])
        texts = np.concatenate([part.texts for _, part, _ in parts])
        entry_, offset_, rest_ = columns(rows.templates[key], ints, texts)
        told = np.repeat(np.array([entry for entry, _, _ in parts], dtype=np.int64), counts)
        found.entry[at] = told if entry_ is None else entry_
        base = np.repeat(np.array([base for _, _, base in parts], dtype=np.int64), counts)
        found.order[at] = base + np.concatenate([part.lane for _, part, _ in parts])
        if offset_ is not None:
            found.ndim[at] = offset_.shape[1]
            found.offset[at, : offset_.shape[1]] = offset_
        found.rest[at, : rest_.shape[1]] = rest_
        parts.clear()
        first = last
    return found
