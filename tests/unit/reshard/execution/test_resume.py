"""In which order the units of a run are done."""

import itertools

import pytest

from reshard.execution.resume import interleave


@pytest.mark.parametrize(("count", "num_stripes"), [(0, 2), (1, 2), (7, 1), (7, 2), (7, 3), (64, 8), (3, 8)])
def test_every_unit_is_done_once_and_neighbours_in_time_are_apart(count: int, num_stripes: int) -> None:
    order = interleave(count, num_stripes)
    assert sorted(order) == list(range(count))
    length = count // num_stripes
    for at in range(num_stripes * (length - 1) + 1 if length else 0):  # what all threads work on at a time
        together = sorted(order[at : at + num_stripes])
        assert all(second - first >= length - 1 for first, second in itertools.pairwise(together))


def test_each_stripe_is_done_from_front_to_back() -> None:
    assert interleave(8, 2) == [0, 4, 1, 5, 2, 6, 3, 7]
