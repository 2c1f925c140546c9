"""Lay out a `.pt` file that unmodified torch.load reads: all bytes but the tensor payloads, and where those go."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from reshard.formats.pt.archive import Payload, Skeleton, Slot, lay_out
from reshard.formats.pt.emit import emit
from reshard.formats.pt.objects import Storage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PtLayout:
    """A `.pt` file to be written.

    Attributes:
        num_bytes: size of the file.
        fixed: known bytes and their offsets.
        slots: where each storage without data goes.
    """

    num_bytes: int
    fixed: tuple[tuple[int, bytes], ...]
    slots: dict[Storage, Slot]


def lay_out_pt(stem: str, value: Any) -> PtLayout:
    """Lay out a file for `value`, whose tensors' storages have their data in memory or get it later.

    Args:
        stem: the file's name without suffix; torch names the archive's common prefix after it.
        value: object tree of `objects`.

    Raises:
        UnsupportedError: `value` holds something that a `.pt` file cannot.
    """
    pickled, storages = emit(value)
    # torch hashes the names and CRCs here; nothing reads it back but log lines, so the pickle's hash serves as well.
    identity = str(int.from_bytes(hashlib.sha256(pickled).digest()[:16], "big")).rjust(40, "0").encode()
    known = [Payload(name=name, num_bytes=len(data), data=data) for name, data in _records(pickled)]
    unknown = [
        Payload(name=f"data/{key}", num_bytes=storage.num_bytes, data=storage.data)
        for key, storage in enumerate(storages)
    ]
    last = [
        Payload(name="version", num_bytes=2, data=b"3\n"),
        Payload(name=".data/serialization_id", num_bytes=len(identity), data=identity),
    ]
    skeleton: Skeleton = lay_out(stem, [*known, *unknown, *last])
    slots = skeleton.slots[len(known) : len(known) + len(unknown)]
    return PtLayout(
        num_bytes=skeleton.num_bytes,
        fixed=skeleton.fixed,
        slots={storage: slot for storage, slot in zip(storages, slots, strict=True) if storage.data is None},
    )


def _records(pickled: bytes) -> list[tuple[str, bytes]]:
    return [("data.pkl", pickled), (".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")]
