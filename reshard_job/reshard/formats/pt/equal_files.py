"""Read files of many ranks that differ in names, checksums and payloads only: parse the first, compare the others.

The ranks of a run save the same objects around tensors of their own. The bytes that may differ are each copy of the
archive's name, the payloads of tensors with their CRC-32, and the entry `.data/serialization_id`, which is not used. If
all other bytes are those of a file that was read before, the zip directory and the pickle need not be parsed again.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from reshard.formats.pt.archive import END, END64, Entry
from reshard.formats.pt.exchange import StorageExchange, find_holders
from reshard.formats.pt.objects import Storage
from reshard.formats.pt.reader import PtFile, read, read_open
from reshard.storage.files import Bytes, File, open_file
from reshard.tensors.intervals import Int64Array

_MAX_KNOWN_BYTES = 64 << 20  # of files to compare with; the latest are kept
_GAP_BYTES = 1 << 16  # payloads up to this size are read with what is around them, larger ones are skipped
_LOCAL_CRC, _LOCAL_NAME, _CENTRAL_CRC, _CENTRAL_NAME = 14, 30, 16, 46
_TAIL_BYTES = 22 + 20 + 56  # the three records at the end of an archive without comment
_DESCRIPTOR = b"PK\x07\x08"  # before the CRC-32 behind a payload, if the local header does not state it

FileKey = tuple[int, int, bytes]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """A file that was read, and what to compare other files with.

    Attributes:
        file: the file as it was read.
        ranges: (first byte, length) of the byte ranges that are compared; large payloads are not among them.
        content: bytes of all these ranges, [bytes].
        same: 255 for bytes in which another file must be equal, else 0, [bytes].
        names: positions of the archive's name in `content`, [names].
        name: the archive's name.
        keys: keys of the storages, in the order of `checksums`.
        checksums: position of the CRC-32 of every storage in `content`, [storages].
        holders: identities of the containers that hold tensors.
    """

    file: PtFile
    ranges: tuple[tuple[int, int], ...]
    content: Bytes
    same: Bytes
    names: Int64Array
    name: bytes
    keys: tuple[str, ...]
    checksums: Int64Array
    holders: frozenset[int]


class EqualFileReader:
    """Reader of files that remembers the latest files to compare others with."""

    def __init__(self) -> None:
        self._known: OrderedDict[FileKey, KnownFile] = OrderedDict()
        self._num_bytes = 0

    def read(self, path: Path) -> PtFile:
        """Read a file as `reader.read` does; what it has in common with an earlier file are the same objects.

        Storages are shared if the archives state that their payloads have the same CRC-32, or if they are empty.

        Raises:
            UnsupportedError, UnsafePickleError, CorruptSourceError: see `reader.read`.
        """
        try:
            file = open_file(path)
        except OSError:
            return read(path)  # raises the error that explains why
        with file:
            if file.is_remote:
                return read_open(file, str(path))[0]
            key = _read_key(file)
            known = self._known.get(key) if key is not None else None
            equal = None if known is None else _match_file(file, str(path), known)
            if equal is not None:
                return equal
            pt_file, entries = read_open(file, str(path))
            if key is not None:
                self._remember(key, _learn_file(file, pt_file, entries, key))
            return pt_file

    def _remember(self, key: FileKey, known: KnownFile | None) -> None:
        if known is None:
            return
        if key in self._known:
            self._num_bytes -= 2 * len(self._known.pop(key).content)
        self._known[key] = known
        self._num_bytes += 2 * len(known.content)
        while self._num_bytes > _MAX_KNOWN_BYTES:
            self._num_bytes -= 2 * len(self._known.popitem(last=False)[1].content)


def _read_key(file: File) -> FileKey | None:
    """Read what equal files have in common: size, position of the directory, and the start of its first record.

    Returns:
        These three, of which the record includes a CRC-32; None if the archive is laid out in an unusual way.
    """
    try:
        num_bytes = file.num_bytes
        tail = file.read(_TAIL_BYTES, max(0, num_bytes - _TAIL_BYTES))
        if len(tail) != _TAIL_BYTES:
            return None
        fields = END.unpack(tail[-END.size :])
        if fields[0] != b"PK\x05\x06":  # it has a comment
            return None
        position = END64.unpack(tail[: END64.size])[9] if tail[:4] == b"PK\x06\x06" else fields[6]
        return num_bytes, position, file.read(_CENTRAL_NAME, position)
    except (OSError, OverflowError):
        return None


def _learn_file(file: File, pt_file: PtFile, entries: Mapping[str, Entry], key: FileKey) -> KnownFile | None:
    """Collect what to compare other files with; return None if the directory is not at its usual position."""
    storages = sorted((entries[f"data/{name}"].offset, name) for name in pt_file.storages)
    payloads = [(offset, pt_file.storages[name].num_bytes) for offset, name in storages]
    ranges, position = [], 0
    for offset, count in payloads:
        if count > _GAP_BYTES:
            ranges.append((position, offset - position))
            position = offset + count
    ranges.append((position, pt_file.num_bytes - position))
    content = np.frombuffer(_read_ranges(file, ranges), dtype=np.uint8)
    if len(content) != sum(count for _, count in ranges):
        return None
    starts = np.array([start for start, _ in ranges], dtype=np.int64)
    shift = starts - np.cumsum([0, *(count for _, count in ranges[:-1])])

    def locate(positions: Sequence[int]) -> Int64Array:
        """Map positions in the file to positions in `content`."""
        where = np.array(positions, dtype=np.int64)
        moved: Int64Array = where - shift[np.searchsorted(starts, where, side="right") - 1]
        return moved

    central = _find_central_headers(content[max(0, locate([key[1]])[0]) :].tobytes(), key[1], len(entries))
    if central is None:
        return None
    headers = dict(zip(entries, central, strict=True))
    length = int.from_bytes(content[locate([headers["data.pkl"] + 28])[0] :][:2].tobytes(), "little") - len("data.pkl/")
    variable = [entry for name, entry in entries.items() if name == ".data/serialization_id"]
    variable += [entries[f"data/{name}"] for _, name in storages]
    names = locate(
        [*(entry.header + _LOCAL_NAME for entry in entries.values()), *(header + _CENTRAL_NAME for header in central)]
    )
    records = [headers[entry.name] for entry in variable]
    ends = [entry.offset + entry.num_bytes for entry in variable]
    descriptors = [end + 4 for end in ends if content[locate([end])[0] :][:4].tobytes() == _DESCRIPTOR]
    sums = locate(
        [
            *(entry.header + _LOCAL_CRC for entry in variable),
            *(header + _CENTRAL_CRC for header in records),
            *descriptors,
        ]
    )
    same = np.full(len(content), 255, dtype=np.uint8)
    if entries["data.pkl"].crc32 is not None:  # an archive that states none has zeros there, and equal files must too
        same[(sums[:, None] + np.arange(4)).reshape(-1)] = 0
    for entry in variable:
        if 0 < entry.num_bytes <= _GAP_BYTES:
            first = locate([entry.offset])[0]
            same[first : first + entry.num_bytes] = 0
    checked = tuple(name for _, name in storages if pt_file.storages[name].num_bytes)
    return KnownFile(
        file=pt_file,
        ranges=tuple(ranges),
        content=content,
        same=same,
        names=names,
        name=content[names[0] : names[0] + length].tobytes(),
        keys=checked,
        checksums=locate([headers[f"data/{name}"] + _CENTRAL_CRC for name in checked]),
        holders=find_holders(pt_file.value),
    )


def _find_central_headers(directory: bytes, position: int, count: int) -> list[int] | None:
    """Find the positions in the file of the directory's records; return None if one is not where it should be."""
    positions, at = [], 0
    for _ in range(count):
        if directory[at : at + 4] != b"PK\x01\x02" or at + _CENTRAL_NAME > len(directory):
            return None
        positions.append(position + at)
        at += _CENTRAL_NAME + sum(struct.unpack_from("<3H", directory, at + 28))
    return positions


