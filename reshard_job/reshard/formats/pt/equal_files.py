"""Files of many ranks that differ in their names, checksums and payloads only: read once, then compared.

The ranks of a run save the same objects around tensors of their own. A file whose every byte is that of a file read
before, but for those that may differ, means the same: its zip directory and its pickle need not be looked at again.
What may differ are the archive's name wherever it stands, the payloads of tensors and their CRC-32, and the entry
`.data/serialization_id` that nothing reads.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from reshard.formats.pt.archive import Entry
from reshard.formats.pt.exchange import Exchange, holders
from reshard.formats.pt.objects import Storage
from reshard.formats.pt.reader import PtFile, read, read_open
from reshard.storage.files import Bytes, File, open_file
from reshard.tensors.intervals import Int64Array

_MAX_KNOWN_BYTES = 64 << 20  # of files to compare with; those seen last are kept
_GAP_BYTES = 1 << 16  # payloads up to this are read along, larger ones are skipped
_LOCAL_CRC, _LOCAL_NAME, _CENTRAL_CRC, _CENTRAL_NAME = 14, 30, 16, 46
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_TAIL_BYTES = 22 + 20 + 56  # the three records at the end of an archive without comment
_DESCRIPTOR = b"PK\x07\x08"  # before the CRC-32 behind a payload, where the local header leaves it open

Key = tuple[int, int, bytes]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A file that was read.

    Attributes:
        file: what it is.
        ranges: (first byte, number) of what is compared, without large payloads.
        content: all that, one after the other, [bytes].
        same: 255 where another file must be equal, else 0, [bytes].
        names: where the archive's name stands in `content`, [names].
        name: that name.
        keys: of the storages, in the order of `checksums`.
        checksums: where the CRC-32 of every storage stands in `content`, [storages].
        holders: identities of the containers in which there are tensors.
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


class Twins:
    """Reads files, and remembers them."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, Known] = OrderedDict()
        self._num_bytes = 0

    def read(self, path: Path) -> PtFile:
        """What `reader.read` says of the file, with all that it shares with an earlier one in the same objects.

        Storages are shared if the archives state that their payloads have the same CRC-32, or if they are empty.

        Raises:
            UnsupportedError, UnsafePickleError, CorruptSourceError: see `reader.read`.
        """
        try:
            file = open_file(path)
        except OSError:
            return read(path)  # says why
        with file:
            if file.slow_to_ask:
                return read_open(file, str(path))[0]
            key = _key(file)
            known = self._known.get(key) if key is not None else None
            twin = None if known is None else _twin(file, str(path), known)
            if twin is not None:
                return twin
            found, entries = read_open(file, str(path))
            if key is not None:
                self._remember(key, _known(file, found, entries, key))
            return found

    def _remember(self, key: Key, known: Known | None) -> None:
        if known is None:
            return
        if key in self._known:
            self._num_bytes -= 2 * len(self._known.pop(key).content)
        self._known[key] = known
        self._num_bytes += 2 * len(known.content)
        while self._num_bytes > _MAX_KNOWN_BYTES:
            self._num_bytes -= 2 * len(self._known.popitem(last=False)[1].content)


def _key(file: File) -> Key | None:
    """What twins have in common: size, place of the directory, and the start of its first entry, with its CRC-32."""
    try:
        num_bytes = file.num_bytes
        tail = file.read(_TAIL_BYTES, max(0, num_bytes - _TAIL_BYTES))
        if len(tail) != _TAIL_BYTES:
            return None
        fields = _END.unpack(tail[-_END.size :])
        if fields[0] != b"PK\x05\x06":  # it has a comment
            return None
        position = _END64.unpack(tail[: _END64.size])[9] if tail[:4] == b"PK\x06\x06" else fields[6]
        return num_bytes, position, file.read(_CENTRAL_NAME, position)
    except (OSError, OverflowError):
        return None


