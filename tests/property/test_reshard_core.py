"""The core of the resharder, with a format made for the purpose: any cut to any other cut, to the last bit."""

import dataclasses
import itertools
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.checksums import crc
from reshard.errors import CorruptSourceError, PlanError, StorageFullError, VerificationError
from reshard.execution import tile
from reshard.execution.executor import execute
from reshard.planning.check import check_plan
from reshard.planning.plan import make_plan
from reshard.planning.units import Unit, Units
from reshard.storage.source_reader import SourceReader
from reshard.tensors.geometry import Box, flat_interval_to_boxes, tiles, whole
from reshard.tensors.layout import (
    Checksum,
    ChecksumField,
    Index,
    LogicalTensor,
    SourceFile,
    TargetFile,
    TargetLayout,
    TensorKey,
)
from reshard.tensors.shard_table import ShardTableBuilder
from reshard.topology import Topology
from tests.randomness import examples

DTYPES = {"float32": np.float32, "float64": np.float64, "bfloat16": np.uint16, "uint8": np.uint8}
shapes = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[Box]]:
    """Ways to cut a tensor over ranks: tensor parallel along a dim, then a flat partition of each shard."""
    shards = [whole(shape)]
    for dim, size in enumerate(shape):
        bounds = sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else []
        edges = [0, *bounds, size]
        shards = [
            Box((*box.offset[:dim], low, *box.offset[dim + 1 :]), (*box.size[:dim], high - low, *box.size[dim + 1 :]))
            for box in shards
            for low, high in itertools.pairwise(edges)
        ]
    ranks = []
    for shard in shards:
        count = shard.num_elements
        edges = [0, *sorted(draw(st.sets(st.integers(0, count), max_size=3))), count]
        for low, high in itertools.pairwise(edges):
            ranks.append([box.shift(shard.offset) for box, _ in flat_interval_to_boxes(shard.size, low, high)])
    return [rank for rank in ranks if rank]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], str, list[list[Box]], list[list[Box]]]:
    shape = draw(shapes)
    return shape, draw(st.sampled_from(sorted(DTYPES))), draw(cuts(shape)), draw(cuts(shape))


