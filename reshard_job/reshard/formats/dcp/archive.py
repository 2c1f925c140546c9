"""The zip archive of one item inside a file, read by byte ranges; `pt.archive` reads archives that are whole files.

An item is what `torch.save` makes of one tensor or object. A small item is read at once; of a large one only the head
(with the pickle) and the tail (with the directory) are read. Source: caffe2/serialize/inline_container.cc of torch
2.13 and the zip specification (APPNOTE 6.3.10, sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16 and 4.5.3).
"""

from __future__ import annotations

import struct

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.pt.archive import CENTRAL, END, END64, LIMIT32, LOCAL, LOCATOR64, MAX_DIRECTORY_BYTES, Entry
from reshard.storage.files import File

END_BYTES = 2 << 10
"""Number of bytes read at each end of an item: enough for the pickle, headers and directory of a usual one."""


class Window:
    """Bytes `start:start + length` of a file; the constructor reads both ends and keeps them."""

    def __init__(self, file: File, start: int, length: int, where: str) -> None:
        self.file = file
        self.start = start
        self.length = length
        self.where = where
        self.num_bytes_read = 0
        if length <= 2 * END_BYTES:
            self._head = self._tail = self._pread(0, length)
        else:
            self._head, self._tail = self._pread(0, END_BYTES), self._pread(length - END_BYTES, END_BYTES)

    def _pread(self, offset: int, length: int) -> bytes:
        data = self.file.read(length, self.start + offset)
        self.num_bytes_read += len(data)
        if len(data) != length:
            raise CorruptSourceError(
                f"{self.where}: the file ends inside of it: truncated", hint="use an earlier checkpoint"
            )
        return data

    def get(self, offset: int, length: int) -> bytes:
        """Return bytes `offset:offset + length` of the window.

        Raises:
            CorruptSourceError: the range lies outside of the window, or the file is shorter.
        """
        if offset < 0 or length < 0 or offset + length > self.length:
            raise CorruptSourceError(f"{self.where}: byte {offset + length} of {self.length} is asked for")
        if offset + length <= len(self._head):
            return self._head[offset : offset + length]
        first = self.length - len(self._tail)
        if offset >= first:
            return self._tail[offset - first : offset - first + length]
        return self._pread(offset, length)


def read_directory(window: Window) -> dict[str, Entry]:
    """Read the entries of the archive by name; offsets count from the start of the file.

    Raises:
        UnsupportedError: an entry is compressed or encrypted.
        CorruptSourceError: the directory is truncated, or payloads overlap or lie outside of the item.
    """
    try:
        return _check_apart(_read_entries(window), window.where)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise CorruptSourceError(f"{window.where}: its zip directory is damaged ({error})") from error


def _read_entries(window: Window) -> dict[str, Entry]:
    if window.get(0, min(4, window.length)) != b"PK\x03\x04":
        raise CorruptSourceError(f"{window.where}: is not a zip archive, as torch.save makes them")
    count, num_bytes, position = _read_end(window)
    if num_bytes > MAX_DIRECTORY_BYTES or position + num_bytes > window.length:
        raise CorruptSourceError(f"{window.where}: its zip directory claims {num_bytes} bytes at {position}")
    data, at = window.get(position, num_bytes), 0
    fields_of: dict[str, tuple[int, int, int]] = {}
    prefix = ""
    for _ in range(count):
        name, fields, at = _parse_central(data, at, window.where)
        prefix = prefix or name.partition("/")[0] + "/"
        if not name.startswith(prefix) or name[len(prefix) :] in fields_of:
            raise CorruptSourceError(f"{window.where}: entry {name!r} is there twice, or outside of {prefix!r}")
        fields_of[name[len(prefix) :]] = fields
    # torch.serialization.set_crc32_options(False) (torch 2.6 and later) writes 0 for every checksum.
    has_checksums = any(crc for crc, _, _ in fields_of.values())
    return {
        name: Entry(
            name=name,
            offset=_locate_payload(window, header, size),
            num_bytes=size,
            crc32=crc if has_checksums else None,
            header=window.start + header,
        )
        for name, (crc, size, header) in fields_of.items()
    }


