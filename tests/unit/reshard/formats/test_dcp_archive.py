"""Zip archives in the middle of files: those of torch and of others are read, those that lie are refused."""

import io
import os
import struct
import zipfile
from pathlib import Path

import pytest

from reshard.errors import CorruptSourceError, UnsupportedError
from reshard.formats.dcp.archive import Window, read_directory
from reshard.formats.dcp.writing.skeleton import RankFiles
from reshard.formats.pt.archive import Entry
from reshard.storage.files import open_file


def directory(tmp_path: Path, content: bytes, *, start: int = 0) -> dict[str, Entry]:
    """Entries of an archive that begins at byte `start` of a file and ends before its end."""
    (tmp_path / "file").write_bytes(b"x" * start + content + b"y" * 7)
    with open_file(tmp_path / "file") as file:
        return read_directory(Window(file, start, len(content), "item"))


def zipped(entries: dict[str, bytes], compression=zipfile.ZIP_STORED, **info) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in entries.items():
            entry = zipfile.ZipInfo(f"archive/{name}")
            entry.compress_type = compression
            with archive.open(entry, "w", **info) as target:
                target.write(data)
    return stream.getvalue()


@pytest.mark.parametrize("start", [0, 3, 4096])
@pytest.mark.parametrize("force", [False, True])
def test_archives_of_others_are_read_anywhere_in_a_file(start, force, tmp_path):
    entries = {"data.pkl": b"1" * 100, "data/0": bytes(range(256)) * 100}
    content = zipped(entries, force_zip64=force)
    found = directory(tmp_path, content, start=start)
    file = (tmp_path / "file").read_bytes()
    assert {name: file[item.offset : item.offset + item.num_bytes] for name, item in found.items()} == entries


def test_a_directory_longer_than_what_is_read_at_first_is_read(tmp_path):
    entries = {f"data/{number}": bytes([number % 256]) * 40 for number in range(300)}
    assert len(directory(tmp_path, zipped(entries))) == 300


def test_sizes_beyond_four_gigabytes_are_read(tmp_path):
    """A sparse file: what torch writes for a chunk of 5 GiB, without its bytes."""
    files = RankFiles(1)
    place, byte_offset = files.add_chunk(0, "float32", (5 << 28,))
    (target,) = files.build()
    with (tmp_path / "file").open("wb") as stream:
        stream.truncate(target.num_bytes)
        for position, data in target.fixed:
            os.pwrite(stream.fileno(), data, position)
    with open_file(tmp_path / "file") as file:
        found = read_directory(Window(file, place.offset, place.length, "item"))
    assert (found["data/0"].offset, found["data/0"].num_bytes) == (byte_offset, 5 << 30)


def patched(content: bytes, mark: bytes, offset: int, form: str, value: int, *, last: bool = False) -> bytes:
    at = (content.rindex(mark) if last else content.index(mark)) + offset
    return content[:at] + struct.pack(form, value) + content[at + struct.calcsize(form) :]


GOOD = zipped({"data.pkl": b"abc", "data/0": b"defg"})
CENTRAL, END = b"PK\x01\x02", b"PK\x05\x06"
ARCHIVES = {
    "compressed": (zipped({"data.pkl": b"a" * 99}, zipfile.ZIP_DEFLATED), UnsupportedError, "compressed"),
    "encrypted": (patched(GOOD, CENTRAL, 8, "<H", 1), UnsupportedError, "encrypted"),
    "not an archive": (b"no archive, but longer than an end record", CorruptSourceError, "not a zip archive"),
    "shorter than an end record": (b"PK\x03\x04", CorruptSourceError, "does not end with a zip directory"),
    "cut off": (GOOD[:-1], CorruptSourceError, "truncated"),
    "a directory outside": (patched(GOOD, END, 16, "<I", 10**6), CorruptSourceError, "claims"),
    "a directory too long": (patched(GOOD, END, 12, "<I", 10**6), CorruptSourceError, "claims"),
    "too many entries": (patched(GOOD, END, 10, "<H", 3), CorruptSourceError, "damaged"),
    "a payload too long": (
        patched(patched(GOOD, CENTRAL, 24, "<I", 5000), CENTRAL, 20, "<I", 5000), CorruptSourceError,
        "no entry of 5000"),
    "a header elsewhere": (patched(GOOD, CENTRAL, 42, "<I", 5), CorruptSourceError, "at byte 5"),
    "two sizes": (patched(GOOD, CENTRAL, 20, "<I", 2), CorruptSourceError, "the sizes 2 and 3"),
    "the same payload twice": (patched(GOOD, CENTRAL, 42, "<I", 0, last=True), CorruptSourceError, "overlap"),
    "the same name twice": (
        zipped({"data.pkl": b"a", "data.pkm": b"b"}).replace(b"pkm", b"pkl"), CorruptSourceError, "there twice"),
    "no file names": (GOOD.replace(b"archive/data/0", b"archivf/data/0"), CorruptSourceError, "outside of"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_that_lie_are_refused(name, tmp_path):
    content, kind, mentioned = ARCHIVES[name]
    with pytest.raises(kind, match=mentioned):
        directory(tmp_path, content)
