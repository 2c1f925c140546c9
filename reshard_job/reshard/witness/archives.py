"""Read the directory of zip archives that torch.save writes, with nothing but the format's rules."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from reshard.errors import VerificationError
from reshard.storage.files import open_file

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_TAIL_BYTES = 64 << 10


class Entry(NamedTuple):
    """An entry of an archive: where its local header starts, and how long its content is."""

    name: str
    header: int
    num_bytes: int
    flags: int


class Kept:
    """The content of a small object in a store, which was fetched once."""

    is_remote = True

    def __init__(self, content: bytes) -> None:
        self._content, self.num_bytes = content, len(content)

    def read(self, num_bytes: int, position: int) -> bytes:
        return self._content[position : position + num_bytes]


class Readable(Protocol):
    """An open file, as far as strangers need one."""

    @property
    def num_bytes(self) -> int:
        """Return the size."""
        ...

    @property
    def is_remote(self) -> bool:
        """Return True if the file is in an object store."""
        ...

    def read(self, num_bytes: int, position: int) -> bytes:
        """Read up to `num_bytes` from `position`."""
        ...


_SMALL_BYTES = 1 << 20
_kept: contextvars.ContextVar[dict[str, Kept] | None] = contextvars.ContextVar("kept", default=None)


@contextlib.contextmanager
def keeping_small_objects(kept: dict[str, Kept]) -> Iterator[None]:
    """Fetch small objects of stores once, and as a whole; keep them in `kept`."""
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


@contextlib.contextmanager
def open_for_reading(path: Path) -> Iterator[Readable]:
    """Open a file of a checkpoint.

    Raises:
        OSError: the file cannot be opened.
    """
    kept = _kept.get()
    if kept is not None and str(path) in kept:
        yield kept[str(path)]
        return
    with open_file(path, follow=True) as file:
        if kept is None or not file.is_remote or file.num_bytes > _SMALL_BYTES:
            yield file
            return
        kept[str(path)] = Kept(file.read(file.num_bytes, 0))
    yield kept[str(path)]


class Archive:
    """An archive in a file, or in a range of a file.

    Args:
        path: the file.
        start: first byte of the archive.
        num_bytes: length of the archive; None for the rest of the file.
    """

    def __init__(self, path: Path, *, start: int = 0, num_bytes: int | None = None) -> None:
        self.path, self.start = path, start
        with open_file(path, follow=True) as file:
            self.num_bytes = file.num_bytes - start if num_bytes is None else num_bytes
            self._read_directory(file)
            entry = self._find("data.pkl")
            self.pickle = file.read(entry.num_bytes, start + self._content_of(file, entry))

    def _fail(self, what: str) -> VerificationError:
        return VerificationError(f"a witness cannot read it: {what}", path=str(self.path))

    def _read_directory(self, file: Readable) -> None:
        tail = min(self.num_bytes, _TAIL_BYTES)
        first = self.num_bytes - tail
        data = file.read(tail, self.start + first)
        at = data.rfind(b"PK\5\6")
        if at < 0 or at + _END.size > len(data):
            raise self._fail("no end of a zip archive")
        _, _, _, _, count, size, offset, _ = _END.unpack_from(data, at)
        self.directory_end = at + first
        locator = at - _LOCATOR.size
        if locator >= 0 and data[locator : locator + 4] == b"PK\6\7":
            wide = _LOCATOR.unpack_from(data, locator)[2] - first
            fields = (
                _END64.unpack_from(data, wide)
                if wide >= 0
                else _END64.unpack(file.read(_END64.size, self.start + first + wide))
            )
            count, size, offset = fields[7], fields[8], fields[9]
            self.directory_end = first + wide
        self.directory = offset
        if offset + size != self.directory_end:
            raise self._fail("its directory does not end where its end record starts")
        table = (
            data[offset - first : offset - first + size] if offset >= first else file.read(size, self.start + offset)
        )
        self.entries: dict[str, Entry] = {}
        here = 0
        for _ in range(count):
            entry, here = self._read_entry(table, here)
            self.entries[entry.name.partition("/")[2]] = entry

    def _read_entry(self, table: bytes, here: int) -> tuple[Entry, int]:
        fields = _ENTRY.unpack_from(table, here)
        flags, method, packed, size, name_bytes, extra_bytes, comment_bytes = fields[3], fields[4], *fields[8:13]
        header = fields[16]
        here += _ENTRY.size
        name = table[here : here + name_bytes].decode()
        extra, here = table[here + name_bytes : here + name_bytes + extra_bytes], here + name_bytes + extra_bytes
        if 0xFFFFFFFF in (size, packed, header):
            size, packed, header = _widen(extra, size, packed, header)
        if method or size != packed:
            raise self._fail(f"entry {name} is compressed")
        return Entry(name, header, size, flags), here + comment_bytes

    def _find(self, name: str) -> Entry:
        if name not in self.entries:
            raise self._fail(f"has no entry {name}")
        return self.entries[name]

    def _content_of(self, file: Readable, entry: Entry) -> int:
        fields = _LOCAL.unpack(file.read(_LOCAL.size, self.start + entry.header))
        if fields[0] != b"PK\3\4":
            raise self._fail(f"entry {entry.name} has no header")
        return entry.header + _LOCAL.size + int(fields[9]) + int(fields[10])

    @functools.cached_property
    def contents(self) -> dict[str, tuple[int, int]]:
        """Return where each entry's content starts in the file, and its length in bytes."""
        with open_for_reading(self.path) as file:
            return {
                name: (self.start + self._content_of(file, entry), entry.num_bytes)
                for name, entry in self.entries.items()
            }

    def find_storage(self, key: str) -> tuple[int, int]:
        """Return where a storage starts in the file, and its length in bytes."""
        if f"data/{key}" not in self.entries:
            raise self._fail(f"has no storage {key}")
        return self.contents[f"data/{key}"]

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges of the file between entries, which are no part of the zip format: (start, stop).

        Raises:
            VerificationError: entries overlap.
        """
        found: list[tuple[int, int]] = []
        end = 0
        for entry in sorted(self.entries.values(), key=lambda item: item.header):
            if entry.header < end:
                raise self._fail(f"entry {entry.name} overlaps another one")
            if entry.header > end:
                found.append((self.start + end, self.start + entry.header))
            content = self.contents[entry.name.partition("/")[2]][0] - self.start
            end = content + entry.num_bytes
            if entry.flags & 8:
                end += self._descriptor_bytes(entry, end)
        if end > self.directory:
            raise self._fail("its directory overlaps an entry")
        return [*found, *([(self.start + end, self.start + self.directory)] if end < self.directory else [])]

    def _descriptor_bytes(self, entry: Entry, at: int) -> int:
        """Return the length of the descriptor behind an entry; it repeats the size in 4 or in 8 bytes."""
        with open_for_reading(self.path) as file:
            data = file.read(24, self.start + at)
        if data[:4] != b"PK\7\x08":
            raise self._fail(f"entry {entry.name} has no data descriptor")
        return 24 if struct.unpack("<2Q", data[8:24]) == (entry.num_bytes, entry.num_bytes) else 16


def _widen(extra: bytes, *values: int) -> list[int]:
    """Replace sizes and positions that do not fit 32 bits by those of the extra field 1 (ZIP64)."""
    here = 0
    while here + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, here)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, here + 4))
            return [next(wide) if value == 0xFFFFFFFF else value for value in values]
        here += 4 + length
    return list(values)
