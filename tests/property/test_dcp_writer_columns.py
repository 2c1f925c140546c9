"""A DCP target that is laid out in columns is, byte for byte, the one that is laid out chunk by chunk."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reshard.formats.base import Request
from reshard.formats.dcp import FORMAT
from reshard.formats.dcp.metadata import Entry, Place
from reshard.formats.dcp.writing import records
from reshard.formats.dcp.writing.metadata_file import build_metadata_file
from reshard.formats.pt import blocks
from reshard.formats.pt.emit import Emitter, encode_integer
from reshard.tensors.geometry import Box, whole
from reshard.tensors.layout import Index, LogicalTensor, ParamGroup, SourceFile, TargetFile, TensorKey
from reshard.tensors.shard_table import ShardTableBuilder
from reshard.topology import Topology
from tests.property import dcp_one_by_one
from tests.randomness import examples

WORLDS = (1, 2, 3, 7, 12, 13, 40, 300, 1100)


def index_of(shapes: list[tuple[int, ...]], dtypes: list[str]) -> Index:
    """A source of another format, with a parameter group for the weights."""
    table, logical, position = ShardTableBuilder(), [], 0
    for at, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        key = TensorKey(("weight", "exp_avg")[at % 2], f"layers.{at // 2}.weight")
        logical.append(LogicalTensor(key=key, shape=shape, dtype=dtype))
        if logical[-1].num_elements:
            table.add(tensor=at, box=whole(shape), file=0, byte_offset=position)
        position += logical[-1].num_bytes
    names = tuple(item.key.name for item in logical if item.key.state == "weight")
    return Index(
        root=Path("source"),
        format="deepspeed",
        topology=Topology(dp=2, zero=1),
        step=4,
        samples=0,
        tensors=tuple(logical),
        files=(SourceFile(path="data", num_bytes=position),),
        shards=table.build(),
        groups=(ParamGroup(names=names, options={"lr": 0.1, "betas": (0.9, 0.95)}, scalars={"step": 4}),),
    )


def fixed(file: TargetFile) -> bytes:
    """Everything but tensor data, with zeros in its place."""
    content = bytearray(file.num_bytes)
    for position, data in file.fixed:
        content[position : position + len(data)] = data
    return bytes(content)


@st.composite
def indices(draw: st.DrawFn) -> tuple[Index, int]:
    """Scalars, empty tensors, fewer rows than ranks, even and uneven cuts; and ranks to cut for."""
    world = draw(st.sampled_from(WORLDS))
    rows = st.one_of(st.integers(0, 9), st.sampled_from([world - 1, world, world + 1, 3 * world, 300 * world]))
    inner = st.sampled_from([1, 2, 3, 300, 70_000])
    shape = st.one_of(
        st.just(()), rows.map(lambda count: (count,)), st.tuples(rows, inner), st.tuples(rows, inner, st.just(1))
    )
    shapes = draw(st.lists(st.one_of(shape, st.tuples(rows, *[st.sampled_from([1, 2])] * 4)), min_size=1, max_size=5))
    dtypes = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])
    return index_of(shapes, [draw(dtypes) for _ in shapes]), world


@settings(max_examples=examples(25), deadline=None)
@given(case=indices(), batch=st.sampled_from([5, 100, 1 << 15]))
@example(case=(index_of([(1100, 2), (1100 * 5 - 1, 70_000), (1099,)], ["float32"] * 3), 1100), batch=100)
def test_a_target_in_columns_is_the_one_of_single_chunks(case, batch):
    index, world = case
    request = Request(topology=Topology(dp=world, zero=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_ROWS", batch)
        layout = FORMAT.layout(index, request)
    files, rows = dcp_one_by_one.lay_out(index, request)
    assert [file.path for file in layout.files] == [file.path for file in files]
    for found, wanted in zip(layout.files, files, strict=True):
        assert found.num_bytes == wanted.num_bytes, wanted.path
        assert found.checksums == wanted.checksums, wanted.path
        assert fixed(found) == fixed(wanted) if found.num_bytes < 1 << 22 else tuple(found.fixed) == tuple(wanted.fixed)
    assert boxes(layout) == rows


def boxes(layout) -> list[dcp_one_by_one.Row]:
    """List the place of every chunk, by tensor and rank; each lies there as an array of its own."""
    table = layout.shards.boxes()
    found = []
    for at in range(len(table)):
        row = table.row(at, len(layout.tensors[table.tensor[at]].shape))
        steps = [math.prod(row.box.size[dim + 1 :]) for dim in range(row.box.ndim)]
        assert all(size == 1 or have == want for size, have, want in zip(row.box.size, row.strides, steps, strict=True))
        found.append((row.tensor, row.box, row.file, row.byte_offset))
    return sorted(found, key=lambda row: (row[0], row[2]))


pieces = st.lists(
    st.tuples(st.integers(0, 1 << 40), st.integers(0, 30), st.integers(0, 1 << 50), st.integers(1, 1 << 33)),
    min_size=1,
    max_size=60,
)


@settings(max_examples=examples(25), deadline=None)
@given(tensors=st.lists(st.tuples(st.integers(1, 5), pieces), min_size=1, max_size=4), known=st.booleans())
def test_metadata_of_any_chunks_is_written_as_one_by_one(tensors, known):
    """Several chunks of a file, in any order, as the grids of Megatron-Core have them."""
    entries = [] if known else [Entry(key="x", path=("x",), shape=None, dtype="", chunks=((None, Place("b", 0, 9)),))]
    for at, (ndim, found) in enumerate(tensors):
        chunks = tuple(
            (Box((first, *(3,) * (ndim - 1)), (length, *(300,) * (ndim - 1))), Place(f"__{rank}_0", start, length))
            for first, rank, start, length in found
        )
        entries.append(Entry(key=f"w.{at}", path=("w", at), shape=(1 << 41,) * ndim, dtype="int8", chunks=chunks))
    assert fixed(build_metadata_file(entries)) == dcp_one_by_one.pickled(entries)


EDGES = [(1 << bits) + step for bits in range(7, 62) for step in (-1, 0, 1)]


@given(values=st.lists(st.one_of(st.sampled_from([0, *EDGES]), st.integers(0, (1 << 63) - 1)), min_size=1))
@example(values=EDGES)
def test_integers_in_columns_are_the_opcodes_of_each(values):
    block = blocks.integer_block(np.array(values, dtype=np.int64))
    assert blocks.join_blocks([block], len(values)) == b"".join(map(encode_integer, values))


def test_references_in_columns_are_the_opcodes_of_each():
    emitter, numbers = Emitter(), [0, 255, 256, 65_536, 1 << 24]
    emitter.memo = {number: number for number in numbers}
    block = blocks.reference_block(np.array(numbers))
    assert blocks.join_blocks([block], len(numbers)) == b"".join(map(emitter.encode_reference, numbers))