def elements(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Arbitrary bits, infinities and not-a-numbers included."""
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape, dtype=int)) * DTYPES[dtype]().itemsize)
    return np.frombuffer(raw, dtype=DTYPES[dtype]).reshape(shape).copy()


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(box.offset, box.end, strict=True))


def write_source(folder: Path, full: np.ndarray, dtype: str, ranks: list[list[Box]], junk: int = 5) -> Index:
    """One file per rank: junk, then its boxes one after the other."""
    builder, files = ShardTableBuilder(), []
    for number, boxes in enumerate(ranks):
        content = bytearray(np.random.default_rng(number).bytes(junk))
        for box in boxes:
            builder.add(tensor=0, box=box, file=number, byte_offset=len(content))
            content += np.ascontiguousarray(full[slices(box)]).tobytes()
        (folder / f"rank{number}").write_bytes(content)
        payload = bytes(content[junk:])
        stated = (Checksum(start=junk, num_bytes=len(payload), crc32=zlib.crc32(payload)),)
        files.append(SourceFile(path=f"rank{number}", num_bytes=len(content), checksums=stated))
    tensor = LogicalTensor(key=TensorKey("fp32", "w"), shape=full.shape, dtype=dtype)
    return Index(
        root=folder,
        format="raw",
        topology=Topology(),
        step=1,
        samples=1,
        tensors=(tensor,),
        files=tuple(files),
        shards=builder.build(),
    )


def target_layout(full: np.ndarray, ranks: list[list[Box]], *, copies: int = 1) -> TargetLayout:
    """One file per rank and copy: a checksum field, padding, then its boxes."""
    builder, files = ShardTableBuilder(), []
    for copy in range(copies):
        for boxes in ranks:
            position = 16
            for box in boxes:
                builder.add(tensor=0, box=box, file=len(files), byte_offset=position, replica=copy)
                position += box.num_elements * full.itemsize
            field = ChecksumField(start=16, num_bytes=position + 3 - 16, positions=(4,))
            files.append(
                TargetFile(
                    path=f"c{len(files)}",
                    num_bytes=position + 3,
                    fixed=((0, b"HEAD\0\0\0\0"),),
                    checksums=(field,),
                )
            )
    return TargetLayout(format="raw", topology=Topology(), files=tuple(files), shards=builder.build())


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(case=cases(), limits=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 300)))
@pytest.mark.parametrize("mapped", [False, True])
def test_any_cut_becomes_any_other_cut_reading_and_writing_each_byte_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, *, mapped: bool, case, limits
) -> None:
    copies, threads, band = limits
    monkeypatch.setattr(SourceReader, "may_map", mapped)
    monkeypatch.setattr(tile, "SLICE_BYTES", band)
    monkeypatch.setattr(tile, "SMALLEST_BOX_BYTES", 0)
    shape, dtype, source_ranks, target_ranks = case
    full = elements(shape, dtype)
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    index = write_source(source, full, dtype, source_ranks)
    layout = target_layout(full, target_ranks, copies=copies)
    plan = make_plan(index, layout, num_threads=threads)
    check_plan(plan)
    outcome = execute(plan, target)
    for number, boxes in enumerate(target_ranks * copies):
        content = (target / f"c{number}").read_bytes()
        expected = b"".join(np.ascontiguousarray(full[slices(box)]).tobytes() for box in boxes)
        assert content[16 : 16 + len(expected)] == expected
        assert int.from_bytes(content[4:8], "little") == zlib.crc32(content[16:])
        assert outcome.file_crc32[number] == zlib.crc32(content)
    assert outcome.bytes_read == full.nbytes
    assert outcome.bytes_written == copies * (full.nbytes + 8 * len(target_ranks))
    assert outcome.digests == {"fp32/w": f"{zlib.crc32(full.tobytes()):08x}"}


@given(shapes, st.data())
def test_a_run_is_a_box_of_consecutive_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    flat = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    ends = [sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
    box = Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
    inside = flat[slices(box)].reshape(-1)
    assert box.is_consecutive(shape) == (inside[-1] - inside[0] + 1 == len(inside))


@given(shapes, st.integers(1, 40))
def test_tiles_are_consecutive_and_cover_the_tensor(shape: tuple[int, ...], limit: int) -> None:
    flat = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    found = [flat[slices(box)].reshape(-1) for box in tiles(shape, limit)]
    assert np.concatenate(found).tolist() == flat.reshape(-1).tolist()
    assert max(map(len, found)) <= max(limit, 1)


def cut_one_by_one(tensors: list[tuple[int, tuple[int, ...], int]], unit_bytes: int) -> list[Unit]:
    """Units, each with its boxes from the start."""
    units: list[Unit] = []
    boxes: list[tuple[int, Box]] = []
    held = 0
    for number, shape, item_bytes in tensors:
        for box in tiles(shape, unit_bytes // item_bytes):
            num_bytes = box.num_elements * item_bytes
            if boxes and held + num_bytes > unit_bytes:
                units.append(Unit(tuple(boxes), held))
                boxes, held = [], 0
            boxes.append((number, box))
            held += num_bytes
    return [*units, Unit(tuple(boxes), held)] if boxes else units


@given(st.lists(st.tuples(st.lists(st.integers(0, 7), max_size=4), st.sampled_from([1, 2, 8])), max_size=6), st.data())
def test_units_that_are_made_on_access_are_those_that_are_made_from_the_start(cases, data: st.DataObject) -> None:
    tensors = [(at, tuple(shape), item_bytes) for at, (shape, item_bytes) in enumerate(cases)]
    unit_bytes = data.draw(st.integers(1, 200))
    units, expected = Units(tensors, unit_bytes), cut_one_by_one(tensors, unit_bytes)
    assert list(units) == expected
    assert units[1:] == tuple(expected[1:])
    assert units.count_bytes(range(len(units))) == sum(unit.num_bytes for unit in expected)
    assert [units[-1]] == expected[-1:] if expected else len(units) == 0


@given(shapes, st.data())
def test_a_flat_interval_is_a_few_consecutive_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    flat = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    start = data.draw(st.integers(0, flat.size))
    stop = data.draw(st.integers(start, flat.size))
    boxes = flat_interval_to_boxes(shape, start, stop)
    assert [i for box, _ in boxes for i in flat[slices(box)].reshape(-1)] == list(range(start, stop))
    assert all(flat[slices(box)].reshape(-1)[0] == first for box, first in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.binary(min_size=1, max_size=40)), max_size=6), st.integers(0, 9))
def test_a_checksum_is_assembled_from_its_parts(parts: list[tuple[int, bytes]], tail: int) -> None:
    content, pieces = b"", []
    for gap, data in parts:
        content += bytes(gap)
        pieces.append((7 + len(content), len(data), zlib.crc32(data)))
        content += data
    content += bytes(tail)
    assert crc.assemble(reversed(pieces), start=7, num_bytes=len(content)) == zlib.crc32(content)


@pytest.fixture
def conversion(tmp_path: Path):
    full = elements((64, 48), "float32")
    halves = [[Box((0, 0), (64, 20))], [Box((0, 20), (64, 28))]]
    thirds = [[Box((0, 0), (10, 48))], [Box((10, 0), (30, 48))], [Box((40, 0), (24, 48))]]
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    index = write_source(tmp_path / "source", full, "float32", halves)
    return index, target_layout(full, thirds), tmp_path / "target"


def test_a_truncated_source_is_named(conversion) -> None:
    index, layout, target = conversion
    path = index.root / "rank1"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptSourceError, match=r"rank1: ends at byte .* truncated"):
        execute(make_plan(index, layout), target)


@pytest.mark.parametrize("position", [5, 700, -1])
def test_a_flipped_byte_in_the_source_is_named(conversion, position: int) -> None:
    index, layout, target = conversion
    path = index.root / "rank0"
    content = bytearray(path.read_bytes())
    content[position] ^= 16
    path.write_bytes(content)
    with pytest.raises(CorruptSourceError, match="rank0: bytes 5:5125 have CRC-32"):
        execute(make_plan(index, layout), target)


def test_a_full_disk_is_reported_with_the_free_bytes(conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    index, layout, target = conversion

    def full_disk(*_arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full_disk)
    with pytest.raises(StorageFullError, match="bytes are free"):
        execute(make_plan(index, layout), target)


def test_elements_in_each_others_places_are_never_published(conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tile

    index, layout, target = conversion
    scatter = module.find_touching

    def misplace(shards, rows, tile):
        """Bring the first target box the bytes of the box one row further down."""
        for row, part in scatter(shards, rows, tile):
            yield row, part.shift((1, 0)) if shards is layout.shards and part.size[0] == 10 else part

    monkeypatch.setattr(module, "find_touching", misplace)
    with pytest.raises(VerificationError, match="fp32/w, copy 0: source"):
        execute(make_plan(index, layout), target)


@pytest.mark.parametrize(
    ("boxes", "complaint"),
    [
        ([Box((0, 0), (60, 48))], "2880 of 3072 elements"),
        ([Box((0, 0), (64, 48)), Box((3, 3), (2, 2))], "overlap"),
        ([Box((0, 0), (32, 48)), Box((32, 0), (33, 48))], "lies outside"),
    ],
)
def test_a_target_that_is_not_covered_exactly_is_refused(conversion, boxes: list[Box], complaint: str) -> None:
    index, _, _ = conversion
    layout = target_layout(elements((64, 48), "float32"), [boxes])
    with pytest.raises(PlanError, match=complaint):
        check_plan(make_plan(index, layout))


def test_a_hole_in_the_source_is_refused_with_the_tensors_name(conversion) -> None:
    index, layout, _ = conversion
    builder = ShardTableBuilder()
    builder.add(tensor=0, box=Box((0, 0), (64, 20)), file=0, byte_offset=5)
    with pytest.raises(PlanError, match=r"source fp32/w .* 1280 of 3072"):
        check_plan(make_plan(dataclasses.replace(index, shards=builder.build()), layout))


def test_bytes_of_a_target_that_are_written_twice_are_refused(conversion) -> None:
    index, layout, _ = conversion
    builder = ShardTableBuilder()
    builder.add(tensor=0, box=Box((0, 0), (32, 48)), file=0, byte_offset=16)
    builder.add(tensor=0, box=Box((32, 0), (32, 48)), file=0, byte_offset=20)
    file = dataclasses.replace(layout.files[0], num_bytes=20000)
    with pytest.raises(PlanError, match="written twice"):
        check_plan(make_plan(index, dataclasses.replace(layout, files=(file,), shards=builder.build())))
