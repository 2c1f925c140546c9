"""What lies where: logical tensors, and the boxes of them that files hold.

A format's reader describes a source as an `Index`; its writer describes a target as a `TargetLayout`. Both speak of the
same logical tensors, so planning is intersecting boxes. Tables are columns of numpy arrays: a row costs tens of bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.geometry import Box, strides_of
from reshard.topology import Topology

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch's name of the type. The resharder moves bits and never converts them."""

Int64Array = npt.NDArray[np.int64]


class TensorKey(NamedTuple):
    """Identity of a logical tensor.

    Attributes:
        state: what it is of the parameter: `weight` (model type), `fp32` (master weight), `exp_avg`, ...
        name: full parameter name.
    """

    state: str
    name: str

    def __str__(self) -> str:
        return f"{self.state}/{self.name}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogicalTensor:
    """A full tensor, however it is cut.

    Attributes:
        key: state and name.
        shape: of the full tensor, [ndim].
        dtype: a key of `ITEM_BYTES`.
    """

    key: TensorKey
    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_elements(self) -> int:
        """Elements of the full tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) if self.shape else 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor."""
        return self.num_elements * self.item_bytes


class ShardRow(NamedTuple):
    """One row of a `ShardTable`, for those who look at single rows."""

    tensor: int
    replica: int
    box: Box
    file: int
    byte_offset: int
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable:
    """Boxes of logical tensors and the bytes of files that hold them.

    Rows of one tensor with the same `replica` number cover the tensor exactly; every replica holds all of it.

    Attributes:
        tensor: index into the list of logical tensors, [rows].
        replica: which complete copy the row belongs to, from 0, [rows].
        offset: first element of the box, [rows, max_ndim]; dims that a tensor lacks are 0.
        size: elements of the box, [rows, max_ndim]; dims that a tensor lacks are 1.
        file: index into the list of files, [rows].
        byte_offset: position of the box's first element in the file, [rows].
        stride: distance in elements between neighbours in the file, [rows, max_ndim].
    """

    tensor: Int64Array
    replica: Int64Array
    offset: Int64Array
    size: Int64Array
    file: Int64Array
    byte_offset: Int64Array
    stride: Int64Array

    def __len__(self) -> int:
        return len(self.tensor)

    def row(self, index: int, ndim: int) -> ShardRow:
        """One row, with the tensor's own number of dims."""
        return ShardRow(
            tensor=int(self.tensor[index]),
            replica=int(self.replica[index]),
            box=Box(tuple(self.offset[index, :ndim].tolist()), tuple(self.size[index, :ndim].tolist())),
            file=int(self.file[index]),
            byte_offset=int(self.byte_offset[index]),
            strides=tuple(self.stride[index, :ndim].tolist()),
        )

    def by_tensor(self, num_tensors: int) -> list[Int64Array]:
        """Row numbers of every tensor, in the table's order."""
        order = np.argsort(self.tensor, kind="stable")
        bounds = np.searchsorted(self.tensor[order], np.arange(num_tensors + 1))
        return [order[bounds[i] : bounds[i + 1]] for i in range(num_tensors)]


class ShardTableBuilder:
    """Collects rows and turns them into columns."""

    def __init__(self) -> None:
        self._rows: list[ShardRow] = []

    def add(
        self,
        *,
        tensor: int,
        box: Box,
        file: int,
        byte_offset: int,
        strides: Sequence[int] | None = None,
        replica: int = 0,
    ) -> None:
        """Add a row; without `strides` the box lies in the file as a row-major array of its own."""
        found = tuple(strides) if strides is not None else strides_of(box.size)
        self._rows.append(ShardRow(tensor, replica, box, file, byte_offset, found))

    def build(self) -> ShardTable:
        """The table."""
        ndim = max([1, *(row.box.ndim for row in self._rows)])

        def column(values: list[int]) -> Int64Array:
            return np.array(values, dtype=np.int64)

        def matrix(values: list[tuple[int, ...]], missing: int) -> Int64Array:
            padded = [(*value, *(missing,) * (ndim - len(value))) for value in values]
            return np.array(padded, dtype=np.int64).reshape(len(values), ndim)

        return ShardTable(
            tensor=column([row.tensor for row in self._rows]),
            replica=column([row.replica for row in self._rows]),
            offset=matrix([row.box.offset for row in self._rows], 0),
            size=matrix([row.box.size for row in self._rows], 1),
            file=column([row.file for row in self._rows]),
            byte_offset=column([row.byte_offset for row in self._rows]),
            stride=matrix([row.strides for row in self._rows], 0),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    """CRC-32 (zlib) of a byte range that the source's own container states."""

    start: int
    num_bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of the source.

    Attributes:
        path: relative to the index' root.
        num_bytes: size when it was indexed.
        checksums: what the container states about byte ranges, in ascending order.
    """

    path: str
    num_bytes: int
    checksums: tuple[Checksum, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """A source checkpoint, known from its metadata alone.

    Attributes:
        root: the checkpoint's folder.
        format: name of the format.
        topology: what the files are laid out for.
        step: optimizer steps done.
        samples: global samples consumed.
        tensors: all logical tensors; tables refer to them by position.
        files: all files with shards.
        shards: where everything is.
        extra: what the format's own writer needs besides (scalars, parameter groups, order of names); opaque here.
    """

    root: Path
    format: str
    topology: Topology
    step: int
    samples: int
    tensors: tuple[LogicalTensor, ...]
    files: tuple[SourceFile, ...]
    shards: ShardTable
    extra: Any = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumField:
    """A CRC-32 (zlib, little-endian, 4 bytes) of a byte range that the target's container wants to state.

    Attributes:
        start: first byte of the range.
        num_bytes: its length.
        positions: where the checksum has to be written; inside `fixed` parts of the file.
    """

    start: int
    num_bytes: int
    positions: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """A file to be written. Bytes that are neither fixed nor covered by a shard are zero.

    Attributes:
        path: relative to the target's folder.
        num_bytes: exact size.
        fixed: (position, bytes) of everything that is not tensor data.
        checksums: filled in by the executor.
    """

    path: str
    num_bytes: int
    fixed: tuple[tuple[int, bytes], ...] = ()
    checksums: tuple[ChecksumField, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetLayout:
    """A target checkpoint, complete but for the tensors' bytes.

    Attributes:
        format: name of the format.
        topology: what the files are laid out for.
        files: all files.
        shards: where every box of the source's logical tensors goes; refers to `Index.tensors` and to `files`.
        model: `Commit.model` of the target.
    """

    format: str
    topology: Topology
    files: tuple[TargetFile, ...]
    shards: ShardTable
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
