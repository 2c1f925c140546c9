"""Write and read the manifest: a plan as data, with the files that each rank opens.

The page docs/manifest-format.md is normative. `manifest.json` holds names, `columns.npz` holds numbers.
`reshard.virtual.load` executes the plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reshard.contract import COMMIT_FILE, MANIFEST_VERSIONS
from reshard.errors import CorruptSourceError, PlanError, TopologyError
from reshard.planning.check import check_plan
from reshard.planning.plan import Plan, make_plan
from reshard.storage.files import open_file
from reshard.storage.object_store import location
from reshard.system.limits import DEFAULT_MEMORY_BYTES
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Checksum, Index, LogicalTensor, SourceFile, TargetFile, TargetLayout, TensorKey
from reshard.tensors.shard_table import ShardTable
from reshard.topology import Topology
from reshard.virtual.columns import INT64, UINT8, Column, file_sha256, pack, unpack
from reshard.virtual.file_forms import matrix, pack_files, require_distinct_paths, unpack_content, unpack_files
from reshard.virtual.values import (
    require_below,
    require_count,
    require_dtype,
    require_relative_path,
    require_shape,
    require_text,
)

MANIFEST_FILE, COLUMNS_FILE = "manifest.json", "columns.npz"
_MAX_JSON_BYTES = 1 << 30
_PLACES: Mapping[str, int] = {
    "tensor": 1,
    "replica": 1,
    "offset": 2,
    "size": 2,
    "file": 1,
    "byte_offset": 1,
    "stride": 2,
}
"""Columns of a `ShardTable` with their number of dims, in all versions of the manifest."""

_OF_FAMILIES: Mapping[str, int] = {"start": 1, "stop": 1, "chunk": 1, "item_bytes": 1}
"""Columns of a `ShardTable` that version 1 of the manifest does not have."""

_COLUMNS_1: Mapping[str, tuple[np.dtype[Any], int]] = {
    **{f"{side}_{name}": (INT64, ndim) for side in ("source", "target") for name, ndim in _PLACES.items()},
    "checksum": (INT64, 2),
    "fixed": (INT64, 2),
    "fixed_content": (UINT8, 1),
    "field": (INT64, 2),
    "field_position": (INT64, 2),
    "rank_first": (INT64, 1),
    "rank_file": (INT64, 1),
}
_COLUMNS: Mapping[int, Mapping[str, tuple[np.dtype[Any], int]]] = {
    1: _COLUMNS_1,
    2: {
        **_COLUMNS_1,
        **{f"{side}_{name}": (INT64, ndim) for side in ("source", "target") for name, ndim in _OF_FAMILIES.items()},
        "form": (INT64, 2),
        "gap": (INT64, 2),
    },
}
"""Columns of each version: type of the elements and number of dims."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A conversion that loading executes.

    Attributes:
        plan: of the whole conversion.
        fingerprint: of the plan that was written.
        ranks: positions in `plan.layout.files` of the files that each rank opens, [ranks][files].
        source_commit: CRC-32 of the source's COMMIT.json when the manifest was made, or None if it had none.
    """

    plan: Plan
    fingerprint: str
    ranks: tuple[Int64Array, ...]
    source_commit: int | None


def commit_crc32(folder: Path) -> int | None:
    """Return the CRC-32 of a folder's COMMIT.json, or None if it has none."""
    try:
        with open_file(folder / COMMIT_FILE) as file:
            return zlib.crc32(file.read(file.num_bytes, 0))
    except OSError:
        return None


def encode(manifest: Manifest) -> dict[str, bytes]:
    """Return the content of the manifest's files, by name."""
    plan = manifest.plan
    index, layout = plan.index, plan.layout
    crc32 = manifest.source_commit
    files, columns = pack_files(layout.files)
    packed = pack({**_columns(manifest), **columns})
    value = {
        "version": MANIFEST_VERSIONS[-1],
        "plan": manifest.fingerprint,
        "columns_sha256": hashlib.sha256(packed).hexdigest(),
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
            "files": files,
        },
        "step": index.step,
        "samples": index.samples,
    }
    content = json.dumps(value, separators=(",", ":"), sort_keys=True) + "\n"
    return {MANIFEST_FILE: content.encode(), COLUMNS_FILE: packed}


