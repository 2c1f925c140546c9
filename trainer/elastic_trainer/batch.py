"""Batch arithmetic: the global batch stays the same at every topology. Pure.

One step consumes `global_batch` samples, numbered consecutively over the whole training. Sample `j` of a step (from 0)
is processed by replica `(j // micro_batch) % dp` in micro step `j // (micro_batch * dp)`, so that any number of
replicas sees the same global sequence. With context parallelism several data parallel ranks are one replica.
"""

from __future__ import annotations

import dataclasses

from elastic_trainer.errors import ConfigurationError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How one step's samples are spread over replicas and time.

    Attributes:
        global_batch: samples per optimizer step.
        micro_batch: samples that one replica processes at once.
        dp: replicas that get different samples (`Topology.num_replicas`).
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
        """Global sample numbers of each micro step of one replica, for the step that starts at `first_sample`.

        `dp_rank` is the replica's number, from 0 (`Topology.replica`).
        """
        if not 0 <= dp_rank < self.dp:
            raise ConfigurationError(
                f"replica {dp_rank} of {self.dp}: with context parallelism it is session.topology.replica(rank)"
            )
        stride = self.micro_batch * self.dp
        starts = (first_sample + step * stride + dp_rank * self.micro_batch for step in range(self.accumulation_steps))
        return tuple(range(start, start + self.micro_batch) for start in starts)


def shuffled(sample: int, *, num_samples: int, seed: int) -> int:
    """Dataset row of a global sample number: every epoch is a permutation of its own, computed without a table.

    A four-round Feistel network on the smallest power of four that holds `num_samples`, walked until the result is a
    row (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Random access, no state, the
    same on every rank.
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
    """A well-spread 64-bit function of its arguments (finalizer of splitmix64, Steele et al. 2014)."""
    state = (value * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 + epoch * 0x2545F4914F6CDD1D + round_) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31
