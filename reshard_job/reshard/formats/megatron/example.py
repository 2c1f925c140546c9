"""What a Megatron-Core folder says of the folder to be written: keys, how tensors are cut, objects, the common part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from reshard.formats.dcp.metadata import Entry
from reshard.tensors.layout import TensorKey


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a logical tensor is.

    Attributes:
        key: of its entry.
        layer: its place in an entry of stacked layers; None where the entry is the tensor.
        shape: of the tensor, [ndim].
        dtype: of its elements, torch's name.
        counts: pieces along each dim, [ndim].
    """

    key: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: str
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MegatronExtra:
    """What the writer needs of a folder besides its tensors.

    Attributes:
        homes: of every logical tensor.
        order: keys of all entries, in the folder's order.
        objects: entries that are not tensors, but for the common part and for the optimizer's own buffers.
        common: entry of the common part where it is an object; None where it is a file of its own.
        buckets: the optimizer's states are laid out for its own buffers.
    """

    homes: Mapping[TensorKey, Home]
    order: tuple[str, ...]
    objects: tuple[Entry, ...]
    common: Entry | None
    buckets: bool
