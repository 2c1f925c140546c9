"""Lay out a `.pt` file that unmodified torch.load reads: all bytes but the tensor payloads, and where those go."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from reshard.formats.pt.archive import Payload, Skeleton, Slot, lay_out
from reshard.formats.pt.emit import emit
from reshard.formats.pt.objects import Storage
from reshard.planning.constant_bytes import Stamped, Stencil


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PtLayout:
    """A `.pt` file to be written.

    Attributes:
        num_bytes: size of the file.
        fixed: known bytes and their offsets.
        slots: where each storage without data goes.
    """

    num_bytes: int
    fixed: Stamped
    slots: dict[Storage, Slot]

    def named(self, stem: str) -> PtLayout:
        """The same file under another name of the same length."""
        return dataclasses.replace(self, fixed=Stamped(self.fixed.stencil, stem.encode()))


@dataclasses.dataclass(frozen=True, slots=True)
class Pickled:
    """An object tree as a file will hold it, whatever the file is called.

    Attributes:
        data: the pickle.
        storages: of its tensors, in the order of their keys `0`, `1`, ...
    """

    data: bytes
    storages: list[Storage]


def pickled(value: Any) -> Pickled:
    """Pickle an object tree of `objects`, whose tensors' storages have their data in memory or get it later.

    Raises:
        UnsupportedError: `value` holds something that a `.pt` file cannot.
    """
    return Pickled(*emit(value))


def lay_out_pt(stem: str, value: Any) -> PtLayout:
    """Lay out a file.

    Args:
        stem: the file's name without suffix; torch names the archive's common prefix after it.
        value: an object tree, or what `pickled` made of it.

    Raises:
        UnsupportedError: as `pickled`.
    """
    found = value if isinstance(value, Pickled) else pickled(value)
    # torch hashes the names and CRCs here; nothing reads it back but log lines, so the pickle's hash serves as well.
    identity = str(int.from_bytes(hashlib.sha256(found.data).digest()[:16], "big")).rjust(40, "0").encode()
    known = [Payload(name=name, num_bytes=len(data), data=data) for name, data in _records(found.data)]
    unknown = [
        Payload(name=f"data/{key}", num_bytes=storage.num_bytes, data=storage.data)
        for key, storage in enumerate(found.storages)
    ]
    last = [
        Payload(name="version", num_bytes=2, data=b"3\n"),
        Payload(name=".data/serialization_id", num_bytes=len(identity), data=identity),
    ]
    skeleton: Skeleton = lay_out(stem, [*known, *unknown, *last])
    slots = skeleton.slots[len(known) : len(known) + len(unknown)]
    prefix = stem.encode()
    gaps = np.array(skeleton.prefixes, dtype=np.int64)
    return PtLayout(
        num_bytes=skeleton.num_bytes,
        fixed=Stamped(Stencil(pieces=skeleton.fixed, gaps=gaps, num_bytes=len(prefix)), prefix),
        slots={storage: slot for storage, slot in zip(found.storages, slots, strict=True) if storage.data is None},
    )


def _records(pickled: bytes) -> list[tuple[str, bytes]]:
    return [("data.pkl", pickled), (".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")]
