"""Chunks and items that `.metadata` lists, in columns.

Batches of records are in columns already (`formats.pt.batches`) and are copied; other records are parsed one by one.
Source: torch/distributed/checkpoint/metadata.py and filesystem.py (`_StorageInfo`) of torch 2.13.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np

from reshard.formats.dcp.chunks import Place
from reshard.formats.pt.batches import RecordBatch, TemplateRecords, iterate_records
from reshard.formats.pt.objects import Inert, Size
from reshard.formats.pt.template import IntHole, Template, TextHole
from reshard.tensors.intervals import Int64Array

METADATA_FILE = ".metadata"
MAX_DIMS = 64
"""Of a tensor, as torch has it."""

_MOST = 1 << 62
_FILE_NAME = re.compile(r"^[^/\\\0]+$")


class EntryError(Exception):
    """The records of one entry in `.metadata` are invalid."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTable:
    """Chunks or items of entries, one row each.

    Attributes:
        entry: number of the entry, or -1 for none, [rows].
        order: place in `.metadata`, which orders the chunks of an entry, [rows].
        ndim: number of dims of the offset; -1 if there is no offset, [rows].
        offset: first element, [rows, max_ndim].
        rest: size of a chunk [rows, max_ndim]; or file number, first byte and length of an item [rows, 3].
    """

    entry: Int64Array
    order: Int64Array
    ndim: Int64Array
    offset: Int64Array
    rest: Int64Array


class RowCollector:
    """Collector of the rows of a `RowTable`."""

    def __init__(self) -> None:
        self.single: list[tuple[int, tuple[int, ...] | None, tuple[int, ...]]] = []
        self.single_order: list[int] = []
        self.parts: dict[int, list[tuple[int, TemplateRecords, int]]] = {}
        self.templates: dict[int, Template] = {}
        self.count = 0

    def add(self, entry: int, offset: tuple[int, ...] | None, rest: tuple[int, ...]) -> None:
        """Add one row."""
        self.single.append((entry, offset, rest))
        self.single_order.append(self.count)
        self.count += 1

    def add_part(self, entry: int, part: TemplateRecords) -> None:
        """Add the records of a batch that fit one template; call `skip` after the last such part of the batch."""
        self.templates[id(part.template)] = part.template
        self.parts.setdefault(id(part.template), []).append((entry, part, self.count))

    def skip(self, count: int) -> None:
        """Advance the place in `.metadata` behind a batch of `count` records."""
        self.count += count


def parse_fields(value: Any, name: str) -> Mapping[str, Any]:
    """Return the attributes of an object of torch's class `name`, in any module: it differs between releases.

    Raises:
        EntryError: the value is not such an object.
    """
    if not isinstance(value, Inert) or value.target.name != name or not isinstance(value.state, Mapping):
        raise EntryError(f"expected a {name}, found {value!r:.100}")
    return value.state


