"""Rows of the tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.measure import Measurement

_NOT_BY_CALLS = 0.5
"""A conversion that reads less of a checkpoint has mapped files that were in the page cache: no kernel counts that."""

HEAD = (
    "| command | wall s, median (all) | read / checkpoint | written / checkpoint | peak memory |\n|---|---|---|---|---|"
)


def row(name: str, runs: Sequence[Measurement], checkpoint_bytes: int) -> str:
    """One command: seconds, and bytes as multiples of the checkpoint."""
    last = runs[-1]
    read = last.bytes_read / checkpoint_bytes
    return (
        f"| {name} | {seconds(runs)} "
        f"| {'mapped' if read < _NOT_BY_CALLS else f'{read:.2f}'} | {last.bytes_written / checkpoint_bytes:.2f} "
        f"| {max(item.peak_rss_bytes for item in runs) / 2**20:.0f} MiB |"
    )


def median(runs: Sequence[Measurement]) -> float:
    """Wall time in seconds."""
    return statistics.median(item.seconds for item in runs)


def seconds(runs: Sequence[Measurement]) -> str:
    """`1.2 (1.1, 1.2, 1.3)`."""
    return f"{median(runs):.2f} ({', '.join(f'{item.seconds:.2f}' for item in runs)})"