def find_central_records(window: Window) -> dict[str, int]:
    """Find the position in the item of each entry's directory record, by name.

    The directory must have passed `read_directory`.
    """
    count, num_bytes, position = _read_end(window)
    data, at = window.get(position, num_bytes), 0
    positions: dict[str, int] = {}
    for _ in range(count):
        name, _, end = _parse_central(data, at, window.where)
        positions[name.partition("/")[2]] = position + at
        at = end
    return positions


def _read_end(window: Window) -> tuple[int, int, int]:
    """Read the end record, behind which torch writes no comment.

    Returns:
        Number of entries, and length and position of the directory in bytes.
    """
    end = window.length - END.size
    fields = END.unpack(window.get(end, END.size)) if end >= 0 else (b"",)
    if fields[0] != b"PK\x05\x06":
        raise CorruptSourceError(f"{window.where}: does not end with a zip directory: truncated or damaged")
    count, num_bytes, position = fields[4], fields[5], fields[6]
    if end >= LOCATOR64.size:
        locator = LOCATOR64.unpack(window.get(end - LOCATOR64.size, LOCATOR64.size))
        if locator[0] == b"PK\x06\x07":
            wide = END64.unpack(window.get(locator[2], END64.size))
            if wide[0] != b"PK\x06\x06":
                raise CorruptSourceError(f"{window.where}: its zip directory has no ZIP64 end record")
            return wide[7], wide[8], wide[9]
    return count, num_bytes, position


def _parse_central(data: bytes, at: int, where: str) -> tuple[str, tuple[int, int, int], int]:
    """Parse the directory's record at byte `at`.

    Returns:
        Name of the entry; (CRC-32, size, position of the local header); byte behind the record.
    """
    record = CENTRAL.unpack_from(data, at)
    if record[0] != b"PK\x01\x02":
        raise CorruptSourceError(f"{where}: its zip directory is damaged at byte {at}")
    flags, method, crc, packed, size = record[3], record[4], record[7], record[8], record[9]
    name_end = at + CENTRAL.size + record[10]
    end = name_end + record[11] + record[12]
    if end > len(data):
        raise CorruptSourceError(f"{where}: its zip directory is cut off")
    name = data[at + CENTRAL.size : name_end].decode()
    if method != 0 or flags & 1:
        raise UnsupportedError(f"{where}: entry {name!r} is compressed or encrypted, torch.save does neither")
    wide = _parse_zip64(data[name_end : name_end + record[11]])
    header = record[16]
    if size == LIMIT32:
        size, wide = wide[0], wide[1:]
    if packed == LIMIT32:
        packed, wide = wide[0], wide[1:]
    if header == LIMIT32:
        header = wide[0]
    if packed != size:
        raise CorruptSourceError(f"{where}: entry {name!r} has the sizes {packed} and {size}")
    return name, (crc, size, header), end


def _parse_zip64(extra: bytes) -> tuple[int, ...]:
    """Return the numbers of the ZIP64 field, followed by three zeros in place of absent ones."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            return (*struct.unpack_from(f"<{length // 8}Q", extra, at + 4), 0, 0, 0)
        at += 4 + length
    return (0, 0, 0)


def _locate_payload(window: Window, header: int, size: int) -> int:
    """Locate the payload in the file, behind the *local* header: only its extra field includes the padding."""
    fields = LOCAL.unpack(window.get(header, LOCAL.size))
    offset: int = header + LOCAL.size + fields[9] + fields[10]
    if fields[0] != b"PK\x03\x04" or offset + size > window.length:
        raise CorruptSourceError(f"{window.where}: no entry of {size} bytes at byte {header}")
    return window.start + offset


def _check_apart(entries: dict[str, Entry], where: str) -> dict[str, Entry]:
    end, before = 0, ""
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset < end:
            raise CorruptSourceError(f"{where}: entries {before!r} and {entry.name!r} overlap")
        end, before = entry.offset + entry.num_bytes, entry.name
    return entries
