"""Pack the target files of a manifest: thousands of files share a form, and differ in their paths and the names inside.

A form is the size of a file, its bytes that are not tensor data (with gaps for a text), and the checksums that its
container states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.planning.constant_bytes import BytesTemplate, FilledTemplate, FixedRange
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import ChecksumField, TargetFile
from reshard.virtual import values
from reshard.virtual.columns import Column

Entry = list[Any]
"""`[path, form]`, or `[path, form, text]` where the form has gaps."""

_WIDTHS = {"form": 2, "fixed": 3, "gap": 2, "field": 3, "field_position": 2}
"""Number of values in each row of the columns, without `fixed_content`."""


def pack_files(files: Sequence[TargetFile]) -> tuple[list[Entry], dict[str, Column]]:
    """Return an entry for each file, and the columns of their forms."""
    keys = [_key(file) for file in files]
    shared = {key for key, number in Counter(keys).items() if number > 1}
    forms: dict[Hashable, int] = {}
    entries: list[Entry] = []
    columns: dict[str, list[tuple[int, ...]]] = {name: [] for name in _WIDTHS}
    contents: list[bytes] = []
    for file, key in zip(files, keys, strict=True):
        stamped = file.fixed if isinstance(file.fixed, FilledTemplate) and key in shared else None
        if key not in forms:
            form = forms[key] = len(forms)
            pieces = file.fixed if stamped is None else stamped.template.ranges
            columns["form"].append((file.num_bytes, 0 if stamped is None else len(stamped.text)))
            columns["fixed"] += [(form, position, len(content)) for position, content in pieces]
            contents += [content for _, content in pieces]
            columns["gap"] += (
                [] if stamped is None else [(form, position) for position in stamped.template.gaps.tolist()]
            )
            for field in file.checksums:
                columns["field_position"] += [(len(columns["field"]), position) for position in field.positions]
                columns["field"].append((form, field.start, field.num_bytes))
        entries.append([file.path, forms[key], *([] if stamped is None else [stamped.text.decode()])])
    return entries, {
        **{name: matrix(rows, _WIDTHS[name]) for name, rows in columns.items()},
        "fixed_content": np.frombuffer(b"".join(contents), dtype=np.uint8),
    }


def _key(file: TargetFile) -> Hashable:
    """Return a key that is equal for files of one form; a file that is not stamped has a form of its own."""
    if not isinstance(file.fixed, FilledTemplate):
        return id(file)
    return id(file.fixed.template), file.num_bytes, file.checksums


def matrix(rows: Sequence[tuple[int, ...]], width: int) -> Int64Array:
    """Return rows as a column of two dims, also if there are none."""
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def unpack_files(entries: Sequence[Any], columns: Mapping[str, Column]) -> tuple[TargetFile, ...]:
    """Read target files from what `pack_files` wrote; raises `ValueError` or `TypeError` for anything else."""
    forms = [(values.require_count(size), values.require_count(length)) for size, length in columns["form"].tolist()]
    pieces, fields = unpack_content(len(forms), columns)
    gaps: list[list[int]] = [[] for _ in forms]
    for form, position in columns["gap"].tolist():
        gaps[values.require_below(form, len(forms))].append(values.require_count(position))
    stencils = [_stencil(*form) for form in zip(pieces, gaps, (length for _, length in forms), strict=True)]
    files: list[TargetFile] = []
    for path, number, *rest in entries:
        form = values.require_below(number, len(forms))
        size, length = forms[form]
        name = "".join(map(values.require_text, rest)).encode()
        if len(name) != length:
            raise ValueError(f"{path!r:.200}: a text of {len(name)} bytes, its form has gaps of {length}")
        fixed = FilledTemplate(stencils[form], name) if length else pieces[form]
        files.append(
            TargetFile(path=values.require_relative_path(path), num_bytes=size, fixed=fixed, checksums=fields[form])
        )
    require_distinct_paths(files)
    return tuple(files)


def require_distinct_paths(files: Sequence[TargetFile]) -> None:
    """Raise `ValueError` if a path is listed twice."""
    if len({file.path for file in files}) != len(files):
        raise ValueError("a target file is listed twice")


def _stencil(pieces: tuple[FixedRange, ...], gaps: Sequence[int], num_bytes: int) -> BytesTemplate:
    positions = np.array(gaps, dtype=np.int64)
    starts, ends = np.array(sorted((at, at + len(content)) for at, content in pieces), dtype=np.int64).reshape(-1, 2).T
    piece = np.searchsorted(starts, positions, side="right") - 1
    if (piece < 0).any() or (positions + num_bytes > ends[piece]).any():
        raise ValueError(f"a gap of {num_bytes} bytes is not inside of fixed bytes")
    return BytesTemplate(ranges=pieces, gaps=positions, num_bytes=num_bytes)


def unpack_content(
    num_forms: int, columns: Mapping[str, Column]
) -> tuple[list[tuple[FixedRange, ...]], list[tuple[ChecksumField, ...]]]:
    """Return the fixed bytes and the checksum fields of each form; in version 1 of the manifest, of each file."""
    positions: list[list[int]] = [[] for _ in range(len(columns["field"]))]
    for field, position in columns["field_position"].tolist():
        positions[values.require_below(field, len(positions))].append(values.require_count(position))
    fields: list[list[ChecksumField]] = [[] for _ in range(num_forms)]
    for (form, start, num_bytes), own in zip(columns["field"].tolist(), positions, strict=True):
        fields[values.require_below(form, num_forms)].append(
            ChecksumField(
                start=values.require_count(start), num_bytes=values.require_count(num_bytes), positions=tuple(own)
            )
        )
    pieces: list[list[FixedRange]] = [[] for _ in range(num_forms)]
    content, done = columns["fixed_content"].tobytes(), 0
    for form, position, length in columns["fixed"].tolist():
        pieces[values.require_below(form, num_forms)].append(
            (values.require_count(position), content[done : done + values.require_count(length)])
        )
        done += length
    if done != len(content):
        raise ValueError(f"fixed_content has {len(content)} bytes, expected {done}")
    return [tuple(own) for own in pieces], [tuple(own) for own in fields]
