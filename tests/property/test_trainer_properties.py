"""Data position: the same global sequence of samples at any number of replicas."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.batch import BatchPlan, shuffled


@st.composite
def plans(draw):
    micro, dp, accumulation = (draw(st.integers(1, 6)) for _ in range(3))
    return BatchPlan(global_batch=micro * dp * accumulation, micro_batch=micro, dp=dp)


@given(plan=plans(), step=st.integers(0, 1000))
def test_replicas_together_consume_each_sample_of_the_step_once(plan, step):
    first = step * plan.global_batch
    seen = [
        number
        for dp_rank in range(plan.dp)
        for batch in plan.micro_batches(first_sample=first, dp_rank=dp_rank)
        for number in batch
    ]
    assert sorted(seen) == list(range(first, first + plan.global_batch))


@given(plan=plans(), step=st.integers(0, 1000))
def test_micro_batches_in_time_and_rank_order_are_the_global_sequence(plan, step):
    first = step * plan.global_batch
    per_rank = [plan.micro_batches(first_sample=first, dp_rank=dp_rank) for dp_rank in range(plan.dp)]
    in_order = [number for same_time in zip(*per_rank, strict=True) for batch in same_time for number in batch]
    assert in_order == list(range(first, first + plan.global_batch))


@given(plan=plans())
def test_every_replica_takes_the_same_number_of_micro_steps(plan):
    counts = {len(plan.micro_batches(first_sample=0, dp_rank=dp_rank)) for dp_rank in range(plan.dp)}
    assert counts == {plan.accumulation_steps}


@given(num_samples=st.integers(1, 400), seed=st.integers(0, 2**32), epoch=st.integers(0, 5))
def test_an_epoch_is_a_permutation_of_the_data(num_samples, seed, epoch):
    start = epoch * num_samples
    rows = [shuffled(start + index, num_samples=num_samples, seed=seed) for index in range(num_samples)]
    assert sorted(rows) == list(range(num_samples))


@given(seed=st.integers(0, 2**32))
def test_epochs_and_seeds_are_in_different_orders(seed):
    def order(epoch, seed):
        return [shuffled(epoch * 200 + index, num_samples=200, seed=seed) for index in range(200)]

    assert order(0, seed) != order(1, seed)
    assert order(0, seed) != order(0, seed + 1)
    assert order(0, seed) != list(range(200))
