"""Lay out a `.pt` file for unmodified torch.load: all bytes but the tensor payloads, and the positions of these."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from reshard.formats.pt.archive import Payload, Skeleton, Slot, lay_out
from reshard.formats.pt.emit import emit
from reshard.formats.pt.objects import Storage
from reshard.planning.constant_bytes import BytesTemplate, FilledTemplate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PtLayout:
    """A `.pt` file to be written.

    Attributes:
        num_bytes: size of the file.
        fixed: known bytes and their offsets.
        slots: position of each storage without data.
    """

    num_bytes: int
    fixed: FilledTemplate
    slots: dict[Storage, Slot]

    def with_stem(self, stem: str, *, is_own: bool = False) -> PtLayout:
        """Return the layout of the same file under another name of the same length; see `FilledTemplate.is_own`."""
        return dataclasses.replace(self, fixed=FilledTemplate(self.fixed.template, stem.encode(), is_own=is_own))


@dataclasses.dataclass(frozen=True, slots=True)
class PickledObject:
    """An object tree as a pickle, for files of any name.

    Attributes:
        data: the pickle.
        storages: storages of its tensors, in the order of their keys `0`, `1`, ...
    """

    data: bytes
    storages: list[Storage]


def pickle_object(value: Any) -> PickledObject:
    """Pickle an object tree; the data of its storages may be in memory or follow later.

    Raises:
        UnsupportedError: `value` holds an object that a `.pt` file cannot hold.
    """
    return PickledObject(*emit(value))


def lay_out_pt(stem: str, value: Any) -> PtLayout:
    """Lay out a file.

    Args:
        stem: the file's name without suffix; torch names the archive's common prefix after it.
        value: an object tree, or the result of `pickle_object`.

    Raises:
        UnsupportedError: see `pickle_object`.
    """
    pickle = value if isinstance(value, PickledObject) else pickle_object(value)
    # torch writes a hash of the names and CRCs, which it only logs; the hash of the pickle serves as well.
    identity = str(int.from_bytes(hashlib.sha256(pickle.data).digest()[:16], "big")).rjust(40, "0").encode()
    first = [Payload(name=name, num_bytes=len(data), data=data) for name, data in _list_records(pickle.data)]
    payloads = [
        Payload(name=f"data/{key}", num_bytes=storage.num_bytes, data=storage.data)
        for key, storage in enumerate(pickle.storages)
    ]
    last = [
        Payload(name="version", num_bytes=2, data=b"3\n"),
        Payload(name=".data/serialization_id", num_bytes=len(identity), data=identity),
    ]
    skeleton: Skeleton = lay_out(stem, [*first, *payloads, *last])
    slots = skeleton.slots[len(first) : len(first) + len(payloads)]
    prefix = stem.encode()
    gaps = np.array(skeleton.prefixes, dtype=np.int64)
    return PtLayout(
        num_bytes=skeleton.num_bytes,
        fixed=FilledTemplate(BytesTemplate(ranges=skeleton.fixed, gaps=gaps, num_bytes=len(prefix)), prefix),
        slots={storage: slot for storage, slot in zip(pickle.storages, slots, strict=True) if storage.data is None},
    )


def _list_records(pickled: bytes) -> list[tuple[str, bytes]]:
    return [("data.pkl", pickled), (".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")]