def _read_ranges(file: File, ranges: Sequence[tuple[int, int]]) -> bytes:
    """Read byte ranges; return fewer bytes on an error, which the ordinary reader then reports."""
    try:
        return b"".join(file.read(count, start) for start, count in ranges)
    except OSError:
        return b""


def _match_file(file: File, path: str, known: KnownFile) -> PtFile | None:
    """Return the file if it equals the known one in every byte that must be the same, else None."""
    content = np.frombuffer(_read_ranges(file, known.ranges), dtype=np.uint8)
    if len(content) != len(known.content):
        return None
    name = content[known.names[0] : known.names[0] + len(known.name)].tobytes()
    if not name.isascii() or b"/" in name:
        return None
    renamed = content.copy()
    for letter in [at for at, (one, two) in enumerate(zip(name, known.name, strict=True)) if one != two]:
        if (renamed[known.names + letter] != name[letter]).any():
            return None
        renamed[known.names + letter] = known.name[letter]
    if ((renamed ^ known.content) & known.same).any():
        return None
    changed = _find_changed_storages(known, content)
    if not changed:
        return dataclasses.replace(known.file, path=path)
    storages = {key: changed.get(id(old), old) for key, old in known.file.storages.items()}
    value = StorageExchange(changed, known.holders).copy(known.file.value)
    return dataclasses.replace(known.file, path=path, value=value, storages=storages)


def _find_changed_storages(known: KnownFile, content: Bytes) -> dict[int, Storage]:
    """Build new storages for those of the known file whose payload may differ, by identity of the known storage."""
    changed: dict[int, Storage] = {}
    sums = np.ascontiguousarray(content[known.checksums[:, None] + np.arange(4)]).view("<u4").reshape(-1)
    for key, crc32 in zip(known.keys, sums.tolist(), strict=True):
        old = known.file.storages[key]
        if old.crc32 is None or old.crc32 != crc32:
            changed[id(old)] = dataclasses.replace(old, crc32=None if old.crc32 is None else crc32)
    return changed
