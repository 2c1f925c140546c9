"""The global order of samples, as index lists for one replica: a sampler for torch's DataLoader. Pure.

The order is a function of the sample's global number, so the position is one integer, and every number of replicas sees
the same samples in the same step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from elastic_trainer.batch import BatchPlan, shuffled
from elastic_trainer.errors import ConfigurationError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GlobalOrder:
    """The rows of the dataset that one replica takes, from the first sample of a step on.

    Attributes:
        num_rows: rows of the dataset.
        plan: distribution of a step's samples.
        replica: number of this replica, from 0.
        seed: selects the permutations, one per epoch.
        shuffle: False for the order of the dataset in every epoch.
    """

    num_rows: int
    plan: BatchPlan
    replica: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ConfigurationError(f"the dataset has {self.num_rows} rows: expected at least 1")

    def row(self, sample: int) -> int:
        """Return the dataset row of a global sample number."""
        if not self.shuffle:
            return sample % self.num_rows
        return shuffled(sample, num_samples=self.num_rows, seed=self.seed)

    def micro_batches(self, first_sample: int) -> Iterator[list[int]]:
        """Yield the rows of each micro batch, without end; `first_sample` is the first sample of a step.

        >>> order = GlobalOrder(
        ...     num_rows=6, plan=BatchPlan(global_batch=4, micro_batch=1, dp=2), replica=1, shuffle=False
        ... )
        >>> [rows for rows, _ in zip(order.micro_batches(4), range(4))]
        [[5], [1], [3], [5]]
        """
        while True:
            for numbers in self.plan.micro_batches(first_sample=first_sample, dp_rank=self.replica):
                yield [self.row(number) for number in numbers]
            first_sample += self.plan.global_batch

    def step_batches(self, first_sample: int) -> Iterator[list[int]]:
        """Yield the rows of all of a step's micro batches, one list per step, without end."""
        batches = self.micro_batches(first_sample)
        while True:
            yield [row for _ in range(self.plan.accumulation_steps) for row in next(batches)]


class PositionedSampler:
    """Batch sampler of a DataLoader: it begins at the training's position whenever the loader is iterated.

    Args:
        batches: returns the batches of rows from a sample on; see `GlobalOrder`.
        position: returns the global number of the next step's first sample.
    """

    def __init__(self, batches: Callable[[int], Iterator[list[int]]], position: Callable[[], int]) -> None:
        self._batches = batches
        self._position = position

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self._position())


class RowSampler(PositionedSampler):
    """Sampler of a DataLoader: the same rows one by one, for a loader that makes batches of `plan.micro_batch`."""

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]
        return (row for rows in super().__iter__() for row in rows)
