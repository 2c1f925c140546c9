"""A part of a plan of families: every byte of the wanted files comes from where the whole plan takes it."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.planning.check import check_plan
from reshard.planning.plan import Plan
from reshard.tensors.geometry import Box, strides_of
from reshard.virtual.restrict import restrict, select_files
from tests.boxes import in_boxes
from tests.property.test_shard_families import plan_of, shape_lists
from tests.randomness import examples


def origins(plan: Plan) -> dict[tuple[str, int], tuple[str, int]]:
    """Map every element of the target's files to its origin: (path, byte) -> (path, byte)."""
    found = {}
    sides = (plan.index.shards, plan.index.files), (plan.layout.shards, plan.layout.files)
    places: list[dict[tuple[int, int], list[tuple[str, int]]]] = [{}, {}]
    for held, (shards, files), tensors in zip(places, sides, (plan.index.tensors, plan.target_tensors), strict=True):
        for at in range(len(shards)):
            tensor = tensors[int(shards.tensor[at])]
            for row in shards.iterate_boxes(np.array([at]), len(tensor.shape)):
                for element, byte in elements(row.box, row.strides, tensor.shape, tensor.item_bytes):
                    where = (files[row.file].path, row.byte_offset + byte)
                    held.setdefault((row.tensor, element), []).append(where)
    for (number, element), wheres in places[1].items():
        ((source),) = places[0][int(plan.origins[number]), element]
        found |= dict.fromkeys(wheres, source)
    return found


def elements(box: Box, strides: tuple[int, ...], shape: tuple[int, ...], item_bytes: int):
    """Number of each element of a box in its flattened tensor, and its byte in the file."""
    for index in np.ndindex(*box.size):
        number = sum((low + at) * step for low, at, step in zip(box.offset, index, strides_of(shape), strict=True))
        yield number, sum(at * step for at, step in zip(index, strides, strict=True)) * item_bytes


@settings(max_examples=examples(60))
@given(shape_lists, st.integers(1, 6), st.integers(1, 6), st.data())
def test_the_wanted_files_are_made_of_the_same_bytes(shapes, before, after, data):
    plan = plan_of(shapes, before, after)
    if data.draw(st.booleans(), label="source in boxes"):
        plan = dataclasses.replace(plan, index=in_boxes(plan).index, source_rows=in_boxes(plan).source_rows)
    if data.draw(st.booleans(), label="target in boxes"):
        plan = dataclasses.replace(plan, layout=in_boxes(plan).layout, target_rows=in_boxes(plan).target_rows)
    files = data.draw(st.sets(st.integers(0, len(plan.layout.files) - 1)))
    part = restrict(plan, files)
    check_plan(part)
    assert [file.path for file in part.layout.files] == [plan.layout.files[at].path for at in sorted(files)]
    paths = {file.path for file in part.layout.files}
    expected = {where: source for where, source in origins(plan).items() if where[0] in paths}
    assert origins(part) == expected
    assert part.bytes_to_read == 4 * len(set(expected.values()))


@given(shape_lists, st.integers(1, 9), st.data())
def test_the_rows_of_some_files_are_the_boxes_that_lie_in_them(shapes, ranks, data):
    table = plan_of(shapes, 1, ranks).layout.shards
    files = np.array(sorted(data.draw(st.sets(st.integers(0, ranks - 1)))), dtype=np.int64)
    boxes = table.boxes()
    kept = boxes.take(np.flatnonzero(np.isin(boxes.file, files)))
    kept = dataclasses.replace(kept, file=np.searchsorted(files, kept.file))
    assert rows(select_files(table, files).boxes()) == rows(kept)


def rows(table):
    """Every box of a table."""
    columns = (table.tensor, table.replica, table.file, table.byte_offset, table.offset, table.size)
    return sorted(map(tuple, np.column_stack(columns).tolist()))


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_a_run_of_ranks_is_one_row_of_each_tensor(before, after, data):
    shapes = [(7, 11), (13,)]
    first = data.draw(st.integers(0, after - 1))
    last = data.draw(st.integers(first, after - 1))
    part = restrict(plan_of(shapes, before, after), range(first, last + 1))
    assert len(part.layout.shards) <= len(shapes)
    assert len(part.index.shards) <= 2 * len(shapes)
