"""Explain where every box of a tensor lies in the source and where it goes in the target. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.errors import UsageError
from reshard.planning.plan import Plan
from reshard.system.limits import format_bytes
from reshard.tensors.geometry import Box, strides_of
from reshard.tensors.intervals import Int64Array
from reshard.tensors.layout import Index, LogicalTensor
from reshard.tensors.shard_table import ShardRow, ShardTable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A box of a tensor and the place of its bytes.

    Attributes:
        label: short name in texts and pictures: `S3` in the source, `T3` in the target.
        box: part of the tensor.
        file: path inside the checkpoint.
        start: first byte in the file.
        stop: byte behind the last.
        strides: distance in elements between neighbours in the file, `[ndim]`.
        copy: which complete copy of the tensor it belongs to, from 0.
        used: True if the conversion reads the box; it reads one of several copies in a source.
        origins: label of each source box that it is made of, and the region that both share; empty in a source.
    """

    label: str
    box: Box
    file: str
    start: int
    stop: int
    strides: tuple[int, ...]
    copy: int
    used: bool = True
    origins: tuple[tuple[str, Box], ...] = ()

    @property
    def is_contiguous(self) -> bool:
        """True if the box's bytes follow each other in the file without gaps, in the order of its elements."""
        dense = strides_of(self.box.size)
        return all(
            size == 1 or stride == wanted
            for size, stride, wanted in zip(self.box.size, self.strides, dense, strict=True)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetTensor:
    """A tensor of the target and its places."""

    tensor: LogicalTensor
    places: tuple[Place, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One tensor of the source, and the target tensors that are made of it.

    Attributes:
        tensor: of the source.
        places: of all its copies in the source.
        targets: tensors that are made of it; empty if there is no target, or if the target does not hold the tensor.
        source: the source's format and topology in words.
        target: the target's format and topology in words; empty without a target.
        averaged: number of tensor-parallel ranks over whose copies the tensor is averaged; 0 if it is not.
    """

    tensor: LogicalTensor
    places: tuple[Place, ...]
    targets: tuple[TargetTensor, ...]
    source: str
    target: str
    averaged: int = 0


def find(index: Index, pattern: str) -> list[int]:
    """Return the positions of the tensors that a pattern names.

    Args:
        index: the checkpoint.
        pattern: a name (stands for all its states), `state/name`, or a glob of either.

    Raises:
        UsageError: nothing matches; names the closest tensors.
    """
    name = index.aliases.get(pattern, pattern)
    exact = [at for at, tensor in enumerate(index.tensors) if name in (tensor.key.name, str(tensor.key))]
    matching = exact or [
        at
        for at, tensor in enumerate(index.tensors)
        if fnmatch.fnmatchcase(tensor.key.name, pattern) or fnmatch.fnmatchcase(str(tensor.key), pattern)
    ]
    if matching:
        return matching
    known = dict.fromkeys(tensor.key.name for tensor in index.tensors) | dict.fromkeys(
        str(tensor.key) for tensor in index.tensors
    )
    close = difflib.get_close_matches(pattern, known, n=5, cutoff=0.5) or list(known)[:5]
    raise UsageError(
        f"no tensor is called {pattern!r}",
        path=str(index.root),
        problems=[f"there is for instance {candidate}" for candidate in close],
        hint="reshard inspect --tensors lists them all; a glob such as 'fp32/*' names several",
    )


def explain(index: Index, numbers: Sequence[int], plan: Plan | None = None) -> tuple[Explanation, ...]:
    """Explain the tensors at these positions of `index.tensors`; with a plan, also where they go."""
    rows = index.shards.by_tensor(len(index.tensors))
    return tuple(_explain(index, number, rows[number], plan) for number in numbers)


def _explain(index: Index, number: int, rows: Int64Array, plan: Plan | None) -> Explanation:
    tensor = index.tensors[number]
    used = None if plan is None else _used_rows(plan, number)
    places: list[Place] = []
    for row_number in _ordered(index.shards, rows).tolist():
        needed = used is None or row_number in used
        for row in index.shards.iterate_boxes(np.array([row_number]), len(tensor.shape)):
            label = f"S{len(places) + 1}"
            places.append(_place(label, row, tensor, index.files[row.file].path, used=needed))
    return Explanation(
        tensor=tensor,
        places=tuple(places),
        targets=() if plan is None else _targets(plan, number, places),
        source=f"{index.format} {index.topology}",
        target="" if plan is None else f"{plan.layout.format} {plan.layout.topology}",
        averaged=index.averaged.get(tensor.key, 0),
    )


def _used_rows(plan: Plan, number: int) -> set[int]:
    """Return the rows that a tensor is made of: those of one copy, or of all copies that are averaged."""
    average = plan.averages.get(number)
    copies = () if average is None else average.ranks
    return set(np.concatenate([plan.source_rows[number], *copies]).tolist())


def _targets(plan: Plan, number: int, sources: Sequence[Place]) -> tuple[TargetTensor, ...]:
    shards, rows = plan.layout.shards, plan.target_rows[number]
    targets, count = [], 0
    for target in np.unique(shards.tensor[rows]).tolist():
        tensor = plan.target_tensors[target]
        places = []
        for row in shards.iterate_boxes(_ordered(shards, rows[shards.tensor[rows] == target]), len(tensor.shape)):
            common = ((place.label, place.box.intersect(row.box)) for place in sources if place.used)
            origins = tuple((label, box) for label, box in common if box is not None)
            count += 1
            place = _place(f"T{count}", row, tensor, plan.layout.files[row.file].path)
            places.append(dataclasses.replace(place, origins=origins))
        targets.append(TargetTensor(tensor=tensor, places=tuple(places)))
    return tuple(targets)


def _ordered(shards: ShardTable, rows: Int64Array) -> Int64Array:
    """Sort rows by copy, then by the tensor's elements."""
    ordered: Int64Array = rows[np.lexsort((shards.start[rows], *shards.offset[rows].T[::-1], shards.replica[rows]))]
    return ordered


def _place(label: str, row: ShardRow, tensor: LogicalTensor, file: str, *, used: bool = True) -> Place:
    last = sum((size - 1) * stride for size, stride in zip(row.box.size, row.strides, strict=True))
    return Place(
        label=label,
        box=row.box,
        file=file,
        start=row.byte_offset,
        stop=row.byte_offset + (last + 1) * tensor.item_bytes,
        strides=row.strides,
        copy=row.replica,
        used=used,
    )


def to_dict(explanation: Explanation) -> dict[str, Any]:
    """Return the JSON value."""
    value: dict[str, Any] = {
        **_tensor_dict(explanation.tensor),
        "layout": explanation.source,
        "boxes": [_place_dict(place) for place in explanation.places],
        "averaged": explanation.averaged,
    }
    if explanation.target:
        value["target"] = {
            "layout": explanation.target,
            "tensors": [
                {**_tensor_dict(item.tensor), "boxes": [_place_dict(place) for place in item.places]}
                for item in explanation.targets
            ],
        }
    return value


def _tensor_dict(tensor: LogicalTensor) -> dict[str, Any]:
    return {
        "state": tensor.key.state,
        "name": tensor.key.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "bytes": tensor.num_bytes,
    }


def _place_dict(place: Place) -> dict[str, Any]:
    value: dict[str, Any] = {
        "label": place.label,
        "offset": list(place.box.offset),
        "size": list(place.box.size),
        "file": place.file,
        "start": place.start,
        "stop": place.stop,
        "strides": list(place.strides),
        "copy": place.copy,
    }
    if place.label.startswith("S"):
        value["used"] = place.used
    else:
        value["from"] = [
            {"label": label, "offset": list(box.offset), "size": list(box.size)} for label, box in place.origins
        ]
    return value


def to_lines(explanation: Explanation, aliases: Mapping[str, str]) -> list[str]:
    """Return lines for people; `aliases` are `Index.aliases`."""
    names = [alias for alias, name in aliases.items() if name == explanation.tensor.key.name]
    also = f"; also called {', '.join(names)}" if names else ""
    ranks = explanation.averaged
    mean = f"; where copies differ, the mean of those of {ranks} tensor-parallel ranks" if ranks else ""
    lines = [f"{_describe(explanation.tensor)}{also}{mean}", f"  source: {explanation.source}"]
    lines += _table(explanation.places)
    for item in explanation.targets:
        lines.append(f"  target: {explanation.target}")
        if item.tensor.key != explanation.tensor.key or item.tensor.dtype != explanation.tensor.dtype:
            cast = item.tensor.dtype != explanation.tensor.dtype
            rounded = f", {explanation.tensor.dtype} rounded to nearest even" if cast else ""
            lines.append(f"    as {_describe(item.tensor)}{rounded}")
        lines += _table(item.places)
    if explanation.target and not explanation.targets:
        lines.append(f"  target: {explanation.target}: does not hold this tensor")
    return lines


def _describe(tensor: LogicalTensor) -> str:
    return f"{tensor.key}  {list(tensor.shape)} {tensor.dtype}, {format_bytes(tensor.num_bytes)}"


def _table(places: Sequence[Place]) -> list[str]:
    """Return one line for each place, in columns."""
    copies = len({place.copy for place in places}) > 1
    cells = []
    for place in places:
        how = "" if place.is_contiguous else f"strides {list(place.strides)}"
        copy = f"copy {place.copy}{'' if place.used else ' (not read)'}" if copies else ""
        origins = ", ".join(label if box == place.box else f"{label} {box}" for label, box in place.origins)
        cells.append(
            (
                place.label,
                str(place.box),
                place.file,
                f"bytes {place.start}:{place.stop}",
                how,
                copy,
                f"<- {origins}" if origins else "",
            )
        )
    widths = [max(len(row[column]) for row in cells) for column in range(7)] if cells else []
    used = [column for column, width in enumerate(widths) if width]
    return ["    " + "  ".join(row[column].ljust(widths[column]) for column in used).rstrip() for row in cells]
