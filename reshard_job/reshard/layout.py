"""What lies where: logical tensors, and the boxes of them that files hold.

A format's reader describes a source as an `Index`; its writer describes a target as a `TargetLayout`. Both speak of the
same logical tensors, so planning is intersecting boxes. Tables are columns of numpy arrays: a row costs tens of bytes.
"""

from __future__ import annotations

import dataclasses
from array import array
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

PADDING = "#padding"
"""Suffix of the logical tensor that holds a vocabulary's padding rows.

The true rows are a tensor of their own, so that they compare equal however much padding a topology needs.
"""

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
    """Collects rows and turns them into columns; tens of bytes a row while it does."""

    def __init__(self) -> None:
        self._scalars = array("q")  # tensor, replica, file, byte_offset and number of dims of every row
        self._dims = array("q")  # offset, size and stride of every dim of every row

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
        found = strides if strides is not None else strides_of(box.size)
        self._scalars.extend((tensor, replica, file, byte_offset, len(box.size)))
        for dim in zip(box.offset, box.size, found, strict=True):
            self._dims.extend(dim)

    def build(self) -> ShardTable:
        """The table."""
        scalars = np.array(self._scalars, dtype=np.int64).reshape(-1, 5)
        dims = np.array(self._dims, dtype=np.int64).reshape(-1, 3)
        ndims = scalars[:, 4]
        shape = (len(scalars), max(1, int(ndims.max(initial=1))))
        row = np.repeat(np.arange(len(scalars)), ndims)
        dim = np.arange(len(dims)) - np.repeat(np.cumsum(ndims) - ndims, ndims)
        matrices = []
        for column, missing in ((0, 0), (1, 1), (2, 0)):
            matrix = np.full(shape, missing, dtype=np.int64)
            matrix[row, dim] = dims[:, column]
            matrices.append(matrix)
        return ShardTable(
            tensor=np.ascontiguousarray(scalars[:, 0]),
            replica=np.ascontiguousarray(scalars[:, 1]),
            offset=matrices[0],
            size=matrices[1],
            file=np.ascontiguousarray(scalars[:, 2]),
            byte_offset=np.ascontiguousarray(scalars[:, 3]),
            stride=matrices[2],
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


Plain = int | float | str | bool | None | Sequence["Plain"] | Mapping[str, "Plain"]
"""What settings and scalars are, once the framework's own classes are left behind."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """One parameter group of the optimizer, in words that every format shares.

    Attributes:
        names: parameters, in the optimizer's order.
        options: settings of the group (`lr`, `betas`, `weight_decay`, ...), without its `params`.
        scalars: states that are one number for the whole group (`step`).
    """

    names: tuple[str, ...]
    options: Mapping[str, Plain] = dataclasses.field(default_factory=dict)
    scalars: Mapping[str, int | float] = dataclasses.field(default_factory=dict)


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
        groups: the optimizer's parameter groups, for writers of other formats; empty where there is no optimizer.
        aliases: second name of a tied weight -> name of the tensor that it is.
        extra: what the format's own writer needs besides; opaque here.
        notes: what of the source no writer of another format can take along, in words for the user.
        left_out: states that the source holds and that were not asked for.
    """

    root: Path
    format: str
    topology: Topology
    step: int
    samples: int
    tensors: tuple[LogicalTensor, ...]
    files: tuple[SourceFile, ...]
    shards: ShardTable
    groups: tuple[ParamGroup, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extra: Any = None
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def number_of(self, key: TensorKey) -> int | None:
        """Position of a tensor in `tensors`, or None."""
        return next((at for at, tensor in enumerate(self.tensors) if tensor.key == key), None)


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
        shards: where every box goes; refers to the target's tensors and to `files`.
        tensors: the target's tensors, as its own reader will find them; empty if they are the source's, one for one.
        origins: source tensor (position in `Index.tensors`) of each of `tensors`, [tensors]. Shapes are equal; a float
            type may differ and is converted, rounding to nearest even. One source tensor may have several targets.
        model: `Commit.model` of the target.
        notes: what of the source the target does not hold, in words for the user.
    """

    format: str
    topology: Topology
    files: tuple[TargetFile, ...]
    shards: ShardTable
    tensors: tuple[LogicalTensor, ...] = ()
    origins: tuple[int, ...] = ()
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
