"""Logical tensors, and the descriptions of source and target checkpoints that hold them.

A format's reader describes a source as an `Index`. A format's writer describes a target as a `TargetLayout`. Both refer
to the same logical tensors, so a plan is made by intersecting boxes. `reshard.tensors.shard_table` has the tables of
boxes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, overload

import numpy as np

from reshard.errors import UnsupportedError
from reshard.file_identity import FileIdentity
from reshard.tensors.intervals import Int64Array
from reshard.tensors.shard_table import Ranges, ShardTable
from reshard.topology import Topology

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element, by torch's name of the type. The resharder moves bits and never converts them."""

PADDING = "#padding"
"""Suffix of the logical tensor that holds a vocabulary's padding rows.

The rows of the vocabulary itself are a separate tensor, so that they compare equal whatever padding a topology needs.
"""


class TensorKey(NamedTuple):
    """Identity of a logical tensor.

    Attributes:
        state: which value of the parameter it is: `weight` (model type), `fp32` (master weight), `exp_avg`, ...
        name: full parameter name.
    """

    state: str
    name: str

    def __str__(self) -> str:
        return f"{self.state}/{self.name}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogicalTensor:
    """A full tensor, independent of how files shard it.

    Attributes:
        key: state and name.
        shape: shape of the full tensor, [ndim].
        dtype: a key of `ITEM_BYTES`.
    """

    key: TensorKey
    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Return the bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_elements(self) -> int:
        """Return the number of elements of the full tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) if self.shape else 1

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the full tensor."""
        return self.num_elements * self.item_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    """CRC-32 (zlib) of a byte range, as the source file's container states it."""

    start: int
    num_bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Checksums(Sequence[Checksum]):
    """Checksums in columns, for files with thousands of them; a `Checksum` object is made on access.

    Attributes:
        start: first byte of each range, [ranges].
        num_bytes: length of each range, [ranges].
        crc32: CRC-32 of each range, [ranges].
    """

    start: Int64Array
    num_bytes: Int64Array
    crc32: Int64Array

    def __len__(self) -> int:
        return len(self.start)

    @overload
    def __getitem__(self, at: int) -> Checksum: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Checksum, ...]: ...
    def __getitem__(self, at: int | slice) -> Checksum | tuple[Checksum, ...]:
        if isinstance(at, slice):
            return tuple(self[number] for number in range(*at.indices(len(self))))
        return Checksum(start=int(self.start[at]), num_bytes=int(self.num_bytes[at]), crc32=int(self.crc32[at]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of the source.

    Attributes:
        path: path relative to the index' root.
        num_bytes: size when the file was indexed.
        checksums: checksums of byte ranges that the container states, in ascending order.
        crc32: CRC-32 of the whole file, where the commit states it.
        identity: identity of the file when it was indexed; None if it was not recorded.
    """

    path: str
    num_bytes: int
    checksums: Sequence[Checksum] = ()
    crc32: int | None = dataclasses.field(default=None, compare=False)
    identity: FileIdentity | None = dataclasses.field(default=None, compare=False)


Plain = int | float | str | bool | None | Sequence["Plain"] | Mapping[str, "Plain"]
"""Type of settings and scalars after the framework's own classes were replaced by plain Python values."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """One parameter group of the optimizer, in terms that all formats share.

    Attributes:
        names: names of the parameters, in the optimizer's order.
        options: settings of the group (`lr`, `betas`, `weight_decay`, ...), without its `params`.
        scalars: states that are one number for the whole group (`step`).
    """

    names: tuple[str, ...]
    options: Mapping[str, Plain] = dataclasses.field(default_factory=dict)
    scalars: Mapping[str, int | float] = dataclasses.field(default_factory=dict)


class FormatExtra(Protocol):
    """Facts of a checkpoint besides its tensors, for writers of its own or of a related format.

    Each format has a frozen class of its own. A writer narrows `Index.extra` with `isinstance` to a class that it
    knows. All other modules hand the object on or drop it.
    """

    format_name: ClassVar[str]
    """`Index.format` of the checkpoint."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFolder:
    """The folder of a training stack, which holds a checkpoint in subfolders and files of its own beside them.

    Attributes:
        stack: name of the stack, see `reshard.folders.stacks`.
        parts: names of the subfolders: one with a whole checkpoint, or several that hold one together.
        side_files: the files beside them, without the one that names the subfolder and without a commit marker.
    """

    stack: str
    parts: tuple[str, ...]
    side_files: tuple[SourceFile, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Description of a source checkpoint, made from its metadata alone.

    Attributes:
        root: the checkpoint's folder.
        format: name of the format.
        topology: topology that the files are laid out for.
        step: optimizer steps done.
        samples: global samples consumed.
        tensors: all logical tensors; tables refer to them by position.
        files: all files with shards.
        shards: all boxes and the bytes that hold them.
        groups: the optimizer's parameter groups, for writers of other formats; empty if there is no optimizer.
        aliases: second name of a tied weight -> name of the tensor that holds it.
        extra: facts besides the tensors that only formats read; None if there are none or if they no longer hold.
        notes: sentences for the user about data that writers of other formats cannot write.
        left_out: states that the source holds and that the user did not select.
        metadata: files without shards that were read to make the index; empty if they were not recorded.
        unread: error that says why `tensors` lists only the weights of a source that holds more; it is raised when
            other states are requested.
        has_rounded_weights: the framework guarantees that each `weight` is the `fp32` of its name, rounded to its type.
        rank_local: tensors that each data-parallel rank computes for itself (buffers); their copies may differ.
        free_copies: tensors of which the framework uses only the first copies -> number of those, which must be equal;
            further ones may differ.
        averaged: tensors that are the mean of their copies -> number n of tensor-parallel ranks. Copies 0 to n - 1 are
            those of the ranks; a further copy k equals copy k % n. Tensors that were not selected are listed, too.
        renamed: key of each tensor -> its key in the files, see `own_key`; empty if no name map was applied.
        folder: the training folder that `root` is, whose subfolder holds the checkpoint; None for a plain checkpoint.
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
    extra: FormatExtra | None = None
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    metadata: tuple[SourceFile, ...] = dataclasses.field(default=(), compare=False)
    unread: UnsupportedError | None = None
    has_rounded_weights: bool = False
    rank_local: frozenset[TensorKey] = frozenset()
    free_copies: Mapping[TensorKey, int] = dataclasses.field(default_factory=dict)
    averaged: Mapping[TensorKey, int] = dataclasses.field(default_factory=dict)
    renamed: Mapping[TensorKey, TensorKey | None] = dataclasses.field(default_factory=dict)
    folder: TrainingFolder | None = None

    def __post_init__(self) -> None:
        """Refuse facts that another format's reader collected: a writer would take them for its own.

        Raises:
            ValueError: `extra` is of another format than the index.
        """
        if self.extra is not None and self.extra.format_name != self.format:
            raise ValueError(f"Index.extra is of the format {self.extra.format_name!r}, expected {self.format!r}")

    def own_key(self, key: TensorKey) -> TensorKey | None:
        """Return the key that the files use for a tensor; None if a name map split or merged the tensor."""
        return self.renamed.get(key) if self.renamed else key

    def number_of(self, key: TensorKey) -> int | None:
        """Return the position of a tensor in `tensors`, or None if it is not there."""
        return next((at for at, tensor in enumerate(self.tensors) if tensor.key == key), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumField:
    """A field of the target's container that states the CRC-32 (zlib, little-endian, 4 bytes) of a byte range.

    Attributes:
        start: first byte of the range.
        num_bytes: length of the range.
        positions: positions in the file where the checksum is written, inside `TargetFile.fixed`.
    """

    start: int
    num_bytes: int
    positions: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """A file to be written. Bytes that are neither fixed nor covered by a shard are zero, see `TargetLayout.zeros`.

    Attributes:
        path: path relative to the target's folder.
        num_bytes: exact size.
        fixed: (position, bytes) of everything that is not tensor data.
        checksums: fields that the executor fills in.
    """

    path: str
    num_bytes: int
    fixed: Sequence[tuple[int, bytes]] = ()
    checksums: tuple[ChecksumField, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetLayout:
    """Description of a target checkpoint: everything except the tensors' bytes.

    Attributes:
        format: name of the format.
        topology: topology that the files are laid out for.
        files: all files.
        shards: all boxes and the bytes that will hold them; refers to the target's tensors and to `files`.
        tensors: the target's tensors, as its own reader will find them; empty if they are the source's, one for one.
        origins: source tensor (position in `Index.tensors`) of each of `tensors`, [tensors]. Shapes are equal. A float
            type may differ and is converted, rounding to nearest even. One source tensor may have several targets.
        model: `Commit.model` of the target.
        notes: sentences for the user about data of the source that the target does not hold.
        aliases: second name of a tied weight -> its first name, where only the target knows it.
        zeros: ranges that stay zero on purpose (padding, alignment). Together with the fixed bytes and the shards they
            account for every byte of every file once. None if they are not known, as in a virtual commit.
        folder: name of the subfolder with the checkpoint, where the target is a training folder; empty otherwise.
        parts: names of the subfolders that hold the checkpoint together, where the target is a training folder of that
            kind; empty otherwise.
    """

    format: str
    topology: Topology
    files: tuple[TargetFile, ...]
    shards: ShardTable
    tensors: tuple[LogicalTensor, ...] = ()
    origins: tuple[int, ...] = ()
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    zeros: Ranges | None = None
    folder: str = ""
    parts: tuple[str, ...] = ()
