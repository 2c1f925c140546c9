"""Boxes into disjoint cells: the same union, and every cell inside or outside of every box."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.tensors.geometry import Box
from reshard.virtual.cells import join_cells, split_into_cells, subtract

SHAPE = (5, 4, 3)


@st.composite
def boxes(draw):
    low = [draw(st.integers(0, size - 1)) for size in SHAPE]
    size = [draw(st.integers(1, full - at)) for full, at in zip(SHAPE, low, strict=True)]
    return Box(tuple(low), tuple(size))


def mark(found, into):
    for box in found:
        into[tuple(slice(low, high) for low, high in zip(box.offset, box.end, strict=True))] += 1
    return into


@given(st.lists(boxes(), min_size=1, max_size=5))
def test_cells_cover_the_union_once_and_are_inside_or_outside_of_every_box(given_boxes):
    found = split_into_cells(given_boxes)
    count = mark(found, np.zeros(SHAPE, dtype=int))
    assert ((count == 1) == (mark(given_boxes, np.zeros(SHAPE, dtype=int)) > 0)).all()
    assert count.max() == 1
    for cell, box in itertools.product(found, given_boxes):
        assert cell.intersect(box) in (None, cell)


@given(st.lists(st.tuples(st.integers(0, 2), boxes()), min_size=1, max_size=5))
def test_joined_cells_cover_the_same_once_and_every_copy_holds_all_of_a_cell_or_nothing(copies):
    found = split_into_cells(box for _, box in copies)
    together = join_cells(found, copies)
    count = mark(together, np.zeros(SHAPE, dtype=int))
    assert (count == mark(found, np.zeros(SHAPE, dtype=int))).all()
    assert len(together) <= len(found)
    for cell, copy in itertools.product(together, range(3)):
        held = mark([box for own, box in copies if own == copy], np.zeros(SHAPE, dtype=int)) > 0
        inside = held[tuple(slice(low, high) for low, high in zip(cell.offset, cell.end, strict=True))]
        assert inside.all() or not inside.any()


def test_columns_of_one_copy_become_whole_rows():
    left, right = Box((0, 0), (4, 2)), Box((0, 2), (4, 3))
    assert join_cells([left, right], [("a", left), ("a", right)]) == [Box((0, 0), (4, 5))]


def test_columns_stay_apart_where_a_second_copy_wants_only_one_of_them():
    left, right = Box((0, 0), (4, 2)), Box((0, 2), (4, 3))
    assert join_cells([left, right], [("a", left), ("a", right), ("b", left)]) == [left, right]


@given(boxes(), boxes())
def test_subtract_leaves_what_is_not_in_the_other(box, other):
    count = mark(subtract(box, other), np.zeros(SHAPE, dtype=int))
    expected = (mark([box], np.zeros(SHAPE, dtype=int)) > 0) & (mark([other], np.zeros(SHAPE, dtype=int)) == 0)
    assert (count == expected).all()


def test_equal_boxes_and_boxes_apart_stay_whole():
    first, second = Box((0, 0), (2, 8)), Box((2, 0), (1, 3))
    assert split_into_cells([second, first, first]) == [first, second]


def test_a_scalar_is_one_cell():
    assert split_into_cells([Box((), ()), Box((), ())]) == [Box((), ())]
