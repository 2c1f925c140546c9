"""Read the zip directory of a `.pt` file, and lay out the zip skeleton of a new one.

Only archives as torch's writer makes them are supported: STORED entries, payloads at multiples of 64 bytes (padding in
the local header's extra field, id `FB`), ZIP64 if a size or an offset needs it. Source:
caffe2/serialize/inline_container.cc of torch 2.13 and the zip specification (APPNOTE 6.3.10, sections 4.3.7, 4.3.12,
4.3.14 to 4.3.16 and 4.5.3).
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import IO, cast

from reshard.errors import CorruptSourceError, StoreError, UnsupportedError, make_read_error
from reshard.storage.files import File, Stream

ALIGNMENT_BYTES = 64
MAX_ENTRIES = 1 << 20
MAX_DIRECTORY_BYTES = 64 << 20

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR64 = struct.Struct("<4sIQI")
_UTF8 = 0x0800
LIMIT32 = 0xFFFFFFFF
"""Value of a field of 32 bits whose number stands in a ZIP64 record."""

_LIMIT16 = 0xFFFF


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of an archive.

    Attributes:
        name: its name without the archive's common prefix.
        offset: byte offset of the payload in the file.
        num_bytes: length of the payload.
        crc32: CRC-32 that the directory states; None if the archive states none.
        header: byte offset of its local header; -1 if not known.
    """

    name: str
    offset: int
    num_bytes: int
    crc32: int | None
    header: int = -1