def _columns(manifest: Manifest) -> dict[str, Column]:
    plan = manifest.plan
    rows = np.concatenate([np.empty(0, dtype=np.int64), *plan.source_rows])
    sides = (("source", plan.index.shards, rows), ("target", plan.layout.shards, slice(None)))
    sums = [
        (at, item.start, item.num_bytes, item.crc32)
        for at, file in enumerate(plan.index.files)
        for item in file.checksums
    ]
    return {
        **{
            f"{side}_{name}": getattr(table, name)[chosen]
            for side, table, chosen in sides
            for name in (*_PLACES, *_OF_FAMILIES)
        },
        "checksum": matrix(sums, 4),
        "rank_first": np.cumsum([0, *(len(files) for files in manifest.ranks)], dtype=np.int64),
        "rank_file": np.concatenate([np.empty(0, dtype=np.int64), *manifest.ranks]),
    }


def decode(folder: Path, *, memory_bytes: int = DEFAULT_MEMORY_BYTES, num_threads: int = 1) -> Manifest:
    """Read the manifest in `folder` and prove its plan exact.

    Raises:
        CorruptSourceError: not a manifest of a version that this program reads, or not a consistent one.
    """
    path = folder / MANIFEST_FILE
    try:
        with open_file(path) as file:
            if file.num_bytes > _MAX_JSON_BYTES:
                raise ValueError(f"has {file.num_bytes} bytes: at most {_MAX_JSON_BYTES} are read")
            value = json.loads(file.read(file.num_bytes, 0))
        version = value.get("version") if type(value) is dict else None
        if type(version) is not int or version not in MANIFEST_VERSIONS:
            raise ValueError(f"version {version!r:.40}: this program reads {', '.join(map(str, MANIFEST_VERSIONS))}")
        columns = unpack(folder / COLUMNS_FILE, _COLUMNS[version])
        if version > 1 and (actual := file_sha256(folder / COLUMNS_FILE)) != value["columns_sha256"]:
            raise ValueError(f"{COLUMNS_FILE} has SHA-256 {actual}, expected {value['columns_sha256']!r:.80}")
        return _decode(value, columns, memory_bytes, num_threads)
    except (OSError, KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CorruptSourceError(
            f"is not a manifest: {type(error).__name__}: {error!s:.300}", path=str(path)
        ) from error
    except (PlanError, TopologyError) as error:
        raise CorruptSourceError(f"is not a consistent manifest: {error}", path=str(path)) from error


def _decode(value: Mapping[str, Any], columns: Mapping[str, Column], memory_bytes: int, num_threads: int) -> Manifest:
    """Build the manifest from its two files; raise one of the errors that `decode` expects if they do not fit."""
    source, target = value["source"], value["target"]
    tensors = tuple(
        LogicalTensor(
            key=TensorKey(require_text(state), require_text(name)), shape=require_shape(size), dtype=require_dtype(kind)
        )
        for state, name, size, kind in source["tensors"]
    )
    origins = tuple(require_below(origin, len(tensors)) for *_, origin in target["tensors"])
    index = Index(
        root=location(require_text(source["path"])),
        format=require_text(source["format"]),
        topology=Topology.from_dict(source["topology"]),
        step=require_count(value["step"]),
        samples=require_count(value["samples"]),
        tensors=tensors,
        files=_source_files(source["files"], columns["checksum"]),
        shards=_table("source", columns, len(tensors), len(source["files"])),
    )
    layout = TargetLayout(
        format=require_text(target["format"]),
        topology=Topology.from_dict(target["topology"]),
        files=(_files_1 if value["version"] == 1 else unpack_files)(target["files"], columns),
        shards=_table("target", columns, len(origins), len(target["files"])),
        tensors=tuple(
            LogicalTensor(
                key=TensorKey(require_text(state), require_text(name)),
                shape=tensors[origin].shape,
                dtype=require_dtype(kind),
            )
            for state, name, kind, origin in target["tensors"]
        ),
        origins=origins,
    )
    plan = make_plan(index, layout, memory_bytes=memory_bytes, num_threads=num_threads)
    check_plan(plan)
    _check_source_ranges(index)
    fingerprint = require_text(value["plan"])
    if value["version"] == 1 and plan.fingerprint != fingerprint:  # version 2 has checksums, which are faster
        raise ValueError(f"its plan is {plan.fingerprint}, {fingerprint:.40} was written")
    crc32 = source["commit_crc32"]
    return Manifest(
        plan=plan,
        fingerprint=fingerprint,
        ranks=_ranks(columns, layout),
        source_commit=None if crc32 is None else int(require_text(crc32), 16),
    )


def _table(side: str, columns: Mapping[str, Column], num_tensors: int, num_files: int) -> ShardTable:
    names = [name for name in (*_PLACES, *_OF_FAMILIES) if f"{side}_{name}" in columns]
    table = {name: columns[f"{side}_{name}"].astype(np.int64) for name in names}
    if (
        len({len(column) for column in table.values()}) != 1
        or len({table[name].shape for name in ("offset", "size", "stride")}) != 1
    ):
        raise ValueError(f"columns of the {side} differ in length")
    if any(len(column) and int(column.min()) < 0 for column in table.values()):
        raise ValueError(f"a column of the {side} holds a negative number")
    for name, limit in (("tensor", num_tensors), ("file", num_files)):
        if len(table[name]) and int(table[name].max()) >= limit:
            raise ValueError(f"{side}_{name} holds {int(table[name].max())}, there are {limit}")
    return ShardTable(**table)


def _source_files(files: Sequence[Any], checksums: Column) -> tuple[SourceFile, ...]:
    by_file: list[list[Checksum]] = [[] for _ in files]
    for file, start, num_bytes, crc32 in checksums.tolist():
        by_file[require_below(file, len(files))].append(
            Checksum(
                start=require_count(start), num_bytes=require_count(num_bytes), crc32=require_below(crc32, 1 << 32)
            )
        )
    return tuple(
        SourceFile(path=require_relative_path(path), num_bytes=require_count(num_bytes), checksums=tuple(sums))
        for (path, num_bytes), sums in zip(files, by_file, strict=True)
    )


def _files_1(files: Sequence[Any], columns: Mapping[str, Column]) -> tuple[TargetFile, ...]:
    """Read the target files of version 1, which lists the fixed bytes of each file."""
    pieces, fields = unpack_content(len(files), columns)
    target_files = tuple(
        TargetFile(
            path=require_relative_path(path), num_bytes=require_count(num_bytes), fixed=fixed, checksums=fields_of_file
        )
        for (path, num_bytes), fixed, fields_of_file in zip(files, pieces, fields, strict=True)
    )
    require_distinct_paths(target_files)
    return target_files


def _ranks(columns: Mapping[str, Column], layout: TargetLayout) -> tuple[Int64Array, ...]:
    first, files = columns["rank_first"].astype(np.int64), columns["rank_file"].astype(np.int64)
    world = layout.topology.world_size
    good = len(first) == world + 1 and first[0] == 0 and first[-1] == len(files) and bool((np.diff(first) >= 0).all())
    if not good or (len(files) and not 0 <= int(files.min()) <= int(files.max()) < len(layout.files)):
        raise ValueError(f"the files of {world} ranks are not told")
    return tuple(files[first[rank] : first[rank + 1]] for rank in range(world))


def _check_source_ranges(index: Index) -> None:
    """Check that every row lies in its file, and every part of a family in its own file."""
    shards = index.shards
    item = np.array([tensor.item_bytes for tensor in index.tensors], dtype=np.int64)[shards.tensor]
    ranges, gaps = shards.ranges(item)
    extent = (((shards.size[gaps] - 1) * shards.stride[gaps]).sum(axis=1) + 1) * item[gaps]
    full = np.flatnonzero(shards.size[gaps].prod(axis=1) > 0)
    first = np.concatenate([ranges.first, shards.file[gaps][full]])
    last = np.concatenate([ranges.last, shards.file[gaps][full] + 1])
    end = np.concatenate([ranges.stop, (shards.byte_offset[gaps] + extent)[full]])
    sizes = np.array([file.num_bytes for file in index.files], dtype=np.int64)
    if not len(first):
        return
    # Of the files that a range of bytes lies in, the smallest is the first to be too small.
    smallest = np.minimum.reduceat(np.append(sizes, 0), np.stack([first, last], axis=1).reshape(-1))[::2]
    beyond = np.flatnonzero(end > smallest)
    if len(beyond):
        at = int(beyond[0])
        file = min(index.files[first[at] : last[at]], key=lambda item: item.num_bytes)
        raise ValueError(f"source file {file.path}: {file.num_bytes} bytes, but byte {end[at] - 1} is read")
