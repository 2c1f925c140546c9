"""The manifest: a plan as data, with the files that each rank opens. Written and read here, executed elsewhere.

The page docs/manifest-format.md is normative. `manifest.json` holds names, `columns.npz` numbers.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reshard.check import check_plan
from reshard.contract import COMMIT_FILE
from reshard.errors import CorruptSourceError, PlanError, TopologyError
from reshard.files import open_file
from reshard.layout import (
    ITEM_BYTES,
    Checksum,
    ChecksumField,
    Index,
    Int64Array,
    LogicalTensor,
    ShardTable,
    SourceFile,
    TargetFile,
    TargetLayout,
    TensorKey,
)
from reshard.plan import DEFAULT_MEMORY_BYTES, Plan, make_plan
from reshard.remote import location
from reshard.topology import Topology
from reshard.virtual_columns import INT64, UINT8, Column, pack, unpack

VERSION = 1
"""Raised when a reader of the old version would be wrong about the new one."""

MANIFEST_FILE, COLUMNS_FILE = "manifest.json", "columns.npz"
_MAX_JSON_BYTES = 1 << 30
_SHARD_COLUMNS: Mapping[str, int] = {
    "tensor": 1,
    "replica": 1,
    "offset": 2,
    "size": 2,
    "file": 1,
    "byte_offset": 1,
    "stride": 2,
}
"""Columns of a `ShardTable`, and their number of dims."""

_COLUMNS: Mapping[str, tuple[np.dtype[Any], int]] = {
    **{f"{side}_{name}": (INT64, ndim) for side in ("source", "target") for name, ndim in _SHARD_COLUMNS.items()},
    "checksum": (INT64, 2),
    "fixed": (INT64, 2),
    "fixed_content": (UINT8, 1),
    "field": (INT64, 2),
    "field_position": (INT64, 2),
    "rank_first": (INT64, 1),
    "rank_file": (INT64, 1),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A conversion that is done when it is loaded.

    Attributes:
        plan: of the whole conversion.
        ranks: positions in `plan.layout.files` of the files that each rank opens, [ranks][files].
        source_commit: CRC-32 of the source's COMMIT.json when this was made, or None if it had none.
    """

    plan: Plan
    ranks: tuple[Int64Array, ...]
    source_commit: int | None


def commit_crc32(folder: Path) -> int | None:
    """CRC-32 of a folder's COMMIT.json, or None if it has none."""
    try:
        with open_file(folder / COMMIT_FILE) as file:
            return zlib.crc32(file.read(file.num_bytes, 0))
    except OSError:
        return None


def encode(manifest: Manifest) -> dict[str, bytes]:
    """Content of the manifest's files, by name."""
    plan = manifest.plan.in_boxes()
    manifest = dataclasses.replace(manifest, plan=plan)
    index, layout = plan.index, plan.layout
    crc32 = manifest.source_commit
    value = {
        "version": VERSION,
        "plan": plan.fingerprint,
        "source": {
            "path": str(index.root),
            "format": index.format,
            "topology": index.topology.to_dict(),
            "commit_crc32": None if crc32 is None else f"{crc32:08x}",
            "tensors": [[*item.key, list(item.shape), item.dtype] for item in index.tensors],
            "files": [[file.path, file.num_bytes] for file in index.files],
        },
        "target": {
            "format": layout.format,
            "topology": layout.topology.to_dict(),
            "tensors": [
                [*item.key, item.dtype, int(origin)]
                for item, origin in zip(plan.target_tensors, plan.origins, strict=True)
            ],
            "files": [[file.path, file.num_bytes] for file in layout.files],
        },
        "step": index.step,
        "samples": index.samples,
    }
    text = json.dumps(value, separators=(",", ":"), sort_keys=True) + "\n"
    return {MANIFEST_FILE: text.encode(), COLUMNS_FILE: pack(_columns(manifest))}