def parse_box(chunk: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parse the offset and size of a chunk of a tensor.

    Raises:
        EntryError: the value is not a chunk, or has another number of dims than the tensor.
    """
    fields = parse_fields(chunk, "ChunkStorageMetadata")
    offset, size = fields.get("offsets"), fields.get("sizes")
    if not _is_size(offset) or not _is_size(size) or not len(offset) == len(size) == len(shape):
        raise EntryError(f"a chunk at {offset!r:.80} of {size!r:.80}, the tensor is {list(shape)}")
    return tuple(offset), tuple(size)


def _is_size(value: Any) -> TypeGuard[tuple[int, ...]]:
    """Return True for a `torch.Size`, and for a tuple of numbers, as Megatron-FSDP leaves it in its chunks."""
    if isinstance(value, Size):
        return True
    return type(value) is tuple and all(type(part) is int and part >= 0 for part in value)


def parse_item(index: Any) -> tuple[str, tuple[int, ...] | None]:
    """Parse the key and offset of an item.

    Raises:
        EntryError: the value is not the index of an item.
    """
    name = parse_fields(index, "MetadataIndex")
    key, offset = name.get("fqn"), name.get("offset")
    if not isinstance(key, str) or not (offset is None or isinstance(offset, Size)):
        raise EntryError(f"an index {key!r:.80} at {offset!r:.80}")
    if offset is not None and (len(offset) > MAX_DIMS or any(part >= _MOST for part in offset)):
        raise EntryError(f"{key}: an item at {list(offset[:8])!s:.200}")
    return key, None if offset is None else tuple(offset)


def parse_place(key: str, fields: Mapping[str, Any]) -> Place:
    """Parse the place of an item.

    Raises:
        EntryError: the file name is not that of a file in the folder, or the byte range is impossible.
    """
    name, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    if not isinstance(name, str) or not is_file_name(name):
        raise EntryError(f"{key}: file name {name!r:.80} is not that of a file in the folder")
    if type(offset) is not int or type(length) is not int or not 0 <= offset < _MOST or not 1 <= length < _MOST:
        raise EntryError(f"{key}: bytes {offset!r:.40} + {length!r:.40} of {name}")
    return Place(name, offset, length)


def is_file_name(name: str) -> bool:
    """Return True if `name` can be a file in the folder itself, other than `.metadata`."""
    return _FILE_NAME.match(name) is not None and name not in (".", "..", METADATA_FILE)


def find_chunk_columns(template: Template) -> tuple[list[int], list[int]] | None:
    """Find the integer columns of offset and size; None if records of the template are not chunks."""
    try:
        fields = parse_fields(template.tree[0], "ChunkStorageMetadata")
    except EntryError:
        return None
    offset, size = fields.get("offsets"), fields.get("sizes")
    if not isinstance(offset, Size) or not isinstance(size, Size) or len(offset) != len(size):
        return None
    return list(offset), list(size)


def find_item_columns(template: Template) -> tuple[int, list[int] | None, int, tuple[int, int]] | None:
    """Find the columns of key, offset, file name, and (first byte, length).

    Returns:
        The columns; None if records of the template are not items.
    """
    try:
        index, info = parse_fields(template.tree[0], "MetadataIndex"), parse_fields(template.tree[1], "_StorageInfo")
    except EntryError:
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
    rows: RowCollector,
    batch: RecordBatch,
    entry: int,
    fits: Callable[[Template], bool],
    add_single: Callable[[tuple[Any, ...]], None],
) -> None:
    """Add the records of a batch.

    Args:
        rows: collector to add to.
        batch: the records.
        entry: number of their entry, or -1.
        fits: True for a template whose columns can be added as they are.
        add_single: called with the objects of each other record.
    """
    for part in batch.parts:
        if fits(part.template):
            rows.add_part(entry, part)
        else:
            for _, objects in iterate_records(batch, part):
                add_single(objects)
    rows.skip(batch.count)


def build_table(
    rows: RowCollector,
    width: int,
    columns: Callable[[Template, Int64Array, Int64Array], tuple[Int64Array | None, Int64Array | None, Int64Array]],
    max_ndim: int,
) -> RowTable:
    """Build the table of all rows that were added to a collector, and release its batches.

    Args:
        rows: the collector.
        width: number of columns of `rest`; columns that a row lacks are 1.
        columns: returns (entry or None, offset or None, rest) of records of a template, from its integers and strings.
        max_ndim: largest number of dims of an offset.
    """
    count = len(rows.single) + sum(len(part.number) for parts in rows.parts.values() for _, part, _ in parts)
    table = RowTable(
        entry=np.zeros(count, dtype=np.int64),
        order=np.zeros(count, dtype=np.int64),
        ndim=np.full(count, -1, dtype=np.int64),
        offset=np.zeros((count, max_ndim), dtype=np.int64),
        rest=np.ones((count, width), dtype=np.int64),
    )
    for row, (entry, offset, rest) in enumerate(rows.single):
        table.entry[row] = entry
        table.rest[row, : len(rest)] = rest
        if offset is not None:
            table.ndim[row] = len(offset)
            table.offset[row, : len(offset)] = offset
    table.order[: len(rows.single)] = rows.single_order
    first = len(rows.single)
    for key, parts in rows.parts.items():
        counts = np.array([len(part.number) for _, part, _ in parts], dtype=np.int64)
        last = first + int(counts.sum())
        at = slice(first, last)
        ints = np.concatenate([part.ints for _, part, _ in parts])
        texts = np.concatenate([part.texts for _, part, _ in parts])
        own_entry, own_offset, own_rest = columns(rows.templates[key], ints, texts)
        entries = np.repeat(np.array([entry for entry, _, _ in parts], dtype=np.int64), counts)
        table.entry[at] = entries if own_entry is None else own_entry
        base = np.repeat(np.array([base for _, _, base in parts], dtype=np.int64), counts)
        table.order[at] = base + np.concatenate([part.number for _, part, _ in parts])
        if own_offset is not None:
            table.ndim[at] = own_offset.shape[1]
            table.offset[at, : own_offset.shape[1]] = own_offset
        table.rest[at, : own_rest.shape[1]] = own_rest
        parts.clear()
        first = last
    return table
