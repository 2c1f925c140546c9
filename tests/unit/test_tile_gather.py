"""Runs of a source row, out of mappings or by reading: the same elements and the same checksums."""

import errno
import os

import numpy as np
import pytest

from reshard import tile
from reshard.crc import Piece, crc32
from reshard.errors import CorruptSourceError
from reshard.files import LocalFile
from reshard.geometry import Box
from reshard.layout import SourceFile
from reshard.reading import Source
from reshard.shards import ShardRow

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
    source = Source(tmp_path, [SourceFile(path="file", num_bytes=BEGIN + values.nbytes, checksums=())])
    yield values, source, tmp_path / "file"
    source.close()


@pytest.fixture
def window(request, monkeypatch):
    monkeypatch.setattr(tile, "_GATHER_BYTES", request.param)


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
    pieces = tile.gather(source, row, part, elements)
    content = bytes(BEGIN) + values.tobytes()
    assert pieces == [Piece(at, length, crc32(content[at : at + length])) for at, length, _ in pieces]
    assert sum(piece.num_bytes for piece in pieces) == elements.nbytes
    within = tuple(slice(low, high) for low, high in zip(part.offset, part.end, strict=True))
    assert (elements == array[within]).all()


@pytest.mark.parametrize("maps", [False, True], ids=["reads", "maps"])
def test_a_file_that_became_shorter_is_told(stored, maps):
    _, source, path = stored
    source.may_map = maps
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(CorruptSourceError, match="truncated"):
        tile.gather(source, row_of((COLUMNS, 1)), Box((0, 0), (ROWS, 7)), np.zeros((ROWS, 7), dtype=np.uint32))


@pytest.mark.parametrize("held", [False, True], ids=["on-disk", "in-cache"])
def test_only_what_the_kernel_held_before_it_was_asked_for_is_looked_at(stored, held, monkeypatch):
    values, source, _ = stored
    source.may_map = True
    monkeypatch.setattr(LocalFile, "holds", lambda *_: held)
    source.expect([(0, BEGIN, BEGIN + 400)])
    monkeypatch.undo()  # by now the disk has brought it
    found = source.view(0, BEGIN + 4, 80)
    assert (found is not None) == held
    behind = source.view(0, BEGIN + 400, 80)
    assert (behind.view(np.uint32) == values[100:120]).all()


def test_a_file_that_was_just_written_is_held_and_one_dropped_from_the_cache_is_not(stored):
    _, _, path = stored
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    with LocalFile(path) as file:
        assert file.holds(BEGIN, 400)
        # The kernel is asked of the other file: to ask makes it fetch what it has not. Now and then it drops nothing,
        # and a file system in memory never does.
        told = [
            (dropped(path, lambda: not file.holds(BEGIN, 400)), dropped(other, lambda: waits_for(other)))
            for _ in range(10)
        ]
    assert any(ours for ours, _ in told) == any(kernels for _, kernels in told)


def dropped(path, is_gone):
    drop(path)
    return is_gone()


def drop(path):
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def waits_for(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(descriptor)
    return False