def _columns(manifest: Manifest) -> dict[str, Column]:
    plan = manifest.plan
    rows = np.concatenate([np.empty(0, dtype=np.int64), *plan.source_rows])
    sides = (("source", plan.index.shards, rows), ("target", plan.layout.shards, slice(None)))
    found: dict[str, Column] = {
        f"{side}_{name}": getattr(table, name)[chosen] for side, table, chosen in sides for name in _SHARD_COLUMNS
    }
    files = list(enumerate(plan.layout.files))
    fields = [(at, field) for at, file in files for field in file.checksums]
    fixed = [(at, position, content) for at, file in files for position, content in file.fixed]
    sums = [
        (at, item.start, item.num_bytes, item.crc32)
        for at, file in enumerate(plan.index.files)
        for item in file.checksums
    ]
    found["checksum"] = _matrix(sums, 4)
    found["fixed"] = _matrix([(at, position, len(content)) for at, position, content in fixed], 3)
    found["fixed_content"] = np.frombuffer(b"".join(content for _, _, content in fixed), dtype=np.uint8)
    found["field"] = _matrix([(at, field.start, field.num_bytes) for at, field in fields], 3)
    found["field_position"] = _matrix(
        [(at, position) for at, (_, field) in enumerate(fields) for position in field.positions], 2
    )
    found["rank_first"] = np.cumsum([0, *(len(files) for files in manifest.ranks)], dtype=np.int64)
    found["rank_file"] = np.concatenate([np.empty(0, dtype=np.int64), *manifest.ranks])
    return found