def _known(file: File, found: PtFile, entries: Mapping[str, Entry], key: Key) -> Known | None:
    """What to compare other files with; None of an archive whose directory is not where it should be."""
    storages = sorted((entries[f"data/{name}"].offset, name) for name in found.storages)
    payloads = [(offset, found.storages[name].num_bytes) for offset, name in storages]
    ranges, position = [], 0
    for offset, count in payloads:
        if count > _GAP_BYTES:
            ranges.append((position, offset - position))
            position = offset + count
    ranges.append((position, found.num_bytes - position))
    content = np.frombuffer(_read(file, ranges), dtype=np.uint8)
    if len(content) != sum(count for _, count in ranges):
        return None
    starts = np.array([start for start, _ in ranges], dtype=np.int64)
    shift = starts - np.cumsum([0, *(count for _, count in ranges[:-1])])

    def at(positions: Sequence[int]) -> Int64Array:
        """Places in `content` of positions in the file."""
        where = np.array(positions, dtype=np.int64)
        moved: Int64Array = where - shift[np.searchsorted(starts, where, side="right") - 1]
        return moved

    central = _central_headers(content[max(0, at([key[1]])[0]) :].tobytes(), key[1], len(entries))
    if central is None:
        return None
    headers = dict(zip(entries, central, strict=True))
    length = int.from_bytes(content[at([headers["data.pkl"] + 28])[0] :][:2].tobytes(), "little") - len("data.pkl/")
    varied = [entry for name, entry in entries.items() if name == ".data/serialization_id"]
    varied += [entries[f"data/{name}"] for _, name in storages]
    names = at(
        [*(entry.header + _LOCAL_NAME for entry in entries.values()), *(header + _CENTRAL_NAME for header in central)]
    )
    stated = [headers[entry.name] for entry in varied]
    ends = [entry.offset + entry.num_bytes for entry in varied]
    described = [end + 4 for end in ends if content[at([end])[0] :][:4].tobytes() == _DESCRIPTOR]
    sums = at(
        [*(entry.header + _LOCAL_CRC for entry in varied), *(header + _CENTRAL_CRC for header in stated), *described]
    )
    same = np.full(len(content), 255, dtype=np.uint8)
    if entries["data.pkl"].crc32 is not None:  # an archive that states none has zeros there, as its twins must
        same[(sums[:, None] + np.arange(4)).reshape(-1)] = 0
    for entry in varied:
        if 0 < entry.num_bytes <= _GAP_BYTES:
            first = at([entry.offset])[0]
            same[first : first + entry.num_bytes] = 0
    own = tuple(name for _, name in storages if found.storages[name].num_bytes)
    return Known(
        file=found,
        ranges=tuple(ranges),
        content=content,
        same=same,
        names=names,
        name=content[names[0] : names[0] + length].tobytes(),
        keys=own,
        checksums=at([headers[f"data/{name}"] + _CENTRAL_CRC for name in own]),
        holders=holders(found.value),
    )


def _central_headers(directory: bytes, position: int, count: int) -> list[int] | None:
    """Positions of the directory's headers in the file; None if they are not there."""
    found, at = [], 0
    for _ in range(count):
        if directory[at : at + 4] != b"PK\x01\x02" or at + _CENTRAL_NAME > len(directory):
            return None
        found.append(position + at)
        at += _CENTRAL_NAME + sum(struct.unpack_from("<3H", directory, at + 28))
    return found


def _read(file: File, ranges: Sequence[tuple[int, int]]) -> bytes:
    """What can be read of these ranges: who needs to know why it is not all reads the file in the ordinary way."""
    try:
        return b"".join(file.read(count, start) for start, count in ranges)
    except OSError:
        return b""


def _twin(file: File, path: str, known: Known) -> PtFile | None:
    """The file, if it is as the known one where it must be."""
    found = np.frombuffer(_read(file, known.ranges), dtype=np.uint8)
    if len(found) != len(known.content):
        return None
    name = found[known.names[0] : known.names[0] + len(known.name)].tobytes()
    if not name.isascii() or b"/" in name:
        return None
    other = found.copy()
    for letter in [at for at, (one, two) in enumerate(zip(name, known.name, strict=True)) if one != two]:
        if (other[known.names + letter] != name[letter]).any():
            return None
        other[known.names + letter] = known.name[letter]
    if ((other ^ known.content) & known.same).any():
        return None
    changed = _changed(known, found)
    if not changed:
        return dataclasses.replace(known.file, path=path)
    storages = {key: changed.get(id(old), old) for key, old in known.file.storages.items()}
    value = Exchange(changed, known.holders).copy(known.file.value)
    return dataclasses.replace(known.file, path=path, value=value, storages=storages)


def _changed(known: Known, found: Bytes) -> dict[int, Storage]:
    """Storages in place of those of the known file whose payload may be another, by the identity of the latter."""
    changed: dict[int, Storage] = {}
    sums = np.ascontiguousarray(found[known.checksums[:, None] + np.arange(4)]).view("<u4").reshape(-1)
    for key, crc32 in zip(known.keys, sums.tolist(), strict=True):
        old = known.file.storages[key]
        if old.crc32 is None or old.crc32 != crc32:
            changed[id(old)] = dataclasses.replace(old, crc32=None if old.crc32 is None else crc32)
    return changed
