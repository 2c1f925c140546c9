"""Items that are alike but for their elements: of the many that torch writes for equal chunks, one is taken apart.

Two items of one length, type and shape differ in the elements, their CRC-32, and in `.data/serialization_id`, a hash of
the item's checksums; nothing else of their archives. An item whose other bytes are those of one that was taken apart is
like it. Source: caffe2/serialize/inline_container.cc of torch 2.13 (`writeSerializationId`, `writeEndOfFile`).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping

from reshard.formats.dcp.archive import END_BYTES, Window, central_records
from reshard.formats.pt.archive import Entry

_SERIALIZATION_ID = ".data/serialization_id"
_LOCAL_FLAGS, _LOCAL_CRC, _CENTRAL_CRC = 6, 14, 16
_HAS_DESCRIPTOR = 8
_DESCRIPTOR = b"PK\x07\x08"
_UINT4 = struct.Struct("<I")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Bytes that items have in common.

    Attributes:
        fixed: (position in the item, bytes), of all that was read and cannot differ.
        payload: position of the elements' storage in the item.
        num_bytes: of the storage.
        crc32: position of its checksum in the item.
        first: byte of the storage at which the tensor begins.
        strides: in elements, [ndim].
    """

    fixed: tuple[tuple[int, bytes], ...]
    payload: int
    num_bytes: int
    crc32: int
    first: int
    strides: tuple[int, ...]

    def fits(self, window: Window) -> bool:
        """The item is like the one that was taken apart."""
        return all(window.get(position, len(data)) == data for position, data in self.fixed)

    def stated(self, window: Window) -> int:
        """Checksum of the storage."""
        value: int = _UINT4.unpack(window.get(self.crc32, _UINT4.size))[0]
        return value


def learn(
    window: Window, entries: Mapping[str, Entry], storage: str, first: int, strides: tuple[int, ...]
) -> Pattern | None:
    """The pattern of an item; None where it is laid out in an unusual way.

    Args:
        window: the item.
        entries: of its archive, as the window's `read_directory` found them.
        storage: name of the entry that holds the elements.
        first: byte of it at which the tensor begins.
        strides: of the tensor.
    """
    own = entries[storage]
    if own.crc32 is None or own.num_bytes == 0:
        return None
    records = central_records(window)
    free: list[tuple[int, int]] = []
    for name in (storage, _SERIALIZATION_ID):
        if name in entries:
            free += _free(window, entries[name], records[name])
    unread = (min(END_BYTES, window.length), max(min(END_BYTES, window.length), window.length - END_BYTES))
    payload = own.offset - window.start
    if window.length > 2 * END_BYTES:
        if not payload <= unread[0] <= unread[1] <= payload + own.num_bytes:
            return None
        free.append(unread)
    return Pattern(
        fixed=tuple((start, window.get(start, stop - start)) for start, stop in _between(free, window.length)),
        payload=payload,
        num_bytes=own.num_bytes,
        crc32=records[storage] + _CENTRAL_CRC,
        first=first,
        strides=strides,
    )


def _free(window: Window, entry: Entry, record: int) -> Iterator[tuple[int, int]]:
    """Bytes of an entry that differ between items: its payload, and its checksum wherever that stands."""
    start, header = entry.offset - window.start, entry.header - window.start
    end = start + entry.num_bytes
    yield start, end
    yield header + _LOCAL_CRC, header + _LOCAL_CRC + _UINT4.size
    yield record + _CENTRAL_CRC, record + _CENTRAL_CRC + _UINT4.size
    if window.get(header + _LOCAL_FLAGS, 1)[0] & _HAS_DESCRIPTOR:
        at = end + len(_DESCRIPTOR) * (window.get(end, len(_DESCRIPTOR)) == _DESCRIPTOR)
        yield at, at + _UINT4.size


def _between(free: list[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    """What is left of `0:length`."""
    end = 0
    for start, stop in sorted(free):
        if start > end:
            yield end, start
        end = max(end, stop)
    if end < length:
        yield end, length