def _matrix(rows: Sequence[tuple[int, ...]], width: int) -> Int64Array:
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def decode(folder: Path, *, memory_bytes: int = DEFAULT_MEMORY_BYTES, num_threads: int = 1) -> Manifest:
    """Read the manifest in `folder` and prove its plan exact.

    Raises:
        CorruptSourceError: it is not a manifest of a version that this program reads, or not a consistent one.
    """
    path = folder / MANIFEST_FILE
    try:
        with open_file(path) as file:
            if file.num_bytes > _MAX_JSON_BYTES:
                raise ValueError(f"has {file.num_bytes} bytes: at most {_MAX_JSON_BYTES} are read")
            value = json.loads(file.read(file.num_bytes, 0))
        if type(value) is not dict or value.get("version") != VERSION:
            found = value.get("version") if type(value) is dict else None
            raise ValueError(f"version {found!r:.40}: this program reads {VERSION}")
        return _decode(value, unpack(folder / COLUMNS_FILE, _COLUMNS), memory_bytes, num_threads)
    except (OSError, KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CorruptSourceError(
            f"is not a manifest: {type(error).__name__}: {error!s:.300}", path=str(path)
        ) from error
    except (PlanError, TopologyError) as error:
        raise CorruptSourceError(f"is not a consistent manifest: {error}", path=str(path)) from error


def _decode(value: Mapping[str, Any], columns: Mapping[str, Column], memory_bytes: int, num_threads: int) -> Manifest:
    """The manifest from its parts; whatever is wrong with them raises."""
    source, target = value["source"], value["target"]
    tensors = tuple(
        LogicalTensor(key=TensorKey(_text(state), _text(name)), shape=_shape(shape), dtype=_dtype(dtype))
        for state, name, shape, dtype in source["tensors"]
    )
    origins = tuple(_below(origin, len(tensors)) for *_, origin in target["tensors"])
    index = Index(
        root=location(_text(source["path"])),
        format=_text(source["format"]),
        topology=Topology.from_dict(source["topology"]),
        step=_count(value["step"]),
        samples=_count(value["samples"]),
        tensors=tensors,
        files=_source_files(source["files"], columns["checksum"]),
        shards=_table("source", columns, len(tensors), len(source["files"])),
    )
    layout = TargetLayout(
        format=_text(target["format"]),
        topology=Topology.from_dict(target["topology"]),
        files=_target_files(target["files"], columns),
        shards=_table("target", columns, len(origins), len(target["files"])),
        tensors=tuple(
            LogicalTensor(key=TensorKey(_text(state), _text(name)), shape=tensors[origin].shape, dtype=_dtype(dtype))
            for state, name, dtype, origin in target["tensors"]
        ),
        origins=origins,
    )
    plan = make_plan(index, layout, memory_bytes=memory_bytes, num_threads=num_threads)
    _check_source_ranges(index)
    check_plan(plan)
    if plan.fingerprint != value["plan"]:
        raise ValueError(f"its plan is {plan.fingerprint}, {value['plan']!r:.40} was written")
    crc32 = source["commit_crc32"]
    ranks = _ranks(columns, layout)
    return Manifest(plan=plan, ranks=ranks, source_commit=None if crc32 is None else int(_text(crc32), 16))


def _table(side: str, columns: Mapping[str, Column], num_tensors: int, num_files: int) -> ShardTable:
    found = {name: columns[f"{side}_{name}"].astype(np.int64) for name in _SHARD_COLUMNS}
    if (
        len({len(column) for column in found.values()}) != 1
        or len({found[name].shape for name in ("offset", "size", "stride")}) != 1
    ):
        raise ValueError(f"columns of the {side} differ in length")
    if any(len(column) and int(column.min()) < 0 for column in found.values()):
        raise ValueError(f"a column of the {side} holds a negative number")
    for name, limit in (("tensor", num_tensors), ("file", num_files)):
        if len(found[name]) and int(found[name].max()) >= limit:
            raise ValueError(f"{side}_{name} holds {int(found[name].max())}, there are {limit}")
    return ShardTable(**found)


def _source_files(files: Sequence[Any], checksums: Column) -> tuple[SourceFile, ...]:
    by_file: list[list[Checksum]] = [[] for _ in files]
    for file, start, num_bytes, crc32 in checksums.tolist():
        by_file[_below(file, len(files))].append(
            Checksum(start=_count(start), num_bytes=_count(num_bytes), crc32=_below(crc32, 1 << 32))
        )
    return tuple(
        SourceFile(path=_inside(path), num_bytes=_count(num_bytes), checksums=tuple(sums))
        for (path, num_bytes), sums in zip(files, by_file, strict=True)
    )


def _target_files(files: Sequence[Any], columns: Mapping[str, Column]) -> tuple[TargetFile, ...]:
    positions: list[list[int]] = [[] for _ in range(len(columns["field"]))]
    for field, position in columns["field_position"].tolist():
        positions[_below(field, len(positions))].append(_count(position))
    fields: list[list[ChecksumField]] = [[] for _ in files]
    for (file, start, num_bytes), own in zip(columns["field"].tolist(), positions, strict=True):
        fields[_below(file, len(files))].append(
            ChecksumField(start=_count(start), num_bytes=_count(num_bytes), positions=tuple(own))
        )
    fixed: list[list[tuple[int, bytes]]] = [[] for _ in files]
    content, done = columns["fixed_content"].tobytes(), 0
    for file, position, length in columns["fixed"].tolist():
        fixed[_below(file, len(files))].append((_count(position), content[done : done + _count(length)]))
        done += length
    if done != len(content):
        raise ValueError(f"fixed_content has {len(content)} bytes, expected {done}")
    found = tuple(
        TargetFile(path=_inside(path), num_bytes=_count(num_bytes), fixed=tuple(own), checksums=tuple(sums))
        for (path, num_bytes), own, sums in zip(files, fixed, fields, strict=True)
    )
    if len({file.path for file in found}) != len(found):
        raise ValueError("a target file is listed twice")
    return found


def _ranks(columns: Mapping[str, Column], layout: TargetLayout) -> tuple[Int64Array, ...]:
    first, files = columns["rank_first"].astype(np.int64), columns["rank_file"].astype(np.int64)
    world = layout.topology.world_size
    good = len(first) == world + 1 and first[0] == 0 and first[-1] == len(files) and bool((np.diff(first) >= 0).all())
    if not good or (len(files) and not 0 <= int(files.min()) <= int(files.max()) < len(layout.files)):
        raise ValueError(f"the files of {world} ranks are not told")
    return tuple(files[first[rank] : first[rank + 1]] for rank in range(world))


def _check_source_ranges(index: Index) -> None:
    """Every row lies in its file."""
    shards = index.shards
    item = np.array([tensor.item_bytes for tensor in index.tensors], dtype=np.int64)[shards.tensor]
    end = shards.byte_offset + (((shards.size - 1) * shards.stride).sum(axis=1) + 1) * item
    sizes = np.array([file.num_bytes for file in index.files], dtype=np.int64)[shards.file]
    beyond = np.flatnonzero((end > sizes) & (shards.size.prod(axis=1) > 0))
    if len(beyond):
        file = index.files[int(shards.file[beyond[0]])]
        raise ValueError(f"source file {file.path}: {file.num_bytes} bytes, but byte {end[beyond[0]] - 1} is read")


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.60}: expected a string")
    return value


def _count(value: Any) -> int:
    return _below(value, 1 << 62)


def _below(value: Any, limit: int) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r:.60}: expected an integer from 0 and below {limit}")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(_count(size) for size in value)


def _dtype(value: Any) -> str:
    if value not in ITEM_BYTES:
        raise ValueError(f"type {value!r:.40}: expected one of {', '.join(ITEM_BYTES)}")
    return str(value)


def _inside(path: Any) -> str:
    if not _text(path) or path.startswith("/") or "\0" in path or {"", ".", ".."} & set(path.split("/")):
        raise ValueError(f"file name {path!r:.200} leaves the folder")
    return str(path)
