"""Patterns of items: torch writes many items for equal chunks, and only the first of these has to be parsed.

Two items of one length, dtype and shape differ in the elements, in the CRC-32 of the elements, and in
`.data/serialization_id` (a hash of the item's checksums). All other bytes of their archives are the same. An item that
has these bytes therefore has the layout of the item that was parsed. Source: caffe2/serialize/inline_container.cc of
torch 2.13 (`writeSerializationId`, `writeEndOfFile`).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping

from reshard.formats.dcp.archive import END_BYTES, Window, find_central_records
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
        fixed: (position in the item, bytes) of everything that was read and cannot differ.
        payload: position of the elements' storage in the item.
        num_bytes: length of the storage.
        crc32: position of the storage's checksum in the item.
        first: byte of the storage at which the tensor begins.
        strides: strides of the tensor in elements, [ndim].
    """

    fixed: tuple[tuple[int, bytes], ...]
    payload: int
    num_bytes: int
    crc32: int
    first: int
    strides: tuple[int, ...]

    def matches(self, window: Window) -> bool:
        """Return True if the item has the layout of the item that the pattern was learned from."""
        return all(window.get(position, len(data)) == data for position, data in self.fixed)

    def read_crc32(self, window: Window) -> int:
        """Read the CRC-32 of the storage that the item states."""
        value: int = _UINT4.unpack(window.get(self.crc32, _UINT4.size))[0]
        return value


def learn_pattern(
    window: Window, entries: Mapping[str, Entry], storage: str, first: int, strides: tuple[int, ...]
) -> Pattern | None:
    """Learn the pattern of an item that was parsed.

    Args:
        window: the item.
        entries: entries of its archive, as `read_directory` returned them.
        storage: name of the entry that holds the elements.
        first: byte of that entry at which the tensor begins.
        strides: strides of the tensor.

    Returns:
        The pattern; None if the item is laid out in an unusual way.
    """
    own = entries[storage]
    if own.crc32 is None or own.num_bytes == 0:
        return None
    records = find_central_records(window)
    free: list[tuple[int, int]] = []
    for name in (storage, _SERIALIZATION_ID):
        if name in entries:
            free += _list_variable_ranges(window, entries[name], records[name])
    unread = (min(END_BYTES, window.length), max(min(END_BYTES, window.length), window.length - END_BYTES))
    payload = own.offset - window.start
    if window.length > 2 * END_BYTES:
        if not payload <= unread[0] <= unread[1] <= payload + own.num_bytes:
            return None
        free.append(unread)
    return Pattern(
        fixed=tuple(
            (start, window.get(start, stop - start)) for start, stop in _list_remaining_ranges(free, window.length)
        ),
        payload=payload,
        num_bytes=own.num_bytes,
        crc32=records[storage] + _CENTRAL_CRC,
        first=first,
        strides=strides,
    )


def _list_variable_ranges(window: Window, entry: Entry, record: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of an entry that differ between items: its payload, and each copy of its checksum."""
    start, header = entry.offset - window.start, entry.header - window.start
    end = start + entry.num_bytes
    yield start, end
    yield header + _LOCAL_CRC, header + _LOCAL_CRC + _UINT4.size
    yield record + _CENTRAL_CRC, record + _CENTRAL_CRC + _UINT4.size
    if window.get(header + _LOCAL_FLAGS, 1)[0] & _HAS_DESCRIPTOR:
        at = end + len(_DESCRIPTOR) * (window.get(end, len(_DESCRIPTOR)) == _DESCRIPTOR)
        yield at, at + _UINT4.size


def _list_remaining_ranges(free: list[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of `0:length` that are outside of the ranges in `free`."""
    end = 0
    for start, stop in sorted(free):
        if start > end:
            yield end, start
        end = max(end, stop)
    if end < length:
        yield end, length
