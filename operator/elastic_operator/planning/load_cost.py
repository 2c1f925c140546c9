"""Estimate whether a DCP commit is loaded faster as it is, or after a conversion to the new topology. Pure.

torch's DCP reader loads the whole saved chunk for each part that a rank needs of it. A tensor saved in M equal chunks
along its first dim and loaded in N is therefore read (M + N - gcd(M, N)) / M times. A conversion reads the commit once
and writes it once, and then every rank reads exactly its own part. Both are assumed to be limited by the storage, at
STORAGE_BYTES_PER_SECOND; the estimate ignores page caches, and tensors that tensor parallelism cuts along another dim.
"""

from __future__ import annotations

import dataclasses
import math

from reshard.topology import Topology

STORAGE_BYTES_PER_SECOND = 5e8
"""Assumed bandwidth of the checkpoint volume, all readers and writers together."""

CONVERSION_START_SECONDS = 10.0
"""Assumed time in which the pod of a reshard Job is scheduled and starts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadEstimate:
    """Estimated times of both ways to start from a commit.

    Attributes:
        num_bytes: size of the commit; 0 if it is not known.
        amplification: bytes that the ranks read, relative to those they need, if the commit is loaded as it is.
        load_seconds: time to load the commit as it is.
        convert_seconds: time to convert the commit first, and to load the result.
    """

    num_bytes: int
    amplification: float
    load_seconds: float
    convert_seconds: float

    @property
    def is_conversion_faster(self) -> bool:
        """True if the conversion pays; False if the size of the commit is not known."""
        return self.num_bytes > 0 and self.convert_seconds < self.load_seconds

    def __str__(self) -> str:
        times = f"ranks read {self.amplification:.2f} times the bytes that they need"
        if not self.num_bytes:
            return f"{times}, and the size of the commit is not known"
        return (
            f"{times}, about {self.load_seconds:.3g} s for {self.num_bytes / 1e9:.3g} GB, against about "
            f"{self.convert_seconds:.3g} s with a conversion first"
        )


def estimate_load(num_bytes: int, source: Topology, target: Topology) -> LoadEstimate:
    """Estimate both ways to start from a commit.

    >>> str(estimate_load(0, Topology(dp=4, zero=3), Topology(dp=3, zero=3)))
    'ranks read 1.50 times the bytes that they need, and the size of the commit is not known'

    Args:
        num_bytes: size of the commit; 0 if it is not known.
        source: topology in which the commit was written.
        target: topology in which it is loaded.
    """
    amplification = read_amplification(count_chunks(source), count_chunks(target))
    # Without ZeRO every replica loads the whole state.
    needed = num_bytes * (target.dp if target.zero == 0 else 1)
    return LoadEstimate(
        num_bytes=num_bytes,
        amplification=amplification,
        load_seconds=needed * amplification / STORAGE_BYTES_PER_SECOND,
        convert_seconds=CONVERSION_START_SECONDS + (2 * num_bytes + needed) / STORAGE_BYTES_PER_SECOND,
    )


def count_chunks(topology: Topology) -> int:
    """Return into how many chunks the ranks of one pipeline stage cut a tensor."""
    return topology.tp * (topology.dp if topology.zero else 1)


def read_amplification(num_saved: int, num_loaded: int) -> float:
    """Return how often torch's DCP reader reads a tensor of `num_saved` equal chunks for `num_loaded` equal parts.

    >>> read_amplification(4, 3), read_amplification(8, 64), read_amplification(64, 48), read_amplification(6, 3)
    (1.5, 8.0, 1.5, 1.0)
    """
    return (num_saved + num_loaded - math.gcd(num_saved, num_loaded)) / num_saved