def read_directory(file: File, path: str) -> dict[str, Entry]:
    """Read the entries of the archive by name, and check that payloads lie inside the file and do not overlap.

    Raises:
        UnsupportedError: the file is not a zip archive (torch.save before 1.6), or has compressed entries.
        CorruptSourceError: the directory is truncated, or payloads overlap or lie outside of the file.
    """
    num_file_bytes = file.num_bytes
    if file.read(4, 0) != b"PK\x03\x04":
        raise _explain_no_archive(file, path, num_file_bytes)
    try:
        with zipfile.ZipFile(cast(IO[bytes], _Limited(file))) as archive:
            infos = archive.infolist()
    except NotImplementedError as error:
        raise UnsupportedError(f"its zip archive needs what this version does not read: {error}", path=path) from error
    except (zipfile.BadZipFile, OSError, ValueError, struct.error, OverflowError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # `zipfile` takes both for a damaged file
        if isinstance(cause, OSError) and isinstance(failure := make_read_error(cause, path), StoreError):
            raise failure from error
        raise CorruptSourceError(
            f"the zip directory at its end cannot be read ({error}): truncated or damaged", path=path
        ) from error
    if not infos:
        raise CorruptSourceError("its zip directory has no entries", path=path)
    if len(infos) > MAX_ENTRIES:
        raise UnsupportedError(f"{len(infos)} entries: at most {MAX_ENTRIES} are read", path=path)
    prefix = infos[0].filename.partition("/")[0] + "/"
    # torch.serialization.set_crc32_options(False) (torch 2.6 and later) writes 0 for every checksum.
    has_checksums = any(info.CRC for info in infos)
    entries: dict[str, Entry] = {}
    next_header = _map_next_headers(infos)
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise UnsupportedError(f"entry {info.filename!r} is compressed: torch.save stores", path=path)
        if info.flag_bits & 1:
            raise UnsupportedError(f"entry {info.filename!r} is encrypted", path=path)
        if not info.filename.startswith(prefix) or info.filename[len(prefix) :] in entries:
            raise CorruptSourceError(f"entry {info.filename!r}: twice, or outside of {prefix!r}", path=path)
        offset = _find_payload(file, info, next_header.get(info.header_offset), path)
        if offset + info.file_size > num_file_bytes:
            raise CorruptSourceError(
                f"entry {info.filename!r} ends at byte {offset + info.file_size} of {num_file_bytes}", path=path
            )
        name = info.filename[len(prefix) :]
        crc32 = info.CRC if has_checksums else None
        entries[name] = Entry(
            name=name, offset=offset, num_bytes=info.file_size, crc32=crc32, header=info.header_offset
        )
    _check_apart(entries, path)
    return entries


class _Limited(Stream):
    """Stream for `zipfile`, which reads the whole directory at once, with the length that the archive states."""

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes; refuse a size larger than any directory."""
        if size > MAX_DIRECTORY_BYTES:
            raise ValueError(f"it claims {size} bytes, at most {MAX_DIRECTORY_BYTES} are read")
        return super().read(size)


def _map_next_headers(infos: list[zipfile.ZipInfo]) -> dict[int, int]:
    """Map the position of each entry's local header to that of the entry behind it."""
    starts = sorted(info.header_offset for info in infos)
    return dict(itertools.pairwise(starts))


def _find_payload(file: File, info: zipfile.ZipInfo, behind: int | None, path: str) -> int:
    """Find the position of a payload behind its *local* header: only that header's extra field includes the padding.

    In a store in which each read is a request, the header is not read: an aligned payload ends where the next entry
    begins, or before a data descriptor, if flag bit 3 is set (12 bytes and an optional signature of 4; sizes of 8 bytes
    each for ZIP64). If that is wrong, the checksum of the payload does not match.
    """
    if file.is_remote and behind is not None:
        for descriptor in (16, 24) if info.flag_bits & 8 else (0,):
            offset = behind - descriptor - info.file_size
            if offset > info.header_offset + LOCAL.size and offset % ALIGNMENT_BYTES == 0:
                return offset
    header = file.read(LOCAL.size, info.header_offset) if info.header_offset >= 0 else b""
    if len(header) < LOCAL.size or header[:4] != b"PK\x03\x04":
        raise CorruptSourceError(f"no local header for {info.filename!r} at byte {info.header_offset}", path=path)
    fields = LOCAL.unpack(header)
    return int(info.header_offset + LOCAL.size + fields[9] + fields[10])


def _check_apart(entries: dict[str, Entry], path: str) -> None:
    end, before = 0, ""
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset < end:
            raise CorruptSourceError(f"entries {before!r} and {entry.name!r} overlap", path=path)
        end, before = entry.offset + entry.num_bytes, entry.name


def _explain_no_archive(file: File, path: str, num_file_bytes: int) -> Exception:
    if num_file_bytes == 0:
        return CorruptSourceError("is empty", path=path)
    head = file.read(2, 0)
    if head[:1] == b"\x80":
        return UnsupportedError(
            "is a torch.save file of the legacy layout (before torch 1.6, or _use_new_zipfile_serialization=False)",
            path=path,
            hint="save again with torch.save(torch.load(path), path)",
        )
    return CorruptSourceError(f"is not a zip archive: it starts with {head!r}", path=path)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One entry to write: its bytes if they are known, else only their number."""

    name: str
    num_bytes: int
    data: bytes | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Position of an entry's payload.

    Attributes:
        offset: byte offset in the file.
        num_bytes: length.
        crc_positions: byte offsets of its CRC-32 (little endian, 4 bytes each); the skeleton holds 0 there if the
            payload is not known.
    """

    offset: int
    num_bytes: int
    crc_positions: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """An archive without the payloads that are not known.

    Attributes:
        num_bytes: size of the file.
        fixed: known bytes and where they go; with the unknown payloads they cover the file exactly.
        slots: one per payload, in the order they were given.
        prefixes: positions of the archive's prefix inside of `fixed`; another of the same length can replace it.
    """

    num_bytes: int
    fixed: tuple[tuple[int, bytes], ...]
    slots: tuple[Slot, ...]
    prefixes: tuple[int, ...]


def lay_out(prefix: str, payloads: Sequence[Payload]) -> Skeleton:
    """Lay out an archive with entries `prefix/name`."""
    fixed: list[tuple[int, bytes]] = []
    directory: list[bytes] = []
    offsets: list[int] = []
    local_positions: list[int] = []
    central_offsets: list[int] = []
    position = num_directory_bytes = 0
    for payload in payloads:
        name = f"{prefix}/{payload.name}".encode()
        crc = zlib.crc32(payload.data) if payload.data is not None else 0
        header = _build_local_header(name, payload.num_bytes, crc, position)
        central = _build_central_header(name, payload.num_bytes, crc, position)
        fixed.append((position, header))
        local_positions.append(position)
        central_offsets.append(num_directory_bytes)
        offsets.append(position + len(header))
        if payload.data is not None:
            fixed.append((position + len(header), payload.data))
        position += len(header) + payload.num_bytes
        directory.append(central)
        num_directory_bytes += len(central)
    tail = b"".join(directory) + _build_end_records(len(payloads), num_directory_bytes, position)
    fixed.append((position, tail))
    slots = tuple(
        Slot(offset=offset, num_bytes=payload.num_bytes, crc_positions=(local + 14, position + central + 16))
        for payload, offset, local, central in zip(payloads, offsets, local_positions, central_offsets, strict=True)
    )
    return Skeleton(
        num_bytes=position + len(tail),
        fixed=_join_adjacent(fixed),
        slots=slots,
        prefixes=(
            *(local + LOCAL.size for local in local_positions),
            *(position + central + CENTRAL.size for central in central_offsets),
        ),
    )


def _build_local_header(name: bytes, num_bytes: int, crc: int, position: int) -> bytes:
    wide = num_bytes >= LIMIT32
    extra = struct.pack("<2H2Q", 1, 16, num_bytes, num_bytes) if wide else b""
    unpadded = position + LOCAL.size + len(name) + len(extra) + 4
    padding = -unpadded % ALIGNMENT_BYTES
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    size = LIMIT32 if wide else num_bytes
    return (
        LOCAL.pack(b"PK\x03\x04", 45 if wide else 0, _UTF8, 0, 0, 0, crc, size, size, len(name), len(extra))
        + name
        + extra
    )


def _build_central_header(name: bytes, num_bytes: int, crc: int, position: int) -> bytes:
    wide_size, wide_offset = num_bytes >= LIMIT32, position >= LIMIT32
    values = [num_bytes] * 2 * wide_size + [position] * wide_offset
    extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    size = LIMIT32 if wide_size else num_bytes
    offset = LIMIT32 if wide_offset else position
    version = 45 if values else 0
    fields = (version, version, _UTF8, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, offset)
    return CENTRAL.pack(b"PK\x01\x02", *fields) + name + extra


def _build_end_records(num_entries: int, num_directory_bytes: int, directory_offset: int) -> bytes:
    """Build the end records: those of ZIP64, which torch always writes, then the classic one."""
    end64 = directory_offset + num_directory_bytes
    count = min(num_entries, _LIMIT16)
    return (
        END64.pack(b"PK\x06\x06", 44, 0, 45, 0, 0, num_entries, num_entries, num_directory_bytes, directory_offset)
        + LOCATOR64.pack(b"PK\x06\x07", 0, end64, 1)
        + END.pack(
            b"PK\x05\x06",
            0,
            0,
            count,
            count,
            min(num_directory_bytes, LIMIT32),
            min(directory_offset, LIMIT32),
            0,
        )
    )


def _join_adjacent(pieces: list[tuple[int, bytes]]) -> tuple[tuple[int, bytes], ...]:
    """Join (offset, bytes) pairs that follow each other without a gap."""
    joined: list[tuple[int, list[bytes]]] = []
    end = -1
    for offset, data in pieces:
        if offset == end:
            joined[-1][1].append(data)
        else:
            joined.append((offset, [data]))
        end = offset + len(data)
    return tuple((offset, b"".join(parts)) for offset, parts in joined)
