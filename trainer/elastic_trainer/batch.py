"""Batch arithmetic that keeps the global batch the same at every topology. Pure.

One step consumes `global_batch` samples, numbered consecutively over the whole training. Replica
`(j // micro_batch) % dp` processes sample `j` of a step (from 0) in micro step `j // (micro_batch * dp)`, so that any
number of replicas sees the same global sequence. With context parallelism several data parallel ranks are one replica.
"""

from __future__ import annotations

import dataclasses

from elastic_trainer.errors import ConfigurationError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The distribution of one step's samples over replicas and micro steps.

    Attributes:
        global_batch: samples per optimizer step.
        micro_batch: samples that one replica processes at once.
        dp: number of replicas that process different samples (`Topology.num_replicas`).
    """

    global_batch: int
    micro_batch: int
    dp: int

    def __post_init__(self) -> None:
        if min(self.global_batch, self.micro_batch, self.dp) < 1 or self.global_batch % (self.micro_batch * self.dp):
            raise ConfigurationError(
                f"global batch {self.global_batch} is not a multiple of micro batch {self.micro_batch} x "
                f"{self.dp} data parallel replicas = {self.micro_batch * self.dp}: "
                "choose degrees of parallelism or a micro batch that divide it"
            )

    @property
    def accumulation_steps(self) -> int:
        """Micro steps per optimizer step."""
        return self.global_batch // (self.micro_batch * self.dp)

    def micro_batches(self, *, first_sample: int, dp_rank: int) -> tuple[range, ...]:
        """Return the global sample numbers of each micro step of one replica.

        Args:
            first_sample: global number of the step's first sample.
            dp_rank: number of the replica, from 0 (`Topology.replica`).

        Raises:
            ConfigurationError: `dp_rank` is out of range.

        >>> BatchPlan(global_batch=8, micro_batch=2, dp=2).micro_batches(first_sample=16, dp_rank=1)
        (range(18, 20), range(22, 24))
        """
        if not 0 <= dp_rank < self.dp:
            raise ConfigurationError(
                f"replica {dp_rank} of {self.dp}: with context parallelism it is session.topology.replica(rank)"
            )
        stride = self.micro_batch * self.dp
        starts = (first_sample + step * stride + dp_rank * self.micro_batch for step in range(self.accumulation_steps))
        return tuple(range(start, start + self.micro_batch) for start in starts)


def shuffled(sample: int, *, num_samples: int, seed: int) -> int:
    """Return the dataset row of a global sample number; every epoch is a different permutation of all rows.

    The result is the same on every rank and needs no table and no state. The permutation is a four-round Feistel
    network on the smallest power of four that is at least `num_samples`, repeated until the result is a row (cycle
    walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Args:
        sample: global sample number, counted over the whole training.
        num_samples: number of rows of the dataset.
        seed: selects the permutations.

    >>> sorted(shuffled(sample, num_samples=5, seed=1) for sample in range(5))
    [0, 1, 2, 3, 4]
    """
    epoch, value = divmod(sample, num_samples)
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = value >> half_bits, value & mask
        for round_ in range(4):
            left, right = right, left ^ (_mix(right, seed, epoch, round_) & mask)
        value = left << half_bits | right
        if value < num_samples:
            return value


def _mix(value: int, seed: int, epoch: int, round_: int) -> int:
    """Hash the arguments to 64 bits (finalizer of splitmix64, Steele et al. 2014)."""
    state = (value * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 + epoch * 0x2545F4914F6CDD1D + round_) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31
