"""Families of boxes against the boxes that they stand for: whoever asks, the answer is the same."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.cli.estimate import count_requests
from reshard.cli.explain import explain
from reshard.errors import PlanError
from reshard.planning.check import check_plan, cover_problems
from reshard.planning.plan import Plan, make_plan
from reshard.tensors import intervals
from reshard.tensors.geometry import Box, flat_interval_to_boxes, strides_of, whole
from reshard.tensors.layout import Index, LogicalTensor, SourceFile, TargetFile, TargetLayout, TensorKey
from reshard.tensors.shard_table import ShardTable, ShardTableBuilder
from reshard.topology import Topology
from tests.boxes import in_boxes
from tests.randomness import examples

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)
shape_lists = st.lists(shapes, min_size=1, max_size=4)
HEAD_BYTES = 8


def tensors_of(shapes_: list[tuple[int, ...]]) -> tuple[LogicalTensor, ...]:
    return tuple(
        LogicalTensor(key=TensorKey("fp32", f"t{at}"), shape=shape, dtype="float32") for at, shape in enumerate(shapes_)
    )


def families(shapes_: list[tuple[int, ...]], ranks: int) -> tuple[ShardTable, list[int]]:
    """Every tensor cut over all ranks, one slot after the other in each rank's file; and the files' sizes."""
    builder, position = ShardTableBuilder(), HEAD_BYTES
    for number, shape in enumerate(shapes_):
        count = math.prod(shape)
        slot = -(-count // ranks)
        builder.add_family(
            tensor=number,
            box=whole(shape),
            start=0,
            stop=count,
            chunk=slot,
            file=0,
            byte_offset=position,
            item_bytes=4,
        )
        position += slot * 4
    return builder.build(), [position] * ranks


def by_hand(shapes_: list[tuple[int, ...]], ranks: int) -> set[tuple[object, ...]]:
    """The boxes of `families`, made one by one."""
    found, position = set(), HEAD_BYTES
    for number, shape in enumerate(shapes_):
        count = math.prod(shape)
        slot = -(-count // ranks)
        for rank in range(ranks):
            start, stop = min(rank * slot, count), min((rank + 1) * slot, count)
            for box, first in flat_interval_to_boxes(shape, start, stop):
                at = position + (first - start) * 4
                found.add((number, 0, box, rank, at, strides_of(shape)))
        position += slot * 4
    return found


def rows_of(table: ShardTable, shapes_: list[tuple[int, ...]]) -> list[tuple[object, ...]]:
    return [tuple(table.row(at, len(shapes_[table.tensor[at]]))) for at in range(len(table))]


def plan_of(shapes_: list[tuple[int, ...]], before: int, after: int) -> Plan:
    source, sizes = families(shapes_, before)
    target, target_sizes = families(shapes_, after)
    index = Index(
        root=Path("/nowhere"),
        format="raw",
        topology=Topology(dp=before),
        step=1,
        samples=1,
        tensors=tensors_of(shapes_),
        files=tuple(SourceFile(path=f"s{at}", num_bytes=size) for at, size in enumerate(sizes)),
        shards=source,
    )
    layout = TargetLayout(
        format="raw",
        topology=Topology(dp=after),
        files=tuple(
            TargetFile(path=f"t{at}", num_bytes=size, fixed=((0, b"HEADHEAD"),)) for at, size in enumerate(target_sizes)
        ),
        shards=target,
    )
    return make_plan(index, layout)


@given(shapes, st.data())
def test_intervals_are_cut_as_one_by_one(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(shape)
    ends = data.draw(st.lists(st.tuples(st.integers(0, count), st.integers(0, count)), min_size=1, max_size=5))
    start, stop = np.array([min(pair) for pair in ends]), np.array([max(pair) for pair in ends])
    size = np.array([[*shape, *(1,) * (4 - len(shape))]] * len(ends))  # as in a table with wider tensors
    cut = intervals.cut(size, start, stop)
    ndim = len(shape)
    for at in range(len(ends)):
        mine = np.flatnonzero(cut.interval == at)
        found = [
            (Box(tuple(cut.offset[row, :ndim].tolist()), tuple(cut.size[row, :ndim].tolist())), int(cut.first[row]))
            for row in mine
        ]
        assert tuple(found) == flat_interval_to_boxes(shape, int(start[at]), int(stop[at]))
    assert intervals.count(size, start, stop).tolist() == np.bincount(cut.interval, minlength=len(ends)).tolist()


@given(shape_lists, st.integers(1, 9))
def test_a_family_stands_for_its_boxes(shapes_: list[tuple[int, ...]], ranks: int) -> None:
    table, sizes = families(shapes_, ranks)
    boxes = table.boxes()
    found = rows_of(boxes, shapes_)
    assert set(found) == by_hand(shapes_, ranks)
    assert len(found) == len(set(found)) == table.num_boxes.sum()
    assert not boxes.has_families
    assert table.boxes_by_tensor(len(shapes_)).tolist() == boxes.boxes_by_tensor(len(shapes_)).tolist()
    assert table.num_elements.tolist() == [math.prod(shape) for shape in shapes_]
    item = np.full(len(table), 4)
    by_file = boxes.bytes_by_file(np.full(len(boxes), 4), len(sizes))
    assert table.bytes_by_file(item, len(sizes)).tolist() == by_file.tolist()
    for number, shape in enumerate(shapes_):
        each = list(table.iterate_boxes(np.array([number]), len(shape)))
        assert [row.box for row in each] == [row[2] for row in found if row[0] == number]


@given(shapes.filter(bool), st.integers(1, 9), st.data())
def test_a_region_touches_the_same_boxes(shape: tuple[int, ...], ranks: int, data: st.DataObject) -> None:
    table, _ = families([shape], ranks)
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    size = [data.draw(st.integers(1, length - at)) for length, at in zip(shape, low, strict=True)]
    region = Box(tuple(low), tuple(size))
    rows, boxes = np.arange(len(table)), table.boxes()
    expected = list(boxes.boxes_touching(np.arange(len(boxes)), region))
    assert list(table.boxes_touching(rows, region)) == expected
    assert [row for row in rows_of(boxes, [shape]) if row[2].intersect(region)] == [tuple(row) for row in expected]


@given(shape_lists, st.integers(1, 9), st.integers(1, 9))
def test_a_plan_of_families_is_that_of_their_boxes(shapes_: list[tuple[int, ...]], before: int, after: int) -> None:
    plan = plan_of(shapes_, before, after)
    boxes = in_boxes(plan)
    check_plan(plan)
    check_plan(boxes)
    assert list(plan.units) == list(boxes.units)
    assert plan.summary() == boxes.summary()
    assert count_requests(plan) == count_requests(boxes)
    numbers = range(len(shapes_))
    assert explain(plan.index, numbers, plan) == explain(boxes.index, numbers, boxes)


@given(shape_lists, st.integers(1, 9), st.data())
def test_a_wrong_family_is_refused_as_its_boxes_are(
    shapes_: list[tuple[int, ...]], ranks: int, data: st.DataObject
) -> None:
    plan = plan_of(shapes_, 1, ranks)
    table = plan.layout.shards
    row = data.draw(st.integers(0, len(table) - 1))
    column, by = data.draw(
        st.sampled_from([("start", 1), ("stop", -1), ("byte_offset", -4), ("byte_offset", 4), ("replica", 1)])
    )
    values = getattr(table, column).copy()
    values[row] += by
    layout = dataclasses.replace(plan.layout, shards=dataclasses.replace(table, **{column: values}))
    wrong = make_plan(plan.index, layout)
    assert is_refused(wrong) == is_refused(in_boxes(wrong))


def is_refused(plan: Plan) -> bool:
    try:
        check_plan(plan)
    except PlanError:
        return True
    return False


@settings(max_examples=examples(30))
@given(st.integers(1, 6), st.integers(1, 7), st.integers(2, 5))
def test_an_element_that_no_family_or_two_hold_is_found(rows: int, columns: int, ranks: int) -> None:
    shape = (rows, columns)
    count, tensors = rows * columns, tensors_of([shape])
    for parts, good in (
        (((0, count),), True),
        (((0, count // 2), (count // 2, count)), True),
        (((0, count - 1),), False),
        (((0, count // 2 + 1), (count // 2, count)), False),
    ):
        builder = ShardTableBuilder()
        some = [part for part in parts if part[0] < part[1]]
        for start, stop in some:
            builder.add_family(
                tensor=0,
                box=whole(shape),
                start=start,
                stop=stop,
                chunk=-(-(stop - start) // ranks),
                file=0,
                byte_offset=start * 4,
                item_bytes=4,
            )
        table = builder.build()
        problems = cover_problems(tensors, table, np.arange(len(table)), side="source")
        assert (not problems) == (good or not some)
        assert bool(problems) == bool(cover_problems(tensors, table.boxes(), np.arange(len(table.boxes())), side="s"))


@pytest.mark.parametrize(("start", "stop", "chunk"), [(0, 13, 4), (-1, 12, 4), (3, 3, 4), (0, 12, 0)])
def test_a_family_of_other_elements_than_its_box_has_is_no_family(start: int, stop: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="a family of elements"):
        ShardTableBuilder().add_family(
            tensor=0, box=whole((3, 4)), start=start, stop=stop, chunk=chunk, file=0, byte_offset=0, item_bytes=4
        )


def test_a_family_has_no_single_row() -> None:
    table, _ = families([(3, 4)], 5)
    with pytest.raises(ValueError, match="family"):
        table.row(0, 2)
