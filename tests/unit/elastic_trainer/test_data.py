"""Sample order, loaders and streams: the same samples in every step, whatever the number of replicas."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from elastic_trainer.batch import BatchPlan
from elastic_trainer.data import stateful
from elastic_trainer.data.order import GlobalOrder, PositionedSampler, RowSampler
from elastic_trainer.errors import ConfigurationError

ROWS, GLOBAL = 50, 24


def order(dp: int, replica: int, *, shuffle: bool = True) -> GlobalOrder:
    plan = BatchPlan(global_batch=GLOBAL, micro_batch=2, dp=dp)
    return GlobalOrder(num_rows=ROWS, plan=plan, replica=replica, seed=7, shuffle=shuffle)


def rows_of_step(dp: int, step: int, **options: bool) -> list[int]:
    """Rows of all replicas in a step."""
    found = []
    for replica in range(dp):
        one = order(dp, replica, **options)
        found += next(one.step_batches(step * GLOBAL))
    return sorted(found)


@pytest.mark.parametrize("dp", [2, 3, 4, 6, 12])
@pytest.mark.parametrize("step", [0, 1, 2, 7])
def test_a_step_has_the_same_rows_at_every_dp(dp: int, step: int) -> None:
    assert rows_of_step(dp, step) == rows_of_step(1, step)


def test_an_epoch_has_every_row_once() -> None:
    stream = itertools.chain.from_iterable(order(1, 0).step_batches(0))
    assert sorted(itertools.islice(stream, ROWS)) == list(range(ROWS))
    assert sorted(itertools.islice(stream, ROWS)) == list(range(ROWS))


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    stream = itertools.chain.from_iterable(order(1, 0, shuffle=False).step_batches(0))
    assert list(itertools.islice(stream, 2 * ROWS)) == [*range(ROWS), *range(ROWS)]


def test_a_sampler_begins_at_the_position_of_the_moment() -> None:
    position = 0
    one = order(2, 1)
    batches = PositionedSampler(one.micro_batches, lambda: position)
    rows = RowSampler(one.micro_batches, lambda: position)
    first = next(iter(batches))
    position = GLOBAL
    later = next(iter(batches))
    assert first != later
    assert list(itertools.islice(rows, 2)) == later
    assert list(itertools.islice(order(2, 1).micro_batches(GLOBAL), 1)) == [later]


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="0 rows"):
        GlobalOrder(num_rows=0, plan=BatchPlan(global_batch=1, micro_batch=1, dp=1), replica=0)


class Loader:
    """A stateful loader of one replica: batches of 2 of the numbers that are its share."""

    def __init__(self, replica: int, replicas: int, *, num_samples: int = 40) -> None:
        self._share = list(range(replica, num_samples, replicas))
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]

    def __iter__(self) -> Any:
        while self._position < len(self._share):
            batch = self._share[self._position : self._position + 2]
            self._position += 2
            yield batch
        self._position = 0


def resume(loader: Any, state: Any, *, samples: int, replicas: int, rule: stateful.Rule = "skip") -> stateful.Stream:
    return stateful.resume(loader, state, samples=samples, batch_samples=2 * replicas, rule=rule, what="no state")


def test_a_stream_goes_on_exactly_with_its_state_and_into_the_next_epoch() -> None:
    quiet = resume(Loader(1, 2), None, samples=0, replicas=2)
    assert quiet.start.how == "first"
    expected = list(itertools.islice(quiet, 25))
    first = resume(Loader(1, 2), None, samples=0, replicas=2)
    for done in (3, 12):
        head = list(itertools.islice(first, done))
        state = first.state_dict()
        first = resume(Loader(1, 2), state, samples=4 * done, replicas=2)
        assert first.start.how == "exact"
        assert head == expected[:done]
        expected = expected[done:]
    assert list(itertools.islice(first, 10)) == expected


def test_at_another_dp_a_stream_that_is_dealt_in_turn_skips_exactly_what_was_seen() -> None:
    seen = {row for replica in range(2) for batch in itertools.islice(iter(Loader(replica, 2)), 3) for row in batch}
    assert seen == set(range(12))
    rest = set()
    for replica in range(3):
        stream = resume(Loader(replica, 3), None, samples=12, replicas=3)
        assert (stream.start.how, stream.start.skipped_batches) == ("skip", 2)
        assert "discards the first 2 batches" in stream.start.message
        rest |= set(next(stream))
    assert rest == set(range(12, 18))


def test_batches_are_skipped_over_the_end_of_an_epoch() -> None:
    stream = resume(Loader(0, 2), None, samples=44, replicas=2)
    assert stream.start.skipped_batches == 11
    assert next(stream) == [4, 6]
    assert stream.state_dict()["epoch"] == 1


def test_a_stream_may_begin_again_instead() -> None:
    stream = resume(Loader(0, 3), None, samples=12, replicas=3, rule="repeat")
    assert stream.start.how == "repeat"
    assert "repeats up to 12 samples" in stream.start.message
    assert next(stream) == [0, 3]


def test_what_keeps_no_state_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="list has no state_dict"):
        resume([1, 2], None, samples=0, replicas=1)


def test_a_stream_without_a_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no batch for this replica"):
        next(resume(Loader(5, 6, num_samples=3), None, samples=0, replicas=6))
