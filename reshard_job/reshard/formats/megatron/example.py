"""Facts that the target takes from an example folder: keys, how tensors are cut, objects, the common part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from reshard.formats.dcp.metadata import Entry
from reshard.formats.megatron.names import NAME
from reshard.tensors.layout import TensorKey


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorLocation:
    """Location of a logical tensor in the folder.

    Attributes:
        key: key of its entry.
        layer: its position in an entry of stacked layers; None if the entry is the tensor.
        shape: shape of the tensor, [ndim].
        dtype: torch's name of its dtype.
        counts: number of chunks along each dim, [ndim].
    """

    key: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: str
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MegatronExtra:
    """Facts besides the tensors that the writer needs.

    Attributes:
        locations: location of every logical tensor.
        order: keys of all entries, in the folder's order.
        objects: entries that are not tensors, without the common part and the optimizer's own buffers.
        common: entry of the common part if it is an object; None if it is a file of its own.
        buckets: the optimizer's states are laid out for its own buffers, and are not among the tensors.
        settings: fields of the optimizer that are to be in the common part, because its states are found in buckets and
            will be written as `fully_reshardable`; by number for each optimizer of a chain; None if the common part has
            them.
    """

    format_name: ClassVar[str] = NAME
    locations: Mapping[TensorKey, TensorLocation]
    order: tuple[str, ...]
    objects: tuple[Entry, ...]
    common: Entry | None
    buckets: bool
    settings: Mapping[Any, Any] | None = None
