"""Runs of a source row, out of mappings or by reading: the same elements and the same checksums."""

import os

import numpy as np
import pytest

from reshard.checksums.crc import CrcRange, crc32
from reshard.errors import CorruptSourceError
from reshard.execution import scan
from reshard.storage import files
from reshard.storage.files import LocalFile
from reshard.storage.source_reader import SourceReader
from reshard.tensors.geometry import Box
from reshard.tensors.layout import SourceFile
from reshard.tensors.shard_table import ShardRow

ROWS, COLUMNS, BEGIN = 40, 30, 70
PARTS = [
    Box((0, 5), (40, 7)),
    Box((3, 0), (9, 1)),
    Box((0, 0), (40, 30)),
    Box((39, 29), (1, 1)),
    Box((2, 4), (0, 3)),
]


def row_of(strides):
    return ShardRow(
        tensor=0, box=Box((0, 0), (ROWS, COLUMNS)), file=0, byte_offset=BEGIN, strides=strides, replica=0
    )  # fmt: skip


@pytest.fixture
def stored(tmp_path):
    values = np.random.default_rng(1).integers(0, 1 << 32, ROWS * COLUMNS, dtype=np.uint32)
    (tmp_path / "file").write_bytes(bytes(BEGIN) + values.tobytes())
    source = SourceReader(tmp_path, [SourceFile(path="file", num_bytes=BEGIN + values.nbytes, checksums=())])
    yield values, source, tmp_path / "file"
    source.close()


@pytest.fixture
def window(request, monkeypatch):
    monkeypatch.setattr(scan, "GATHER_BYTES", request.param)


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("window", [1, 300, 4 << 20], ids=lambda size: f"{size}-bytes-at-a-time", indirect=True)
@pytest.mark.parametrize("maps", [False, True], ids=["reads", "maps"])
@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["row-major", "column-major"])
def test_every_element_arrives_with_the_checksum_of_its_run(stored, part, maps, turned):
    values, source, _ = stored
    source.may_map = maps
    array = values.reshape(COLUMNS, ROWS).T if turned else values.reshape(ROWS, COLUMNS)
    row = row_of((1, ROWS) if turned else (COLUMNS, 1))
    elements = np.zeros(part.size, dtype=np.uint32)
    pieces = scan.gather(source, row, part, elements)
    content = bytes(BEGIN) + values.tobytes()
    assert pieces == [CrcRange(at, length, crc32(content[at : at + length])) for at, length, _ in pieces]
    assert sum(piece.num_bytes for piece in pieces) == elements.nbytes
    within = tuple(slice(low, high) for low, high in zip(part.offset, part.end, strict=True))
    assert (elements == array[within]).all()


@pytest.mark.parametrize("maps", [False, True], ids=["reads", "maps"])
def test_a_file_that_became_shorter_is_told(stored, maps):
    _, source, path = stored
    source.may_map = maps
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(CorruptSourceError, match="truncated"):
        scan.gather(source, row_of((COLUMNS, 1)), Box((0, 0), (ROWS, 7)), np.zeros((ROWS, 7), dtype=np.uint32))


@pytest.mark.parametrize("held", [False, True], ids=["on-disk", "in-cache"])
def test_only_what_the_kernel_held_before_it_was_asked_for_is_looked_at(stored, held, monkeypatch):
    values, source, _ = stored
    source.may_map = True
    monkeypatch.setattr(LocalFile, "is_cached", lambda *_: held)
    source.prefetch([(0, BEGIN, BEGIN + 400)])
    monkeypatch.undo()  # by now the disk has brought it
    found = source.view(0, BEGIN + 4, 80)
    assert (found is not None) == held
    behind = source.view(0, BEGIN + 400, 80)
    assert (behind.view(np.uint32) == values[100:120]).all()


def test_a_file_that_was_just_written_is_held(stored):
    _, _, path = stored
    with LocalFile(path) as file:
        assert file.is_cached(BEGIN, 400)
        assert not file.is_cached(BEGIN, 0)
        assert not file.is_cached(path.stat().st_size - 10, 20)


@pytest.mark.parametrize("counts", [True, False], ids=["cachestat", "mincore"])
def test_old_and_new_kernels_say_the_same_of_ranges_that_are_held(stored, counts, monkeypatch):
    _, _, path = stored
    if not counts:
        monkeypatch.setattr(files, "_count_cached_pages", lambda *_: None)
    size = path.stat().st_size
    with LocalFile(path) as file:
        held = [file.is_cached(*part) for part in ((0, 1), (0, size), (size - 1, 1), (size, 1), (size - 1, 2), (7, 0))]
    assert held == [True, True, True, False, False, False]


def test_ranges_that_are_held_are_mapped_once_for_a_unit(stored, monkeypatch):
    values, source, _ = stored
    source.may_map = True
    views = []
    view = LocalFile.view
    monkeypatch.setattr(LocalFile, "view", lambda self, *part: views.append(part) or view(self, *part))
    source.prefetch([(0, BEGIN, BEGIN + 80), (0, BEGIN + 160, BEGIN + 400)])
    assert (source.view(0, BEGIN + 4, 76).view(np.uint32) == values[1:20]).all()
    assert (source.view(0, BEGIN + 160, 240).view(np.uint32) == values[40:100]).all()
    assert views == [(BEGIN, 400)]


def test_a_file_that_the_kernel_has_dropped_is_not_held_until_it_is_read_again(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with LocalFile(path) as file:
        told = [dropped(path, file) for _ in range(10)]  # now and then the kernel drops nothing
        if not any(told):
            pytest.skip("a file system in memory")
        file.read(1 << 20, 0)
        assert file.is_cached(0, 1 << 20)


def dropped(path, file):
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return not file.is_cached(0, 1 << 20)


def test_nothing_is_a_view_of_nothing(stored):
    """Not of the rest of the file, as mmap would take it."""
    _, _, path = stored
    with LocalFile(path) as file:
        assert file.view(0, 0) is None
